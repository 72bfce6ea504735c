"""Settings of environments as plain data, which a checkpoint holds, and functions that import paths name."""

import functools
import pkgutil
import re
from typing import Any

import numpy as np

from ppo_lightning.errors import ConfigError, first_line

PLAIN = {type(None), bool, int, float, str}
IMPORT_PATH = re.compile(r"\w+(\.[\w<>]+)+")  # no id of an environment looks like this


def maker_of(env_id: Any) -> Any:
    """Import what an import path names, and return anything else as it is."""
    if not (isinstance(env_id, str) and IMPORT_PATH.fullmatch(env_id)):
        return env_id
    try:
        return pkgutil.resolve_name(env_id)
    except (ImportError, AttributeError, ValueError) as error:
        reason = "only the program that defined it has it" if "<" in env_id else first_line(error)
        give = "give data.env_id, an environment's id or a function's import path"
        raise ConfigError(f"data.env_id {env_id!r} cannot be imported ({reason}): {give}.") from error


def plain(value: Any) -> Any:
    """Return a setting as plain data, as the command line gives it: no object, no function."""
    if isinstance(value, functools.partial):  # with positional arguments, a name that cannot be imported
        return plain(value.func) + (".<arguments>" if value.args else "")
    if callable(value) and type(value).__repr__ is object.__repr__:  # shows an address, which changes
        value = type(value)
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return plain_argument(value)


def plain_argument(value: Any) -> Any:
    """Return an argument as it is, or the ``class_path`` of an object, which a checkpoint cannot hold."""
    if type(value) is dict and {*map(type, value)} <= PLAIN:
        return {key: plain_argument(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(plain_argument, value))
    if isinstance(value, np.generic):
        return value.item()
    kind = value if callable(value) and hasattr(value, "__qualname__") else type(value)
    return value if type(value) in PLAIN else {"class_path": f"{kind.__module__}.{kind.__qualname__}"}
