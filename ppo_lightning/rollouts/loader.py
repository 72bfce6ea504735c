"""The loader of a run's rollouts, which counts them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase

from ppo_lightning import private
from ppo_lightning.rollouts.base import Collector
from ppo_lightning.rollouts.overlap import OverlappedCollector
from ppo_lightning.rollouts.plan import Plan
from ppo_lightning.rollouts.progress import Progress


@dataclass(eq=False)
class RolloutLoader:
    """Loader of a run's rollouts, one epoch after the other. Episodes continue from one to the next.

    The length keeps Lightning from prefetching, which would collect rollout t + 1 with the policy before
    update t. The last epoch may be shorter: the run stops after its last rollout, for any ``max_epochs``. The
    profiler records ``collect``: the collection of a rollout, or the wait for it.
    """

    collector: Collector | OverlappedCollector
    plan: Plan
    progress: Progress
    trainer: Any  # its `should_stop` is set with the last rollout
    num_infos: int  # numbers in an episode's `info`

    def __post_init__(self) -> None:
        self._rollouts = iter(self.collector)
        self._length = min(self.plan.rollouts_per_epoch, len(self.collector))

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[TensorDictBase]:
        for _ in range(self._length):
            with self.trainer.profiler.profile("collect"):
                rollout = next(self._rollouts, None)
            if rollout is None:
                self.trainer.should_stop = True  # a resumed run that was complete
                return
            # Counted before Lightning hands the rollout on: all hooks see the new numbers.
            self.progress.count(rollout, self.plan.frames_per_rollout, self.num_infos)
            # ModelCheckpoint uses it in file names, also for rollouts that are not logged.
            self.trainer.callback_metrics["step"] = torch.tensor(self.progress.env_steps).as_subclass(
                private.EnvSteps
            )
            if self.progress.rollout_steps >= self.plan.num_frames:
                self.trainer.should_stop = True  # Lightning validates before it stops
            yield rollout

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the data module saves the collector. Without this method, Lightning warns."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing, see :meth:`state_dict`."""
