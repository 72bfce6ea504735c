"""Settings in a checkpoint, and detection of those that would import or call code."""

from typing import Any

from ppo_lightning.checkpoints.agent import is_ours
from ppo_lightning.checkpoints.file import read_checkpoint
from ppo_lightning.checkpoints.versions import arguments_of, require_known
from ppo_lightning.errors import ConfigError


def module_settings(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of a checkpoint's module, without the agent and entries of Lightning.

    A module may have saved ``agent`` in any form, which is not read: ``checkpoint["agent"]`` describes the
    agent.

    Args:
        checkpoint: From :func:`~ppo_lightning.checkpoints.file.read_checkpoint`.
    """
    saved = checkpoint["hyper_parameters"].items()
    return {key: value for key, value in saved if key != "agent" and key[0] != "_"}


def data_settings(path: Any, given: dict[str, Any], owner: type) -> dict[str, Any]:
    """Return the data module's settings of a checkpoint, overridden by given ones.

    Args:
        path: Path or URL of the checkpoint.
        given: Settings that override those of the checkpoint.
        owner: Class of the data module.

    Raises:
        ConfigError: The file cannot be read, a setting does not exist, or one would import or call code.
    """
    checkpoint = read_checkpoint(path)
    settings = checkpoint["datamodule_hyper_parameters"].items()
    data = {key: value for key, value in settings if not key.startswith("_") and key not in given}
    require_known(checkpoint, "data", data, arguments_of(owner))
    if code := code_in_data(data):
        raise ConfigError(
            f"The checkpoint's settings import or call code ({code}): give these settings yourself."
        )
    return data | given


def code_in_data(data: dict[str, Any]) -> dict[str, Any]:
    """Return the data module's settings that would import or call code, by key."""
    code = code_in_id(data["env_id"]) if "env_id" in data else {}
    if data.get("transforms"):
        code["data.transforms"] = data["transforms"]
    if may_be_code(data.get("env_kwargs"), strings=False):
        code["data.env_kwargs"] = data["env_kwargs"]
    return code


def code_in_id(env_id: Any) -> dict[str, Any]:
    """Return ``data.env_id`` by key if it is an import path, a class, or in a module of another package."""
    if isinstance(env_id, str):
        module, _, name = env_id.rpartition(":")
        if "." not in name and (not module or is_ours(module)):
            return {}
    return {"data.env_id": env_id}


def may_be_code(value: Any, strings: bool = True) -> bool:
    """Return whether jsonargparse may import something for a value.

    Args:
        value: Value of a setting. A ``class_path`` is imported for an argument of any type.
        strings: Whether a string with a dot counts as an import path.
    """
    if isinstance(value, dict):
        return "class_path" in value or any(may_be_code(entry, strings) for entry in value.values())
    if isinstance(value, list | tuple):
        return any(may_be_code(entry, strings) for entry in value)
    return strings and isinstance(value, str) and "." in value
