"""The progress of a run: environment steps and finished episodes."""

import time
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from ppo_lightning.utils import collectives
from ppo_lightning.utils.seeding import Stream

LAST_EPISODES = 100


class Progress:
    """Environment steps and episodes of a run, of all ranks.

    The loader of the data module counts each rollout before Lightning hands it on, so that no override of a
    hook loses a rollout or counts it twice. The module and its data module have the same object.

    Example:
        >>> progress = Progress()
        >>> progress.count_extra(256)
        >>> progress.env_steps, progress.rollout_steps
        (256, 0)
    """

    finished: list[Tensor]  # since the last point of the loggers, see `finished_episodes`
    metrics: dict[str, Tensor]  # the last values, which callbacks monitor also after a resume

    def __init__(self) -> None:
        self.episode_returns: deque[float] = deque(maxlen=LAST_EPISODES)
        self.episode_lengths: deque[float] = deque(maxlen=LAST_EPISODES)
        self.draws: Counter[Stream] = Counter()  # of random numbers since the last rollout was counted
        self.reset()

    def reset(self) -> None:
        """Begin a new run."""
        self.load_state_dict({"env_steps": 0, "episode_returns": (), "begun": time.time()})
        self.evaluated_at: int | None = None  # environment steps at the last evaluation of a fit
        self.evaluation: dict[str, float] = {}  # its results
        self.start({})

    def start(self, run: dict[str, Any]) -> None:
        """Start the clock of a fit, of a new run or of a resumed one.

        ``run`` is what a checkpoint says of the data. Later, other runs may use the data module.
        """
        self.run = run
        self.steps_before = self.env_steps
        self.draws.clear()
        self._started = time.perf_counter()
        self.learn_from_here()

    def learn_from_here(self) -> None:
        """Estimate the time that is left from the steps after this one, which learning accompanies."""
        self._learning = self.env_steps, time.perf_counter()

    def seconds_left(self, steps: int) -> float | None:
        """Return the seconds that further environment steps take, None before the first with learning."""
        first, since = self._learning
        done = self.env_steps - first
        return steps * (time.perf_counter() - since) / done if done else None

    def count(self, rollout: TensorDictBase, frames: int, num_infos: int = 0) -> None:
        """Count a rollout [N, T] of this rank, of ``frames`` steps on all ranks. This is a collective."""
        self.draws.clear()
        self.env_steps += frames
        episodes = collectives.concatenate(finished_episodes(rollout, num_infos))
        if len(episodes):
            self.episode_returns.extend(episodes[:, 0].tolist())
            self.episode_lengths.extend(episodes[:, 1].tolist())
            same = [x for x in self.finished if x.shape[1] == episodes.shape[1]]  # `log_info` may change
            self.finished = [*same, episodes]

    def evaluated(self, results: Mapping[str, Any]) -> None:
        """Keep the results of an evaluation of a fit."""
        self.evaluated_at = self.env_steps
        self.evaluation = {key.removeprefix("eval/"): float(x) for key, x in results.items()}

    def count_extra(self, steps: int) -> None:
        """Count environment steps of all ranks outside of rollouts."""
        self.env_steps += steps
        self.extra_steps += steps

    @property
    def rollout_steps(self) -> int:
        """Environment steps of the counted rollouts."""
        return self.env_steps - self.extra_steps

    @property
    def mean_return(self) -> float | None:
        """Mean return of the last 100 training episodes, None before the first one."""
        returns = self.episode_returns
        return sum(returns) / len(returns) if returns else None

    def steps_per_second(self) -> float:
        """Return the environment steps per second of wall-clock time, since the start of this fit."""
        return (self.env_steps - self.steps_before) / (time.perf_counter() - self._started)

    def state_dict(self) -> dict[str, Any]:
        """Return the counters and the last episodes, as plain types."""
        return {
            "env_steps": self.env_steps,
            "extra_steps": self.extra_steps,
            "begun": self.begun,
            "episode_returns": list(self.episode_returns),
            "episode_lengths": list(self.episode_lengths),
            "finished": [episodes.tolist() for episodes in self.finished],
            "metrics": {name: float(value) for name, value in self.metrics.items()},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, or a checkpoint with its entries."""
        self.env_steps: int = state_dict["env_steps"]
        self.extra_steps: int = state_dict.get("extra_steps", 0)  # outside of rollouts: RND's random steps
        self.begun: float = state_dict.get("begun", 0.0)  # seconds since 1970; since version 0.2.0
        self.episode_returns.clear()
        self.episode_returns.extend(state_dict["episode_returns"])
        self.episode_lengths.clear()
        self.episode_lengths.extend(state_dict.get("episode_lengths", ()))  # since version 0.2.0
        self.finished = [torch.tensor(rows, dtype=torch.float32) for rows in state_dict.get("finished", ())]
        self.metrics = {name: torch.tensor(x) for name, x in state_dict.get("metrics", {}).items()}


def finished_episodes(rollout: TensorDictBase, num_infos: int = 0) -> Tensor:
    """Return return, length, row and infos of the episodes that finished in a rollout [N, T], [E, 3 + I].

    The row is the index of the environment on its rank. Numbers that the info does not have are NaN.
    """
    following = rollout["next"]
    done = following["episode_done"]
    if not done.any():
        return torch.zeros(0, 3 + num_infos, dtype=torch.float32)
    row = torch.arange(len(done), device=done.device)[:, None, None].expand(done.shape)
    no_info = torch.full((*rollout.shape, num_infos), torch.nan, device=done.device)
    columns = (following["episode_reward"], following["step_count"], row, following.get("info", no_info))
    return torch.cat([column.float() for column in columns], dim=-1)[done[..., 0]]
