"""Exceptions for users, and imports of optional dependencies."""

import difflib
import importlib
from collections.abc import Iterable, Mapping
from types import ModuleType, TracebackType


class ConfigError(ValueError):
    """An invalid setting.

    The message is one sentence that names the setting and the fix. The command line shows it without a
    traceback.

    Example:
        >>> raise ConfigError("data.num_envs (3) must be divisible by the number of ranks (2).")
        Traceback (most recent call last):
        ppo_lightning.errors.ConfigError: data.num_envs (3) must be divisible by the number of ranks (2).
    """


class NonFiniteError(ValueError):
    """NaN or infinity in an observation, a reward, a loss or a checkpoint.

    Example:
        >>> raise NonFiniteError("The reward of environment 0 is nan at its step 19.")
        Traceback (most recent call last):
        ppo_lightning.errors.NonFiniteError: The reward of environment 0 is nan at its step 19.
    """


def blame(error: BaseException, frames: TracebackType | None, note: str) -> None:
    """Add a note to an error of the user's code, and mark the frames of this code.

    Args:
        error: The error.
        frames: Traceback from the first frame of the user's code on.
        note: Says which code raised the error.
    """
    error.add_note(note)
    error.user_frames = frames  # type: ignore[attr-defined]


def cut_traceback(error: BaseException) -> None:
    """Reduce the traceback of an error that :func:`blame` marked to the frames of the user's code.

    The frames of Lightning, PyTorch and this package above say nothing about such an error. Other errors keep
    their traceback.
    """
    error.__traceback__ = getattr(error, "user_frames", error.__traceback__)


def import_extra(module: str, extra: str) -> ModuleType:
    """Import an optional dependency.

    Args:
        module: Import name of the module, for example ``"envpool"``.
        extra: Extra of this package that installs the module.

    Returns:
        The module.

    Raises:
        ConfigError: The module is not installed. The message has the pip commands.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"The package {module!r} is missing: run pip install 'ppo-lightning[{extra}]', or, in a clone,"
            f" pip install -c constraints.txt -e '.[{extra}]'."
        ) from error


def nearest(name: str, known: Iterable[str] | Mapping[str, str], limit: int = 3) -> str:
    """Suggest the known names that are closest to a name.

    Args:
        name: An unknown name.
        known: The known names. A mapping gives the form to show for each name.
        limit: Maximum number of suggestions.

    Returns:
        ``": did you mean A, B?"``, or an empty string.

    Example:
        >>> nearest("CartPol-v1", ["CartPole-v1", "Pendulum-v1"])
        ': did you mean CartPole-v1?'
    """
    lowered = {key.lower(): known[key] if isinstance(known, Mapping) else key for key in known}
    close = difflib.get_close_matches(name.lower(), lowered, n=limit)
    return f": did you mean {', '.join(lowered[key] for key in close)}?" if close else ""


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or the name of its type if there is no message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
