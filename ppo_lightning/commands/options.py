"""Commands, options and help texts of the command line, without importing PyTorch or Lightning."""

import argparse
import ast
import functools
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import docstring_parser

from ppo_lightning import __version__
from ppo_lightning.errors import ConfigError, nearest

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
    "details": "list the implementation details of a run, or compare two checkpoints",
    "recipes": "list the bundled recipes with environment, steps and measured return",
    "benchmark": "train recipes with several seeds; compare with published results, draw learning curves",
    "tune": "search hyperparameters on Optuna, over several recipes, seeds and machines",
    "compare": "test whether the runs of one benchmark are worse than those of another",
    "tournament": "let checkpoints and scripted players play each other, and rate them",
}
DESCRIPTIONS = SUBCOMMANDS | OTHER_COMMANDS
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
SOURCES = {  # group of options -> classes that take them, and their files; the first class is the default
    "model": {
        "PPO": "algorithms/ppo.py",
        "RPO": "algorithms/rpo.py",
        "PPG": "algorithms/ppg.py",
        "RND": "algorithms/rnd.py",
        "RecurrentPPO": "algorithms/recurrent.py",
        "SelfPlay": "games/selfplay.py",
    },
    "model.agent": {
        "MLPAgent": "models/mlp.py",
        "CNNAgent": "models/cnn.py",
    },
    "data": {"RolloutDataModule": "rollouts/datamodule.py"},
    "trainer": {"Trainer": "pytorch/trainer/trainer.py"},
}
# Import paths and short names of the classes of `model` and `model.agent`
OURS = re.compile(rf"(ppo_lightning\.([\w.]+\.)?)?({'|'.join([*SOURCES['model'], *SOURCES['model.agent']])})")
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
    """Answer ``--help``, ``--version``, ``recipes``, unknown commands and misspelt options.

    Args:
        args: Arguments of the command line.

    Returns:
        Whether the command line is answered, so that no command must run.

    Raises:
        SystemExit: With code 2 if the command, a recipe or an option is unknown.
    """
    if "--version" in args[:1]:
        print(f"ppo-lightning {__version__}")
    elif not args or args[0] in ("-h", "--help"):
        print(_commands())
    elif args[0] == "recipes":
        importlib.import_module("ppo_lightning.commands.recipes").main(args[1:])
    elif args[0] in SUBCOMMANDS and {"-h", "--help"} & set(args):
        print(_subcommand(args[0]))
    else:
        try:
            checked(args)
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(2) from None
        return False
    return True


def checked(args: Sequence[str]) -> list[str]:
    """Return the arguments with the files of bundled recipes, after checking all names.

    The check refuses what jsonargparse would refuse, too, but within a second: before PyTorch is imported.
    It leaves to jsonargparse the keys of the user's own classes, keys within a value, and YAML text.

    Args:
        args: Arguments of the command line.

    Raises:
        ConfigError: The command, a recipe or an option is unknown, or a recipe cannot be read.
    """
    if args[:1] and not args[0].startswith("-") and args[0] not in DESCRIPTIONS:
        guess = nearest(args[0], list(DESCRIPTIONS), limit=1)
        raise ConfigError(
            f"there is no command {args[0]!r}{guess or '.'} Commands: {', '.join(DESCRIPTIONS)}."
        )
    from ppo_lightning.commands.recipes import with_recipe_paths  # imports PyYAML: not for `--help`

    args = with_recipe_paths(args)
    if args[:1] and args[0] in SUBCOMMANDS:
        known = known_options(args[0])
        given = list(_given(args))
        classes = [
            str(value)
            for name, value in given
            if value and _CLASS.fullmatch(name) and not isinstance(value, dict)
        ]
        has_checkpoint = any(name in ("--ckpt_path", "ckpt_path") and value for name, value in given)
        is_open = has_checkpoint or not all(map(OURS.fullmatch, classes))
        for name, _ in given:
            dashes = name[: len(name) - len(name.lstrip("-"))]
            parts = name.lstrip("-").removesuffix("+").split(".")
            if parts[0] == "model":
                if is_open or {"class_path", "dict_kwargs", "help"} & set(parts):
                    continue
                parts = [part for part in parts if part != "init_args"]
            depth = 1 if parts[0] not in SOURCES else 3 if parts[:2] == ["model", "agent"] else 2
            if (key := ".".join(parts[:depth])) not in known:
                raise ConfigError(unknown_option(dashes + key, "" if dashes else _writer(args, name)))
    return args


_CLASS = re.compile(r"(--)?model(\.init_args)?(\.agent)?(\.class_path)?")


def _given(args: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each option in the recipes and the flags.

    Raises:
        ConfigError: A recipe cannot be read, or an argument belongs to no option.
    """
    from ppo_lightning.commands.config_files import read_yaml, split_configs
    from ppo_lightning.commands.recipes import bundled_recipes

    configs, others = split_configs(args[1:])
    for path in configs:
        if os.path.isfile(path):  # jsonargparse reports a missing file, or the value is YAML itself
            yield from _flat(read_yaml(path, "--config"))
    flag = ""
    for arg in others:
        name, equals, value = arg.partition("=")
        if re.match("--?[a-zA-Z]", arg) and " " not in name:
            flag = name
            yield flag, value
            flag = "" if equals or flag in FLAGS else flag
        elif flag:
            yield flag, arg
            flag = ""
        elif arg != "--":
            recipe = arg in bundled_recipes() or arg.endswith((".yaml", ".yml"))
            meant = f"--config {arg}" if recipe else f"--data.env_id {arg}"
            raise ConfigError(f"the argument {arg!r} belongs to no option: did you mean {meant}?")


def _writer(args: Sequence[str], name: str) -> str:
    """Return which version wrote the saved configuration that has a key; empty for a recipe."""
    from ppo_lightning.commands.config_files import read_yaml, split_configs

    for path in filter(os.path.isfile, split_configs(args[1:])[0]):
        header = re.match(r"# (?:ppo_lightning==(\S+)|lightning)", Path(path).read_text(encoding="utf-8"))
        if header and name in dict(_flat(read_yaml(path, "--config"))):
            version = f"ppo_lightning {header[1]}" if header[1] else "an older version of ppo_lightning"
            return f" ({version} wrote {path})"
    return ""


def _flat(settings: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items() if isinstance(settings, dict) else ():
        yield f"{prefix}{key}", value
        yield from _flat(value, f"{prefix}{key}.")


@functools.cache
def known_options(command: str) -> dict[str, str]:
    """Return the options of a command of Lightning's CLI by name, and how messages show them.

    They are read from the source files: importing PyTorch and Lightning takes five seconds.
    """
    flags = (
        "help",
        "config",
        "print_config",
        "seed_everything",
        "model",
        "data",
        "trainer",
        *FLAGS,
        *SETTINGS,
    )
    objects = {"datamodule", "dataloaders", "train_dataloaders", "val_dataloaders"}
    method = {argument.arg for argument, _ in _arguments(_class("trainer", "Trainer"), command)}
    known = {name.lstrip("-"): name.lstrip("-") for name in (*flags, *sorted(method - objects))}
    for group, owners in SOURCES.items():
        for owner in owners:
            of = "" if owner == next(iter(owners)) else f" of ppo_lightning.{owner}"
            for argument, _ in _arguments(_class(group, owner)):
                known.setdefault(f"{group}.{argument.arg}", f"{group}.{argument.arg}{of}")
    return known


def unknown_option(key: str, writer: str = "") -> str:
    """Say in one sentence that there is no such option, and name those that were probably meant.

    Args:
        key: The key of a recipe or the flag, as the user wrote it.
        writer: Which version wrote the key, in words.
    """
    name = key.lstrip("-").replace("-", "_")
    dashes = "--" if key.startswith("-") else ""
    known = {option: f"{dashes}{shown}" for option, shown in known_options("fit").items()}
    ends = {option.rpartition(".")[2]: shown for option, shown in reversed(known.items())}
    guess = nearest(name.rpartition(".")[2], known | ends) or "; --help lists all keys."
    return f"the {'option' if dashes else 'key'} {key!r} is unknown{writer}{guess}"


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
        description=f"{DESCRIPTIONS[command]}. In YAML, put options of the algorithm under model.init_args."
        " Integers may be written as 1e6, 500k or 1M.",
    )
    parser.add_argument(
        "-c",
        "--config",
        metavar="RECIPE",
        help="bundled recipe, or YAML file; flags override it wherever they stand",
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
    model = parser.add_argument_group("algorithm (--model.help CLASS lists the options of a variant)")
    model.add_argument(
        "--model", metavar="CLASS", help="PPO, a variant or your own subclass (default: ppo_lightning.PPO)"
    )
    _add(model, "model")
    agent = parser.add_argument_group("agent (of MLPAgent; --model.agent CLASS chooses another)")
    _add(agent, "model.agent")
    _add(parser.add_argument_group("rollouts and environments"), "data")
    _add(parser.add_argument_group("Lightning's Trainer"), "trainer")
    return parser.format_help()


@functools.cache
def _class(group: str, owner: str) -> ast.ClassDef:
    """Return a class of a group of options, read from the source file."""
    folder = Path(__file__).parents[1]
    if group == "trainer":
        folder = Path(next(iter(importlib.util.find_spec("lightning").submodule_search_locations)))  # type: ignore
    body = ast.parse((folder / SOURCES[group][owner]).read_text(encoding="utf-8")).body
    return next(node for node in body if isinstance(node, ast.ClassDef) and node.name == owner)


def _arguments(cls: ast.ClassDef, function: str = "__init__") -> Iterator[tuple[ast.arg, ast.expr | None]]:
    """Yield the arguments of a function that have a default or are keywords, and their defaults."""
    for node in cls.body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            positional = node.args.args[len(node.args.args) - len(node.args.defaults) :]
            defaults = [*node.args.defaults, *node.args.kw_defaults]
            yield from zip([*positional, *node.args.kwonlyargs], defaults, strict=True)


def _add(parser: Any, group: str) -> None:
    """Add the arguments of the default class of a group to the parser's group of options."""
    owner = next(iter(SOURCES[group]))
    cls = _class(group, owner)
    init = next(node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    docstring = docstring_parser.parse(ast.get_docstring(init) or ast.get_docstring(cls) or "")
    described = {param.arg_name: " ".join((param.description or "").split()) for param in docstring.params}
    for argument, default in _arguments(cls):
        name = argument.arg
        value = ast.unparse(default) if default else None
        kind = ast.unparse(argument.annotation or ast.Name("Any"))
        kind = re.sub(r"Annotated\[(.*), Range\((.*?)(?:, (.*?))?\)\]", _in_words, kind)
        if owner == "Trainer":
            value = TRAINER_DEFAULTS.get(name, value)
        text = f"{described.get(name, '')} (type: {kind}, default: {value})".strip().replace("%", "%%")
        parser.add_argument(f"--{group}.{name}", metavar=name.upper(), help=text)


def _in_words(match: re.Match[str]) -> str:
    kind, low, high = match.groups()
    return f"{kind} from {low} to {high}" if high else f"{kind} from {low}"
