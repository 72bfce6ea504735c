"""Recordings of random play, from which :mod:`~ppo_lightning.envs.conformance` judges an environment."""

import time
from typing import NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.data import Bounded, Categorical, Composite, TensorSpec
from torchrl.envs import EnvBase

from ppo_lightning.envs.batched import BatchedEnv
from ppo_lightning.spaces.specs import choice_counts, columns, mask_columns

AT_A_BOUND = 0.25  # share of the components of continuous actions that lie at one of their bounds
REACHED = 10.0  # largest bound that a policy with standard deviation 1 may reach


class Recording(NamedTuple):
    """T steps of N environments.

    Attributes:
        observation: Observations before each step, [T, N, ...].
        reward: Rewards for training, [T, N].
        terminated: Flags of the steps, [T, N] bool.
        truncated: Flags of the steps, [T, N] bool.
        over: Whether a step ended the episode, [T, N] bool. This differs from ``done`` if the loss of a life
            terminates learning.
        final: Final observations of the K steps that are done, [K, ...], ordered by step.
        seconds: Duration of a step of one environment, resets included, seconds. NaN: not measured.
        skipped: Steps that do not count, such as those of a dead player, [T, N] bool. None: all steps count.
        rows_per_game: Adjacent environments that are the players of one game.
    """

    observation: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    over: np.ndarray
    final: np.ndarray
    seconds: float = float("nan")
    skipped: np.ndarray | None = None
    rows_per_game: int = 1

    @property
    def done(self) -> np.ndarray:
        """Whether a step has a final observation, [T, N] bool."""
        return self.terminated | self.truncated

    @property
    def first(self) -> np.ndarray:
        """Whether an observation is the first of an episode, [T, N] bool."""
        start = np.ones((1, self.over.shape[1]), bool)
        if self.skipped is None:
            return np.concatenate([start, self.over[:-1]])
        return np.concatenate([start, (self.over | self.skipped)[:-1]]) & ~self.skipped


class Episodes(NamedTuple):
    """The E whole episodes of a recording.

    Attributes:
        length: Steps, [E].
        total: Returns, [E].
        terminated: Whether the last step terminated the episode, [E] bool.
        last: Observation before the last step, [E, ...].
        final: Final observation, [E, ...].
    """

    length: np.ndarray
    total: np.ndarray
    terminated: np.ndarray
    last: np.ndarray
    final: np.ndarray


def episodes_of(recording: Recording) -> Episodes:
    """Return the whole episodes of a recording, ordered by their last step."""
    num_steps, num_envs = recording.over.shape
    separate = recording.over if recording.skipped is None else recording.over | recording.skipped
    ends = np.where(separate, np.arange(num_steps)[:, None], -1)
    ends = np.concatenate([np.full((1, num_envs), -1), np.maximum.accumulate(ends)])
    previous_end = ends[:-1]  # last step of the episode before, -1 for the first one
    sums = np.concatenate([np.zeros((1, num_envs)), np.cumsum(recording.reward, axis=0)])
    lengths = np.arange(num_steps)[:, None] - previous_end
    totals = sums[1:] - np.take_along_axis(sums, previous_end + 1, axis=0)
    over = recording.over & recording.done
    if recording.skipped is not None:
        over &= ~recording.skipped
    row = np.cumsum(recording.done).reshape(recording.over.shape) - 1  # index into `final`
    return Episodes(
        lengths[over],
        totals[over],
        recording.terminated[over],
        recording.observation[over],
        recording.final[row[over]],
    )


def recording_of(rollout: TensorDictBase, seconds: float = float("nan"), rows_per_game: int = 1) -> Recording:
    """Convert a rollout [N, T] with TorchRL's keys.

    Args:
        rollout: Keys ``observation`` and, under ``next``, ``observation``, ``reward`` and flags. A rollout of
            this package also has ``episode_done``.
        seconds: Duration of a step of one environment, seconds.
        rows_per_game: Adjacent environments that are the players of one game.
    """
    following = rollout["next"]

    def flag(key: str, default: str | None = None) -> np.ndarray:
        if key not in following.keys():  # noqa: SIM118  (a TensorDict)
            return np.zeros(rollout.shape[::-1], bool) if default is None else flag(default)
        return following[key].reshape(rollout.shape).transpose(0, 1).numpy(force=True)

    done = following["done"].reshape(rollout.shape).transpose(0, 1)
    skipped = None
    if "valid" in rollout.keys():  # noqa: SIM118  (a TensorDict)
        # The collector ends the advantages at a skipped step, which ends no episode.
        valid = rollout["valid"].transpose(0, 1).numpy(force=True)
        skipped = ~valid & flag("done") & ~flag("episode_done")
    return Recording(
        rollout["observation"].transpose(0, 1).numpy(force=True),
        following["reward"].reshape(rollout.shape).transpose(0, 1).numpy(force=True),
        flag("terminated", default="done"),
        flag("truncated"),
        flag("episode_done", default="done"),
        following["observation"].transpose(0, 1)[done].numpy(force=True),
        seconds,
        skipped,
        rows_per_game,
    )


def record(env: EnvBase, num_steps: int, seed: int = 0) -> Recording:
    """Step environments as the collectors do, with random actions that masks allow.

    Args:
        env: Environments of batch size [N]. They are reset first.
        num_steps: T.
        seed: Seed of the actions.
    """
    if isinstance(env, BatchedEnv):
        return _record_arrays(env, num_steps, np.random.default_rng(seed))
    start = time.perf_counter()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        rollout = env.rollout(num_steps, break_when_any_done=False)
    return recording_of(rollout, (time.perf_counter() - start) / rollout.numel())


def _record_arrays(env: BatchedEnv, num_steps: int, generator: np.random.Generator) -> Recording:
    observation_spec, action_spec = env.agent_specs
    mask = mask_columns(observation_spec)
    shape = (num_steps, env.num_envs)
    rewards = np.zeros(shape)
    terminateds, truncateds, overs, skipped = np.zeros((4, *shape), bool)
    finals: list[np.ndarray] = []
    start = time.perf_counter()
    observation = env.reset_arrays()
    elapsed = time.perf_counter() - start
    observations = np.zeros((num_steps, *observation.shape), observation.dtype)
    for step in range(num_steps):
        observations[step] = observation
        allowed = None if mask is None else observations[step][:, mask]
        action = random_action(action_spec, env.num_envs, generator, allowed)
        start = time.perf_counter()
        observation, rewards[step], terminateds[step], truncateds[step] = env.step_arrays(action)
        done = terminateds[step] | truncateds[step]
        overs[step] = env.episodes_over(done)
        if env.valid is not None:
            skipped[step] = ~env.valid
        if done.any():
            finals.extend(observation[done])
            observation = env.reset_arrays(done)
        elapsed += time.perf_counter() - start
    # Learning rewards of a game are defined for a whole rollout of raw ones.
    return Recording(
        observations,
        env.learning_reward(rewards),
        terminateds,
        truncateds,
        overs,
        np.array(finals, observations.dtype).reshape(-1, *observations.shape[2:]),
        elapsed / rewards.size,
        skipped,
        env.rows_per_game,
    )


def random_action(
    spec: TensorSpec, num_envs: int, generator: np.random.Generator, mask: np.ndarray | None = None
) -> np.ndarray:
    """Draw actions of N environments in the form of :meth:`BatchedEnv.step_arrays`, [N, ...].

    Choices are uniform over what the mask allows. Continuous components are normal with standard deviation 1,
    as those of a new policy, or lie at one of their bounds.

    Args:
        spec: Action spec of one environment, part by part.
        num_envs: N.
        generator: Source of randomness.
        mask: Allowed choices of all components, [N, number of choices]. None: all.
    """
    counts = choice_counts(spec)
    noise = 1 - generator.random((num_envs, sum(counts)))  # above 0
    if mask is not None:
        noise = noise * (mask > 0)
    components = np.split(noise, np.cumsum(counts)[:-1], axis=1) if counts else []
    choices = [component.argmax(axis=1) for component in components]
    parts = []
    for _, part, place in columns(spec):
        if isinstance(part, Categorical) or part.dtype in (torch.int64, torch.bool):
            chosen = [choices.pop(0) for _ in range(place.stop - place.start)]
            parts.append(np.stack(chosen, axis=1))
        else:
            parts.append(_random_numbers(part, num_envs, generator))
    if isinstance(spec, Composite):
        return np.concatenate(parts, axis=1).astype(np.float32)
    return parts[0].reshape(num_envs, *spec.shape)


def _random_numbers(spec: TensorSpec, num_envs: int, generator: np.random.Generator) -> np.ndarray:
    size = (num_envs, spec.shape.numel())
    values = generator.normal(size=size)
    if isinstance(spec, Bounded):
        low, high = (bound.flatten().numpy() for bound in (spec.space.low, spec.space.high))
        bound = np.where(generator.random(size) < 0.5, low, high)
        at_bound = (generator.random(size) < AT_A_BOUND) & (np.abs(bound) <= REACHED)
        values = np.clip(np.where(at_bound, bound, values), low, high)
    return values.astype(np.float32)


class StepPastEnd(NamedTuple):
    """A step after the end of an episode, without a reset.

    Attributes:
        final: Final observation of the episode.
        following: Observation of the step after it.
        done: Whether that step is done, too.
    """

    final: np.ndarray
    following: np.ndarray
    done: bool


def step_past_end(env: BatchedEnv, num_steps: int) -> StepPastEnd | None:
    """Play until an episode ends, and step on without a reset.

    Args:
        env: Environments that allow this.
        num_steps: Maximum number of steps.
    """
    generator = np.random.default_rng(0)
    observation_spec, action_spec = env.agent_specs
    mask = mask_columns(observation_spec)
    observation = env.reset_arrays()
    for _ in range(num_steps):
        allowed = None if mask is None else observation[:, mask]
        action = random_action(action_spec, env.num_envs, generator, allowed)
        observation, _, terminated, truncated = env.step_arrays(action)
        done = terminated | truncated
        if done.any():
            final = observation[done][0].copy()
            observation, _, terminated, truncated = env.step_arrays(action)
            return StepPastEnd(final, observation[done][0].copy(), bool((terminated | truncated)[done][0]))
    return None
