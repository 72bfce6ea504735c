"""Validate the return values of ``reset`` and ``step``, and add context to their errors."""

from typing import Any, NoReturn

import numpy as np
from gymnasium import spaces

from ppo_lightning.errors import ConfigError
from ppo_lightning.spaces.specs import entries

CONTRACT = {
    "reset": "take seed and options and return (observation, info)",
    "step": "take an action and return (observation, reward, terminated, truncated, info)",
}


def check_parts(answer: Any, call: str, count: int) -> None:
    """Check that ``reset`` or ``step`` returned the right number of values.

    Args:
        answer: The return value.
        call: ``reset`` or ``step``.
        count: Number of values.

    Raises:
        ConfigError: The number is another one.
    """
    if not isinstance(answer, tuple | list) or len(answer) != count:
        given = f"{len(answer)} values" if isinstance(answer, tuple | list) else type(answer).__name__
        raise ConfigError(f"{call}() must {CONTRACT[call]}, and returned {given}.")


def check_step(answer: Any) -> None:
    """Check that the return value of ``step`` has five parts, including a number and two flags.

    Args:
        answer: Return value of ``step``.

    Raises:
        ConfigError: A part has the wrong type. The message names the part.
    """
    check_parts(answer, "step", 5)
    _, reward, terminated, truncated, _ = answer
    for name, value, kind in (
        ("the reward", reward, "a number"),
        ("terminated", terminated, "True or False"),
        ("truncated", truncated, "True or False"),
    ):
        array = np.asarray(value)
        if array.shape != () or array.dtype.kind not in "biuf":
            raise ConfigError(f"{name} is {value!r}: step() must return {kind} there.")


def check_vector_step(answer: Any, num_envs: int) -> None:
    """Check that the return value of a vectorized ``step`` has five parts, including numbers and flags.

    Args:
        answer: Return value of ``step``.
        num_envs: Number of environments N.

    Raises:
        ConfigError: A part has the wrong type or shape. The message names the part.
    """
    check_parts(answer, "step", 5)
    _, reward, terminated, truncated, _ = answer
    for name, value in (("reward", reward), ("terminated", terminated), ("truncated", truncated)):
        array = np.asarray(value)
        if array.shape != (num_envs,) or array.dtype.kind not in "biuf":
            raise ConfigError(
                f"{name} has shape {array.shape} and dtype {array.dtype}: step() must return {num_envs}"
                " numbers or flags there."
            )


def check_observation(value: Any, space: spaces.Space, name: str = "observation") -> None:
    """Check that an observation has the parts and shapes of its space, ignoring axes of length 1.

    Values outside the bounds of a ``Box`` are accepted, because many environments declare rough bounds, but
    not fractions where the space has integers: they would be cut off.

    Args:
        value: The observation, or a part of it.
        space: Space of the observation or the part.
        name: Name of the value in error messages.

    Raises:
        ConfigError: A part does not match its space. The message names the part.
    """
    if isinstance(space, spaces.Dict):
        if not isinstance(value, dict):
            raise ConfigError(f"the {name} is {value!r} and must be a dictionary, as in observation_space.")
        for key, part in entries(space):
            if key not in value:
                raise ConfigError(f"the {name} has no entry {key!r}, which observation_space has.")
            check_observation(value[key], part, f"{name}[{key!r}]")
    elif isinstance(space, spaces.Tuple):
        if len(value) != len(space.spaces):
            raise ConfigError(
                f"the {name} has {len(value)} entries, and observation_space has {len(space.spaces)}."
            )
        for key, part in entries(space):
            check_observation(value[int(key)], part, f"{name}[{key}]")
    else:
        array = np.asarray(value)
        shape = space.shape or ()
        if array.dtype.kind not in "biuf":
            raise ConfigError(f"the {name} is {value!r} and must consist of numbers.")
        if array.shape != shape and _without_ones(array.shape) != _without_ones(shape):
            raise ConfigError(
                f"the {name} has shape {array.shape} and must have shape {shape}, as in observation_space."
            )
        has_integers = array.dtype.kind == "f" and np.issubdtype(space.dtype, np.integer)
        if has_integers and (array != np.trunc(array)).any():
            raise ConfigError(
                f"the {name} has fractions, and its space has the dtype {space.dtype}: declare a Box of dtype"
                " float32."
            )


def _without_ones(shape: tuple[int, ...]) -> list[int]:
    return [length for length in shape if length != 1]


def reraise(error: BaseException, where: str, call: str) -> NoReturn:
    """Re-raise an error of ``reset`` or ``step`` with the name of the environment.

    The error keeps its type and its traceback, and gets a note. ``SystemExit`` becomes a ``RuntimeError``:
    otherwise the process would end with exit code 0, like a complete run.

    Args:
        error: The error.
        where: Id and index of the environment.
        call: ``reset`` or ``step``.

    Raises:
        ConfigError: A check of the return value failed.
        RuntimeError: The environment raised ``SystemExit`` or ``StopIteration``, which callers would
            misinterpret.
    """
    if isinstance(error, ConfigError):
        raise ConfigError(f"{where}: {error}") from error.__cause__
    if isinstance(error, SystemExit | StopIteration):
        raise RuntimeError(f"{where}: {call}() raised {error!r}.") from error
    note = f"{where}: {call}() raised this."
    if isinstance(error, TypeError | ValueError):
        note += f" It must {CONTRACT[call]}."
    if call == "reset":
        note += " This package calls reset() without options: a wrapper can add them."
    error.add_note(note)
    raise error
