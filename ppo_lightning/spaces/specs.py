"""Gymnasium spaces as TorchRL specs, and specs as plain data that a checkpoint can hold."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torchrl.data import Binary, Bounded, Categorical, Composite, MultiCategorical, TensorSpec, Unbounded

from ppo_lightning.errors import ConfigError

MASK = "action_mask"  # the entry of a dictionary of observations that says which discrete actions are allowed
CELL = (11, 6, 3)  # how many objects, colours and states MiniGrid has (minigrid/core/constants.py)
LARGEST = 2**24  # numbers in an observation or an action that a file may name
SMALLEST_PICTURE = 36  # pixels: a smaller one (a few cells of a grid) is a vector


def spec_from_space(space: spaces.Space) -> TensorSpec:
    """Describes a Gymnasium space of one environment as a TorchRL spec.

    Floating point boxes become float32; integer boxes (pixels) keep their dtype, so that they are stored as they are.

    Args:
        space: A ``Box``, a ``Discrete`` that starts at 0, a ``MultiDiscrete``, a ``MultiBinary``, or a ``Dict`` or a ``Tuple``
            of these; entries of text are left out.

    Raises:
        ConfigError: The space is of another kind.
    """
    if isinstance(space, spaces.Discrete):
        if space.start != 0:
            raise ConfigError(
                f"The space {space} starts at {space.start}: wrap the environment so that it starts at 0."
            )
        return Categorical(int(space.n), shape=(), dtype=torch.int64)
    if isinstance(space, spaces.MultiDiscrete):
        if space.start.any():
            raise ConfigError(f"The space {space} does not start at 0: wrap the environment so that it does.")
        return MultiCategorical(space.nvec.flatten().tolist(), dtype=torch.int64)
    if isinstance(space, spaces.MultiBinary):
        size = int(np.prod(space.shape))
        return Binary(size, shape=(size,), dtype=torch.int64)
    if isinstance(space, spaces.Box):
        floating = np.issubdtype(space.dtype, np.floating)
        dtype = torch.float32 if floating else torch.from_numpy(np.empty(0, space.dtype)).dtype
        low, high = (
            torch.from_numpy(np.asarray(space.low)).to(dtype),
            torch.from_numpy(np.asarray(space.high)).to(dtype),
        )
        if floating and not (low.isfinite().all() and high.isfinite().all()):
            return Unbounded(shape=space.shape, dtype=dtype)
        return Bounded(low, high, shape=space.shape, dtype=dtype)
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return Composite({name: spec_from_space(its) for name, its in entries(space)})
    raise ConfigError(
        f"The space {space} is not supported: the environment needs a Box, a Discrete, a MultiDiscrete or a MultiBinary space,"
        " or a dictionary or a tuple of these."
    )


def entries(space: spaces.Dict | spaces.Tuple) -> list[tuple[str, spaces.Space]]:
    """Returns names and spaces of the entries, those of a tuple counted; text is left out, for no network here reads it.

    Also text of a kind of its own, which MiniGrid's is.
    """
    named = (
        space.spaces.items()
        if isinstance(space, spaces.Dict)
        else ((str(i), its) for i, its in enumerate(space.spaces))
    )
    return [
        (name, its)
        for name, its in named
        if not isinstance(its, spaces.Text) and type(its).__name__ != "MissionSpace"
    ]


def without_text(space: spaces.Space) -> bool:
    """Tells whether :func:`entries` leaves nothing of a space out, however deep."""
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        return True
    kept = entries(space)
    return len(kept) == len(space.spaces) and all(without_text(its) for _, its in kept)


def cells_as_choices(space: spaces.Space) -> spaces.Space:
    """Returns MiniGrid's observations without their text and with each cell as an object, a colour and a state.

    It declares them as bytes, of which a network would take a ball for more of a key. Any other space is returned as it is.
    """
    if not (isinstance(space, spaces.Dict) and set(space) == {"direction", "image", "mission"}):
        return space
    shape = space["image"].shape or ()
    if shape[2:] != (3,) or shape[0] >= SMALLEST_PICTURE:  # a wrapper drew pixels, or did the same as this
        return space
    return spaces.Dict(direction=space["direction"], image=spaces.MultiDiscrete(np.broadcast_to(CELL, shape)))


def columns(spec: TensorSpec, name: str = "", start: int = 0) -> Iterator[tuple[str, TensorSpec, slice]]:
    """Yields the parts of a spec, with the columns of each where they lie in one row, one after the other.

    The names of nested parts are joined by dots.
    """
    if not isinstance(spec, Composite):
        yield name, spec, slice(start, start + spec.shape.numel())
        return
    for key in spec.keys():  # noqa: SIM118  (a Composite)
        for part in columns(spec[key], f"{name}.{key}" if name else key, start):
            yield part
            start = part[2].stop


def row_spec(spec: TensorSpec) -> TensorSpec:
    """Returns the spec of the rows that a spec of several parts, or of a discrete observation, is stored as.

    Floats, with the bounds of each column; bytes, where nothing in it needs more.
    """
    parts = [part for _, part, _ in columns(spec)]
    if any(part.dtype == torch.uint8 and part.ndim == 3 for part in parts) and all(map(_in_a_byte, parts)):
        return Unbounded(shape=(sum(part.shape.numel() for part in parts),), dtype=torch.uint8)
    lows, highs = zip(*map(_bounds, parts), strict=True)
    low, high = torch.cat(lows), torch.cat(highs)
    if not (low.isfinite().all() and high.isfinite().all()):
        return Unbounded(shape=low.shape, dtype=torch.float32)
    return Bounded(low, high, shape=low.shape, dtype=torch.float32)


def _in_a_byte(spec: TensorSpec) -> bool:
    if isinstance(spec, MultiCategorical):
        return bool((spec.nvec <= 256).all())
    return int(spec.space.n) <= 256 if isinstance(spec, Categorical) else spec.dtype == torch.uint8


def _bounds(spec: TensorSpec) -> tuple[torch.Tensor, torch.Tensor]:
    size = spec.shape.numel()
    if isinstance(spec, MultiCategorical):
        return torch.zeros(size), spec.nvec.flatten().float() - 1
    if isinstance(spec, Categorical):
        return torch.zeros(size), torch.full((size,), float(spec.space.n - 1))
    if isinstance(spec, Bounded):
        return spec.space.low.flatten().float(), spec.space.high.flatten().float()
    return torch.full((size,), -torch.inf), torch.full((size,), torch.inf)


def is_picture(spec: TensorSpec) -> bool:
    """Returns whether a part of an observation is a picture of bytes for a convolutional network, [C, H, W] or [H, W, C]."""
    return spec.dtype == torch.uint8 and spec.ndim == 3 and sorted(spec.shape)[1] >= SMALLEST_PICTURE


def stored(observation_spec: TensorSpec) -> TensorSpec:
    """Returns the spec of the tensors that hold an observation: a box as it is, everything else as a row."""
    plain = not isinstance(observation_spec, Composite | Categorical)
    return observation_spec if plain else row_spec(observation_spec)


def mask_columns(observation_spec: TensorSpec) -> slice | None:
    """Returns where in a row the mask of the actions lies, which may have parts; None: there is none."""
    found = [its for name, _, its in columns(observation_spec) if is_mask(name)]
    return slice(found[0].start, found[-1].stop) if found else None


def is_mask(name: str) -> bool:
    """Returns whether a part of an observation, by its name, is the mask of the actions, or a part of it."""
    return name == MASK or name.startswith(f"{MASK}.")


def choices(action_spec: TensorSpec) -> list[int]:
    """Returns of how many actions each discrete component chooses, in the order of a mask's entries."""
    numbers: list[int] = []
    for _, part, _ in columns(action_spec):
        if isinstance(part, MultiCategorical):
            numbers += part.nvec.flatten().tolist()
        elif isinstance(part, Categorical):
            numbers += [int(part.space.n)] * max(1, part.shape.numel())
    return numbers


def not_measured(observation_spec: TensorSpec) -> list[slice]:
    """Returns the columns that are no measurements, and shall not be normalised: choices, pictures, masks."""
    return [
        its
        for name, part, its in columns(observation_spec)
        if isinstance(part, Categorical) or is_picture(part) or is_mask(name)
    ]


def is_vector(spec: TensorSpec) -> bool:
    """Returns whether all parts of an observation are floats, which together are a plain vector."""
    return all(part.dtype.is_floating_point and not is_mask(name) for name, part, _ in columns(spec))


def spec_to_plain(spec: TensorSpec) -> dict[str, Any]:
    """Describes a spec by strings, numbers and lists only (``torch.load(..., weights_only=True)`` reads them)."""
    if isinstance(spec, Composite):
        return {"kind": "Composite", "parts": {key: spec_to_plain(spec[key]) for key in spec.keys()}}  # noqa: SIM118
    if isinstance(spec, MultiCategorical):
        return {"kind": "MultiCategorical", "n": spec.nvec.flatten().tolist()}
    if isinstance(spec, Binary):
        return {"kind": "Binary", "n": int(spec.shape[0])}
    if isinstance(spec, Categorical):
        return {"kind": "Categorical", "n": int(spec.space.n)}
    plain = {"kind": "Unbounded", "shape": list(spec.shape), "dtype": str(spec.dtype).removeprefix("torch.")}
    if isinstance(spec, Bounded):
        plain |= {"kind": "Bounded", "low": _shrink(spec.space.low), "high": _shrink(spec.space.high)}
    return plain


def spec_from_plain(plain: dict[str, Any]) -> TensorSpec:
    """Rebuild the spec that :func:`spec_to_plain` described.

    Raises:
        ConfigError: It is larger than any observation, or of no type of PyTorch.
    """
    if plain["kind"] == "Composite":
        return Composite({key: spec_from_plain(part) for key, part in plain["parts"].items()})
    numbers = plain["n"] if "n" in plain else math.prod(plain["shape"])
    size = max(map(abs, numbers)) * len(numbers) if isinstance(numbers, list) else numbers
    if not 0 <= size <= LARGEST:
        raise ConfigError(
            f"The checkpoint names a space of {size} numbers: the file is damaged, or was edited."
        )
    if plain["kind"] == "MultiCategorical":
        return MultiCategorical(numbers, dtype=torch.int64)
    if plain["kind"] == "Binary":
        return Binary(size, shape=(size,), dtype=torch.int64)
    if plain["kind"] == "Categorical":
        return Categorical(size, shape=(), dtype=torch.int64)
    shape, dtype = tuple(plain["shape"]), getattr(torch, plain["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(
            f"The checkpoint names a space of type {plain['dtype']!r}: the file is damaged, or was edited."
        )
    if plain["kind"] == "Unbounded":
        return Unbounded(shape=shape, dtype=dtype)
    low, high = (torch.as_tensor(plain[key], dtype=dtype).expand(shape).clone() for key in ("low", "high"))
    return Bounded(low, high, shape=shape, dtype=dtype)


def _shrink(bound: torch.Tensor) -> Any:
    """Returns one number for a bound that is equal everywhere (84 x 84 pixels), nested lists otherwise."""
    return (
        bound.flatten()[0].item() if bound.numel() and (bound == bound.flatten()[0]).all() else bound.tolist()
    )
