"""Validate the return values of ``reset`` and ``step``, and add context to their errors."""

from types import TracebackType
from typing import Any, NoReturn

import numpy as np
from gymnasium import spaces

from ppo_lightning.errors import ConfigError, blame, first_line
from ppo_lightning.spaces.specs import entries

CONTRACT = {
    "reset": "take seed and options and return (observation, info)",
    "step": "take an action and return (observation, reward, terminated, truncated, info)",
}
# Modules that read an environment's return values. An error raised in one of them is about these values.
READERS = (
    "gymnasium.core",
    "gymnasium.utils.passive_env_checker",
    "gymnasium.wrappers.",
    f"{__package__}.answers",
    f"{__package__}.batched",
    f"{__package__}.gymnasium",
    f"{__package__}.vector",
    "ppo_lightning.spaces.rows",
)
# Modules between an adapter and the environment itself.
WRAPPERS = (
    "gymnasium.core",
    "gymnasium.envs.registration",
    "gymnasium.wrappers.",
    "torchrl.envs.",
    f"{__package__}.",
)


def check_step(answer: Any, num_envs: int | None = None) -> None:
    """Check that the return value of ``step`` has five parts, including numbers and flags.

    Args:
        answer: Return value of ``step``.
        num_envs: Number of environments of a vectorized environment. None: a single one.

    Raises:
        ConfigError: A part has the wrong type or shape. The message names the part.
    """
    _, reward, terminated, truncated, _ = answer
    for name, value, kind in (
        ("the reward", reward, "a number"),
        ("terminated", terminated, "True or False"),
        ("truncated", truncated, "True or False"),
    ):
        array = np.asarray(value)
        is_number = array.dtype.kind in "biuf"
        if num_envs is None and not (is_number and array.shape == ()):
            raise ConfigError(f"{name} is {value!r}: step() must return {kind} there.")
        if num_envs is not None and not (is_number and array.shape == (num_envs,)):
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

    An error in the environment's own code keeps its type and its traceback and gets a note. ``SystemExit``
    becomes a ``RuntimeError``: otherwise the process would end with exit code 0, like a complete run.

    Args:
        error: The error.
        where: Id and index of the environment.
        call: ``reset`` or ``step``.

    Raises:
        ConfigError: The return value violates Gymnasium's interface.
        RuntimeError: The environment raised ``SystemExit`` or ``StopIteration``, which callers would
            misinterpret.
    """
    if isinstance(error, ConfigError):
        raise ConfigError(f"{where}: {error}") from error.__cause__
    if isinstance(error, SystemExit | StopIteration):
        raise RuntimeError(f"{where}: {call}() raised {error!r}.") from error
    interface_errors = TypeError | ValueError | LookupError | AssertionError
    if isinstance(error, interface_errors) and _is_about_the_answer(error):
        raise ConfigError(
            f"{where}: {call}() must {CONTRACT[call]}: {first_line(error).rstrip('.')}."
        ) from error
    hint = " This package calls reset() without options: a wrapper can add them." if call == "reset" else ""
    blame_env(error, f"{where}: {call}() raised this.{hint}")
    raise error


def blame_env(error: BaseException, note: str) -> None:
    """Mark an error of an environment, see :func:`~ppo_lightning.errors.blame`.

    Args:
        error: The error, while its traceback begins at the caller.
        note: Names the environment.
    """
    assert error.__traceback__ is not None
    called = error.__traceback__.tb_next or error.__traceback__
    frames: TracebackType | None = called
    while frames is not None and _module(frames).startswith(WRAPPERS):
        frames = frames.tb_next
    blame(error, frames or called, note)


def _module(traceback: TracebackType) -> str:
    return traceback.tb_frame.f_globals.get("__name__", "")


def _is_about_the_answer(error: BaseException) -> bool:
    traceback = error.__traceback__
    assert traceback is not None
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return _module(traceback).startswith(READERS)
