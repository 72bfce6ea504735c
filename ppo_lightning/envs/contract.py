"""Validate the return values of ``reset`` and ``step``, and add context to their errors."""

import contextlib
import reprlib
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import gymnasium.envs.registration
import numpy as np
from gymnasium import spaces

from ppo_lightning.errors import ConfigError, first_line, nearest
from ppo_lightning.spaces.specs import MASK, entries

SUCCESS = "is_success"  # in the info at the end of an episode
CONTRACT = {
    "reset": "take seed and options and return (observation, info)",
    "step": "take an action and return (observation, reward, terminated, truncated, info)",
}
NUMBERS = {bool, int, float} | {np.dtype(code).type for code in "?efd" + np.typecodes["AllInteger"]}


def check_parts(answer: Any, call: str, count: int) -> Any:
    """Return what ``reset`` or ``step`` returned, or raise a ConfigError if its length is another one."""
    if not isinstance(answer, tuple | list) or len(answer) != count:
        given = f"{len(answer)} values" if isinstance(answer, tuple | list) else type(answer).__name__
        raise ConfigError(f"{call}() must {CONTRACT[call]}, and returned {given}.")
    return answer


def check_step(answer: Any, num_envs: int | None = None) -> None:
    """Raise a ConfigError unless ``step`` returned numbers, or ``num_envs`` of each, and an info."""
    _, *numbers, info = check_parts(answer, "step", 5)
    shape = () if num_envs is None else (num_envs,)
    kind = "a number or flag" if num_envs is None else f"{num_envs} numbers or flags"
    for name, value in zip(("the reward", "terminated", "truncated"), numbers, strict=True):
        array = _as_array(value)
        if array.dtype.kind not in "biuf" or array.shape != shape:
            is_several = isinstance(value, Mapping) or array.size > 1
            several = name == "the reward" and num_envs is None and is_several
            hint = " (objectives: LinearReward of mo_gymnasium; players: data.backend pettingzoo)" * several
            raise ConfigError(f"{name} is {describe(value)}: step() must return {kind} there{hint}.")
    if not isinstance(info, Mapping):
        raise ConfigError(f"the info is {describe(info)}: step() must return a dictionary there.")


def check_observation(value: Any, space: spaces.Space, name: str = "observation") -> None:
    """Check that an observation has the parts and shapes of its space, ignoring axes of length 1.

    Values outside the bounds of a ``Box`` are accepted, because many environments declare rough bounds, but
    not fractions where the space has integers: they would be cut off. A ConfigError has the ``name``.
    """
    if isinstance(space, spaces.Dict | spaces.Tuple):
        if isinstance(space, spaces.Dict):
            kind = f"dictionary with {', '.join(map(str, space))}"
            has_parts = isinstance(value, Mapping) and space.keys() <= value.keys()
        else:
            kind = f"tuple of {len(space.spaces)}"
            has_parts = isinstance(value, tuple | list | np.ndarray) and len(value) == len(space.spaces)
        if not has_parts:
            raise ConfigError(f"the {name} is {describe(value)} and must be a {kind}.")
        for key, part in entries(space):
            place: Any = key if isinstance(space, spaces.Dict) else int(key)
            check_observation(value[place], part, f"{name}[{place!r}]")
        return
    array = _as_array(value)
    shape = space.shape or ()
    fits = array.shape == shape or array.squeeze().shape == tuple(length for length in shape if length != 1)
    if array.dtype.kind not in "biuf" or not fits:
        raise ConfigError(
            f"the {name} is {describe(value)} and must be an array of numbers of shape {shape}."
        )
    has_integers = array.dtype.kind == "f" and np.issubdtype(space.dtype, np.integer)
    if has_integers and (array != np.trunc(array)).any():
        raise ConfigError(f"the {name} has fractions, and its space {space.dtype}: declare a Box of float32.")


def store(target: np.ndarray, rows: Any) -> None:
    """Assign observations to an array of the type of their space, or refuse integers that do not fit."""
    target[:] = rows
    values = np.asarray(rows)
    if np.can_cast(values.dtype, target.dtype, casting_to(target.dtype)):
        return
    if len(lost := np.extract(target != values, np.broadcast_to(values, target.shape))):
        raise ConfigError(f"the observation has the value {lost[0]}, which its space ({target.dtype}) lacks.")


def casting_to(dtype: np.dtype) -> Any:
    """Return the casting of NumPy that keeps observations, except for the rounding of floats."""
    return "safe" if dtype.kind in "biu" else "same_kind"


def require_action(allowed: bool) -> None:
    """Raise a ConfigError unless a mask allows an action. At episode ends it need not."""
    if not allowed:
        raise ConfigError(f"its {MASK} allows no action before the episode has ended.")


def require_known(env_id: str, known: Collection[str], what: str, remedy: str) -> None:
    """Raise a ConfigError unless an id is known, with the nearest known one, or how to find these."""
    if env_id not in known:
        hint = nearest(env_id, known) or f": {remedy}."
        raise ConfigError(f"env_id {env_id!r} is not {what}{hint}")


@contextlib.contextmanager
def fitting(env_id: str, env_kwargs: Mapping[str, Any], *errors: type[Exception]) -> Iterator[None]:
    """Turn errors of a constructor that gets arguments into one that names ``data.env_kwargs``."""
    try:
        yield
    except errors as error:
        place = place_of(error)
        if place and not env_kwargs:
            raise
        message = f"data.env_kwargs does not fit env_id {env_id!r}: {first_line(error)}"
        raise ConfigError(f"{message}{place and f' ({place})'}.") from error


def place_of(error: BaseException) -> str:
    """Return file and line of an error from below this package and Gymnasium's registration, or nothing."""
    frames = traceback.extract_tb(error.__traceback__)
    if error.__context__ is not None:  # Gymnasium raises a TypeError of a constructor again
        frames += traceback.extract_tb(error.__context__.__traceback__)
    skipped = str(Path(__file__).parents[1]), gymnasium.envs.registration.__file__
    inside = [frame for frame in frames if not frame.filename.startswith(skipped)]
    return f"{Path(inside[-1].filename).name}, line {inside[-1].lineno}" if inside else ""


def numbers_in(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of an info."""
    arrays = {key: _as_array(value) for key, value in info.items()}
    return {key: x.item() for key, x in arrays.items() if x.size == 1 and x.dtype.kind in "biuf"}


def numbers_of(info: Any, names: Sequence[str], count: int) -> np.ndarray:
    """Return numbers of an info of some environments, [count, names] float64, NaN where there is none."""
    numbers = np.full((count, len(names)), np.nan)
    found = info if isinstance(info, Mapping) else {}
    for column, name in enumerate(names):
        key = "success" if name == SUCCESS and name not in found else name  # as MetaWorld calls it
        if key in found and (values := _as_array(found[key])).size == count:
            with contextlib.suppress(TypeError, ValueError):  # a text
                numbers[:, column] = values.reshape(count)
            if (present := _as_array(found.get(f"_{key}"))).shape == (count,):  # of a VectorEnv
                numbers[~present.astype(bool), column] = np.nan
    return numbers


def _as_array(value: Any) -> np.ndarray:
    try:
        return np.asarray(value)
    except Exception:  # as a value likes: unequal lengths, a tensor on a GPU or with a gradient, `__array__`
        return np.empty((), object)


def describe(value: Any) -> str:
    """Return a value in one short line."""
    shape = getattr(value, "shape", None)
    return f"an array of shape {tuple(shape)}" if shape else " ".join(reprlib.repr(value).split())


def reraise(error: BaseException, where: str, call: str, step: int = 0, answer: Any = ...) -> NoReturn:
    """Re-raise an error of ``reset`` or ``step`` with the name of the environment.

    The error keeps its type and its traceback, and gets a note. ``SystemExit`` becomes a ``RuntimeError``:
    otherwise the process would end with exit code 0, like a complete run. So does ``StopIteration``. A fault
    in the ``answer`` that ``step`` returned may be the reason of the error, and becomes a ConfigError.
    """
    try:
        if answer is not ...:
            check_step(answer)
    except ConfigError as fault:
        error = fault
    if isinstance(error, ConfigError):
        place = f"{where}, step {step}" if step else where
        raise ConfigError(f"{place}: {error}") from error.__cause__
    if isinstance(error, SystemExit | StopIteration):
        raise RuntimeError(f"{where}: {call}() raised {error!r}.") from error
    note = f"{where}: {call}() raised this."
    if isinstance(error, TypeError | ValueError):
        note += f" It must {CONTRACT[call]}."
    if call == "reset":
        note += " This package calls reset() without options: a wrapper can add them."
    error.add_note(note)
    raise error
