"""Settings in a checkpoint: what this version does not have, and what names code of others."""

import inspect
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from ppo_lightning import __version__
from ppo_lightning.checkpoints.agent import is_ours, known_class, naming_writer, writer_of
from ppo_lightning.errors import ConfigError, first_line
from ppo_lightning.models.actor import Actor
from ppo_lightning.utils.arguments import arguments_of

MAKERS = {"agent", "actor", "critic"}  # arguments of a module that make its agent


def module_settings(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of a module, without entries of Lightning and without ``MAKERS``."""
    saved = checkpoint["hyper_parameters"].items()
    return {key: value for key, value in saved if key not in MAKERS and key[0] != "_"}


def data_settings(checkpoint: Mapping[str, Any], owner: type, given: Collection[str] = ()) -> dict[str, Any]:
    """Return the data module's settings of a checkpoint, without those that the user gives."""
    require_known(checkpoint, owner)
    saved = checkpoint["datamodule_hyper_parameters"].items()
    data = {key: value for key, value in saved if key[0] != "_" and key not in given}
    names = {f"data.{key}" for key in data}
    if code := {key: value for key, value in foreign_code(checkpoint).items() if key in names}:
        raise ConfigError(f"The checkpoint names code, {list_code(code)}: give these settings yourself.")
    return data


def facts_of(data: Any) -> dict[str, Any]:
    """Return what a checkpoint says of the data of a run."""
    return {
        "seed": data.seed,
        "frames_per_rollout": data.frames_per_rollout,
        "datamodule_hyper_parameters": {**data.hparams, "total_timesteps": data.total_timesteps},
    }


def module_from_checkpoint(checkpoint: dict[str, Any], base: type, given: dict[str, Any]) -> Any:
    """Return a module with the hyperparameters of a checkpoint, or those given, without its agent.

    ``base`` is the module's class, or a base of the class that the checkpoint names.
    """
    saved = module_settings(checkpoint)
    module_class = known_class(checkpoint["hyper_parameters"].get("_class_path"), base) or base
    if not _has_keywords(module_class):  # a base may save more
        parameters = inspect.signature(module_class).parameters
        saved = {key: value for key, value in saved.items() if key in parameters}
    replaced = {key: value for key, value in given.items() if key != "weights_only"}
    with naming_writer(checkpoint):
        try:
            module = module_class(**saved | replaced)
        except (TypeError, AttributeError) as error:
            raise ConfigError(f"The checkpoint does not fit {base.__name__}: {first_line(error)}.") from error
    # Another fit chooses these values again.
    names = set(checkpoint["hyper_parameters"].get("_left_out", ())) - replaced.keys()
    module.left_out = getattr(module, "left_out", {}) | {name: saved[name] for name in names & saved.keys()}
    return module


def require_known(checkpoint: Mapping[str, Any], data: type | None = None) -> None:
    """Check that this version has the classes that a checkpoint names, and their settings.

    Not checked are classes that nothing has imported, and without ``data`` the settings of rollouts.
    """
    module, agent = checkpoint["hyper_parameters"], checkpoint["agent"]
    named = module.get("_class_path"), agent["class_path"]
    gone = [path for path in named if is_ours(str(path)) and known_class(path, object) is None]
    for group, owner, settings in (
        ("model", known_class(named[0], object), module_settings(checkpoint)),
        ("model.agent", known_class(named[1], Actor), agent["init_args"]),
        ("data", data, checkpoint["datamodule_hyper_parameters"]),
    ):
        if owner is None or (_has_keywords(owner) and not is_ours(owner.__module__)):  # may read any
            continue
        known = arguments_of(owner)
        if group == "model.agent" and not _has_keywords(owner):  # it does not save arguments of its bases
            known &= inspect.signature(owner).parameters.keys()
        gone += [f"{group}.{key}" for key in settings if key not in known and key[0] != "_"]
    if gone:
        raise ConfigError(
            f"The checkpoint names {', '.join(gone):.300}, which ppo_lightning {__version__} does not have:"
            f" {writer_of(checkpoint)} wrote it and can read it."
        )


def _has_keywords(owner: type) -> bool:
    """Return whether a class takes ``**keywords``."""
    parameters = inspect.signature(owner).parameters.values()
    return any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters)


def foreign_code(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that name code of others, by key, for example ``data.env_id``.

    A checkpoint imports and calls nothing: these settings are the user's to give.
    """
    module, agent = checkpoint["hyper_parameters"], checkpoint["agent"]
    data = checkpoint["datamodule_hyper_parameters"]
    paths = {"model": module.get("_class_path", "ppo_lightning.PPO"), "model.agent": agent["class_path"]}
    code = {key: path for key, path in paths.items() if known_class(path, nn.Module) is None}
    for group, settings in (("model", module_settings(checkpoint)), ("model.agent", agent["init_args"])):
        code |= {f"{group}.{key}": value for key, value in settings.items() if _may_import(value)}
    if "env_id" in data and not _is_id(data["env_id"]):
        code["data.env_id"] = data["env_id"]
    if data.get("transforms"):
        code["data.transforms"] = data["transforms"]
    if "class_path" in str(data.get("env_kwargs")):
        code["data.env_kwargs"] = data["env_kwargs"]
    return code


def list_code(code: Mapping[str, Any]) -> str:
    """Return settings that name code, as a sentence lists them."""
    return f"{', '.join(f'{key} {value!r}' for key, value in code.items()):.300}"


def _may_import(value: Any) -> bool:
    """Return whether a command line could import what a setting says."""
    if isinstance(value, dict):
        return "class_path" in value or any(map(_may_import, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_may_import, value))
    return isinstance(value, str) and "." in value


def _is_id(env_id: Any) -> bool:
    """Return whether the name of an environment is an id, registered by no module of others."""
    if not isinstance(env_id, str):
        return False
    module, _, name = env_id.rpartition(":")
    return "." not in name and (not module or is_ours(module))
