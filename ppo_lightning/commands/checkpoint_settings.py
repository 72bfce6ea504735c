"""Settings of a checkpoint for the command line. Those that import or call code need the user's consent."""

import argparse
import contextlib
import importlib
import json
from collections.abc import Sequence
from typing import Any

from ppo_lightning.algorithms.agent_module import AgentModule
from ppo_lightning.checkpoints.agent import known_class, trained_agent
from ppo_lightning.checkpoints.file import read_checkpoint
from ppo_lightning.checkpoints.settings import (
    code_in_data,
    code_in_id,
    data_settings,
    may_be_code,
    module_settings,
)
from ppo_lightning.commands.options import TRUST
from ppo_lightning.errors import ConfigError
from ppo_lightning.models.actor import Actor
from ppo_lightning.rollouts.datamodule import RolloutDataModule


def with_checkpoint_settings(args: list[str]) -> list[str]:
    """Insert the settings of ``--ckpt_path`` before the flags, so that every flag overrides them.

    A checkpoint holds the settings of algorithm, data and seed. With ``--config``, nothing is inserted.

    Raises:
        ConfigError: The checkpoint cannot be read, or has settings that do not exist or would import or call
            code.
    """
    command = args[0]
    path = option(args, "--ckpt_path")
    if path in (None, "null", "last"):  # the last one is refused where a recipe may name it, too
        return args
    checkpoint = read_checkpoint(path)
    if option(args, "--config", "-c"):
        return args
    overridden = [name for name in ("env_id", "transforms") if option(args, f"--data.{name}")]
    data = data_settings(checkpoint, RolloutDataModule, given=overridden)
    model = module_settings(checkpoint)
    agent = checkpoint["agent"]
    class_path = checkpoint["hyper_parameters"].get("_class_path", "ppo_lightning.PPO")
    code = code_in_data(data)
    for key, name, base, settings in (
        ("model", class_path, AgentModule, model),
        ("model.agent", agent["class_path"], Actor, agent["init_args"]),
    ):
        if known_class(name, base) is None:
            code[key] = name
        code |= {f"{key}.{setting}": value for setting, value in settings.items() if may_be_code(value)}
    _require_trust(code, args, ", or give the run's recipe by --config")
    trained_agent(checkpoint)  # refuses settings that do not match the weights
    if command == "fit":
        print(
            "Settings of algorithm, data and seed: from the checkpoint. Settings of the trainer: flags and"
            " defaults (those of the run: --config cli_config.yaml, in its folder)."
        )
    recipe: dict[str, Any] = {
        "seed_everything": checkpoint["seed"],
        "model": {
            "class_path": class_path,
            "init_args": model | {"agent": {key: agent[key] for key in ("class_path", "init_args")}},
        },
        "data": data,
    }
    if command != "fit":
        recipe["trainer"] = {"logger": False}
    try:
        return [command, "--config", json.dumps(recipe), *args[1:]]
    except TypeError as error:
        raise ConfigError(
            f"The checkpoint's settings are not plain types ({error}): give the run's recipe by --config."
        ) from error


def environment_of(checkpoint: dict[str, Any], args: Sequence[str], chosen_id: str | None = None) -> str:
    """Return the id or import path that the user chose, or that of a checkpoint after checking for trust."""
    data = checkpoint["datamodule_hyper_parameters"]
    env_id = data["env_id"]
    _require_trust({} if chosen_id else code_in_id(env_id), args)
    if chosen_id is None and not isinstance(env_id, str):
        raise ConfigError(
            f"The checkpoint's data.env_id {env_id!r} is neither an id nor an import path, which play needs."
        )
    return chosen_id or env_id


def agent_of(checkpoint: dict[str, Any], args: Sequence[str]) -> Actor:
    """Return the agent of a checkpoint, after checking for trust in its class."""
    agent = checkpoint["agent"]
    code = {f"model.agent.{name}": part for name, part in agent["init_args"].items() if _is_class(part)}
    if known_class(agent["class_path"], Actor) is None:
        code["model.agent"] = agent["class_path"]
    _require_trust(code, args)
    return trained_agent(checkpoint)


def _require_trust(code: dict[str, Any], args: Sequence[str], remedy: str = "") -> None:
    """Refuse settings that name code; with ``--trust_checkpoint``, import the classes instead."""
    if code and TRUST not in args:
        listed = ", ".join(f"{key} {value!r}" for key, value in code.items())
        raise ConfigError(
            f"The checkpoint's settings import or call code ({listed:.300}):"
            f" pass {TRUST} if you trust the file{remedy}."
        )
    for key, value in code.items():
        if key not in ("model", "model.agent") and not _is_class(value):
            continue
        path = value["class_path"] if _is_class(value) else value
        try:
            importlib.import_module(str(path).rpartition(".")[0])
        except (ImportError, ValueError) as error:
            raise ConfigError(f"The checkpoint's {key} {path!r} cannot be imported: {error}.") from error


def _is_class(value: Any) -> bool:
    return isinstance(value, dict) and "class_path" in value


def option(args: Sequence[str], *names: str) -> str | None:
    """Return the last value of an option, None if it is not given."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument(*names, dest="value")
    with contextlib.suppress(argparse.ArgumentError):  # an option without a value
        return parser.parse_known_args(args)[0].value
    return None
