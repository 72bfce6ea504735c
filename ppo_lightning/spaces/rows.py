"""Conversion between values of spaces with several parts and rows of numbers."""

from typing import Any

import numpy as np
from gymnasium import spaces

from ppo_lightning.spaces.specs import entries

EXACT = 2**24  # float32 has all integers up to this one


def to_row(space: spaces.Space, value: Any, batch_shape: tuple[int, ...] = ()) -> np.ndarray:
    """Flatten a value of a space to one row [D], or a batch of values to rows [B, D].

    The parts are in the order of :func:`~ppo_lightning.spaces.specs.columns`. A batch is as Gymnasium's
    ``batch_space`` defines it, each part with a leading axis, and has the ``batch_shape`` ``(B,)``.

    Example:
        >>> space = spaces.Tuple([spaces.Discrete(3), spaces.MultiBinary(2)])
        >>> to_row(space, (2, [0, 1])).tolist()
        [2, 0, 1]
        >>> to_row(space, ([2, 0], [[0, 1], [1, 1]]), batch_shape=(2,)).tolist()
        [[2, 0, 1], [0, 1, 1]]
    """
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = value if isinstance(space, spaces.Dict) else {str(i): part for i, part in enumerate(value)}
        rows = [to_row(part_space, parts[name], batch_shape) for name, part_space in entries(space)]
        return np.concatenate(rows, axis=-1)
    return np.asarray(value).reshape(*batch_shape, -1)


def from_row(space: spaces.Space, row: np.ndarray) -> Any:
    """Convert a row [D], or rows [B, D], of :func:`to_row` to a value or a batch of a space of actions.

    ``Box`` values are clipped to their bounds.

    Example:
        >>> from_row(spaces.Tuple([spaces.Discrete(3), spaces.Discrete(2)]), np.array([2.0, 1.0]))
        (np.int64(2), np.int64(1))
    """
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = {}
        start = 0
        for name, part_space in entries(space):
            end = start + _size(part_space)
            parts[name] = from_row(part_space, row[..., start:end])
            start = end
        return parts if isinstance(space, spaces.Dict) else tuple(parts.values())
    if isinstance(space, spaces.Discrete) and row.ndim == 1:
        return space.dtype.type(row[0])
    value = row.reshape((*row.shape[:-1], *(space.shape or ()))).astype(space.dtype)
    return np.asarray(np.clip(value, space.low, space.high)) if isinstance(space, spaces.Box) else value


def _size(space: spaces.Space) -> int:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return sum(_size(part_space) for _, part_space in entries(space))
    return int(np.prod(space.shape or ()))


def raw_dtype(space: spaces.Space) -> np.dtype:
    """Return the type of rows that keeps the precision of all numbers of a space."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return np.result_type(np.float32, *(raw_dtype(part_space) for _, part_space in entries(space)))
    return np.dtype(space.dtype if isinstance(space, spaces.Box) else np.float32)  # choices are small
