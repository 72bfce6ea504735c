"""The command line: ``ppo-lightning fit | validate | test | predict --config RECIPE.yaml``, and the other commands."""

import errno
import importlib
import inspect
import logging
import os
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from jsonargparse import ArgumentParser
from lightning import Callback, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from ppo_lightning.callbacks import ActionWriter, RolloutProgressBar, RunSummary
from ppo_lightning.checkpoint_settings import TRUST, TRUST_HELP, with_checkpoint_settings
from ppo_lightning.datamodule import RolloutDataModule
from ppo_lightning.errors import ConfigError, NonFiniteError, nearest
from ppo_lightning.models import MLPAgent
from ppo_lightning.module import PPO
from ppo_lightning.resume import newest_checkpoint

SUBCOMMANDS = ("fit", "validate", "test", "predict")
OTHER_COMMANDS = {  # where their main functions are
    "play": "video",
    "profile": "profiling",
    "details": "details",
    "export": "export",
    "benchmark": "benchmark.command",
    "compare": "benchmark.compare",
    "ablate": "benchmark.ablate",
}


class Parser(LightningArgumentParser):
    """Lightning's parser, with the algorithm's options in ``--help`` and errors of one sentence."""

    def format_help(self, *args: Any) -> str:
        """Lightning's help, shortened, then the options of PPO: a subclass of it may be chosen, so Lightning lists none."""
        text = super().format_help(*args)
        if "--model" not in self._option_string_actions:
            return text
        _, text = text.split("\n\n", 1)  # without 50 lines of usage
        text = re.sub(r",\s+known\s+subclasses:[^)]*\)", ")", text)
        text = f"usage: {self.prog.replace(' [options]', '')} --config RECIPE.yaml [--OPTION VALUE ...]\n\n{text}"
        algorithm = ArgumentParser(prog=self.prog, usage="", add_help=False)
        algorithm.add_class_arguments(PPO, "model")
        options = algorithm.format_help().split("\n", 1)[1].strip()
        title = "Options of the algorithm, in YAML under model.init_args (--model.help CLASS for a variant's):"
        return f"{text}\n{title}\n\n{options}\n"

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Prints the cause, without the 900 lines of usage, and exits with code 2."""
        print(f"error: {_one_sentence(message)}", file=sys.stderr)
        raise SystemExit(2)


class SaveRunConfig(SaveConfigCallback):
    """Keeps the settings of runs that train; ``validate`` and the others would put theirs into the current folder."""

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Writes ``cli_config.yaml`` at ``fit``."""
        if stage == "fit":
            super().setup(trainer, pl_module, stage)


class PPOCLI(LightningCLI):
    """Lightning's CLI: ``model`` is an algorithm by ``class_path``, ``data`` a :class:`RolloutDataModule`."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Makes PPO the algorithm where none is named."""
        parser.set_defaults({"model": {"class_path": "ppo_lightning.PPO"}})
        parser.add_argument("--auto_resume", action="store_true", help="fit: go on from the newest whole checkpoint, if any")
        parser.add_argument(TRUST, action="store_true", help=TRUST_HELP)

    def before_instantiate_classes(self) -> None:
        """Demand a checkpoint where one is needed; honour ``--trainer.enable_progress_bar false``.

        Lightning refuses that flag beside a progress bar among the callbacks.
        """
        config = self.config[self.subcommand]
        if self.subcommand != "fit" and config.ckpt_path is None:
            raise ConfigError(f"{self.subcommand} needs a trained agent: give --ckpt_path.")
        if config.trainer.enable_progress_bar is False:
            callbacks = self.trainer_defaults["callbacks"]
            self.trainer_defaults["callbacks"] = [c for c in callbacks if not isinstance(c, RolloutProgressBar)]

    def before_fit(self) -> None:
        """Looks whether the run's folders can be written; finds the checkpoint for ``--auto_resume`` and ``--ckpt_path last``.

        Raises:
            ConfigError: A folder cannot be written; or ``--ckpt_path last``, and there is no checkpoint.
        """
        for logger in self.trainer.loggers:
            _require_writable(Path(logger.save_dir or self.trainer.default_root_dir))
        config = self.config_init.fit
        if not config.auto_resume and config.ckpt_path != "last":
            return
        path = newest_checkpoint(self.trainer, self.config.fit.data.env_id, config.seed_everything)
        if path is None and config.ckpt_path == "last":
            raise ConfigError("--ckpt_path last finds no checkpoint of this recipe and seed: start with --auto_resume instead.")
        config.ckpt_path = path

    def _parse_ckpt_path(self) -> None:
        """Does nothing: Lightning 2.6 would put the checkpoint's hyperparameters over the flags given by hand.

        ``main`` reads them before the flags instead (Lightning-AI/pytorch-lightning#20801, #21116).
        """


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command line.

    Args:
        args: The arguments; None: the process's own.

    Raises:
        SystemExit: With code 2 and one sentence on standard error when a setting cannot work.
    """
    args = list(sys.argv[1:] if args is None else args)
    _quieten()
    try:
        if args and args[0] in OTHER_COMMANDS:
            return importlib.import_module(f"ppo_lightning.{OTHER_COMMANDS[args[0]]}").main(args[1:])
        if args and args[0] in SUBCOMMANDS:
            args = with_checkpoint_settings(args)
        sys.argv[1:] = args  # what LightningCLI and the processes that a strategy starts read
        run([RolloutProgressBar(), RunSummary(), ActionWriter()])
    except Exception as error:
        cause = _config_error(error)
        if cause is None:
            raise
        print(f"error: {cause}", file=sys.stderr)
        raise SystemExit(2) from None


def run(callbacks: list[Callback], save_config: bool = True) -> None:
    """Runs a subcommand of Lightning's, as the process's arguments say.

    Args:
        callbacks: Those that no flag turns on.
        save_config: Whether training writes ``cli_config.yaml``.
    """
    PPOCLI(
        PPO,
        RolloutDataModule,
        subclass_mode_model=True,
        seed_everything_default=1,
        auto_configure_optimizers=False,
        parser_class=Parser,
        parser_kwargs={
            "prog": "ppo-lightning",
            "description": "PPO with TorchRL rollouts and PyTorch Lightning. See also play --help and profile --help.",
            "allow_abbrev": False,  # otherwise a misspelt flag counts as another one
            **{command: {"allow_abbrev": False} for command in SUBCOMMANDS},
        },
        save_config_callback=SaveRunConfig if save_config else None,
        save_config_kwargs={"config_filename": "cli_config.yaml", "overwrite": True},
        trainer_defaults={
            "max_epochs": -1,  # data.total_timesteps ends the run
            "num_sanity_val_steps": 0,
            "log_every_n_steps": 1,
            "callbacks": callbacks,
        },
    )


def _require_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ConfigError(f"The folder of the run, {folder}, cannot be written: {error.strerror}.") from error


def _config_error(error: BaseException | None) -> BaseException | None:
    """Finds the error meant for users: jsonargparse wraps what a class raises while it is instantiated."""
    while error is not None and not isinstance(error, ConfigError | NonFiniteError | MisconfigurationException):
        error = error.__cause__
    return error


def _one_sentence(message: str) -> str:
    """Picks the cause out of jsonargparse's report, and names the keys closest to a misspelt one."""
    unknown = re.search(r"ption '([^']+)'", message)
    if unknown and "accept" in message:
        key = unknown.group(1)
        known = {name: name for name in (*inspect.signature(PPO).parameters, "seed_everything", "ckpt_path")}
        known |= {name: f"model.agent.{name}" for name in inspect.signature(MLPAgent).parameters}
        known["rpo_alpha"] = "rpo_alpha of model ppo_lightning.variants.RPO"
        for group, owner in (("data", RolloutDataModule), ("trainer", Trainer)):
            known |= {f"{group}.{name}": f"{group}.{name}" for name in inspect.signature(owner).parameters}
        return f"the key {key!r} is unknown{nearest(key, known) or '; --help lists all keys.'}"
    noise = ("Does not validate", "Subtypes", "Errors", "Given value", "Expected a <class 'NoneType'>")
    lines = [line.strip(" -") for line in message.splitlines()]
    text = " ".join(line for line in lines if line and not line.startswith(noise))
    return re.sub(r"<class '(\w+)'>", r"\1", re.sub(r'Parser key "([^"]+)":', r"\1:", text)).replace("typing.", "")


def _quieten() -> None:
    """Keeps what Lightning says about itself off the screen: hardware it did not find, products, internal deprecations."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\).*")
    warnings.filterwarnings("ignore", message=r"\s*Unable to serialize instance")  # an env_id, tried as a callable first
    warnings.filterwarnings("ignore", message=".*is out of date. You should consider upgrading")  # the recipes' v4
    warnings.filterwarnings("ignore", message=".*DISPLAY environment variable is missing")  # dm_control trying to render
    warnings.filterwarnings("ignore", message="The dirpath has changed from")
    warnings.filterwarnings("ignore", message=".*precision lowered by casting.*")
