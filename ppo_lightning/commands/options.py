"""Commands, options and help texts of the command line, without importing PyTorch or Lightning."""

import argparse
import ast
import importlib
import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import docstring_parser

from ppo_lightning import __version__
from ppo_lightning.errors import nearest

SUBCOMMANDS = {  # of Lightning's CLI
    "fit": "train; with --ckpt_path, resume a run",
    "validate": "evaluate a trained agent on whole episodes (--ckpt_path)",
    "test": "evaluate like validate, with metrics named test/*",
    "predict": "write a trained agent's actions for stored observations",
}
OTHER_COMMANDS = {  # modules of this package with a `main`
    "play": "record a video of a trained agent",
    "export": "write a trained agent as ONNX, or as a folder for the Hugging Face Hub",
    "profile": "measure the time of each stage of a recipe on this machine, and try faster settings",
    "check-env": "report what in an environment would break or bias training",
    "details": "list the implementation details of a run; compare two checkpoints, or another library",
    "recipes": "list the bundled recipes with environment, steps and measured return",
    "benchmark": "train recipes with several seeds; compare with published results, draw learning curves",
    "tune": "search hyperparameters on Optuna, over several recipes, seeds and machines",
    "compare": "test whether the runs of one benchmark are worse than those of another",
    "tournament": "let checkpoints and scripted players play each other, and rate them",
    "ablate": "train a recipe with implementation details switched off, one at a time",
}
DESCRIPTIONS = SUBCOMMANDS | OTHER_COMMANDS
SYNONYMS = {"train": "fit", "resume": "fit", "eval": "validate", "evaluate": "validate", "record": "play"}
TRUST = "--trust_checkpoint"
FLAGS = {  # flags beside those of Lightning
    "--auto_resume": "fit: resume from the newest intact checkpoint, if any",
    TRUST: "import and call code that the settings of --ckpt_path name: only for files that you trust",
}
NAME, NUM_THREADS = "--name", "--num_threads"
SETTINGS = {  # of the command line beside Lightning's own
    NAME: "name of the run in the default loggers (default: the recipe's file name)",
    NUM_THREADS: "PyTorch threads (default: all cores for convolutions and wide layers, otherwise 1)",
}
DEFAULT_NAME = "ppo"  # of a run without a recipe
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


def answer(args: Sequence[str]) -> bool:
    """Answer ``--help``, ``--version``, ``recipes`` and unknown commands.

    Args:
        args: Arguments of the command line.

    Returns:
        Whether the command line is answered, so that no command must run.

    Raises:
        SystemExit: With code 2 if the command is unknown.
    """
    if "--version" in args[:1]:
        print(f"ppo-lightning {__version__}")
    elif not args or args[0] in ("-h", "--help"):
        print(_commands())
    elif args[0] == "recipes":
        importlib.import_module("ppo_lightning.commands.recipes").main(args[1:])
    elif args[0] in SUBCOMMANDS and {"-h", "--help"} & set(args):
        print(_subcommand(args[0]))
    elif not args[0].startswith("-") and args[0] not in DESCRIPTIONS:
        guess = nearest(args[0], {name: name for name in DESCRIPTIONS} | SYNONYMS, limit=1)
        commands = ", ".join(DESCRIPTIONS)
        print(f"error: there is no command {args[0]!r}{guess or '.'} Commands: {commands}.", file=sys.stderr)
        raise SystemExit(2)
    else:
        return False
    return True


def _commands() -> str:
    lines = [f"  {name:<10} {text}" for name, text in DESCRIPTIONS.items()]
    return "\n".join(
        [
            "usage: ppo-lightning COMMAND [--config RECIPE] [--OPTION VALUE ...]",
            "\nPPO with TorchRL rollouts and PyTorch Lightning. Every command has a --help:\n",
            *lines,
            "\nStart with: ppo-lightning fit --config classic/cartpole",
        ]
    )


def _subcommand(command: str) -> str:
    parser = argparse.ArgumentParser(
        prog=f"ppo-lightning {command}",
        usage=f"ppo-lightning {command} --config RECIPE [--OPTION VALUE ...]",
        description=f"{DESCRIPTIONS[command]}. In YAML, put options of the algorithm under model.init_args.",
    )
    parser.add_argument(
        "-c", "--config", metavar="RECIPE", help="bundled recipe, or YAML file; flags override its values"
    )
    parser.add_argument("--print_config", action="store_true", help="print the whole configuration and exit")
    parser.add_argument(
        "--seed_everything", metavar="SEED", help="seed of the run, true for a random seed (default: 1)"
    )
    parser.add_argument(
        "--ckpt_path",
        metavar="FILE",
        help="checkpoint; fit resumes its run, other commands use its agent",
    )
    for flag, text in FLAGS.items():
        parser.add_argument(flag, action="store_true", help=text)
    for setting, text in SETTINGS.items():
        parser.add_argument(setting, metavar=setting[2:].upper(), help=text)
    package = Path(__file__).parents[1]
    trainer = Path(next(iter(importlib.util.find_spec("lightning").submodule_search_locations)))  # type: ignore
    trainer = trainer / "pytorch/trainer/trainer.py"
    model = parser.add_argument_group("algorithm (--model.help CLASS lists the options of a variant)")
    model.add_argument(
        "--model", metavar="CLASS", help="PPO, a variant or your own subclass (default: ppo_lightning.PPO)"
    )
    _add(model, "model.", package / "algorithms/ppo.py", "PPO")
    agent = parser.add_argument_group("agent (of MLPAgent; --model.agent CLASS chooses another)")
    _add(agent, "model.agent.", package / "models/mlp.py", "MLPAgent")
    _add(
        parser.add_argument_group("rollouts and environments"),
        "data.",
        package / "rollouts/datamodule.py",
        "RolloutDataModule",
    )
    _add(parser.add_argument_group("Lightning's Trainer"), "trainer.", trainer, "Trainer")
    return parser.format_help()


def _add(group: Any, prefix: str, path: Path, owner: str) -> None:
    """Add the arguments of a class to a group of options, read from the source file of the class."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    cls = next(node for node in body if isinstance(node, ast.ClassDef) and node.name == owner)
    init = next(node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    docstring = docstring_parser.parse(ast.get_docstring(init) or ast.get_docstring(cls) or "")
    described = {param.arg_name: " ".join((param.description or "").split()) for param in docstring.params}
    positional = init.args.args[len(init.args.args) - len(init.args.defaults) :]
    defaults = [*init.args.defaults, *init.args.kw_defaults]
    for argument, default in zip([*positional, *init.args.kwonlyargs], defaults, strict=True):
        name = argument.arg
        value = ast.unparse(default) if default else None
        kind = ast.unparse(argument.annotation or ast.Name("Any"))
        kind = re.sub(r"Annotated\[(.*), Range\((.*?)(?:, (.*?))?\)\]", _in_words, kind)
        if owner == "Trainer":
            value = TRAINER_DEFAULTS.get(name, value)
        text = f"{described.get(name, '')} (type: {kind}, default: {value})".strip().replace("%", "%%")
        group.add_argument(f"--{prefix}{name}", metavar=name.upper(), help=text)


def _in_words(match: re.Match[str]) -> str:
    kind, low, high = match.groups()
    return f"{kind} from {low} to {high}" if high else f"{kind} from {low}"
