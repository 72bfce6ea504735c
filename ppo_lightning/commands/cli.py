"""Command line: Lightning's ``fit``, ``validate`` and ``test``, and the other commands."""

import argparse
import contextlib
import functools
import importlib
import inspect
import itertools
import logging
import os
import pkgutil
import re
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning import Callback, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import ppo_lightning.callbacks
from ppo_lightning import __version__, private
from ppo_lightning.algorithms.agent_module import AgentModule
from ppo_lightning.algorithms.ppo import PPO
from ppo_lightning.callbacks import Threads
from ppo_lightning.callbacks.guards import FREE_BYTES
from ppo_lightning.checkpoints.agent import known_class
from ppo_lightning.checkpoints.file import read_checkpoint, user_path
from ppo_lightning.checkpoints.resume import folder_of_logger, folders_of_runs, last_checkpoint
from ppo_lightning.checkpoints.run import require_same_run
from ppo_lightning.commands.arguments import Arguments
from ppo_lightning.commands.checkpoint_settings import add_checkpoint_settings
from ppo_lightning.commands.options import DEFAULT_NAME, DESCRIPTIONS, MODULES, TRAINER_DEFAULTS
from ppo_lightning.commands.recipes import bundled_name, bundled_recipes, bundled_tasks
from ppo_lightning.errors import ConfigError, NonFiniteError, first_line, nearest
from ppo_lightning.models import Actor, MLPAgent
from ppo_lightning.rollouts.datamodule import RolloutDataModule
from ppo_lightning.utils.arguments import as_integer

OPTIONS = {  # of the command line beside Lightning's own
    "auto_resume": "fit: resume from the newest intact checkpoint, if any",
    "name": "name of the run in the default loggers (default: that of the recipe, or of the algorithm)",
    "num_threads": "PyTorch threads (default: all cores for convolutions and wide layers, otherwise 1)",
}


class Parser(LightningArgumentParser):
    """Lightning's parser, whose help leaves out hundreds of known subclasses."""

    def format_help(self) -> str:
        """Return the help text."""
        return re.sub(r",\s+known\s+subclasses:[^)]*\)", ")", super().format_help())


private.convert_integers(as_integer)  # 1e4, 500k and 1M
private.keep_texts()
SHORT_NAMES = {
    name.lower(): f"{package.__name__}.{name}"
    for package in (ppo_lightning, ppo_lightning.callbacks)
    for name in package.__all__
}
private.find_short_names(SHORT_NAMES)


class SaveRunConfig(SaveConfigCallback):
    """Callback that saves the settings of ``fit`` only, without those that say where to resume."""

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Write ``cli_config.yaml`` for ``fit``."""
        if stage == "fit":
            _require_writable(Path(trainer.default_root_dir))
            super().setup(trainer, pl_module, stage)

    def save_config(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Write the file into the folder of the run, beside the checkpoints. None without a logger."""
        for key in ("ckpt_path", "auto_resume"):
            self.config.pop(key, None)
        for logger in trainer.loggers[:1]:
            version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
            path = folder_of_logger(trainer) / version / self.config_filename
            path.parent.mkdir(parents=True, exist_ok=True)
            self.parser.save(self.config, path, skip_none=False, overwrite=True)


@private.keep_flags  # `main` inserts the settings of a checkpoint before the flags
class PPOCLI(LightningCLI):
    """Lightning's CLI: ``model`` is an algorithm, ``data`` a :class:`RolloutDataModule`."""

    algorithm = "ppo_lightning.PPO"  # class path of the model, whose defaults hold

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Return the command of this run: building the parsers of the others takes 0.1 s."""
        return {name: skip for name, skip in super().subcommands().items() if name in self.parser_kwargs}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the flags of this package, and set the default algorithm."""
        if self.subclass_mode_model:
            with contextlib.suppress(ImportError, ValueError, AttributeError):  # parsing names the mistake
                parser.set_defaults({"model": {"class_path": self.algorithm}})
        else:  # for the help
            maker = self.model_class().make_agent  # type: ignore[misc]
            agent = getattr(maker, "func", maker)  # C51 completes its agent
            parser.add_class_arguments(agent, "model.agent", skip={"observation_spec", "action_spec"})
        parser.add_argument("--auto_resume", action="store_true", help=OPTIONS["auto_resume"])
        parser.add_argument("--name", type=str | None, default=None, help=OPTIONS["name"])
        parser.add_argument("--num_threads", type=int | None, default=None, help=OPTIONS["num_threads"])

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the arguments, and refuse a seed that NumPy does not accept."""
        super().parse_arguments(parser, args)
        seed = self.config[self.config.subcommand].seed_everything
        if seed is None or not 0 <= seed < 2**32:
            raise ConfigError(f"seed_everything is {seed}: it must be between 0 and {2**32 - 1}.")

    def before_instantiate_classes(self) -> None:
        """Check ``--ckpt_path`` and ``--num_threads``, and add the callbacks that depend on flags."""
        config = self.config[self.subcommand]
        if self.subcommand != "fit" and config.ckpt_path in (None, "last"):  # Lightning: fresh weights
            raise ConfigError(f"{self.subcommand} needs a trained agent: give its file as --ckpt_path.")
        name = config.name or _recipe_name(config.config) or self.algorithm.rpartition(".")[2].lower()
        for logger in config.trainer.logger if isinstance(config.trainer.logger, list) else ():
            settings = logger.init_args
            if settings.get("name") == DEFAULT_NAME:
                settings.save_dir = str(user_path(config.trainer.default_root_dir or "") / settings.save_dir)
                settings.name = name
            elif config.name and logger.class_path.endswith(("CSVLogger", "TensorBoardLogger")):
                settings.name = name  # in a saved configuration, these have the name of its run
        if config.num_threads is not None:
            callbacks = self.trainer_defaults["callbacks"]
            self.trainer_defaults["callbacks"] = [*callbacks, Threads(config.num_threads)]

    def before_fit(self) -> None:
        """Check that the folders are writable, and find the checkpoint of ``--auto_resume``.

        A complete run ends here with code 0, before a new version is created.
        """
        for logger in self.trainer.loggers:
            _require_writable(Path(logger.save_dir or self.trainer.default_root_dir))
        config = self.config_init.fit
        if config.auto_resume:
            env_id, seed = self.datamodule.hparams["env_id"], config.seed_everything
            path = last_checkpoint(*folders_of_runs(self.trainer), env_id=env_id, seed=seed)
            # At its first start, the run may resume from a checkpoint of another run.
            config.ckpt_path = path or config.ckpt_path
        if config.ckpt_path == "last":
            raise ConfigError("ckpt_path takes a file: fit --auto_resume finds the last one of a run.")
        if config.ckpt_path is not None and user_path(config.ckpt_path).is_file():
            checkpoint = read_checkpoint(config.ckpt_path)
            self.datamodule.trainer = self.trainer  # as `fit` does: sizes left out are the algorithm's
            self.trainer.strategy.connect(self.model)
            require_same_run(self.datamodule, checkpoint)
            self.config.fit.seed_everything = checkpoint["seed"]  # for `SaveRunConfig`: a run keeps its seed
            writer = known_class(checkpoint["hyper_parameters"].get("_class_path"), AgentModule)
            steps = checkpoint["env_steps"] - checkpoint.get("extra_steps", 0)
            total = self.datamodule.total_timesteps
            is_over = steps + checkpoint["frames_per_rollout"] > total and private.has_evaluated(checkpoint)
            if is_over and writer in (None, type(self.model)):  # `fit` refuses another algorithm
                print(f"The run has {steps} steps: raise data.total_timesteps ({total}) to train longer.")
                raise SystemExit(0)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Return the Trainer, whose refusal of a setting becomes a ConfigError."""
        try:
            return super().instantiate_trainer(**kwargs)
        except (ValueError, TypeError, ImportError, OSError) as error:
            raise ConfigError(f"Lightning's Trainer refuses its settings: {first_line(error)}") from error


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line. An invalid setting ends it with code 2 and one sentence on standard error."""
    args = list(sys.argv[1:] if args is None else args)
    _quieten()
    try:
        if args and args[0] in MODULES:
            return importlib.import_module(MODULES[args[0]]).main(args[1:])
        arguments = Arguments(args)
        if not arguments.asks_for_help:
            add_checkpoint_settings(arguments)
        run([], arguments)
    except Exception as error:
        if (message := _explain(error, args)) is None:
            raise
        print(f"error: {message}", file=sys.stderr)
        raise SystemExit(2) from None


def run(callbacks: list[Callback], arguments: Arguments, save_config: bool = True) -> None:
    """Run a subcommand of Lightning's CLI, with callbacks beside those that flags add."""
    command, is_help = arguments.command, arguments.asks_for_help
    algorithm = arguments.algorithm(default=PPOCLI.algorithm)
    algorithm = SHORT_NAMES.get(algorithm.lower(), algorithm)
    helped = pkgutil.resolve_name(algorithm) if is_help else PPO
    common = {"exit_on_error": False, "allow_abbrev": False}  # an abbreviation may be another flag
    settings = {
        "dump_header": [f"ppo_lightning=={__version__}", f"lightning.pytorch=={lightning.__version__}"],
        "conflict_handler": "resolve" if is_help else "error",
        "usage": f"ppo-lightning {command} --config RECIPE [--OPTION VALUE ...]",
        "description": f"{DESCRIPTIONS[command]}. Options of the algorithm are those of {helped.__name__}:"
        " --model.help CLASS lists those of a variant, --model.agent.help CLASS of an agent. Integers may be"
        " written as 1e6, 500k or 1M.",
    }
    # The parser would keep the values of PPO's defaults for the settings of another algorithm.
    cli = type("PPOCLI", (PPOCLI,), {"algorithm": algorithm})
    try:
        cli(
            helped if is_help else AgentModule,
            RolloutDataModule,
            args=[command, "--help"] if is_help else arguments.words(),
            subclass_mode_model=not is_help,
            seed_everything_default=1,
            auto_configure_optimizers=False,
            parser_class=Parser,
            parser_kwargs={"prog": "ppo-lightning", **common, command: common | settings},
            save_config_callback=SaveRunConfig if save_config else None,
            save_config_kwargs={"config_filename": "cli_config.yaml", "save_to_log_dir": False},
            trainer_defaults=TRAINER_DEFAULTS | {"callbacks": callbacks},
        )
    except argparse.ArgumentError as error:
        raise ConfigError(_explain_parsing(error.message, arguments)) from error


def _recipe_name(configs: Sequence[Any] | None) -> str:
    """Return the file name of the last recipe, without its suffix; nothing for a saved configuration."""
    paths = [Path(str(config)) for config in configs or () if str(config).endswith((".yaml", ".yml"))]
    return "" if not paths or paths[-1].stem == "cli_config" else paths[-1].stem


def _require_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # On a full disk, TensorBoard would end the run with a traceback. Zeros might be compressed.
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(os.urandom(FREE_BYTES))
    except OSError as error:
        raise ConfigError(f"The folder of the run, {folder}, cannot be written: {error.strerror}.") from error


def _explain(error: BaseException, args: Sequence[str]) -> BaseException | str | None:
    """Return the message for a mistake of the user, None for any other error, which needs its traceback."""
    cause: BaseException | None = error
    while cause is not None:  # jsonargparse wraps errors of a constructor
        if isinstance(cause, ConfigError | NonFiniteError | MisconfigurationException):
            return cause
        cause = cause.__cause__
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        settings = "data.num_envs, data.num_steps, data.eval_episodes, model.buffer_size or the widths of"
        return f"The run does not fit into memory ({first_line(error)}): lower {settings} model.agent."
    if isinstance(error, OSError) and isinstance(error.filename, str):
        path, named = Path(error.filename), [Path(arg.rpartition("=")[2]) for arg in args]
        if any(path in (name, *name.parents) or (name.name and name in path.parents) for name in named):
            return f"{path} cannot be used ({error.strerror}): name another file or folder."
    return None


def _explain_parsing(message: str, arguments: Arguments) -> str:
    """Extract the cause from jsonargparse's report, with suggestions for a misspelled option or key."""
    if extra := re.match(r"unrecognized arguments: ([^\s=]+)", message):
        name = extra[1]
        if name.startswith("-"):
            return _explain_unknown(name)
        known = bundled_recipes().keys() | bundled_tasks().keys()
        is_recipe = bundled_name(name) in known or name.endswith((".yaml", ".yml"))
        meant = f"--config {name}" if is_recipe else f"--data.env_id {name}"
        return f"the argument {name!r} belongs to no option: did you mean {meant}?"
    option = r"(?:(?:Group '(\S+)'|Subcommand '\w+') does not accept option|Option) '([^']+)'"
    if unknown := re.search(option, message):
        flags = (name for name, _ in arguments.options if name.endswith(f".{unknown[2]}"))
        return _explain_unknown(next(flags, ".".join(filter(None, unknown.groups()))))
    noise = ("Does not validate", "Subtypes", "Errors", "Given value", "Expected a <class 'NoneType'>")
    lines = dict.fromkeys(line.strip(" -") for line in message.splitlines())  # a union repeats some
    text = " ".join(line for line in lines if line and not line.startswith(noise))
    text = re.sub(r'Parser key "([^"]+)":', r"\1:", text)
    # Around the cause of a wrong agent
    text = re.sub(r"Type \S+\.Callable.* callable class: | Got value: Namespace.*", "", text)
    text = re.sub(r"<class '([\w.]+)'>", r"\1", text).replace("typing.", "")
    return textwrap.shorten(text, 400, placeholder=" ...")


def _explain_unknown(name: str) -> str:
    """Say in one sentence that there is no such option or key, and name those that were probably meant."""
    dashes, kind = ("--", "option") if name.startswith("-") else ("", "key")
    known = {option: f"{dashes}{shown}" for option, shown in known_options().items()}
    ends = {option.rpartition(".")[2]: shown for option, shown in reversed(known.items())}
    if name.lstrip("-") in known:
        return f"the {kind} {name!r} is unknown: it belongs to another algorithm or agent."
    parts = name.lstrip("-").replace("-", "_").replace(".init_args", "").split(".")
    prefixes = itertools.accumulate(parts, "{}.{}".format)
    unknown = next((prefix for prefix in prefixes if prefix not in known), parts[-1])
    guess = nearest(unknown.rpartition(".")[2], known | ends) or "; --help lists all keys."
    return f"the {kind} {name!r} is unknown{guess}"


@functools.cache
def known_options() -> dict[str, str]:
    """Return the options by name, and how messages show them: with the class, unless it is the default."""
    flags = ("config", "print_config", "seed_everything", "ckpt_path", "model", "data", "trainer")
    known = {name: name for name in (*flags, *OPTIONS)}
    packages = (ppo_lightning, importlib.import_module("ppo_lightning.offpolicy"))
    ours = [getattr(package, name) for package in packages for name in package.__all__]
    for group, default, base in (
        ("model", PPO, AgentModule),
        ("model.agent", MLPAgent, Actor),
        ("data", RolloutDataModule, RolloutDataModule),
        ("trainer", Trainer, Trainer),
    ):
        for owner in [default, *(cls for cls in ours if isinstance(cls, type) and issubclass(cls, base))]:
            suffix = "" if owner is default else f" of ppo_lightning.{owner.__name__}"
            for name, parameter in inspect.signature(owner.__init__).parameters.items():
                if parameter.default is not parameter.empty:
                    known.setdefault(f"{group}.{name}", f"{group}.{name}{suffix}")
    return known


def _quieten() -> None:
    """Hide messages that users cannot act on: missing hardware, products, deprecations inside libraries."""
    # SDL needs this variable even for rendering off screen.
    os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.gettempdir())
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("lightning.pytorch.profilers").setLevel(logging.INFO)  # the report of trainer.profiler
    for message in (
        ".*is out of date. You should consider upgrading",  # environments of version v4 in recipes
        ".*DISPLAY environment variable is missing",  # dm_control looks for a display
        "The dirpath has changed from",
        "LightningCLI's args parameter",  # main passes it on purpose
        ".*precision lowered by casting.*",
    ):
        warnings.filterwarnings("ignore", message=message)
