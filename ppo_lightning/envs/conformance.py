"""Checks of recorded play: what in an environment would break or bias training.

Each check is a function of arrays and yields findings.
"""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
from torchrl.data import Bounded, TensorSpec

from ppo_lightning.envs.recording import REACHED, Recording, StepPastEnd, episodes_of
from ppo_lightning.spaces.specs import columns

LARGE_REWARD = 100.0  # root mean square; the value function would dominate the loss
SMALL_REWARD = 1e-5  # root mean square of the non-zero rewards
NARROW_ACTION = 0.1  # width of a range that a policy with standard deviation 1 nearly always leaves
SHORT_EPISODE = 10  # steps; shorter tasks often have a fixed length


class Finding(NamedTuple):
    """Something in an environment that a user should know.

    Attributes:
        severity: An ``error`` would break training. A ``warning`` would bias or waste it. A ``note`` is
            normal for some environments.
        check: Short name of the check.
        what: What was seen.
        remedy: What to do.

    Example:
        >>> print(Finding("note", "reward", "All rewards are 0.", "Play longer."))
        reward: All rewards are 0. Play longer.
    """

    severity: Literal["error", "warning", "note"]
    check: str
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.check}: {self.what} {self.remedy}"


Findings = Iterator[Finding]


def check_finite(recording: Recording) -> Findings:
    """Check for NaN and infinity."""
    for name, values in (("observation", recording.observation), ("reward", recording.reward)):
        finite = np.isfinite(values) if values.dtype.kind == "f" else np.ones(1, bool)
        if not finite.all():
            step, env = np.argwhere(~finite)[0][:2]
            yield Finding(
                "error",
                "non-finite",
                f"The {name} of environment {env} is not finite at its step {step}.",
                "A run ends there. Find the cause, or restart with data.env_kwargs.max_restarts.",
            )


def check_rewards(recording: Recording) -> Findings:
    """Check the scale of the rewards, and whether random play changes the return."""
    rewards = recording.reward
    if not np.isfinite(rewards).all():
        return
    if not rewards.any():
        yield Finding(
            "note",
            "reward",
            f"All {rewards.size} rewards of random play are 0.",
            "PPO learns nothing before it finds a reward. A sparse task may need many steps.",
        )
        return
    scale = float(np.sqrt(np.mean(np.square(rewards[rewards != 0], dtype=np.float64))))
    total = episodes_of(recording).total
    remedy = "Set model.norm_reward to true, or scale the rewards to about 1."
    if scale > LARGE_REWARD:
        what = f"The rewards are large: their root mean square is {scale:.2g}."
        yield Finding("warning", "reward", what, remedy)
    elif scale < SMALL_REWARD:  # they may grow with skill
        what = f"The rewards of random play are small: their root mean square is {scale:.2g}."
        yield Finding("note", "reward", what, remedy)
    elif len(total) > 2 and np.ptp(total) == 0:
        yield Finding(
            "note",
            "reward",
            f"All {len(total)} episodes of random play have the return {total[0]:g}.",
            "PPO learns nothing before the returns of two episodes differ.",
        )


def check_episode_ends(recording: Recording, limit: int | None = None, planned: int = 0) -> Findings:
    """Check that episodes end.

    Args:
        recording: Random play.
        limit: Known time limit, steps.
        planned: Requested number of steps. With fewer steps the check is inconclusive.
    """
    num_steps = len(recording.over)
    if recording.over.any() or (limit is not None and limit > num_steps):
        return
    what = f"No episode ended within {num_steps} steps."
    if num_steps < planned:
        yield Finding("note", "endless", what, "Raise --seconds to see whether episodes end.")
        return
    yield Finding(
        "warning",
        "endless",
        what,
        "Validation plays whole episodes and would not end. Set data.env_kwargs.max_episode_steps."
        " If episodes are longer, raise --steps.",
    )


def check_time_limits(recording: Recording, flags_time_limits: bool = True) -> Findings:
    """Check whether a time limit is flagged as a termination.

    The finding requires that all of the longest episodes have the same length and terminate. It is omitted
    if the observation has a clock, from which the agent can predict the end.

    Args:
        recording: Random play.
        flags_time_limits: Whether the adapter can tell time limits from terminations.
    """
    episodes = episodes_of(recording)
    if len(episodes.length) < 3:
        return
    longest = episodes.length.max()
    at_limit = episodes.length == longest
    count = int(at_limit.sum())
    few = count < max(3, 0.1 * len(at_limit))
    if few or longest < SHORT_EPISODE or not episodes.terminated[at_limit].all():
        return
    last, final = (part[at_limit].reshape(count, -1) for part in (episodes.last, episodes.final))
    same = (last == last[0]).all(axis=0) & (final == final[0]).all(axis=0)
    if (same & (last[0] != final[0])).any():
        return
    what = f"{count} of {len(at_limit)} episodes terminate at exactly step {longest}, and none is longer."
    if not flags_time_limits:
        yield Finding("note", "time limit", what, "This backend reports no time limits, by design.")
        return
    yield Finding(
        "warning",
        "time limit",
        what,
        "If this is a time limit, return truncated=True instead of terminated=True: otherwise the update"
        " takes the value of the final state as 0. If the task ends there, let observations show the time.",
    )


def check_initial_observations(recording: Recording) -> Findings:
    """Check that environments with different seeds have different episodes.

    The players of a game may share its observations. The first player stands for the game.
    """
    players = slice(None, None, recording.rows_per_game)
    is_first = recording.first[:, players]
    num_envs = is_first.shape[1]
    first = recording.observation[:, players][is_first]
    rows = first.reshape(len(first), -1)
    starts, later = rows[:num_envs], rows[num_envs:]
    if num_envs < 2 or len(later) < 3 or not is_first[0].all() or (starts != starts[0]).any():
        return
    if (later != starts[0]).any(axis=1).mean() >= 0.9:
        yield Finding(
            "warning",
            "seed",
            f"All {num_envs} environments start with the same observation, and later episodes start with"
            " others: the seed has no effect.",
            "Call super().reset(seed=seed) and draw all random numbers from self.np_random.",
        )


def check_other_seed(recording: Recording, other: Recording) -> Findings:
    """Check whether the seed has an effect. Many tasks are deterministic.

    Args:
        recording: Random play.
        other: The same actions with another seed.
    """
    if first_difference(recording, other) is None:
        yield Finding(
            "note",
            "seed",
            f"Another seed gives the same {len(other.over)} steps: the environment seems deterministic.",
            "If it should be random, draw from self.np_random after super().reset(seed=seed).",
        )


def check_repetition(recording: Recording, repetition: Recording) -> Findings:
    """Check that the same seed and the same actions give the same episodes.

    Args:
        recording: Random play.
        repetition: The first steps again, in new environments.
    """
    step = first_difference(recording, repetition)
    if step is not None:
        yield Finding(
            "warning",
            "seed",
            f"The same seed and the same actions give other episodes from step {step} on.",
            "Runs cannot be reproduced. Draw all random numbers from self.np_random, not from random,"
            " numpy.random or the clock.",
        )


def check_actions_matter(recording: Recording, other: Recording) -> Findings:
    """Check that actions have an effect.

    Args:
        recording: Random play.
        other: The same seed with other actions.
    """
    if first_difference(recording, other) is None:
        yield Finding(
            "warning",
            "action",
            f"Other actions give the same observations and rewards for {len(other.over)} steps.",
            "The actions seem to have no effect. Check that step() uses its argument.",
        )


def first_difference(one: Recording, other: Recording) -> int | None:
    """Return the first step at which two recordings differ, over the length of the shorter one."""
    num_steps = min(len(one.over), len(other.over))
    for step in range(num_steps):
        for name in ("observation", "reward", "terminated", "truncated"):
            values, others = getattr(one, name)[step], getattr(other, name)[step]
            if not np.array_equal(values, others, equal_nan=values.dtype.kind == "f"):
                return step
    return None


def check_autoreset(recording: Recording) -> Findings:
    """Check whether final observations are first observations of the next episode.

    The finding requires final observations in the range of first observations, and preceding observations
    outside this range.
    """
    episodes = episodes_of(recording)
    inside = _range_of_starts(recording)
    if inside is None or len(episodes.final) < 3:
        return
    if inside(episodes.final).all() and inside(episodes.last).mean() <= 0.5:
        yield Finding(
            "warning",
            "autoreset",
            "The environment resets itself: the observation of the last step belongs to the next episode.",
            "A time limit would bootstrap from the wrong state. Return the final observation, and leave the"
            " reset to the caller.",
        )


def check_step_past_end(recording: Recording, past: StepPastEnd | None) -> Findings:
    """Check whether a step after the end of an episode starts a new one.

    Args:
        recording: Random play.
        past: What such a step returned. None: no episode ended.
    """
    inside = _range_of_starts(recording)
    if past is None or inside is None or past.done:
        return
    if inside(past.following[None]).all() and not inside(past.final[None]).any():
        yield Finding(
            "note",
            "autoreset",
            "A step after the end of an episode starts a new one, without a reset.",
            "This package resets before that step and is not affected.",
        )


def _range_of_starts(recording: Recording) -> Any:
    """Return a function that tells which observations [K, ...] lie in the range of first observations.

    None: there are too few first observations.
    """
    first = recording.observation[recording.first]
    if len(first) < 6:
        return None
    flat = first.reshape(len(first), -1).astype(np.float64)
    low, high = flat.min(axis=0), flat.max(axis=0)
    margin = (high - low) / 2  # of a sample, which is narrower than the distribution

    def inside(observation: np.ndarray) -> np.ndarray:
        rows = observation.reshape(len(observation), -1).astype(np.float64)
        return ((rows >= low - margin) & (rows <= high + margin)).all(axis=1)

    return inside


def check_action_bounds(spec: TensorSpec) -> Findings:
    """Check that continuous actions have a range near [-1, 1], where the policy starts.

    Args:
        spec: Action spec of one environment.
    """
    for name, part, _ in columns(spec):
        if not (isinstance(part, Bounded) and part.dtype.is_floating_point):
            continue
        low, high = part.space.low, part.space.high
        wide = max(low.abs().max().item(), high.abs().max().item()) > REACHED
        if wide or (high - low).min().item() < NARROW_ACTION:
            entry = f" of {name}" if name else ""
            yield Finding(
                "warning",
                "action bounds",
                f"The bounds of the actions{entry} reach from {low.min().item():g} to {high.max().item():g}.",
                "A policy starts with the standard deviation 1. Rescale the actions:"
                " gymnasium.wrappers.RescaleAction(env, -1, 1).",
            )


def check_rollout(recording: Recording, action_spec: TensorSpec, flags_time_limits: bool = True) -> Findings:
    """Run the checks that need no more than the first rollout of a run.

    Args:
        recording: The rollout, whose episodes all begin in it.
        action_spec: Action spec of one environment.
        flags_time_limits: As for :func:`check_time_limits`.
    """
    yield from check_action_bounds(action_spec)
    yield from check_rewards(recording)
    yield from check_time_limits(recording, flags_time_limits)
    yield from check_initial_observations(recording)
    yield from check_autoreset(recording)
