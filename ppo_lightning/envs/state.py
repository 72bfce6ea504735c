"""Complete state of single Gymnasium environments as arrays and plain types, for bit-exact resume."""

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch

from ppo_lightning.private import WRAPPER_ATTRIBUTES, tree_map

# Environments whose complete state is in their attributes and MuJoCo's data. Others may have hidden state.
KNOWN = ("gymnasium.envs.classic_control.", "gymnasium.envs.mujoco.")
# Wrappers whose complete state is in these attributes.
WRAPPERS = {"AtariPreprocessing", "MaskedVelocity", "OrderEnforcing", "PassiveEnvChecker"}
WRAPPERS |= {"RestartOnFailure", "TimeLimit"}
ATTRIBUTES = {*WRAPPER_ATTRIBUTES, "lives", "game_over", "restarts", "first_seed", "last_observation"}
Row = dict[str, Any]


def read_state(env: gymnasium.Env) -> Row | None:
    """Return the state of environment, wrappers and generator by name, None if a part may be hidden."""
    inner = env.unwrapped
    wrappers = {type(layer).__name__ for layer in _layers(env)}
    if not (type(inner).__module__.startswith(KNOWN) and wrappers <= WRAPPERS):
        return None
    state: Row = {
        f"attribute {name}": copy.deepcopy(value) for name, value in vars(inner).items() if is_plain(value)
    }
    state["wrappers"] = wrapper_attributes(env)
    state["random"] = inner.np_random.bit_generator.state
    if (data := getattr(inner, "data", None)) is not None:
        # Rewards and observations read more than MuJoCo's integration state: also results of the last step.
        state |= {f"mujoco {name}": array.copy() for name, array in _arrays(data)}
        state["mujoco time"] = data.time
    return state


def restore_state(env: gymnasium.Env, state: Row) -> None:
    """Restore the state from :func:`read_state` in a new environment of the same kind."""
    env.reset()
    inner: Any = env.unwrapped
    for key, value in state.items():
        kind, _, name = key.partition(" ")
        if kind == "attribute":
            setattr(inner, name, value)
    set_wrapper_attributes(env, state["wrappers"])
    inner.np_random.bit_generator.state = state["random"]
    if "mujoco time" in state:
        for name, array in _arrays(inner.data):
            saved = state[f"mujoco {name}"]
            # Contact arrays vary in shape with the number of contacts. Every step recomputes them.
            if saved.shape == array.shape:
                array[...] = saved
        inner.data.time = state["mujoco time"]


def wrapper_attributes(env: gymnasium.Env) -> Row:
    """Return counters and flags of the wrappers around an environment, by name."""
    return {name: getattr(layer, name) for layer in _layers(env) for name in ATTRIBUTES & vars(layer).keys()}


def set_wrapper_attributes(env: gymnasium.Env, attributes: Row) -> None:
    """Restore the attributes from :func:`wrapper_attributes`."""
    for layer in _layers(env):
        for name in ATTRIBUTES & vars(layer).keys():
            setattr(layer, name, attributes.get(name, getattr(layer, name)))


def _layers(env: Any) -> Iterable[Any]:
    while isinstance(env, gymnasium.Wrapper):
        yield env
        env = env.env


def _arrays(data: Any) -> Iterable[tuple[str, np.ndarray]]:
    for name in dir(data):
        array = None if name.startswith("_") else getattr(data, name)
        if isinstance(array, np.ndarray) and array.flags.writeable:
            yield name, array


def is_plain(value: Any) -> bool:
    """Return whether a value is a number, an array, None or a tuple of these."""
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.kind in "fiub"
    return value is None or isinstance(value, bool | int | float)


def to_plain(value: Any) -> Any:
    """Convert NumPy arrays and scalars to tensors. Other values are unchanged."""
    arrays = np.ndarray | np.generic
    return tree_map(lambda x: torch.from_numpy(np.array(x)) if isinstance(x, arrays) else x, value)


def from_plain(value: Any) -> Any:
    """Convert tensors to NumPy arrays and scalars. Other values are unchanged."""
    return tree_map(lambda x: x.numpy().copy()[()] if isinstance(x, torch.Tensor) else x, value)


def to_columns(rows: Sequence[Row]) -> dict[str, Any]:
    """Stack N states with the same names: to tensors where the shapes agree, and to lists otherwise."""
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in next(iter(rows), ())}
    for name, values in columns.items():
        if all(isinstance(value, torch.Tensor) and value.shape == values[0].shape for value in values):
            columns[name] = torch.stack(values)
    return columns


def to_rows(columns: dict[str, Any]) -> list[Row]:
    """Convert the result of :func:`to_columns` back to N states."""
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
