"""Settings that a checkpoint holds: which of them would import or call code."""

from typing import Any

from ppo_lightning.checkpoints.agent import is_ours
from ppo_lightning.checkpoints.file import read_checkpoint
from ppo_lightning.errors import ConfigError

NOT_THE_FILES = {"_instantiator", "predict_observations"}  # settings of the data that no file decides


def data_settings(path: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the data module in a checkpoint, with those that are given in their place.

    Raises:
        ConfigError: The file cannot be read, or one of its settings names code.
    """
    settings = read_checkpoint(path)["datamodule_hyper_parameters"].items()
    data = {key: value for key, value in settings if key not in {*NOT_THE_FILES, *given}}
    if named := code_in_data(data):
        raise ConfigError(
            f"The checkpoint's settings import or call code ({named}): give these settings yourself."
        )
    return data | given


def code_in_data(data: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the data module that would import or call code, by key."""
    named = code_in_id(data["env_id"]) if "env_id" in data else {}
    if data.get("transforms"):
        named["data.transforms"] = data["transforms"]
    if may_be_code(data.get("env_kwargs"), strings=False):
        named["data.env_kwargs"] = data["env_kwargs"]
    return named


def code_in_id(env_id: Any) -> dict[str, Any]:
    """Return ``data.env_id`` if it is an import path or a class, or names a module that is not of this package."""
    if isinstance(env_id, str):
        module, _, name = env_id.rpartition(":")
        if "." not in name and (not module or is_ours(module)):
            return {}
    return {"data.env_id": env_id}


def may_be_code(value: Any, strings: bool = True) -> bool:
    """Tell whether jsonargparse may import something for a value: a class's path, in an argument of any type; or a string."""
    if isinstance(value, dict):
        return "class_path" in value or any(may_be_code(entry, strings) for entry in value.values())
    if isinstance(value, list | tuple):
        return any(may_be_code(entry, strings) for entry in value)
    return strings and isinstance(value, str) and "." in value
