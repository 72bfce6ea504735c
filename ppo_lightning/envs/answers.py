"""Checks of what ``reset`` and ``step`` return, and explanations of their errors."""

from typing import Any, NoReturn

import numpy as np
from gymnasium import spaces

from ppo_lightning.errors import ConfigError, first_line
from ppo_lightning.spaces.specs import entries

CONTRACT = {
    "reset": "take seed and options and return (observation, info)",
    "step": "take an action and return (observation, reward, terminated, truncated, info)",
}
# Modules that read what an environment returned. An error that one of them raises is about the answer.
READERS = (
    "gymnasium.core",
    "gymnasium.utils.passive_env_checker",
    "gymnasium.wrappers.",
    f"{__package__}.answers",
    f"{__package__}.gymnasium",
    "ppo_lightning.spaces.rows",
)


def check_step(answer: Any) -> None:
    """Demands that an answer to ``step`` has five parts, among them a number and two flags.

    Raises:
        ConfigError: Names the part that is something else.
    """
    _, reward, terminated, truncated, _ = answer
    for name, value, kind in (
        ("the reward", reward, "a number"),
        ("terminated", terminated, "True or False"),
        ("truncated", truncated, "True or False"),
    ):
        array = np.asarray(value)
        if array.shape != () or array.dtype.kind not in "biuf":
            raise ConfigError(f"{name} is {value!r}: step() must return {kind} there.")


def check_observation(value: Any, space: spaces.Space, name: str = "observation") -> None:
    """Demands that an observation has the parts and the shapes of its space; axes of length 1 do not count.

    Values outside of the bounds of a ``Box`` are not refused: many environments declare bounds roughly.

    Args:
        value: The observation, or a part of it.
        space: Of the observation, or of the part.
        name: How the message names the value.

    Raises:
        ConfigError: Names the part that does not fit.
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
        array, shape = np.asarray(value), space.shape or ()
        if array.dtype.kind not in "biuf":
            raise ConfigError(f"the {name} is {value!r} and must consist of numbers.")
        if array.shape != shape and _without_ones(array.shape) != _without_ones(shape):
            raise ConfigError(
                f"the {name} has shape {array.shape} and must have shape {shape}, as in observation_space."
            )


def _without_ones(shape: tuple[int, ...]) -> list[int]:
    return [length for length in shape if length != 1]


def explain(error: BaseException, where: str, call: str) -> NoReturn:
    """Raises an error of ``reset`` or ``step`` again, such that it names the environment.

    An error of the environment's own code keeps its type and its traceback and gets a note. ``SystemExit``
    becomes an error, or the process would end with code 0, as after a whole run.

    Args:
        error: What was raised.
        where: Id and number of the environment.
        call: ``reset`` or ``step``.

    Raises:
        ConfigError: The environment did not return what Gymnasium demands.
        RuntimeError: The environment raised ``SystemExit`` or ``StopIteration``, which mean something else outside.
    """
    if isinstance(error, ConfigError):
        raise ConfigError(f"{where}: {error}") from error.__cause__
    if isinstance(error, SystemExit | StopIteration):
        raise RuntimeError(f"{where}: {call}() raised {error!r}.") from error
    if isinstance(error, TypeError | ValueError | LookupError | AssertionError) and _is_about_the_answer(
        error
    ):
        raise ConfigError(
            f"{where}: {call}() must {CONTRACT[call]}: {first_line(error).rstrip('.')}."
        ) from error
    hint = " It is called without options: a wrapper can add them." if call == "reset" else ""
    error.add_note(f"{where}: {call}() raised this.{hint}")
    raise error


def _is_about_the_answer(error: BaseException) -> bool:
    traceback = error.__traceback__
    assert traceback is not None
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback.tb_frame.f_globals.get("__name__", "").startswith(READERS)
