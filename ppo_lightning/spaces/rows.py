"""Values of spaces with several parts as rows of numbers, for the arrays that environments and networks exchange."""

from typing import Any

import numpy as np
from gymnasium import spaces

from ppo_lightning.spaces.specs import entries


def to_row(space: spaces.Space, value: Any) -> np.ndarray:
    """Returns a value of a space as one row [D]: its parts one after the other, as :func:`columns` has them."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = value if isinstance(space, spaces.Dict) else {str(i): its for i, its in enumerate(value)}
        return np.concatenate([to_row(its, parts[name]) for name, its in entries(space)])
    return np.asarray(value).reshape(-1)


def from_row(space: spaces.Space, row: np.ndarray) -> Any:
    """Returns the value of a space that a row [D] is; numbers of a ``Box`` are clipped to its bounds.

    Args:
        space: Of actions: without text.
        row: As :func:`to_row` would return it; numbers of any type.
    """
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts, start = [], 0
        for name, its in entries(space):
            size = _size(its)
            parts.append((name, from_row(its, row[start : start + size])))
            start += size
        return dict(parts) if isinstance(space, spaces.Dict) else tuple(part for _, part in parts)
    if isinstance(space, spaces.Discrete):
        return int(row[0])
    value = row.reshape(space.shape).astype(space.dtype)
    return np.clip(value, space.low, space.high) if isinstance(space, spaces.Box) else value


def _size(space: spaces.Space) -> int:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return sum(_size(its) for _, its in entries(space))
    return int(np.prod(space.shape or ()))
