"""Settings of a checkpoint for the command line. Those that import or call code need the user's consent."""

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ppo_lightning.algorithms.agent_module import AgentModule
from ppo_lightning.checkpoints.agent import known_class, trained_agent
from ppo_lightning.checkpoints.file import read_checkpoint
from ppo_lightning.checkpoints.settings import code_in_data, code_in_id, may_be_code, module_settings
from ppo_lightning.checkpoints.versions import arguments_of, require_known
from ppo_lightning.commands.options import TRUST
from ppo_lightning.errors import ConfigError
from ppo_lightning.models import ActorCritic
from ppo_lightning.rollouts.datamodule import RolloutDataModule


def with_checkpoint_settings(args: list[str]) -> list[str]:
    """Insert the settings of ``--ckpt_path`` before the flags, so that every flag overrides them.

    A checkpoint holds the settings of algorithm, data and seed. The settings of the trainer are in
    ``cli_config.yaml`` next to it. That file may name any class, so ``--trust_checkpoint`` is needed.
    With ``--config``, nothing is inserted.

    Args:
        args: Command (``fit``, ``validate`` or ``test``) and its arguments.

    Returns:
        The arguments with the settings inserted.

    Raises:
        ConfigError: The checkpoint cannot be read, or has settings that do not exist or would import or call
            code.
    """
    command = args[0]
    path = option(args, "--ckpt_path")
    if path is None or (path == "last" and command == "fit"):
        return args
    checkpoint = read_checkpoint(path)
    if option(args, "--config", "-c"):
        return args
    model, data, agent = (
        module_settings(checkpoint),
        checkpoint["datamodule_hyper_parameters"],
        checkpoint["agent"],
    )
    class_path = checkpoint["hyper_parameters"].get("_class_path", "ppo_lightning.PPO")
    overridden = {name for name in ("env_id", "transforms") if option(args, f"--data.{name}")}
    data = {key: value for key, value in data.items() if not key.startswith("_") and key not in overridden}
    _require_trust(_code_in(class_path, model, data, agent), args, ", or give the run's recipe by --config")
    require_known(checkpoint, "data", data, arguments_of(RolloutDataModule))
    trained_agent(checkpoint)  # refuses settings that do not match the weights
    if command == "fit":
        folder = Path(path).resolve().parent
        saved = folder.parent / "cli_config.yaml"
        has_run = folder.name == "checkpoints" and saved.is_file()
        if has_run and TRUST in args:
            return [command, "--config", str(saved), *args[1:]]
        hint = f" (the run's own: --config {saved})" if has_run else ""
        print(
            "Settings of algorithm, data and seed: from the checkpoint."
            f" Settings of the trainer: flags and defaults{hint}."
        )
    settings: dict[str, Any] = {
        "seed_everything": checkpoint["seed"],
        "model": {
            "class_path": class_path,
            "init_args": model | {"agent": {key: agent[key] for key in ("class_path", "init_args")}},
        },
        "data": data,
    }
    if command != "fit":
        settings["trainer"] = {"logger": False}
    try:
        return [command, "--config", json.dumps(settings), *args[1:]]
    except TypeError as error:
        raise ConfigError(
            f"The checkpoint's settings are not plain types ({error}): give the run's recipe by --config."
        ) from error


def environment_of(checkpoint: dict[str, Any], args: Sequence[str], chosen_id: str | None = None) -> str:
    """Return the id of the environment for ``play`` and ``export``, after checking for trust.

    Args:
        checkpoint: From :func:`~ppo_lightning.checkpoints.file.read_checkpoint`.
        args: Arguments of the command.
        chosen_id: Id that the user chose, None for the checkpoint's.

    Raises:
        ConfigError: Trust is needed to import the environment's module, or a function makes the environment.
    """
    env_id = checkpoint["datamodule_hyper_parameters"]["env_id"]
    _require_trust({} if chosen_id else code_in_id(env_id), args)
    if chosen_id is None and (not isinstance(env_id, str) or "." in env_id.rpartition(":")[2]):
        raise ConfigError(
            f"The checkpoint's data.env_id {env_id!r} is not the id of an environment,"
            " which play and export need."
        )
    return chosen_id or env_id


def agent_of(checkpoint: dict[str, Any], args: Sequence[str]) -> ActorCritic:
    """Return the agent of a checkpoint, after checking for trust in its class.

    Args:
        checkpoint: From :func:`~ppo_lightning.checkpoints.file.read_checkpoint`.
        args: Arguments of the command.

    Raises:
        ConfigError: Trust is needed to import the agent's class, or the agent does not fit its weights.
    """
    agent_class = checkpoint["agent"]["class_path"]
    _require_trust({} if known_class(agent_class, ActorCritic) else {"model.agent": agent_class}, args)
    return trained_agent(checkpoint)


def _require_trust(code: dict[str, Any], args: Sequence[str], remedy: str = "") -> None:
    """Refuse settings that name code; with ``--trust_checkpoint``, import the classes instead."""
    if code and TRUST not in args:
        listed = ", ".join(f"{key} {value!r}" for key, value in code.items())
        raise ConfigError(
            f"The checkpoint's settings import or call code ({listed:.300}):"
            f" pass {TRUST} if you trust the file{remedy}."
        )
    for key in {"model", "model.agent"} & code.keys():
        try:
            importlib.import_module(str(code[key]).rpartition(".")[0])
        except (ImportError, ValueError) as error:
            raise ConfigError(f"The checkpoint's {key} {code[key]!r} cannot be imported: {error}.") from error


def _code_in(
    class_path: Any, model: dict[str, Any], data: dict[str, Any], agent: dict[str, Any]
) -> dict[str, Any]:
    """Return the settings that the parser of the command line would import or call, by key."""
    code = code_in_data(data)
    for key, name, base in (
        ("model", class_path, AgentModule),
        ("model.agent", agent["class_path"], ActorCritic),
    ):
        if known_class(name, base) is None:
            code[key] = name
    for prefix, values in (("model", model), ("model.agent", agent["init_args"])):
        code |= {f"{prefix}.{key}": value for key, value in values.items() if may_be_code(value)}
    return code


def option(args: Sequence[str], *names: str) -> str | None:
    """Return the last value of an option, None if it is not given."""
    value = None
    for index, arg in enumerate(args):
        for name in names:
            if arg == name and index + 1 < len(args):
                value = args[index + 1]
            if arg.startswith(f"{name}="):
                value = arg.removeprefix(f"{name}=")
    return value
