"""Conversion between values of spaces with several parts and rows of numbers."""

from typing import Any

import numpy as np
from gymnasium import spaces

from ppo_lightning.spaces.specs import entries


def to_row(space: spaces.Space, value: Any) -> np.ndarray:
    """Flatten a value of a space to one row [D].

    Args:
        space: The space.
        value: An element of the space.

    Returns:
        All parts in the order of :func:`~ppo_lightning.spaces.specs.columns`.

    Example:
        >>> to_row(spaces.Tuple([spaces.Discrete(3), spaces.MultiBinary(2)]), (2, [0, 1])).tolist()
        [2, 0, 1]
    """
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = value if isinstance(space, spaces.Dict) else {str(i): part for i, part in enumerate(value)}
        return np.concatenate([to_row(part_space, parts[name]) for name, part_space in entries(space)])
    return np.asarray(value).reshape(-1)


def from_row(space: spaces.Space, row: np.ndarray) -> Any:
    """Convert a row [D] to a value of a space, clipping ``Box`` values to their bounds.

    Args:
        space: A space of actions, without text.
        row: A row in the order of :func:`to_row`, with numbers of any type.

    Example:
        >>> from_row(spaces.Tuple([spaces.Discrete(3), spaces.Discrete(2)]), np.array([2.0, 1.0]))
        (2, 1)
    """
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = []
        start = 0
        for name, part_space in entries(space):
            size = _size(part_space)
            parts.append((name, from_row(part_space, row[start : start + size])))
            start += size
        return dict(parts) if isinstance(space, spaces.Dict) else tuple(part for _, part in parts)
    if isinstance(space, spaces.Discrete):
        return int(row[0])
    value = row.reshape(space.shape).astype(space.dtype)
    return np.clip(value, space.low, space.high) if isinstance(space, spaces.Box) else value


def to_rows(space: spaces.Space, value: Any, num_rows: int) -> np.ndarray:
    """Flatten a batch of a space to rows [B, D], see :func:`to_row`.

    Args:
        space: The space of one element.
        value: A batch as Gymnasium's ``batch_space`` defines it: each part has a leading axis.
        num_rows: B.

    Example:
        >>> to_rows(spaces.Tuple([spaces.Discrete(3), spaces.Discrete(2)]), ([2, 0], [1, 1]), 2).tolist()
        [[2, 1], [0, 1]]
    """
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = value if isinstance(space, spaces.Dict) else {str(i): part for i, part in enumerate(value)}
        columns = [to_rows(part_space, parts[name], num_rows) for name, part_space in entries(space)]
        return np.concatenate(columns, axis=1)
    return np.asarray(value).reshape(num_rows, -1)


def from_rows(space: spaces.Space, rows: np.ndarray) -> Any:
    """Convert rows [B, D] to a batch of a space, see :func:`from_row`.

    Args:
        space: A space of actions, without text.
        rows: Rows in the order of :func:`to_rows`, with numbers of any type.

    Example:
        >>> actions = spaces.Tuple([spaces.Discrete(3), spaces.Discrete(2)])
        >>> [part.tolist() for part in from_rows(actions, np.array([[2.0, 1.0], [0.0, 1.0]]))]
        [[2, 0], [1, 1]]
    """
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = []
        start = 0
        for name, part_space in entries(space):
            size = _size(part_space)
            parts.append((name, from_rows(part_space, rows[:, start : start + size])))
            start += size
        return dict(parts) if isinstance(space, spaces.Dict) else tuple(part for _, part in parts)
    value = rows.reshape(len(rows), *(space.shape or ())).astype(space.dtype)
    return np.clip(value, space.low, space.high) if isinstance(space, spaces.Box) else value


def _size(space: spaces.Space) -> int:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return sum(_size(part_space) for _, part_space in entries(space))
    return int(np.prod(space.shape or ()))
