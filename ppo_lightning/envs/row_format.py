"""Rows of arrays that hold the observations and actions of single environments."""

import functools
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torchrl.data import Bounded, Composite, Unbounded

from ppo_lightning.envs.contract import check_observation, require_action, store
from ppo_lightning.spaces.rows import EXACT, from_row, raw_dtype, to_row
from ppo_lightning.spaces.specs import (
    cells_as_choices,
    choice_counts,
    join_vectors,
    mask_columns,
    row_spec,
    spec_from_space,
    stored,
    unsupported,
    with_axis,
    without_text,
)


class RowFormat:
    """How observations become rows of arrays, and rows become actions, for one environment's spaces.

    A dictionary or tuple becomes one row. Agents are built from ``agent_specs``, part by part.

    Args:
        observation_space: Observation space of one environment.
        action_space: Action space of one environment.

    Attributes:
        space: Space of an observation as the environment returns it.
        spaces: Spaces of the row of an observation and of an action.
        agent_specs: Specs of observations and actions, part by part.
        observation_spec: Spec of the row of an observation.
        action_spec: Spec of the row of an action.
        dtype: Type of the arrays of observations, which keeps their precision.
        tensor_dtype: Type of their tensors.
        bounds: Bounds of continuous actions, or None.
        to_row: Makes a row of an observation. None: it is one.
        from_row: Makes an action of a row. None: it is one.
        mask: Columns of the action masks in a row, or None.
    """

    def __init__(self, observation_space: spaces.Space, action_space: spaces.Space) -> None:
        self.space: Any = cells_as_choices(observation_space)
        self.spaces: tuple[Any, Any] = join_vectors(self.space), with_axis(action_space)
        if not without_text(action_space):
            raise unsupported(action_space)
        row_space: Any
        actions: Any
        row_space, actions = self.spaces
        observation_spec, action_spec = spec_from_space(row_space), spec_from_space(actions)
        self.agent_specs = observation_spec, action_spec
        row = stored(observation_spec)
        self.dtype: Any = torch.empty(0, dtype=row.dtype).numpy().dtype
        if isinstance(row_space, spaces.Box) or row.dtype.is_floating_point:
            self.dtype = raw_dtype(row_space)  # statistics need its precision
        self.tensor_dtype = row.dtype
        if row.dtype.is_floating_point:
            # float32 would round large numbers, which the environment returns with more digits.
            bounds = (row.space.low, row.space.high) if isinstance(row, Bounded) else ()
            if self.dtype.itemsize == 8 and any(bound.abs().max() > EXACT for bound in bounds):
                self.tensor_dtype = torch.float64
            row = Unbounded(row.shape, dtype=row.dtype)  # many environments declare rough bounds
        self.observation_spec = row.clone()
        has_parts = isinstance(action_spec, Composite)
        self.action_spec = row_spec(action_spec) if has_parts else action_spec.clone()
        is_continuous = isinstance(actions, spaces.Box) and np.issubdtype(actions.dtype, np.floating)
        self.bounds = (actions.low, actions.high) if is_continuous else None
        is_box = isinstance(self.space, spaces.Box) and self.space is row_space
        self.to_row = None if is_box else functools.partial(to_row, self.space)
        is_simple = isinstance(actions, spaces.Box | spaces.Discrete) and actions is action_space
        self.from_row = None if is_simple else functools.partial(from_row, action_space)
        self.mask = mask_columns(observation_spec)
        self._component_starts = np.cumsum([0, *choice_counts(action_spec)])[:-1]  # of an action, in the mask

    def actions(self, action: np.ndarray) -> Any:
        """Return actions [N, ...] as single environments take them: of the type of their space."""
        if self.from_row is not None:
            return [self.from_row(row) for row in action]
        dtype = self.spaces[1].dtype
        return action if action.dtype is dtype else action.astype(dtype)

    def write(
        self, target: np.ndarray, i: int, observation: Any, over: bool = False, check: bool = False
    ) -> None:
        """Write an observation of a single environment to row ``i`` of ``target`` [N, ...].

        It is validated against the space if ``check`` says so, or if its shape is another one. Unless the
        episode is ``over``, the mask must allow an action.
        """
        try:
            row = observation if self.to_row is None else self.to_row(observation)
            if check or np.shape(row) != target.shape[1:]:  # NumPy would broadcast some of them
                check_observation(observation, self.space)
                row = np.reshape(row, target.shape[1:])
            store(target[i : i + 1], row)
        except Exception:
            check_observation(observation, self.space)
            raise
        if self.mask is not None and self.forbids_all(target[i : i + 1])[0]:
            require_action(over)
            target[i, self.mask] = 1  # the value of a final observation may be that of its best action

    def forbids_all(self, rows: np.ndarray) -> np.ndarray:
        """Return where a mask in observations [N, D] allows no action, [N] bool."""
        masks: np.ndarray = rows[:, self.mask] > 0
        allowed = np.logical_or.reduceat(masks, self._component_starts, axis=1)
        return np.logical_not(allowed.all(axis=1))
