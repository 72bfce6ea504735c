"""Conversion of Gymnasium spaces to TorchRL specs, and of specs to plain data for checkpoints."""

import math
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
from gymnasium import spaces
from torchrl.data import Binary, Bounded, Categorical, Composite, MultiCategorical, TensorSpec, Unbounded

from ppo_lightning.errors import ConfigError
from ppo_lightning.spaces.pictures import SMALLEST_PICTURE, is_picture

MASK = "action_mask"  # observation entry that marks the allowed discrete actions
CELL = (11, 6, 3)  # numbers of objects, colors and states of MiniGrid (minigrid/core/constants.py)
MOST_CHOICES = 2**20  # of a discrete space, whose one-hot encoding is so wide
LARGEST = 2**24  # maximum size of an observation or an action in a checkpoint


def with_axis(space: spaces.Space) -> spaces.Space:
    """Return a ``Box`` of shape () as a vector without entries of one number, and other spaces unchanged."""
    if isinstance(space, spaces.Box) and space.shape == ():
        flat: Any = spaces.flatten_space(space)
        flat.entry_sizes = {}
        return flat
    return space


def cells_as_choices(space: spaces.Space) -> spaces.Space:
    """Replace the byte image of a MiniGrid observation space by a ``MultiDiscrete``, and drop the text.

    MiniGrid declares each cell as three bytes: object, color and state. A network would read these as
    quantities, for example a ball as more than a key. Any other space is returned unchanged.
    """
    if not (isinstance(space, spaces.Dict) and set(space) - {MASK} == {"direction", "image", "mission"}):
        return space
    shape = space["image"].shape or ()
    if shape[2:] != (3,) or shape[0] >= SMALLEST_PICTURE:  # a wrapper rendered pixels or encoded the cells
        return space
    parts = {name: part for name, part in space.items() if name != "mission"}
    return spaces.Dict({**parts, "image": spaces.MultiDiscrete(np.broadcast_to(CELL, shape))})


def join_vectors(space: spaces.Space) -> spaces.Space:
    """Join a dictionary or tuple of float vectors, or a number, to one vector; keep any other space.

    The vector has the attribute ``entry_sizes`` (name -> number of columns), which :func:`spec_from_space`
    copies to the spec. A space with text is not joined. A single number becomes a vector of one number.

    Example:
        >>> join_vectors(spaces.Dict(a=spaces.Box(0, 1, (2,)), b=spaces.Box(0, 1, (3,)))).entry_sizes
        {'a': 2, 'b': 3}
    """
    spec = spec_from_space(space)
    sizes: dict[str, int] = {}
    for name, part, _ in columns(spec):
        while name in sizes:  # the entry "a.b" beside b of a
            name += "'"
        sizes[name] = part.shape.numel()
    if not sum(size for name, size in sizes.items() if not is_mask(name)):
        remedy = "add a constant one by gymnasium.wrappers.TransformObservation"
        raise ConfigError(f"env_id has observations without numbers, {space}: {remedy}.")
    has_parts = isinstance(space, spaces.Dict | spaces.Tuple)
    if not has_parts or not without_text(space) or not is_vector(spec):
        return with_axis(space)
    box: Any = spaces.flatten_space(space)
    box.entry_sizes = {name: size for name, size in sizes.items() if size}
    return box


def spec_from_space(space: spaces.Space) -> TensorSpec:
    """Convert the Gymnasium space of one environment to a TorchRL spec without batch dimensions.

    Floating-point boxes become float32. Integer boxes (pixels) keep their dtype, in which they are stored.

    Args:
        space: A ``Box``, a ``Discrete`` that starts at 0, a ``MultiDiscrete``, a ``MultiBinary``, or a
            ``Dict`` or ``Tuple`` of these. Text entries are dropped.

    Raises:
        ConfigError: The space is of another kind.

    Example:
        >>> spec_from_space(spaces.Discrete(3)).space.n
        3
    """
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete) and np.any(space.start):
        raise ConfigError(f"The space {space} does not start at 0: wrap the environment so that it does.")
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        sizes: Any = space.nvec if isinstance(space, spaces.MultiDiscrete) else np.prod(space.n, dtype=float)
        if np.sum(sizes, dtype=float) > MOST_CHOICES:
            raise unsupported(space)
    if isinstance(space, spaces.Discrete):
        return Categorical(int(space.n), shape=(), dtype=torch.int64)
    if isinstance(space, spaces.MultiDiscrete):
        return MultiCategorical(space.nvec.flatten().tolist(), dtype=torch.int64)
    if isinstance(space, spaces.MultiBinary):
        size = int(np.prod(space.shape))
        return Binary(size, shape=(size,), dtype=torch.int64)
    if isinstance(space, spaces.Box):
        floating = np.issubdtype(space.dtype, np.floating)
        # PyTorch hardly supports unsigned integers beyond bytes.
        kind = {"uint16": "int32", "uint32": "int64", "uint64": "int64"}.get(space.dtype.name, space.dtype)
        kind = np.dtype(np.float32 if floating else kind)
        dtype = torch.from_numpy(np.empty(0, kind)).dtype
        low, high = (torch.from_numpy(inner_bound(space, end, kind)) for end in ("low", "high"))
        spec = Unbounded(shape=space.shape, dtype=dtype)
        if not floating or (low.isfinite().all() and high.isfinite().all()):
            spec = Bounded(low, high, shape=space.shape, dtype=dtype)
        if hasattr(space, "entry_sizes"):
            spec.entry_sizes = space.entry_sizes
        return spec
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return Composite({str(name): spec_from_space(part) for name, part in entries(space)})
    raise unsupported(space)


def inner_bound(space: spaces.Box, end: Literal["low", "high"], dtype: np.dtype) -> np.ndarray:
    """Return a bound of a box in another type: of floats, the nearest numbers that the box contains."""
    bound = getattr(space, end)
    if dtype.kind != "f":
        return np.asarray(
            np.minimum(bound, np.uint64(2**63 - 1)) if bound.dtype == np.uint64 else bound, dtype
        )
    with np.errstate(all="ignore"):
        rounded = np.asarray(bound, dtype)
        inner = np.nextafter(rounded, dtype.type(np.inf if end == "low" else -np.inf))
    return np.where(rounded < bound if end == "low" else rounded > bound, inner, rounded)


def unsupported(space: spaces.Space) -> ConfigError:
    """Return the error about a space that has no spec. Actions have no text, which observations may have."""
    kinds = f"a Box, or a Discrete, MultiDiscrete or MultiBinary with at most {MOST_CHOICES} choices"
    return ConfigError(f"The space {space} is not supported: use {kinds}, or a Dict or Tuple of these.")


def space_from_spec(spec: TensorSpec) -> spaces.Space:
    """Convert the spec of actions to a Gymnasium space, the reverse of :func:`spec_from_space`.

    A ``MultiDiscrete`` or a ``MultiBinary`` space gets one axis, because a spec has its size only.
    Entries that are named by their index form a tuple.
    """
    if isinstance(spec, Composite):
        parts = {key: space_from_spec(part) for key, part in spec.items()}
        is_tuple = list(parts) == [str(i) for i in range(len(parts))]
        return spaces.Tuple(parts.values()) if is_tuple else spaces.Dict(OrderedDict(parts))
    if isinstance(spec, MultiCategorical):
        return spaces.MultiDiscrete(spec.nvec.flatten().tolist())
    if isinstance(spec, Binary):
        return spaces.MultiBinary(spec.shape[-1])
    if isinstance(spec, Categorical):
        return spaces.Discrete(int(spec.space.n))
    low, high = spec.space.low.numpy(), spec.space.high.numpy()
    shape = () if getattr(spec, "entry_sizes", None) == {} else low.shape  # see `with_axis`
    return spaces.Box(low.reshape(shape), high.reshape(shape), dtype=low.dtype)


def entries(space: spaces.Dict | spaces.Tuple) -> list[tuple[str, spaces.Space]]:
    """Return names and spaces of the entries of a dictionary or tuple, without text.

    The entries of a tuple are named by their index. No network of this package reads text.
    """
    if isinstance(space, spaces.Dict):
        named = list(space.spaces.items())
    else:
        named = [(str(i), part) for i, part in enumerate(space.spaces)]
    return [(name, part) for name, part in named if not _is_text(part)]


def _is_text(space: spaces.Space) -> bool:
    # MiniGrid defines a text space of its own, in a package that may not be installed.
    return isinstance(space, spaces.Text) or type(space).__name__ == "MissionSpace"


def without_text(space: spaces.Space) -> bool:
    """Return whether a space has no text at any depth."""
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        return True
    kept = entries(space)
    return len(kept) == len(space.spaces) and all(without_text(part) for _, part in kept)


def columns(spec: TensorSpec, name: str = "", start: int = 0) -> Iterator[tuple[str, TensorSpec, slice]]:
    """Yield name, spec and columns of each part of a spec in its row. Joined vectors are parts, too.

    Dots join the names of nested parts. The first column is ``start``.
    """
    sizes = getattr(spec, "entry_sizes", {})
    parts = {key: Unbounded((size,), dtype=spec.dtype) for key, size in sizes.items()}
    if isinstance(spec, Composite):
        parts = dict(spec.items())
    elif not parts:
        yield name, spec, slice(start, start + spec.shape.numel())
    for key, part in parts.items():
        for leaf in columns(part, f"{name}.{key}" if name else key, start):
            yield leaf
            start = leaf[2].stop


def row_spec(spec: TensorSpec) -> TensorSpec:
    """Return the spec of the row that stores a spec of several parts or a discrete observation.

    The row is bytes if the parts have a picture and all parts fit in bytes. Otherwise the row is float32,
    with the bounds of each column.
    """
    parts = [part for _, part, _ in columns(spec)]
    if any(part.dtype == torch.uint8 and part.ndim > 1 for part in parts) and all(map(_fits_byte, parts)):
        return Unbounded(shape=(sum(part.shape.numel() for part in parts),), dtype=torch.uint8)
    low, high = map(torch.cat, zip(*map(_bounds, parts), strict=True))
    if not (low.isfinite().all() and high.isfinite().all()):
        return Unbounded(shape=low.shape, dtype=torch.float32)
    return Bounded(low, high, shape=low.shape, dtype=torch.float32)


def _fits_byte(spec: TensorSpec) -> bool:
    return max(choice_counts(spec)) <= 256 if isinstance(spec, Categorical) else spec.dtype == torch.uint8


def _bounds(spec: TensorSpec) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(spec, Categorical):
        high = torch.tensor(choice_counts(spec)).float() - 1
        return torch.zeros_like(high), high
    if isinstance(spec, Bounded):
        return spec.space.low.flatten().float(), spec.space.high.flatten().float()
    high = torch.full((spec.shape.numel(),), torch.inf, dtype=torch.float32)
    return -high, high


def stored(observation_spec: TensorSpec) -> TensorSpec:
    """Return the spec of the tensors that store an observation.

    A box is stored unchanged, any other spec as a row, see :func:`row_spec`.
    """
    plain = not isinstance(observation_spec, Composite | Categorical)
    with torch.device("cpu"):  # the bounds are values, also of an agent that is built on the meta device
        return observation_spec if plain else row_spec(observation_spec)


def mask_columns(observation_spec: TensorSpec) -> slice | None:
    """Return the columns of the action mask in a row, whose parts are adjacent, or None without a mask."""
    slices = [part_columns for name, _, part_columns in columns(observation_spec) if is_mask(name)]
    return slice(slices[0].start, slices[-1].stop) if slices else None


def is_mask(name: str) -> bool:
    """Return whether a part of an observation of this name is the action mask or belongs to it."""
    return name == MASK or name.startswith(f"{MASK}.")


def choice_counts(action_spec: TensorSpec) -> list[int]:
    """Return the number of actions of each discrete component, in the order of the mask."""
    counts: list[int] = []
    for _, part, _ in columns(action_spec):
        if isinstance(part, MultiCategorical):
            counts += part.nvec.flatten().tolist()
        elif isinstance(part, Categorical):
            counts += [int(part.space.n)] * max(1, part.shape.numel())
    return counts


def not_measured(observation_spec: TensorSpec) -> list[slice]:
    """Return the columns excluded from normalization: choices, pictures and masks."""
    return [
        part_columns
        for name, part, part_columns in columns(observation_spec)
        if isinstance(part, Categorical) or is_picture(part) or is_mask(name)
    ]


def is_vector(spec: TensorSpec) -> bool:
    """Return whether all parts of an observation are vectors of floats, so that its row is one, too."""
    return all(
        part.dtype.is_floating_point and not is_mask(name) and not is_picture(part)
        for name, part, _ in columns(spec)
    )


def has_numbers_only(spec: TensorSpec) -> bool:
    """Return whether no part of an observation needs an encoder, except the action mask."""
    if not isinstance(spec, Composite):
        return spec.ndim == 1 and spec.dtype.is_floating_point
    parts = [part for name, part, _ in columns(spec) if not is_mask(name)]
    return bool(parts) and not any(map(_needs_encoder, parts))


def _needs_encoder(part: TensorSpec) -> bool:
    is_choice = isinstance(part, Categorical) and not isinstance(part, Binary)
    return is_choice or is_picture(part) or part.dtype == torch.uint8


def spec_to_plain(spec: TensorSpec) -> dict[str, Any]:
    """Convert a spec to strings, numbers and lists, which ``torch.load(..., weights_only=True)`` can read."""
    if isinstance(spec, Composite):
        return {"kind": "Composite", "parts": {key: spec_to_plain(part) for key, part in spec.items()}}
    if isinstance(spec, MultiCategorical):
        return {"kind": "MultiCategorical", "n": spec.nvec.flatten().tolist()}
    if isinstance(spec, Binary):
        return {"kind": "Binary", "n": int(spec.shape[0])}
    if isinstance(spec, Categorical):
        return {"kind": "Categorical", "n": int(spec.space.n)}
    plain: dict[str, Any] = {"kind": "Unbounded", "shape": list(spec.shape)}
    plain["dtype"] = str(spec.dtype).removeprefix("torch.")
    if hasattr(spec, "entry_sizes"):
        plain["entries"] = dict(spec.entry_sizes)
    if isinstance(spec, Bounded):
        plain |= {"kind": "Bounded", "low": _shrink(spec.space.low), "high": _shrink(spec.space.high)}
    return plain


def spec_from_plain(plain: dict[str, Any]) -> TensorSpec:
    """Rebuild a spec from the result of :func:`spec_to_plain`."""
    if plain["kind"] == "Composite":
        return Composite({key: spec_from_plain(part) for key, part in plain["parts"].items()})
    numbers = plain["n"] if "n" in plain else math.prod(plain["shape"])
    size = max(map(abs, numbers)) * len(numbers) if isinstance(numbers, list) else numbers
    name = plain.get("dtype", "int64")
    dtype = getattr(torch, name)
    entry_sizes = plain.get("entries", {})
    fits = not entry_sizes or (size == sum(entry_sizes.values()) and min(entry_sizes.values()) > 0)
    if not (0 <= size <= LARGEST and isinstance(dtype, torch.dtype) and fits):
        what = f"{size} numbers of type {name!r} with entries {entry_sizes}"
        raise ConfigError(f"The checkpoint names a space of {what}: the file is damaged or was edited.")
    if plain["kind"] == "MultiCategorical":
        return MultiCategorical(numbers, dtype=dtype)
    if plain["kind"] == "Binary":
        return Binary(size, shape=(size,), dtype=dtype)
    if plain["kind"] == "Categorical":
        return Categorical(size, shape=(), dtype=dtype)
    shape = tuple(plain["shape"])
    spec: TensorSpec = Unbounded(shape=shape, dtype=dtype)
    if plain["kind"] != "Unbounded":
        low, high = (torch.as_tensor(plain[key], dtype=dtype).expand(shape) for key in ("low", "high"))
        spec = Bounded(low.clone(), high.clone(), shape=shape, dtype=dtype)
    if "entries" in plain:
        spec.entry_sizes = dict(entry_sizes)
    return spec


def _shrink(bound: torch.Tensor) -> Any:
    """Return a single number for a constant bound (84 x 84 pixels), or nested lists."""
    is_constant = bound.numel() and (bound == bound.flatten()[0]).all()
    return bound.flatten()[0].item() if is_constant else bound.tolist()
