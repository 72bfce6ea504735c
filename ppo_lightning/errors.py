"""The exceptions users meet, and the way to an optional dependency."""

import difflib
import importlib
from collections.abc import Iterable, Mapping
from types import ModuleType


class ConfigError(ValueError):
    """A setting that cannot work.

    Its message is one sentence that names the field and the fix; the command line shows it without a traceback.
    """


class NonFiniteError(ValueError):
    """NaN or infinity where it would spoil the run: in an observation, a reward, a loss or a checkpoint."""


def import_extra(module: str, extra: str) -> ModuleType:
    """Imports an optional dependency.

    Args:
        module: The module's import name, for example ``"envpool"``.
        extra: The extra of this package that brings it.

    Raises:
        ConfigError: The module is not installed; the message names the pip commands.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"The package {module!r} is missing: run pip install 'ppo-lightning[{extra}]', or, in a clone,"
            f" pip install -c constraints.txt -e '.[{extra}]'."
        ) from error


def nearest(name: str, known: Iterable[str] | Mapping[str, str], limit: int = 3) -> str:
    """Returns ``": did you mean A, B?"`` for the known names closest to ``name`` (shown as a mapping says), or nothing."""
    lowered = {each.lower(): known[each] if isinstance(known, Mapping) else each for each in known}
    close = difflib.get_close_matches(name.lower(), lowered, n=limit)
    return f": did you mean {', '.join(lowered[key] for key in close)}?" if close else ""


def first_line(error: BaseException) -> str:
    """Returns the first line of an exception's text, or its type's name where it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
