"""Commands and flags of the command line, without importing PyTorch or Lightning."""

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ppo_lightning import __version__
from ppo_lightning.errors import nearest

SUBCOMMANDS = {  # of Lightning's CLI
    "fit": "train; with --ckpt_path, resume a run",
    "validate": "evaluate a trained agent on whole episodes (--ckpt_path)",
    "test": "evaluate like validate, with metrics named test/*",
}
OTHER_COMMANDS = {  # modules of this package with a `main`
    "play": "record a video of a trained agent",
    "export": "write a trained agent as ONNX, or as a folder for the Hugging Face Hub",
    "profile": "measure the time of each stage of a recipe on this machine, and try faster settings",
    "check-env": "report what in an environment would break or bias training",
    "details": "list the implementation details of a run and their places in the code",
    "recipes": "list the bundled recipes with environment, steps and measured return",
    "tournament": "let checkpoints and scripted players play each other, and rate them",
}
EXPERIMENTS = {  # modules of `experiments` with a `main`
    "benchmark": "train recipes with several seeds; compare with published results, draw learning curves",
    "tune": "search hyperparameters on Optuna, over several recipes, seeds and machines",
    "compare": "test whether the runs of one benchmark are worse than those of another",
}
DESCRIPTIONS = SUBCOMMANDS | OTHER_COMMANDS | EXPERIMENTS
MODULES = {  # of the commands that are not Lightning's
    command: f"ppo_lightning.{room}.{command.replace('-', '_')}"
    for room, commands in (("commands", OTHER_COMMANDS), ("experiments", EXPERIMENTS))
    for command in commands
}
DEFAULT_NAME = "{name}"  # in the default loggers, in the place of the name of the run
TRAINER_DEFAULTS: dict[str, Any] = {
    "max_epochs": -1,  # data.total_timesteps ends the run
    "num_sanity_val_steps": 0,
    "log_every_n_steps": 1,
    "enable_model_summary": False,  # RunSummary prints one line instead
    "logger": [
        {"class_path": "CSVLogger", "init_args": {"save_dir": "runs", "name": DEFAULT_NAME}},
        {
            "class_path": "TensorBoardLogger",
            "init_args": {"save_dir": "runs/tensorboard", "name": DEFAULT_NAME, "default_hp_metric": False},
        },
    ],
}
# Flags of ``fit`` for a run that writes and prints nothing.
QUIET = [
    f"--trainer.{name}=false"
    for name in ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
]
QUIET += ["--trainer.callbacks=null"]  # which may need what is left out


def parser_of(command: str, epilog: str = "") -> argparse.ArgumentParser:
    """Return the parser of a command of this package, whose description is that of the list of commands."""
    text = DESCRIPTIONS[command]
    name, description = f"ppo-lightning {command}", f"{text[0].upper()}{text[1:]}."
    return argparse.ArgumentParser(name, description=description, epilog=epilog, allow_abbrev=False)


def at_least(lowest: int) -> Callable[[str], int]:
    """Return the type of an argument that is an integer with a lower bound."""

    def integer(text: str) -> int:
        if (number := int(text)) < lowest:
            raise argparse.ArgumentTypeError(f"{number} must be at least {lowest}.")
        return number

    return integer


def add_agent_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the classes of a checkpoint's agent that are the user's, which a checkpoint does not import."""
    for part in ("agent", "actor", "critic"):
        name = f"--model.{part}"
        parser.add_argument(name, metavar="CLASS", help=f"import path of a class of yours, as {name} of fit")


def run_without_imports(args: Sequence[str]) -> bool:
    """Answer ``--help``, ``--version``, ``recipes`` and unknown commands; return whether one was given."""
    if "--version" in args[:1]:
        print(f"ppo-lightning {__version__}")
    elif not args or args[0] in ("-h", "--help"):
        print("usage: ppo-lightning COMMAND [--config RECIPE] [--OPTION VALUE ...]\n")
        print("PPO, SAC, DQN and others with TorchRL and PyTorch Lightning. Every command has a --help:\n")
        print(*(f"  {name:<10} {text}" for name, text in DESCRIPTIONS.items()), sep="\n")
        print("\nStart with: ppo-lightning fit --config ppo/classic")
    elif args[0] == "recipes":
        importlib.import_module("ppo_lightning.commands.recipes").main(args[1:])
    elif args[0] not in DESCRIPTIONS:
        guess = nearest(args[0], list(DESCRIPTIONS)) or "."
        commands = ", ".join(DESCRIPTIONS)
        print(f"error: there is no command {args[0]!r}{guess} Commands: {commands}.", file=sys.stderr)
        raise SystemExit(2)
    else:
        return False
    return True
