"""Collection of rollouts in a thread, while the main thread learns."""

import copy
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from ppo_lightning.models import ActorCritic
from ppo_lightning.models.actor import evaluating
from ppo_lightning.models.normalizers import Moments, RewardScaler
from ppo_lightning.rollouts.base import Collector
from ppo_lightning.rollouts.storage import add_evaluation
from ppo_lightning.utils import collectives


class OverlappedCollector:
    """Collector that collects rollout t + 1 in a thread, during the update on rollout t.

    The thread acts by a copy of the agent, the behavior policy. When rollout t is handed out, the copy
    receives the weights of the module, which are those after update t - 1, and the module receives the
    statistics up to rollout t, as without a thread. The thread then starts. Nothing else is shared, so that
    the results do not depend on the speed of the thread.

    A rollout is handed out with the log-probabilities and values of the module's weights, which are one
    update newer than the weights that acted. So the clipping range is centered on the policy before the
    update. With the log-probabilities of the older weights, the range is centered on that policy, and
    HalfCheetah learns less (docs/performance.md).

    The first two rollouts have the initial weights. Both are collected before the first update, during which
    PyTorch may compile.

    The state of a checkpoint is that before the pending rollout, with the behavior weights. A resumed run
    collects the pending rollout again.

    Args:
        collector: Collector with copies of agent and scaler. Only the thread steps its environments.
        agent: Agent of the module.
        reward_scaler: Scaler of the module; None: no scaling.

    Source: Huang et al., "Cleanba: A Reproducible and Efficient Distributed Reinforcement Learning Platform"
    (2023), arXiv:2310.00036.

    Example:
        >>> env = make_env("CartPole-v1", num_envs=4)
        >>> agent = MLPAgent(*env.agent_specs)
        >>> acting = RolloutCollector(env, copy.deepcopy(agent), num_steps=8, num_rollouts=3)
        >>> collector = OverlappedCollector(acting, agent)
        >>> sum(rollout.numel() for rollout in collector)
        96
        >>> collector.shutdown()
    """

    def __init__(
        self, collector: Collector, agent: ActorCritic, reward_scaler: RewardScaler | None = None
    ) -> None:
        self.collector = collector
        self.can_resume = collector.can_resume
        self._learner = agent
        acting = _moments(collector.agent, collector.reward_scaler)
        self._moments = list(zip(_moments(agent, reward_scaler), acting, strict=True))
        self._rollouts = iter(collector)
        self.observation: Any = None  # after the rollout that was handed out
        self._pending: Future[TensorDictBase | None] | None = None
        self._before: OrderedDict | None = None  # state before the pending rollout
        # PyTorch's number of threads and the process group belong to a thread.
        num_threads, group = torch.get_num_threads(), collectives.new_group()
        self._thread = ThreadPoolExecutor(1, "rollouts")
        self._thread.submit(torch.set_num_threads, num_threads)
        self._thread.submit(collectives.use_group, group)

    def __len__(self) -> int:
        return len(self.collector)

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Yield the remaining rollouts of the run. An exception of the thread is raised here."""
        is_first = self._pending is None
        if self._pending is None:
            self._pending = self._thread.submit(self._collect)
        while (rollout := self._pending.result()) is not None:
            self.observation = copy.copy(self.collector.observation)
            for learned, collected in self._moments:
                learned.load_state_dict(collected.state_dict())
            self.collector.agent.load_state_dict(self._learner.state_dict())
            self._pending = self._thread.submit(self._collect)
            if is_first:
                self._pending.result()  # other ranks wait for a rollout that failed: no update comes first
                is_first = False
            with self.collector.precision(), evaluating(self._learner):
                add_evaluation(self._learner, rollout)
            yield rollout

    def _collect(self) -> TensorDictBase | None:
        """Collect one rollout, in the thread. Return None after the last one."""
        self._before = self.collector.state_dict()
        rollout = next(self._rollouts, None)
        return None if rollout is None else rollout.clone()  # the collector reuses its storage

    def wait(self) -> None:
        """Wait until the thread is idle."""
        if self._pending is not None:
            wait([self._pending])

    def state_dict(self) -> OrderedDict:
        """Return the collector's state before the pending rollout, and the behavior weights."""
        self.wait()
        state = self._before or self.collector.state_dict()
        return OrderedDict(state, behavior=dict(self.collector.agent.state_dict()))

    def load_state_dict(self, state_dict: OrderedDict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, or the state of a collector without a thread."""
        self.collector.load_state_dict(state_dict)
        if "behavior" in state_dict:
            self.collector.agent.load_state_dict(state_dict["behavior"])
        for learned, collected in self._moments:
            collected.load_state_dict(learned.state_dict())

    def shutdown(self) -> None:
        """Wait for the pending rollout, close the environments and end the thread."""
        self.wait()
        self.collector.shutdown()
        self._thread.shutdown()


def _moments(agent: ActorCritic, reward_scaler: RewardScaler | None) -> list[Moments]:
    """Return the running statistics that a collector updates."""
    parts = nn.ModuleList([agent, reward_scaler or nn.Identity()])
    return [module for module in parts.modules() if isinstance(module, Moments)]
