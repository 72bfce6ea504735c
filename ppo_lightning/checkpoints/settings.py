"""Settings in a checkpoint: what this version does not have, and what would import or call code."""

import inspect
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ppo_lightning import __version__
from ppo_lightning.checkpoints.agent import is_ours, known_class, naming_writer, writer_of
from ppo_lightning.errors import ConfigError, first_line
from ppo_lightning.models.actor import Actor
from ppo_lightning.utils.arguments import arguments_of

MAKERS = {"agent", "actor", "critic"}  # arguments of a module that make its agent


def module_settings(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of a checkpoint's module, without entries of Lightning.

    A module may have saved ``MAKERS`` in any form, which is not read: ``checkpoint["agent"]`` describes the
    agent.
    """
    saved = checkpoint["hyper_parameters"].items()
    return {key: value for key, value in saved if key not in MAKERS and key[0] != "_"}


def data_settings(checkpoint: dict[str, Any], owner: type, given: Collection[str] = ()) -> dict[str, Any]:
    """Return the data module's settings of a checkpoint, without those that the user gives."""
    saved = checkpoint["datamodule_hyper_parameters"].items()
    data = {key: value for key, value in saved if key[0] != "_" and key not in given}
    require_known(checkpoint, "data", data, arguments_of(owner))
    return data


def module_from_checkpoint(checkpoint: dict[str, Any], base: type, given: dict[str, Any]) -> Any:
    """Return a module with the hyperparameters of a checkpoint, without its agent and weights.

    Args:
        checkpoint: From :func:`~ppo_lightning.checkpoints.file.read_checkpoint`.
        base: The module's class, or a base of the class that the checkpoint names.
        given: Hyperparameters that replace those of the checkpoint.
    """
    saved = module_settings(checkpoint)
    module_class = known_class(checkpoint["hyper_parameters"].get("_class_path"), base) or base
    parameters = inspect.signature(module_class).parameters
    if not any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values()):
        saved = {key: value for key, value in saved.items() if key in parameters}  # a base may save more
    replaced = {key: value for key, value in given.items() if key != "weights_only"}
    with naming_writer(checkpoint):
        try:
            return module_class(**saved | replaced)
        except (TypeError, AttributeError) as error:
            raise ConfigError(
                f"The checkpoint's hyperparameters do not fit {base.__name__}: {first_line(error)}."
            ) from error


# Settings and classes that this version does not have


def require_known_classes(checkpoint: Mapping[str, Any]) -> None:
    """Raise a ConfigError if a class of this package, or a setting of it, does not exist any more."""
    model = checkpoint.get("hyper_parameters", {})
    agent = checkpoint["agent"]
    # Until residual bodies left, MLPAgent had this argument, whose name its base class still has.
    is_mlp = agent["class_path"] == "ppo_lightning.models.mlp.MLPAgent"
    if is_mlp and agent["init_args"].pop("body", "mlp") != "mlp":
        raise _unknown(checkpoint, "model.agent.body")
    for group, class_path, base, settings in (
        ("model", model.get("_class_path"), object, model.keys() - MAKERS),
        ("model.agent", agent["class_path"], Actor, agent["init_args"]),
    ):
        if not is_ours(str(class_path)):
            continue
        if (cls := known_class(class_path, object)) is None:
            raise _unknown(checkpoint, class_path)
        if issubclass(cls, base):  # otherwise the builder says which class it needs
            require_known(checkpoint, group, settings, arguments_of(cls))


def require_known_settings(checkpoint: dict[str, Any], module: Any) -> None:
    """Raise a ConfigError if the user's class of a module does not have a hyperparameter any more.

    A checkpoint of another class is not checked: the weights decide whether they fit.
    """
    class_path = checkpoint["hyper_parameters"].get("_class_path")
    # Only classes of the main program and those inside a function are saved without a path.
    same_class = known_class(class_path, object) is type(module) or class_path is None
    if same_class and not is_ours(type(module).__module__):  # `read_checkpoint` has checked those
        require_known(checkpoint, "model", module_settings(checkpoint), module.hparams)


def require_known(
    checkpoint: Mapping[str, Any], group: str, names: Iterable[str], known: Collection[str]
) -> None:
    """Raise a ConfigError if settings do not exist: no setting of a run is dropped silently."""
    unknown = [f"{group}.{name}" for name in names if name not in known and not name.startswith("_")]
    if unknown:
        raise _unknown(checkpoint, ", ".join(sorted(unknown)))


def _unknown(checkpoint: Mapping[str, Any], names: str) -> ConfigError:
    return ConfigError(
        f"The checkpoint names {names:.300}, which ppo_lightning {__version__} does not have:"
        f" {writer_of(checkpoint)} wrote it and can read it."
    )


# Settings that would import or call code


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
    """Return whether jsonargparse may import something for a value, also for a string with a dot."""
    if isinstance(value, dict):
        return "class_path" in value or any(may_be_code(entry, strings) for entry in value.values())
    if isinstance(value, list | tuple):
        return any(may_be_code(entry, strings) for entry in value)
    return strings and isinstance(value, str) and "." in value
