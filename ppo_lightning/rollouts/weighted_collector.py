"""The rollout collector for environments whose steps do not all count."""

from typing import Any

import numpy as np
from torchrl.data import TensorSpec, Unbounded

from ppo_lightning.envs.batched import Step
from ppo_lightning.rollouts.collector import RolloutCollector


class WeightedCollector(RolloutCollector):
    """Collector of rollouts [N, T] from environments that flag steps that do not count (``env.valid``).

    These are the steps at which an environment only reset after an episode end, and those of agents that are
    dead while the episode continues.

    ``weight`` [N, T] is 0 there and 1 elsewhere. Steps of weight 0 enter no statistics of rewards, sums or
    counts, and end the flow of advantages.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._last: np.ndarray | None = None  # raw observations of the last step

    def rollout_keys(self) -> dict[str, TensorSpec]:
        """Return the specs of a step that the rollout stores, by key."""
        keys = super().rollout_keys()
        return keys if self.env.valid is None else keys | {"weight": Unbounded(())}

    def step(self, t: int, action: np.ndarray) -> Step:
        """Step the environments, and store which steps count."""
        results = super().step(t, action)
        if self._weight is not None:
            self._weight[t] = self.env.valid
            if self._memory is not None:
                self._memory[self._weight[t] == 0] = 0
        return results

    def counted(self, t: int, batches: list[np.ndarray], done: np.ndarray | None) -> list[np.ndarray]:
        """Return which rows of batches enter the statistics, each [B] bool; none: all rows do."""
        if self._weight is None:
            return []
        raw, *fresh = batches
        # A dead agent repeats the last observation. A step that only resets has a new one.
        counted = [(self._weight[t] > 0) | differ(raw, self._last)]
        counted += [self.begins(first, raw[done]) for first in fresh]
        self._last = raw.copy()
        return counted

    def begins(self, fresh: np.ndarray, final: np.ndarray) -> np.ndarray:
        """Return where an observation [K, ...] after a reset begins an episode, [K] bool."""
        return np.ones(len(fresh), bool)

    def row_rewards(self) -> np.ndarray:
        """Return the rewards whose sum is the return of a row, [T, N]."""
        rewards = super().row_rewards()
        return rewards if self._weight is None else rewards * self._weight

    def finish(self) -> None:
        """Complete the storage. A step that does not count ends no episode."""
        super().finish()
        if self._weight is not None:
            self._store["next", "episode_done"][self._weight == 0] = False


def differ(rows: np.ndarray, others: np.ndarray | None) -> np.ndarray:
    """Return where rows differ, [B] bool; everywhere if there are no others."""
    return (rows != others).reshape(len(rows), -1).any(axis=1)
