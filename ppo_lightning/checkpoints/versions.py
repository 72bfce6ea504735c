"""Refusal of checkpoints that name settings or classes which this version does not have."""

import inspect
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ppo_lightning import __version__
from ppo_lightning.checkpoints.agent import is_ours, known_class
from ppo_lightning.errors import ConfigError
from ppo_lightning.models.agent import ActorCritic

VERSION = "ppo_lightning"  # entry of checkpoints and Hub folders: the version that wrote them


def require_known_classes(checkpoint: Mapping[str, Any]) -> None:
    """Refuse a checkpoint or a Hub folder if a class of this package, or a setting of it, does not exist.

    Args:
        checkpoint: Content of the file.

    Raises:
        ConfigError: A class or a setting does not exist. The message names the version that wrote the file.
    """
    model = checkpoint.get("hyper_parameters", {})
    agent = checkpoint["agent"]
    for group, class_path, base, settings in (
        ("model", model.get("_class_path"), object, model.keys() - {"agent"}),
        ("model.agent", agent["class_path"], ActorCritic, agent["init_args"]),
    ):
        if not is_ours(str(class_path)):
            continue
        if (cls := known_class(class_path, object)) is None:
            raise _unknown(checkpoint, class_path)
        if issubclass(cls, base):  # otherwise the builder says which class it needs
            require_known(checkpoint, group, settings, arguments_of(cls))


def require_known(
    checkpoint: Mapping[str, Any], group: str, names: Iterable[str], known: Collection[str]
) -> None:
    """Refuse a checkpoint with settings that do not exist: no setting of a run is dropped silently.

    Args:
        checkpoint: Content of the file.
        group: Prefix of the settings, for example ``model``.
        names: Names of the settings in the checkpoint. Those of Lightning begin with an underscore.
        known: Names of the settings that exist.

    Raises:
        ConfigError: A setting does not exist. The message names it, and the version that wrote the file.
    """
    if unknown := sorted(
        f"{group}.{name}" for name in names if name not in known and not name.startswith("_")
    ):
        raise _unknown(checkpoint, ", ".join(unknown))


def arguments_of(cls: type) -> set[str]:
    """Return the names of the arguments of a class and its bases, all of which Lightning saves."""
    return {name for base in cls.__mro__ for name in inspect.signature(base.__init__).parameters}  # type: ignore[misc]


def writer(checkpoint: Mapping[str, Any]) -> str:
    """Return the version that wrote a checkpoint, in words."""
    return f"version {checkpoint[VERSION]}" if VERSION in checkpoint else "an older version"


def _unknown(checkpoint: Mapping[str, Any], names: str) -> ConfigError:
    return ConfigError(
        f"The checkpoint names {names}, which ppo_lightning {__version__} does not have:"
        f" {writer(checkpoint)} wrote it and can read it."
    )
