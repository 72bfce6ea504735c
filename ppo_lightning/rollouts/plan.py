"""Numbers of a run that follow from its settings."""

import math
from dataclasses import dataclass

from ppo_lightning.rollouts.evaluation import STEPS_AT_ONCE

EPOCHS, FEWEST_EPOCHS = 20, 5  # of a run, by default
EVAL_EPISODES, FEWEST_EPISODES = 10, 2  # of an evaluation, by default
UNKNOWN_TIME_LIMIT = 1000  # steps; that of most tasks of MuJoCo and dm_control


@dataclass(frozen=True)
class Plan:
    """Numbers of a run: rollouts, epochs and episodes of evaluation.

    Example:
        >>> plan = Plan(num_envs=4, num_steps=128, total_timesteps=500_000, time_limit=500)
        >>> plan.num_rollouts, plan.rollouts_per_epoch, plan.eval_episodes
        (976, 49, 4)
    """

    num_envs: int  # of all ranks
    num_steps: int  # of each environment in a rollout
    total_timesteps: int  # of all ranks, as the user asks for them
    given_rollouts: int | None = None  # in an epoch, None: see `rollouts_per_epoch`
    given_episodes: int | None = None  # of an evaluation, None: see `eval_episodes`
    time_limit: int | None = None  # largest number of steps of an episode, None: unknown

    @property
    def frames_per_rollout(self) -> int:
        """Environment steps of a rollout, of all ranks."""
        return self.num_envs * self.num_steps

    @property
    def num_rollouts(self) -> int:
        """Rollouts of the run, whole ones only."""
        return self.total_timesteps // self.frames_per_rollout

    @property
    def num_frames(self) -> int:
        """Environment steps of all rollouts."""
        return self.num_rollouts * self.frames_per_rollout

    @property
    def rollouts_per_epoch(self) -> int:
        """Rollouts in an epoch: by default a twentieth of the run, more if evaluations would take long.

        There are five evaluations of two episodes if these take a fifth of the steps at most.
        """
        if self.given_rollouts is not None:
            return self.given_rollouts
        tenth, fifth = (self.affordable_episodes(share) // FEWEST_EPISODES for share in (10, 5))
        epochs = EPOCHS if self.given_episodes is not None else min(max(tenth, 1), EPOCHS)
        rollouts = math.ceil(self.num_rollouts / epochs)
        return (
            min(rollouts, max(self.num_rollouts // FEWEST_EPOCHS, 1)) if fifth >= FEWEST_EPOCHS else rollouts
        )

    @property
    def eval_episodes(self) -> int:
        """Episodes in each evaluation of a fit: by default as many as are affordable, from 2 to 10."""
        if self.given_episodes is not None:
            return self.given_episodes
        epochs = math.ceil(self.num_rollouts / self.rollouts_per_epoch)
        return min(max(self.affordable_episodes(10) // epochs, FEWEST_EPISODES), EVAL_EPISODES)

    def affordable_episodes(self, share: int) -> int:
        """Return the episodes that take 1 / ``share`` of the run's steps, if all reach their time limit."""
        # An evaluation collects so many steps at once, also after the end of its episodes.
        limit = STEPS_AT_ONCE * math.ceil((self.time_limit or UNKNOWN_TIME_LIMIT) / STEPS_AT_ONCE)
        return self.num_frames // (share * limit)
