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
    """Send the metrics of a run to the loggers, to the callbacks and to progress bars.

    Args:
        module: The module whose run is logged.
    """

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
            self.add(info_means("charts", episodes[:, 3:], module.data.factory.log_info))
            self.add(episode_means(episodes[:, :3], progress.zero_sum))
        for name, last in (("return", progress.episode_returns), ("length", progress.episode_lengths)):
            if last:
                self.add({f"charts/avg_episodic_{name}": sum(last) / len(last)})
        values = self._values | dict(values)
        options: dict[str, Any] = {"dtype": torch.float32, "device": module.device}
        scalars = [torch.as_tensor(value, **options) for value in values.values()]
        means = collectives.gather(torch.stack(scalars)).mean(dim=0).cpu()  # one transfer
        # Text: Rich shows three decimals of any number.
        sps = progress.steps_per_second()
        left = (plan.num_frames - progress.rollout_steps) / sps
        shown = {"SPS": f"{sps:.0f}", "steps": str(progress.env_steps), "left": f"{left / 60:.1f} min"}
        if (mean := progress.mean_return) is not None:
            shown["return"] = f"{mean:{decimals(mean)}}"
        private.publish_metrics(trainer, dict(zip(values, means, strict=True)), shown)
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


def episode_means(episodes: Tensor, zero_sum: bool = False) -> dict[str, Tensor]:
    """Return the mean return and length of episodes, over all players and by player.

    The keys are ``charts/episodic_return``, ``charts/episodic_length`` and, for several players, the same
    with the suffix ``-player0`` and so on. A mean over no episode is left out.

    Args:
        episodes: From :func:`~ppo_lightning.rollouts.progress.finished_episodes`, [E, 3].
        zero_sum: Whether the returns are those of player 0 of two-player zero-sum games.

    Example:
        >>> episodes = torch.tensor([[1.0, 5.0, 0.0], [3.0, 7.0, 1.0]])
        >>> episode_means(episodes)["charts/episodic_return-player1"]
        tensor(3.)
    """
    returns, lengths, players = episodes.unbind(-1)
    groups = {"": (returns, lengths)}
    if zero_sum:
        groups |= {"-player0": (returns, lengths), "-player1": (-returns, lengths)}
    for player in players[players >= 0].unique():
        rows = players == player
        groups[f"-player{player:.0f}"] = returns[rows], lengths[rows]
    means = {}
    for suffix, (group_returns, group_lengths) in groups.items():
        if len(group_returns):
            means[f"charts/episodic_return{suffix}"] = group_returns.mean()
            means[f"charts/episodic_length{suffix}"] = group_lengths.mean()
    return means
