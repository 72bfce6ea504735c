"""Build a module from the hyperparameters in a checkpoint."""

import inspect
from typing import Any

from ppo_lightning.checkpoints.agent import is_ours, known_class
from ppo_lightning.checkpoints.settings import module_settings
from ppo_lightning.checkpoints.versions import require_known, writer
from ppo_lightning.errors import ConfigError, first_line


def module_from_checkpoint(checkpoint: dict[str, Any], base: type, given: dict[str, Any]) -> Any:
    """Return a module with the hyperparameters of a checkpoint, without its agent and weights.

    Args:
        checkpoint: From :func:`~ppo_lightning.checkpoints.file.read_checkpoint`.
        base: The module's class, or a base of the class that the checkpoint names.
        given: Hyperparameters that replace those of the checkpoint.

    Raises:
        ConfigError: The hyperparameters do not fit the class.
    """
    saved = module_settings(checkpoint)
    module_class = known_class(checkpoint["hyper_parameters"].get("_class_path"), base) or base
    parameters = inspect.signature(module_class).parameters
    takes_any = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values())
    accepted = {key for key in saved if takes_any or key in parameters}
    replaced = {key: value for key, value in given.items() if key != "weights_only"}
    try:
        return module_class(**{key: saved[key] for key in accepted} | replaced)
    except (TypeError, AttributeError) as error:
        raise ConfigError(
            f"The checkpoint's hyperparameters do not fit {base.__name__}: {first_line(error)}"
            f" ({writer(checkpoint)} wrote them)."
        ) from error


def require_known_settings(checkpoint: dict[str, Any], module: Any) -> None:
    """Refuse a checkpoint with hyperparameters that the user's class of a module does not have any more.

    A checkpoint of another class is not checked: the weights decide whether they fit.

    Args:
        checkpoint: From :func:`~ppo_lightning.checkpoints.file.read_checkpoint`.
        module: Module that loads the checkpoint.

    Raises:
        ConfigError: A hyperparameter does not exist.
    """
    class_path = checkpoint["hyper_parameters"].get("_class_path")
    # Only classes of the main program and those inside a function are saved without a path.
    same_class = known_class(class_path, object) is type(module) or class_path is None
    if same_class and not is_ours(type(module).__module__):  # `read_checkpoint` has checked those
        require_known(checkpoint, "model", module_settings(checkpoint), module.hparams)
