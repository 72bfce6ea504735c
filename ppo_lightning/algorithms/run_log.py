"""Count the steps and episodes of a run, log its metrics, and measure its throughput."""

import time
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from ppo_lightning import private
from ppo_lightning.envs.factory import SUCCESS
from ppo_lightning.rollouts.evaluation import info_means
from ppo_lightning.rollouts.learner import Learner
from ppo_lightning.utils import collectives
from ppo_lightning.utils.rounding import decimals

SAVE_EVERY = 10  # seconds


class RunLog:
    """Count steps and episodes, send metrics to the loggers, and measure the throughput of a fit.

    Args:
        module: The module whose fit starts.
    """

    def __init__(self, module: Learner) -> None:
        self.module = module
        self.steps_before = module.env_steps
        self._values: dict[str, Any] = {}  # for the loggers
        self._episodes: list[Tensor] = []  # that finished since the last point of the loggers
        self.waits = False  # whether there are values that no call of `log` has seen
        self._infos: set[str] | None = None  # names of metrics of infos, None before an episode finished
        self._started = time.perf_counter()
        self._saved = self._started

    def count(self, rollout: TensorDictBase) -> None:
        """Count environment steps and finished episodes of a rollout [N, T], over all ranks.

        The next call of :meth:`log` logs mean return and length of the finished episodes, also by groups of
        the environment, and of the last 100 episodes, and the means of numbers of their infos.
        """
        self.module.env_steps += self.module.data.frames_per_rollout
        # ModelCheckpoint uses it in file names, also for rollouts that are not logged.
        self.module.trainer.callback_metrics["step"] = torch.tensor(self.module.env_steps)
        names = self.module.data.factory.log_info
        episodes = collectives.concatenate(finished_episodes(rollout, len(names)))
        if not len(episodes):
            return
        self.module.episode_returns.extend(episodes[:, 0].tolist())
        self.module.episode_lengths.extend(episodes[:, 1].tolist())
        self._episodes.append(episodes)
        episodes = torch.cat(self._episodes)
        infos = info_means("charts", episodes[:, 3:], names)
        self._infos = (self._infos or set()) | infos.keys()
        self.add(infos)
        groups = {"": episodes}
        if (split := getattr(self.module.data.env, "by_player", None)) is not None:
            groups |= split(episodes[:, :3])
        self.add(episode_means(groups))

    @property
    def missing_infos(self) -> list[str]:
        """Names of ``data.log_info`` of which no finished episode had a number."""
        names = self.module.data.factory.log_info
        infos = self._infos
        return [] if infos is None else [x for x in names if x != SUCCESS and f"charts/{x}" not in infos]

    def add(self, values: Mapping[str, Any]) -> None:
        """Add scalars to the next call of :meth:`log`."""
        self._values |= values
        self.waits = True

    def steps_per_second(self) -> float:
        """Return the environment steps of all ranks per second, since the start of this fit."""
        return (self.module.env_steps - self.steps_before) / (time.perf_counter() - self._started)

    def log(self, values: Mapping[str, Any], rare: bool = False) -> None:
        """Send scalars, averaged over the ranks, to every logger and to the callbacks.

        The x axis is the number of environment steps. ``LightningModule.log`` takes 3.5 ms per iteration (7 %
        of the time of CartPole) and stores the x axis in float32.

        Args:
            values: Scalars by metric name, beside those of :meth:`add`.
            rare: Send the scalars to the loggers now, whatever ``log_every_n_steps`` says.
        """
        module = self.module
        trainer: Any = module.trainer
        for name, last in (("return", module.episode_returns), ("length", module.episode_lengths)):
            if last:
                self.add({f"charts/avg_episodic_{name}": sum(last) / len(last)})
        values = self._values | dict(values)
        self.waits = False
        options: dict[str, Any] = {"dtype": torch.float32, "device": module.device}
        scalars = [torch.as_tensor(value, **options) for value in values.values()]
        means = collectives.gather(torch.stack(scalars)).mean(dim=0).cpu()  # one transfer
        # Text: Rich shows three decimals of any number.
        sps = self.steps_per_second()
        left = (module.data.num_rollouts - module.rollouts_done) * module.data.frames_per_rollout / sps
        shown = {"SPS": f"{sps:.0f}", "steps": str(module.env_steps), "left": f"{left / 60:.1f} min"}
        if module.mean_return is not None:
            shown["return"] = f"{module.mean_return:{decimals(module.mean_return)}}"
        private.publish_metrics(trainer, dict(zip(values, means, strict=True)), shown)
        is_last = module.rollouts_done >= module.data.num_rollouts
        logs = rare or is_last or module.rollouts_done % trainer.log_every_n_steps == 0
        if logs:
            self._values, self._episodes = {}, []
        # CSVLogger saves at (step + 1) % 100 == 0, which environment steps rarely hit.
        saves = time.perf_counter() - self._saved > SAVE_EVERY
        for logger in trainer.loggers:
            if logs:
                logger.log_metrics(dict(zip(values, means.tolist(), strict=True)), step=module.env_steps)
            if saves:
                logger.save()
        if saves:
            self._saved = time.perf_counter()


def finished_episodes(rollout: TensorDictBase, num_infos: int = 0) -> Tensor:
    """Return return, length, row and infos of the episodes that finished in a rollout [N, T], [E, 3 + I].

    The row is the index of the environment on its rank. Numbers that the info does not have are NaN.
    """
    following = rollout["next"]
    done = following["episode_done"]
    if not done.any():
        return torch.zeros(0, 3 + num_infos)
    row = torch.arange(len(done), device=done.device)[:, None, None].expand(done.shape)
    no_info = torch.full((*rollout.shape, num_infos), torch.nan, device=done.device)
    columns = (following["episode_reward"], following["step_count"], row, following.get("info", no_info))
    return torch.cat([column.float() for column in columns], dim=-1)[done[..., 0]]


def episode_means(groups: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the mean return and length of groups of episodes.

    The keys are ``charts/episodic_return`` and ``charts/episodic_length``, each with the suffix of the group.
    A mean over no episode is left out.

    Args:
        groups: Suffix -> return and length of each episode, in the first columns, [E, ...].

    Example:
        >>> episodes = torch.tensor([[1.0, 5.0], [3.0, 7.0]])
        >>> episode_means({"": episodes})["charts/episodic_return"]
        tensor(2.)
    """
    means = {}
    for suffix, episodes in groups.items():
        if len(episodes):
            means[f"charts/episodic_return{suffix}"] = episodes[:, 0].mean()
            means[f"charts/episodic_length{suffix}"] = episodes[:, 1].mean()
    return means
