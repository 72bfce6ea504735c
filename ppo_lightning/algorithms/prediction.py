"""Predictions in the form of the environment: observations as it returns them, actions as it takes them."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchrl.data import Categorical, TensorSpec

from ppo_lightning.errors import ConfigError
from ppo_lightning.models import Actor
from ppo_lightning.spaces.rows import from_row
from ppo_lightning.spaces.specs import columns, is_mask, space_from_spec, spec_from_plain, stored


class Predictor:
    """Function from observations to actions, see :meth:`ppo_lightning.AgentModule.predict`.

    Args:
        recipe: Description of the agent by :func:`~ppo_lightning.checkpoints.agent.agent_to_plain`.
    """

    def __init__(self, recipe: dict[str, Any]) -> None:
        self.recipe = recipe
        spec = spec_from_plain(recipe["observation_spec"])
        self._stored = stored(spec)
        self._action_space = space_from_spec(spec_from_plain(recipe["action_spec"]))
        # Name -> spec, in the order of the row.
        self._parts: dict[str, TensorSpec] = {name: part for name, part, _ in columns(spec)}
        # Parts whose shape in the environment is unknown: the spec has the number of values only.
        unknown = {
            name
            for name, part in self._parts.items()
            if (isinstance(part, Categorical) and part.ndim) or (not name and part.shape == (1,))
        }
        self._flat = self._parts.keys() if hasattr(spec, "entry_sizes") else unknown

    def __call__(
        self, agent: Actor, observation: Any, deterministic: bool, memory: Tensor | None, first: Any
    ) -> tuple[Any, Tensor | None]:
        """Return actions and the next hidden state."""
        if isinstance(observation, Tensor):
            is_batch = None not in _batch_sizes("", observation, self._stored)
            rows = observation if is_batch else observation[None]
        else:
            rows, is_batch = self.read(observation, agent.entries)
        if not self._stored.dtype.is_floating_point:
            rows = rows.to(self._stored.dtype)
        elif not rows.is_floating_point():
            rows = rows.double()
        if rows.is_floating_point() and not rows.float().isfinite().all():
            raise ConfigError("predict takes finite observations, and there is a NaN or an infinity.")
        memory = _start(agent, memory, first, len(rows))
        noise = None if deterministic else agent.noise((len(rows),)).to(agent.device)
        chosen, *_, memory = agent.act(agent.normalize(rows).to(agent.device), noise, memory)
        actions: Any = agent.head.for_environment(chosen)
        if not isinstance(observation, Tensor):
            array = (actions if actions.ndim > 1 else actions.unsqueeze(-1)).numpy(force=True)
            return from_row(self._action_space, array if is_batch else array[0]), memory
        return (actions if is_batch else actions[0]), memory

    def read(self, observation: Any, entries: Any = None) -> tuple[Tensor, bool]:
        """Return the rows of observations in the form of the environment, and whether they are a batch.

        Entries that only the critic reads, according to the ``entries`` of the agent, may be missing. If the
        actor reads one entry, an array may stand for it.
        """
        found = dict(self._find(observation))
        needed = [x for x in self._parts if entries is None or x in entries.actor or is_mask(x)]
        if len(needed) == 1 and not isinstance(observation, Mapping):
            found = {needed[0]: observation}
        if missing := [name for name in needed if name not in found]:
            names = f"{', '.join(needed)}, as the environment returns them"
            raise ConfigError(f"predict takes the entries {names}, and {', '.join(missing)} is missing.")
        arrays = {name: _numbers(name, found[name]) for name in self._parts if name in found}
        possible = [_batch_sizes(x, arrays[x], self._parts[x], x in self._flat) for x in arrays]
        sizes = set.intersection(*possible)
        if not sizes:
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
            raise ConfigError(f"predict takes one observation or a batch, not entries of both: {shapes}.")
        # If all shapes are unknown, a leading 1 fits both.
        is_batch = None not in sizes or (1 in sizes and any(array.ndim > 1 for array in arrays.values()))
        count = max((size for size in sizes if size is not None), default=1)
        widths = {name: part.shape.numel() for name, part in self._parts.items()}
        rows = [arrays.get(x, np.zeros(count * width)).reshape(count, width) for x, width in widths.items()]
        row = np.concatenate(rows, axis=1)  # a copy, which PyTorch may keep
        return torch.from_numpy(row).reshape(count, *self._stored.shape), is_batch

    def _find(self, value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
        """Yield the parts of an observation by name. Entries that the agent does not read are left out."""
        if name in self._parts:
            yield name, value
            return
        inner = value.items() if isinstance(value, Mapping) else ()
        for key, part in enumerate(value) if isinstance(value, tuple | list) else inner:
            yield from self._find(part, f"{name}.{key}" if name else str(key))


def _label(name: str) -> str:
    return f"the entry {name!r}" if name else "observations"


def _numbers(name: str, value: Any) -> np.ndarray:
    try:
        array = np.asarray(value)
    except ValueError:
        array = np.asarray(None)  # lists of different lengths
    if array.dtype.kind not in "biuf":
        raise ConfigError(f"predict takes {_label(name)} of numbers, not {type(value).__name__}.")
    return array


def _batch_sizes(
    name: str, array: np.ndarray | Tensor, part: TensorSpec, is_flat: bool = False
) -> set[int | None]:
    """Return the batch sizes B that the shape of an array allows. None stands for one observation."""
    shape, expected = tuple(array.shape), tuple(part.shape)
    numbers, size = math.prod(shape), part.shape.numel()
    sizes: set[int | None] = {None} if (numbers == size if is_flat else shape == expected) else set()
    if shape and (numbers == shape[0] * size if is_flat else shape[1:] == expected):
        sizes.add(shape[0])
    if not sizes:
        forms = f"{list(expected)} or [{', '.join(map(str, ('B', *expected)))}]"
        raise ConfigError(f"predict takes {_label(name)} of shape {forms}, not {list(shape)}.")
    if part.dtype == torch.uint8 and array.dtype.itemsize > 1:
        raise ConfigError(f"predict takes {_label(name)} of bytes, such as pictures, not {array.dtype}.")
    return sizes


def _start(agent: Actor, memory: Tensor | None, first: Any, count: int) -> Tensor | None:
    """Return the hidden state [B, M] before the observations, zero where ``first`` is true."""
    initial = agent.initial_memory(count)
    if memory is None or initial is None:
        return initial
    starts = torch.as_tensor(False if first is None else first, device=agent.device).bool().reshape(-1, 1)
    if memory.shape != initial.shape or len(starts) not in (1, count):
        got = f"a memory of shape {list(memory.shape)} and {len(starts)} values of first"
        expected = f"the memory is the one of the last call, {list(initial.shape)}, or None"
        raise ConfigError(f"predict got {count} observations, {got}: {expected}.")
    return memory.masked_fill(starts, 0)
