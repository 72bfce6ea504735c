"""Epochs of rollouts for Lightning."""

from collections.abc import Iterator
from typing import Any

from lightning.pytorch.profilers import Profiler
from tensordict import TensorDictBase
from torchrl.collectors import BaseCollector


class RolloutLoader:
    """Loader of a run's rollouts, one epoch after the other.

    The length keeps Lightning from prefetching, which would collect rollout t + 1 with the policy before
    update t. The last epoch may be shorter: PPO stops the run after its last rollout.

    Args:
        collector: Collector of all rollouts of the run. Episodes continue from one epoch to the next.
        rollouts_per_epoch: Number of rollouts in an epoch. A shorter run is one epoch.
        profiler: Records ``collect``: the collection of a rollout, or the wait for it.
    """

    def __init__(self, collector: BaseCollector, rollouts_per_epoch: int, profiler: Profiler) -> None:
        self.collector = collector
        self.profiler = profiler
        self._rollouts = iter(collector)
        self._length = min(rollouts_per_epoch, len(collector))

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[TensorDictBase]:
        for _ in range(self._length):
            with self.profiler.profile("collect"):
                rollout = next(self._rollouts, None)
            if rollout is None:  # the end of the run
                return
            yield rollout

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state, because the data module saves the state of the collector.

        Lightning restores a loader's state in the middle of an epoch only. Without this method, Lightning
        warns that the loader cannot be resumed.
        """
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing, see :meth:`state_dict`."""
