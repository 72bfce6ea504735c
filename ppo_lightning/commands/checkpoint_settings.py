"""Settings of a checkpoint for the command line, which the user gives where they name code."""

import argparse
import json
import pkgutil
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ppo_lightning.checkpoints.agent import known_class, trained_agent
from ppo_lightning.checkpoints.file import read_checkpoint, run_folder
from ppo_lightning.checkpoints.settings import data_settings, foreign_code, list_code, module_settings
from ppo_lightning.commands.arguments import Arguments
from ppo_lightning.errors import ConfigError, first_line
from ppo_lightning.models import Actor
from ppo_lightning.rollouts.datamodule import RolloutDataModule


def add_checkpoint_settings(arguments: Arguments) -> None:
    """Add the settings of ``--ckpt_path`` as a recipe, so that every flag overrides them.

    A checkpoint holds the settings of algorithm, data and seed. With ``--config``, nothing is added.
    """
    command, path = arguments.command, arguments.value("--ckpt_path")
    if path in (None, "null", "last"):  # the last one is refused where a recipe may name it, too
        return
    checkpoint = read_checkpoint(path)
    if arguments.configs:
        return
    code = foreign_code(checkpoint)
    given = {key: value for key in code if (value := arguments.value(f"--{key}")) is not None}
    if foreign := {key: value for key, value in code.items() if key not in given}:
        raise _refusal(foreign, arguments.words(), run_folder(path) / "cli_config.yaml")
    for key in given.keys() & {"model", "model.agent"}:
        _import(given[key])
    data = data_settings(checkpoint, RolloutDataModule, [key.removeprefix("data.") for key in given])
    # A fit chooses anew what was left out, or keeps it.
    left_out = checkpoint["hyper_parameters"].get("_left_out", ()) if command == "fit" else ()
    skipped = {key.removeprefix("model.") for key in given} | {*left_out}
    model = {key: value for key, value in module_settings(checkpoint).items() if key not in skipped}
    agent = checkpoint["agent"]
    settings = {key: x for key, x in agent["init_args"].items() if f"model.agent.{key}" not in given}
    trained_agent(checkpoint)  # refuses settings that do not match the weights
    if command == "fit":
        print(
            "Settings of algorithm, data and seed: from the checkpoint. Settings of the trainer: flags and"
            " defaults (those of the run: --config cli_config.yaml, in its folder)."
        )
    recipe: dict[str, Any] = {
        "seed_everything": checkpoint["seed"],
        "model": {
            "class_path": checkpoint["hyper_parameters"].get("_class_path", "ppo_lightning.PPO"),
            "init_args": model | {"agent": {"class_path": agent["class_path"], "init_args": settings}},
        },
        "data": data,
    }
    if command != "fit":
        recipe["trainer"] = {"logger": False}
    arguments.configs.append(json.dumps(recipe, default=str))


def environment_of(checkpoint: dict[str, Any], command: Sequence[str], chosen_id: str | None) -> str:
    """Return the id or import path that the user chose with ``--env_id``, otherwise that of a checkpoint."""
    code = foreign_code(checkpoint)
    if chosen_id is None and "data.env_id" in code:
        raise _refusal({"env_id": code["data.env_id"]}, command)
    return chosen_id or checkpoint["datamodule_hyper_parameters"]["env_id"]


def agent_of(checkpoint: dict[str, Any], command: Sequence[str], options: argparse.Namespace) -> Actor:
    """Return the agent of a checkpoint, after importing the classes that the user names."""
    plain = checkpoint["agent"]
    paths = {"model.agent": plain["class_path"]} | {
        f"model.{part}": plain["init_args"][part]["class_path"]
        for part in ("actor", "critic")
        if isinstance(plain["init_args"].get(part), dict)
    }
    for key in paths:
        if (path := vars(options)[key]) is not None:
            _import(path)
    if code := {key: path for key, path in paths.items() if known_class(path, nn.Module) is None}:
        raise _refusal(code, command)
    return trained_agent(checkpoint)


def _import(path: str) -> None:
    """Import a class that the user names."""
    try:
        pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"The class {path!r} cannot be imported: {first_line(error)}.") from error


def _refusal(code: Mapping[str, Any], command: Sequence[str], config: Path | None = None) -> ConfigError:
    """Return an error that shows the command with options, or the file, that name a checkpoint's code."""
    flags = [part for key, value in code.items() for part in (f"--{key}", value)]
    if not all(isinstance(flag, str) and "<" not in flag for flag in flags):
        values = [part for key in code for part in (f"--{key}", "VALUE")]
        flags = values if config is None else ["--config", str(config)]
    return ConfigError(
        f"The checkpoint names code, {list_code(code)}, and a checkpoint imports nothing. If you know this"
        f" code, name it yourself: {shlex.join(['ppo-lightning', *command, *flags]):.600}"
    )
