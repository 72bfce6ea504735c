"""Command line: Lightning's ``fit``, ``validate`` and ``test``, and the other commands."""

import argparse
import contextlib
import errno
import functools
import importlib
import inspect
import itertools
import logging
import os
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
import yaml
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
from ppo_lightning.checkpoints.file import read_checkpoint
from ppo_lightning.checkpoints.resume import folder_of_logger, folders_of_runs, last_checkpoint
from ppo_lightning.checkpoints.run import require_same_run
from ppo_lightning.commands.checkpoint_settings import option, with_checkpoint_settings
from ppo_lightning.commands.options import (
    DEFAULT_NAME,
    DESCRIPTIONS,
    FLAGS,
    NAME,
    NUM_THREADS,
    OTHER_COMMANDS,
    SETTINGS,
    SUBCOMMANDS,
    TRAINER_DEFAULTS,
)
from ppo_lightning.commands.recipes import (
    bundled_recipes,
    read_yaml,
    split_configs,
    with_configs_first,
)
from ppo_lightning.errors import ConfigError, NonFiniteError, first_line, nearest
from ppo_lightning.models import ActorCritic, MLPAgent
from ppo_lightning.rollouts.datamodule import RolloutDataModule
from ppo_lightning.utils.arguments import as_integer

HEADER = [f"ppo_lightning=={__version__}", f"lightning.pytorch=={lightning.__version__}"]  # of saved settings
HELP = {"-h", "--help"}


class Parser(LightningArgumentParser):
    """Lightning's parser, whose help leaves out hundreds of known subclasses."""

    def format_help(self) -> str:
        """Return the help text."""
        return re.sub(r",\s+known\s+subclasses:[^)]*\)", ")", super().format_help())


private.convert_integers(as_integer)  # 1e4, 500k and 1M
private.keep_texts()


class SaveRunConfig(SaveConfigCallback):
    """Callback that saves the settings of ``fit`` only, without those that say where to resume."""

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Write ``cli_config.yaml`` for ``fit``."""
        if stage == "fit":
            _require_writable(Path(trainer.default_root_dir))
            super().setup(trainer, pl_module, stage)

    def save_config(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Write the file into the folder of the run, beside that of the checkpoints. None without a logger.

        Lightning would write the file of a run on Weights & Biases to the current folder.
        """
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
        for flag, text in FLAGS.items():
            parser.add_argument(flag, action="store_true", help=text)
        parser.add_argument(NAME, type=str | None, default=None, help=SETTINGS[NAME])
        parser.add_argument(NUM_THREADS, type=int | None, default=None, help=SETTINGS[NUM_THREADS])

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
                settings.save_dir = str(Path(config.trainer.default_root_dir or "", settings.save_dir))
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
        if config.ckpt_path is not None and Path(config.ckpt_path).is_file():
            checkpoint = read_checkpoint(config.ckpt_path)
            require_same_run(self.datamodule, checkpoint)
            self.config.fit.seed_everything = checkpoint["seed"]  # for `SaveRunConfig`: a run keeps its seed
            writer = known_class(checkpoint["hyper_parameters"].get("_class_path"), AgentModule)
            steps = checkpoint["env_steps"] - checkpoint.get("extra_steps", 0)
            total = self.datamodule.total_timesteps
            is_complete = steps + checkpoint["frames_per_rollout"] > total
            if is_complete and writer in (None, type(self.model)):  # `fit` refuses another algorithm
                print(f"The run has {steps} steps: raise data.total_timesteps ({total}) to train longer.")
                raise SystemExit(0)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Return the Trainer, whose refusal of a setting becomes a ConfigError."""
        try:
            return super().instantiate_trainer(**kwargs)
        except (ValueError, TypeError, ImportError, OSError) as error:
            raise ConfigError(f"Lightning's Trainer refuses its settings: {first_line(error)}") from error


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line with these arguments, by default with those of the process.

    Raises:
        SystemExit: With code 2 and one sentence on standard error if a setting is invalid.
    """
    args = list(sys.argv[1:] if args is None else args)
    _quieten()
    try:
        if args and args[0] in OTHER_COMMANDS:
            module = args[0].replace("-", "_")
            return importlib.import_module(f"ppo_lightning.commands.{module}").main(args[1:])
        if args and args[0] in SUBCOMMANDS and not HELP & set(args):
            args = with_checkpoint_settings(args)
        run([], args)
    except Exception as error:
        if (message := _message(error, args)) is None:
            raise
        print(f"error: {message}", file=sys.stderr)
        raise SystemExit(2) from None


def run(callbacks: list[Callback], args: Sequence[str], save_config: bool = True) -> None:
    """Run a subcommand of Lightning's CLI, with callbacks beside those that flags add."""
    is_help = bool(HELP & set(args))
    args = with_configs_first(args)
    algorithm = _read_recipes(args)
    helped = getattr(ppo_lightning, algorithm.rpartition(".")[2], PPO)
    common = {"exit_on_error": False, "allow_abbrev": False}  # an abbreviation may be another flag
    subcommands = {
        command: common
        | {
            "dump_header": HEADER,
            "conflict_handler": "resolve" if is_help else "error",
            "usage": f"ppo-lightning {command} --config RECIPE [--OPTION VALUE ...]",
            "description": f"{DESCRIPTIONS[command]}. Options of the algorithm are those of"
            f" {helped.__name__}: --model.help CLASS lists those of a variant, --model.agent.help CLASS of an"
            " agent. Integers may be written as 1e6, 500k or 1M.",
        }
        for command in SUBCOMMANDS
        if command in args
    }
    # The parser would keep the values of PPO's defaults for the settings of another algorithm.
    cli = type("PPOCLI", (PPOCLI,), {"algorithm": algorithm})
    try:
        cli(
            helped if is_help else AgentModule,
            RolloutDataModule,
            args=[args[0], "--help"] if is_help else args,
            subclass_mode_model=not is_help,
            seed_everything_default=1,
            auto_configure_optimizers=False,
            parser_class=Parser,
            parser_kwargs={"prog": "ppo-lightning", **common, **subcommands},
            save_config_callback=SaveRunConfig if save_config else None,
            save_config_kwargs={"config_filename": "cli_config.yaml", "save_to_log_dir": False},
            trainer_defaults=TRAINER_DEFAULTS | {"callbacks": callbacks},
        )
    except argparse.ArgumentError as error:
        raise ConfigError(_one_sentence(error.message, args)) from error


def _read_recipes(args: Sequence[str]) -> str:
    """Return the class path of the algorithm that flags or recipes name. The last one counts.

    Exported classes that they name are imported, because the parser knows the short names of those only.
    """
    class_path = PPOCLI.algorithm
    words = set(re.findall(r"\w+", " ".join(args)))
    for config in split_configs(args)[0]:
        recipe = read_yaml(config, "--config") if os.path.isfile(config) else yaml.safe_load(config)
        words |= set(re.findall(r"\w+", str(recipe)))
        settings = recipe if isinstance(recipe, dict) else {}
        for group in ("data", "trainer"):
            if not isinstance(settings.get(group, {}), dict | str):
                raise ConfigError(f"--config {config}: {group} holds no settings: add some, or leave it out.")
        class_path = _class_of(settings.get("model")) or class_path
    for package in (ppo_lightning, ppo_lightning.callbacks):
        for name in words & {*package.__all__}:
            getattr(package, name)
    return _class_of(option(args, "--model", "--model.class_path")) or class_path


def _class_of(model: Any) -> str | None:
    """Return the class path of settings of an algorithm: a dictionary, its file, or the class path itself."""
    if isinstance(model, str) and os.path.isfile(model):
        model = read_yaml(model, "--model")
    return model.get("class_path") if isinstance(model, dict) else model


def _recipe_name(configs: Sequence[Any] | None) -> str:
    """Return the file name of the last recipe, without its suffix; nothing for a saved configuration."""
    paths = [Path(str(config)) for config in configs or () if str(config).endswith((".yaml", ".yml"))]
    return "" if not paths or paths[-1].stem == "cli_config" else paths[-1].stem


def _require_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        # On a full disk, creating the TensorBoard file would end the run with a traceback.
        if shutil.disk_usage(folder).free < FREE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise ConfigError(f"The folder of the run, {folder}, cannot be written: {error.strerror}.") from error


def _message(error: BaseException, args: Sequence[str]) -> BaseException | str | None:
    """Return the message for a mistake of the user, None for any other error, which needs its traceback."""
    cause: BaseException | None = error
    while cause is not None:  # jsonargparse wraps errors of a constructor
        if isinstance(cause, ConfigError | NonFiniteError | MisconfigurationException):
            return cause
        cause = cause.__cause__
    if isinstance(error, yaml.YAMLError):  # text of --config
        return f"--config is not YAML: {' '.join(str(error).split())}."
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        settings = "data.num_envs, data.num_steps, data.eval_episodes, model.buffer_size or the widths of"
        return f"The run does not fit into memory ({first_line(error)}): lower {settings} model.agent."
    if isinstance(error, OSError) and isinstance(error.filename, str):
        path, named = Path(error.filename), [Path(arg.rpartition("=")[2]) for arg in args]
        if any(path in (name, *name.parents) or (name.name and name in path.parents) for name in named):
            return f"{path} cannot be used ({error.strerror}): name another file or folder."
    return None


def _one_sentence(message: str, args: Sequence[str]) -> str:
    """Extract the cause from jsonargparse's report, with suggestions for a misspelled key."""
    if extra := re.match(r"unrecognized arguments: ([^\s=]+)", message):
        name = extra[1]
        if name.startswith("-"):
            return _unknown(name)
        is_recipe = name in bundled_recipes() or name.endswith((".yaml", ".yml"))
        meant = f"--config {name}" if is_recipe else f"--data.env_id {name}"
        return f"the argument {name!r} belongs to no option: did you mean {meant}?"
    option = r"(?:(?:Group '(\S+)'|Subcommand '\w+') does not accept option|Option) '([^']+)'"
    if unknown := re.search(option, message):
        key = unknown[2]
        flags = [arg.partition("=")[0] for arg in args if arg.startswith("--")]
        flag = next((flag for flag in flags if flag.endswith(f".{key}")), None)
        name = flag or ".".join(filter(None, unknown.groups()))
        return _unknown(name, "" if flag else _writer(args, key.rpartition(".")[2]))
    noise = ("Does not validate", "Subtypes", "Errors", "Given value", "Expected a <class 'NoneType'>")
    lines = [line.strip(" -") for line in message.splitlines()]
    text = " ".join(line for line in lines if line and not line.startswith(noise))
    text = re.sub(r'Parser key "([^"]+)":', r"\1:", text)
    return re.sub(r"<class '(\w+)'>", r"\1", text).replace("typing.", "")


def _unknown(name: str, writer: str = "") -> str:
    """Say in one sentence that there is no such option, and name those that were probably meant."""
    dashes = "--" if name.startswith("-") else ""
    options, asked = dict(known_options()), name.lstrip("-")
    if options.get(asked) == asked:  # of another algorithm, without its class
        owner = {"model": "PPO", "model.agent": "MLPAgent"}.get(asked.rpartition(".")[0])
        if owner:
            options[asked] += f" of ppo_lightning.{owner}"
        else:
            del options[asked]
    known = {option: f"{dashes}{shown}" for option, shown in options.items()}
    ends = {option.rpartition(".")[2]: shown for option, shown in reversed(known.items())}
    parts = name.lstrip("-").replace("-", "_").replace(".init_args", "").split(".")
    prefixes = itertools.accumulate(parts, "{}.{}".format)
    first_unknown = next((prefix for prefix in prefixes if prefix not in known), parts[-1])
    guess = nearest(first_unknown.rpartition(".")[2], known | ends) or "; --help lists all keys."
    return f"the {'option' if dashes else 'key'} {name!r} is unknown{writer}{guess}"


@functools.cache
def known_options() -> dict[str, str]:
    """Return the options by name, and how messages show them: with the class, unless it is the default."""
    flags = ("config", "print_config", "seed_everything", "ckpt_path", "model", "data", "trainer")
    known = {name.lstrip("-"): name.lstrip("-") for name in (*flags, *FLAGS, *SETTINGS)}
    packages = (ppo_lightning, importlib.import_module("ppo_lightning.offpolicy"))
    ours = [getattr(package, name) for package in packages for name in package.__all__]
    for group, default, base in (
        ("model", PPO, AgentModule),
        ("model.agent", MLPAgent, ActorCritic),
        ("data", RolloutDataModule, RolloutDataModule),
        ("trainer", Trainer, Trainer),
    ):
        for owner in [default, *(cls for cls in ours if isinstance(cls, type) and issubclass(cls, base))]:
            suffix = "" if owner is default else f" of ppo_lightning.{owner.__name__}"
            for name, parameter in inspect.signature(owner.__init__).parameters.items():
                if parameter.default is not parameter.empty:
                    known.setdefault(f"{group}.{name}", f"{group}.{name}{suffix}")
    return known


def _writer(args: Sequence[str], key: str) -> str:
    """Return which version wrote the saved configuration that has a key; empty for a recipe."""
    for path in filter(os.path.isfile, split_configs(args[1:])[0]):
        text = Path(path).read_text(encoding="utf-8")
        header = re.match(r"# (?:ppo_lightning==(\S+)|lightning)", text)
        if header and re.search(rf"^\s*{re.escape(key)}:", text, re.MULTILINE):
            version = f"ppo_lightning {header[1]}" if header[1] else "an older version of ppo_lightning"
            return f" ({version} wrote {path})"
    return ""


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
