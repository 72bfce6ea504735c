"""The whole state of single Gymnasium environments as tensors and plain types, to go on with an episode to the bit."""

from collections.abc import Iterable, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch

# Those whose state is their attributes, and MuJoCo's, is known; of any other there may be more than can be seen.
KNOWN = ("gymnasium.envs.classic_control.", "gymnasium.envs.mujoco.")
# Wrappers whose state is among these attributes; of any other there may be more.
WRAPPERS = {"AtariPreprocessing", "MaskedVelocity", "OrderEnforcing", "PassiveEnvChecker", "TimeLimit"}
WRAPPER_ATTRIBUTES = {"_elapsed_steps", "_has_reset", "lives", "game_over"}
Row = dict[str, Any]


def state_of(env: gymnasium.Env) -> Row | None:
    """Returns the state of an environment with its wrappers and its random generator; None where that cannot be known."""
    inner = env.unwrapped
    wrappers = {type(layer).__name__ for layer in _layers(env)}
    if not (type(inner).__module__.startswith(KNOWN) and wrappers <= WRAPPERS):
        return None
    state: Row = {
        f"attribute {name}": to_plain(value) for name, value in vars(inner).items() if _is_plain(value)
    }
    state["wrappers"] = wrapper_attributes(env)
    state["random"] = inner.np_random.bit_generator.state
    if (data := getattr(inner, "data", None)) is not None:
        # Not only MuJoCo's integration state: rewards and observations read what the last step computed on its way.
        state |= {f"mujoco {name}": torch.from_numpy(array.copy()) for name, array in _arrays(data)}
        state["mujoco time"] = data.time
    return state


def restore(env: gymnasium.Env, state: Row) -> None:
    """Puts an environment into a state that :func:`state_of` returned."""
    env.reset()
    inner: Any = env.unwrapped
    for key, value in state.items():
        kind, _, name = key.partition(" ")
        if kind == "attribute":
            setattr(inner, name, from_plain(value))
    set_wrapper_attributes(env, state["wrappers"])
    inner.np_random.bit_generator.state = state["random"]
    if "mujoco time" in state:
        for name, array in _arrays(inner.data):
            saved = state[f"mujoco {name}"].numpy()
            if (
                saved.shape == array.shape
            ):  # those of contacts change with their number, and every step makes them anew
                array[...] = saved
        inner.data.time = state["mujoco time"]


def wrapper_attributes(env: gymnasium.Env) -> Row:
    """Returns the counts and flags of the wrappers around an environment, by name."""
    return {
        name: getattr(layer, name)
        for layer in _layers(env)
        for name in WRAPPER_ATTRIBUTES & vars(layer).keys()
    }


def set_wrapper_attributes(env: gymnasium.Env, attributes: Row) -> None:
    """Takes back what :func:`wrapper_attributes` returned."""
    for layer in _layers(env):
        for name in WRAPPER_ATTRIBUTES & vars(layer).keys():
            setattr(layer, name, attributes[name])


def _layers(env: Any) -> Iterable[Any]:
    while isinstance(env, gymnasium.Wrapper):
        yield env
        env = env.env


def _arrays(data: Any) -> Iterable[tuple[str, np.ndarray]]:
    for name in dir(data):
        if (
            not name.startswith("_")
            and isinstance(array := getattr(data, name), np.ndarray)
            and array.flags.writeable
        ):
            yield name, array


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.kind in "fiub"
    return value is None or isinstance(value, bool | int | float)


def to_plain(value: Any) -> Any:
    """Makes tensors of arrays and of NumPy's numbers."""
    if isinstance(value, tuple):
        return tuple(map(to_plain, value))
    return torch.from_numpy(np.array(value)) if isinstance(value, np.ndarray | np.generic) else value


def from_plain(value: Any) -> Any:
    """Makes arrays, and NumPy's numbers, of tensors."""
    if isinstance(value, tuple):
        return tuple(map(from_plain, value))
    return value.numpy().copy()[()] if isinstance(value, torch.Tensor) else value


def to_columns(rows: Sequence[Row]) -> dict[str, Any]:
    """Turns the states of N environments into one dictionary: of stacked tensors, where there are such, and of lists."""
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0]}
    for name, values in columns.items():
        if all(isinstance(value, torch.Tensor) and value.shape == values[0].shape for value in values):
            columns[name] = torch.stack(values)
    return columns


def to_rows(columns: dict[str, Any]) -> list[Row]:
    """Undoes :func:`to_columns`."""
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
