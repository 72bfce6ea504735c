"""Metrics of a run for loggers, callbacks and progress bars."""

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ppo_lightning import private
from ppo_lightning.rollouts.evaluation import info_means
from ppo_lightning.rollouts.learner import Learner
from ppo_lightning.utils import collectives
from ppo_lightning.utils.rounding import decimals

SAVE_EVERY = 10  # seconds


class RunLog:
    """Send the metrics of a run to the loggers, to the callbacks and to progress bars."""

    def __init__(self, module: Learner) -> None:
        self.module = module
        self._values: dict[str, Any] = {}  # for the loggers
        self._saved = time.perf_counter()

    def add(self, values: Mapping[str, Any]) -> None:
        """Add scalars to the next call of :meth:`log`."""
        self._values |= values

    def log(self, values: Mapping[str, Any], rare: bool = False) -> None:
        """Send scalars, averaged over the ranks, to every logger and to the callbacks.

        The x axis is the number of environment steps. ``LightningModule.log`` takes 3.5 ms per iteration (7 %
        of the time of CartPole) and stores the x axis in float32.

        Args:
            values: Scalars by metric name, beside those of :meth:`add`.
            rare: Send the scalars to the loggers now, whatever ``log_every_n_steps`` says.
        """
        module = self.module
        progress, plan = module.progress, module.data.plan
        trainer: Any = module.trainer
        if progress.finished:
            episodes = torch.cat(progress.finished)
            groups = {"": episodes}
            if (split := getattr(module.data.env, "by_player", None)) is not None:
                groups |= split(episodes[:, :3])
            self.add(episode_means(groups))
        for name, last in (("return", progress.episode_returns), ("length", progress.episode_lengths)):
            if last:
                self.add({f"charts/avg_episodic_{name}": sum(last) / len(last)})
        values = self._values | dict(values)
        if progress.finished:
            values |= info_means("charts", episodes[:, 3:], module.data.factory.log_info, values)
        options: dict[str, Any] = {"dtype": torch.float32, "device": module.device}
        scalars = [torch.as_tensor(value, **options) for value in values.values()]
        means = collectives.gather(torch.stack(scalars)).mean(dim=0).cpu()  # one transfer
        # Text: Rich shows three decimals of any number.
        left = progress.seconds_left(plan.num_frames - progress.rollout_steps)
        mean = progress.mean_return  # first: a narrow bar ends early
        shown = {} if mean is None else {"return": f"{mean:{decimals(mean)}}"}
        shown |= {"left": "?" if left is None else f"{left / 60:.1f} min"}
        shown |= {"SPS": f"{progress.steps_per_second():.0f}", "steps": str(progress.env_steps)}
        progress.metrics |= dict(zip(values, means, strict=True))
        private.publish_metrics(trainer, progress.metrics, shown)
        is_last = progress.rollout_steps >= plan.num_frames
        logs = rare or is_last or module.rollouts_done % trainer.log_every_n_steps == 0
        if logs:
            self._values, progress.finished = {}, []
        # CSVLogger saves at (step + 1) % 100 == 0, which environment steps rarely hit.
        saves = time.perf_counter() - self._saved > SAVE_EVERY
        for logger in trainer.loggers:
            if logs:
                logger.log_metrics(dict(zip(values, means.tolist(), strict=True)), step=progress.env_steps)
            if saves:
                logger.save()
        if saves:
            self._saved = time.perf_counter()


def episode_means(groups: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the mean ``charts/episodic_return`` and ``length`` of groups of episodes, by suffix.

    The first columns of a group [E, ...] are return and length. A mean over no episode is left out.
    """
    means = {}
    for suffix, episodes in groups.items():
        if len(episodes):
            means[f"charts/episodic_return{suffix}"] = episodes[:, 0].mean()
            means[f"charts/episodic_length{suffix}"] = episodes[:, 1].mean()
    return means
