"""Checks of environments: what in their random play would break or bias training."""

import contextlib
import copy
import math
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Categorical
from torchrl.envs import SerialEnv

from ppo_lightning.envs.batched import BatchedEnv
from ppo_lightning.envs.contract import place_of
from ppo_lightning.envs.factory import EnvFactory
from ppo_lightning.envs.gymnasium import GymnasiumEnv
from ppo_lightning.envs.rollout_checks import Finding, Findings, check_rollout, episodes_of
from ppo_lightning.envs.torchrl import AnyEnv, untransformed
from ppo_lightning.errors import ConfigError, first_line
from ppo_lightning.spaces.rows import to_row
from ppo_lightning.spaces.specs import choice_counts, columns, mask_columns
from ppo_lightning.utils.seeding import isolated

REPLAYED_STEPS = 100  # steps that are repeated with the same seed, with other actions and another seed
SEVERITIES = ("error", "warning", "note")


class Examination(NamedTuple):
    """All findings of :func:`check_environment`, errors first, and its play [N, T] unless it failed."""

    findings: list[Finding]
    rollout: TensorDictBase | None = None


def check_environment(
    factory: EnvFactory, num_envs: int = 4, num_steps: int = 1200, seconds: float = 10.0
) -> Examination:
    """Play at random as the collectors do, and check the environments.

    Args:
        factory: Makes the environments.
        num_envs: Number of environments N.
        num_steps: Steps of each environment.
        seconds: Longest time of random play, seconds. Slow environments make fewer steps.

    Raises:
        ConfigError: The environments cannot be made, as in ``fit``.

    Example:
        >>> check_environment(EnvFactory("CartPole-v1"), num_steps=100).findings
        []
    """

    def replay(seed: int = 1, action_seed: int = 0) -> TensorDictBase:
        # Closed at once, because some environments need a port or a license.
        with contextlib.closing(factory.make(num_envs, seed)) as twin:
            return random_play(twin, min(REPLAYED_STEPS, rollout.shape[1]), action_seed, seconds / 10)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = False
        try:
            with contextlib.closing(factory.make(num_envs)) as env:
                made = True
                rollout = random_play(env, num_steps, 0, seconds)
                limit = factory.time_limit(env) if rollout.shape[1] == num_steps else math.inf
                findings = [
                    *check_finite(rollout),
                    *check_observations(rollout),
                    *check_resets(rollout),
                    *check_episode_ends(rollout, limit),
                    *check_rollout(rollout, env),
                    *check_replays(rollout, replay),
                    *check_interface(env),
                ]
        except (Exception, SystemExit) as error:
            if not made and isinstance(error, ConfigError):
                raise
            notes = " ".join(getattr(error, "__notes__", []))
            place = place_of(error)
            message = f"{type(error).__name__}: {first_line(error).rstrip('.')}{place and f' ({place})'}."
            what = f"{message} {notes}".rstrip()
            what = str(error) if isinstance(error, ConfigError) else what
            return Examination([Finding("error", "exception", what, "A run would end there.")])
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return Examination(findings, rollout)


def random_play(env: AnyEnv, num_steps: int, seed: int = 0, seconds: float = math.inf) -> TensorDictBase:
    """Step environments as the collectors do, with random actions that masks allow.

    Return a rollout [N, T] with their keys. Environments of TorchRL ignore the ``seconds``.
    """
    if not isinstance(env, BatchedEnv):
        with isolated():
            torch.manual_seed(seed)
            return env.rollout(num_steps, break_when_any_done=False)
    policy, generator = random_policy(env, seed), np.random.default_rng(seed)
    end = time.monotonic() + seconds
    observation = env.reset_arrays()
    steps: list[TensorDict] = []
    while len(steps) < num_steps and (time.monotonic() < end or not steps):
        before = torch.tensor(observation)
        action = policy(observation, generator)
        result = env.step_arrays(action)
        observation = result.observation
        done = result.terminated | result.truncated
        counts = np.ones_like(done) if env.valid is None else env.valid.copy()
        following = {
            "observation": torch.tensor(observation),
            "reward": torch.tensor(result.reward, dtype=torch.float64),
            "terminated": torch.tensor(result.terminated),
            "done": torch.from_numpy(done | ~counts),  # a step that does not count ends no episode
            "episode_done": torch.from_numpy(result.over & counts),
        }
        player = torch.arange(env.num_envs) % getattr(env, "rows_per_game", 1)
        weight = torch.from_numpy(counts).float()
        step = {"observation": before, "weight": weight, "player": player, "next": following}
        steps.append(TensorDict(step, [env.num_envs]))
        if done.any():
            observation = env.reset_arrays(done)
    played: Any = torch.stack(steps, 1)
    rewards = env.learning_reward(played["next", "reward"].T.numpy())
    played["next", "reward"] = torch.from_numpy(rewards).T
    return played


def random_policy(env: BatchedEnv, seed: int = 0) -> Callable[[np.ndarray, np.random.Generator], np.ndarray]:
    """Return a function that draws actions [B, ...] which the masks in observations [B, ...] allow."""
    observation_spec, action_spec = env.agent_specs
    space = copy.deepcopy(env.spaces[1])  # the environment may sample from its own
    space.seed(seed)
    mask, counts = mask_columns(observation_spec), choice_counts(action_spec)
    choices = [place for _, part, place in columns(action_spec) if isinstance(part, Categorical)]

    def draw(observation: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        actions = np.stack([to_row(space, space.sample()) for _ in observation])
        if counts:
            # Of random keys, the highest allowed one of each component wins.
            keys = generator.random((len(observation), sum(counts)))
            if mask is not None:
                keys[observation[:, mask] <= 0] = -1
            parts = np.split(keys, np.cumsum(counts)[:-1], axis=1)
            for column, part in zip(np.r_[tuple(choices)], parts, strict=True):
                actions[:, column] = part.argmax(axis=1)
        return actions.reshape(-1, *env.action_spec_unbatched.shape)

    return draw


def check_interface(env: AnyEnv) -> Findings:
    """Run Gymnasium's or TorchRL's own checker."""
    from gymnasium.utils.env_checker import check_env  # here, because `fit` imports this module
    from torchrl.envs.utils import check_env_specs

    base = untransformed(env)
    try:
        if isinstance(base, GymnasiumEnv):
            check_env(base.envs[0], skip_render_check=True, skip_close_check=True)
        elif not isinstance(base, BatchedEnv):
            check_env_specs(base.create_env_fn[0]() if isinstance(base, SerialEnv) else base)
    except (Exception, SystemExit) as error:
        said = first_line(error).rstrip(".")
        if isinstance(base, GymnasiumEnv):
            remedy = "This package needs no more. Other libraries may."
            yield Finding("note", "gymnasium", f"Gymnasium's check_env says: {said}.", remedy)
        else:
            remedy = "Make the specs agree with what reset and step return."
            yield Finding("warning", "specs", f"TorchRL's check_env_specs says: {said}.", remedy)


def check_finite(rollout: TensorDictBase) -> Findings:
    """Check for NaN and infinity."""
    for name, values in (("observation", rollout["observation"]), ("reward", rollout["next", "reward"])):
        faults = (~values.isfinite()).nonzero()
        if len(faults):
            what = f"The {name} of environment {faults[0, 0]} is not finite at its step {faults[0, 1]}."
            remedy = "A run ends there. Find the cause, or restart with data.env_kwargs.max_restarts."
            yield Finding("error", "non-finite", what, remedy)


def check_observations(rollout: TensorDictBase) -> Findings:
    """Check that observations change within episodes."""
    if (rollout["next", "observation"] == rollout["observation"]).all() and not rollout["next", "done"].all():
        what = "The observation never changes during an episode."
        yield Finding("warning", "observation", what, "Check that step() returns the next observation.")


def check_resets(rollout: TensorDictBase) -> Findings:
    """Check whether each environment begins all its episodes in one state, unlike the other environments."""
    env, start, _ = episodes_of(rollout)
    if not len(env):
        return
    starts = rollout["observation"][env, start].flatten(1)
    first = starts[(env[:, None] == env).int().argmax(dim=1)]  # of the same environment
    kinds = len(starts.unique(dim=0))
    repeats = len(env) - len(env.unique())
    # The chance of so many repeats, if each episode began in one of these states at random.
    if kinds > 1 and (starts == first).all() and kinds**repeats > 1000:
        what = "All episodes of an environment begin with one observation, and environments differ."
        remedy = "reset() seems to seed its generator again: pass its seed to super().reset() as it is."
        yield Finding("warning", "seed", what, remedy)


def check_episode_ends(rollout: TensorDictBase, limit: float | None) -> Findings:
    """Check that episodes end, unless their known time limit is longer than the rollout."""
    if not rollout["next", "done"].any() and (limit is None or limit <= rollout.shape[1]):
        what = f"No episode ended within {rollout.shape[1]} steps, and validation plays whole episodes."
        remedy = "Wrap it in gymnasium.wrappers.TimeLimit, or set data.env_kwargs.max_episode_steps of an id."
        yield Finding("warning", "endless", what, remedy)


def check_replays(rollout: TensorDictBase, replay: Callable[..., TensorDictBase]) -> Findings:
    """Check that the same seed and actions give the same episodes in a ``replay``, and others do not."""
    step = first_difference(rollout, replay())
    if step is not None:
        what = f"The same seed and the same actions give other episodes from step {step} on."
        remedy = "Draw all random numbers from self.np_random, not from random, numpy.random or the clock."
        yield Finding("warning", "seed", what, remedy)
        return
    if first_difference(rollout, replay(action_seed=1)) is None:
        what = "Other actions give the same observations and rewards."
        remedy = "The actions seem to have no effect. Check that step() uses its argument."
        yield Finding("warning", "action", what, remedy)
    if first_difference(rollout, replay(seed=2)) is None:
        env, start, _ = episodes_of(rollout)
        is_random = len(rollout["observation"][env, start].unique(dim=0)) > 1
        what = "Another seed gives the same episodes."
        remedy = "Draw from self.np_random after super().reset(seed=seed), unless the task is deterministic."
        yield Finding("warning" if is_random else "note", "seed", what, remedy)


def first_difference(one: TensorDictBase, other: TensorDictBase) -> int | None:
    """Return the first step at which two rollouts differ, over the length of the shorter one."""
    shape = one.shape[0], min(one.shape[1], other.shape[1]), -1
    steps = []
    for key in ("observation", ("next", "observation"), ("next", "reward"), ("next", "done")):
        a, b = (rollout[key][:, : shape[1]].reshape(shape).double().nan_to_num() for rollout in (one, other))
        steps += (a != b).any(dim=2).any(dim=0).nonzero()[:1].flatten().tolist()
    return min(steps, default=None)
