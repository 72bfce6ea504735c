"""The checks of environments: each fault is named, and correct environments have none."""

import copy
import functools
import random
import time

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Bounded
from torchrl.envs import CatTensors, StepCounter, UnsqueezeTransform
from torchrl.envs.custom import PendulumEnv

from ppo_lightning.envs import EnvFactory
from ppo_lightning.envs.conformance import check_environment, random_play
from ppo_lightning.envs.rollout_checks import (
    check_action_bounds,
    check_rollout,
    check_time_limits,
    episodes_of,
)
from ppo_lightning.envs.torchrl import as_torchrl
from ppo_lightning.spaces.specs import mask_columns
from tests.envs import broken_envs
from tests.envs.broken_envs import BROKEN, Walk
from tests.helpers import NO_PROCGEN, needs_dm_control


def faults(findings):
    return [(finding.severity, finding.check) for finding in findings if finding.severity != "note"]


def examine(env_id, backend="gymnasium", seconds=20.0, num_steps=1200, **env_kwargs):
    return check_environment(EnvFactory(env_id, backend, env_kwargs), num_steps=num_steps, seconds=seconds)


@pytest.mark.parametrize("env", BROKEN, ids=lambda env: env.__name__)
def test_a_broken_environment_has_the_intended_finding_and_no_other(env):
    findings = examine(env).findings
    assert faults(findings) == [BROKEN[env]], [*map(str, findings)]


class NoInfo(Walk):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed, options=options)[0], None


@pytest.mark.parametrize(
    ("env_id", "notes"),
    [
        *((env_id, []) for env_id in (Walk, "CartPole-v1", "Pendulum-v1", "FrozenLake-v1", "Reach-v0")),
        ("ppo_lightning.envs.tasks:Locks-v0", ["seed"]),  # deterministic
        ("ppo_lightning.envs.tasks:MountainCarSparse-v0", ["reward"]),
        (NoInfo, ["gymnasium"]),  # whose checker is asked
    ],
)
def test_a_correct_environment_is_clean_or_has_a_note(env_id, notes):
    findings, rollout = examine(env_id)
    assert [(finding.severity, finding.check) for finding in findings] == [("note", note) for note in notes]
    assert rollout.shape == (4, 1200)


def test_random_play_obeys_masks_and_leaves_the_space_alone():
    env = EnvFactory("ppo_lightning.envs.tasks:Locks-v0").make(3)
    mask = env.reset_arrays()[0, mask_columns(env.agent_specs[0])]
    actions = []
    step = env.step_arrays
    env.step_arrays = lambda action: actions.append(action) or step(action)
    env.spaces[1].seed(1)
    next_sample = copy.deepcopy(env.spaces[1]).sample()
    random_play(env, 200)
    assert np.array_equal(env.spaces[1].sample(), next_sample), "an environment may draw from its space"
    left, right = np.split(mask, 2)
    actions = np.stack(actions)
    assert set(actions[..., 0].ravel()) == set(np.flatnonzero(left))
    assert set(actions[..., 1].ravel()) == set(np.flatnonzero(right))


def test_random_play_is_the_rollout_of_torchrl_with_the_same_whole_episodes():
    env, twin = (EnvFactory("Script-v0").make(2) for _ in range(2))
    expected = as_torchrl(env).rollout(60, break_when_any_done=False)
    actions = iter(expected["action"].transpose(0, 1).numpy())
    step = twin.step_arrays
    twin.step_arrays = lambda _: step(next(actions))
    played = random_play(twin, 60)
    for key in ("observation", ("next", "observation"), *(("next", k) for k in ("reward", "terminated"))):
        torch.testing.assert_close(played[key], expected[key].reshape(played[key].shape), check_dtype=False)
    for rollout in (expected, played):
        rows, start, end = episodes_of(rollout)
        assert len(rows) == rollout["next", "done"].sum() > 10
        clock = rollout["observation"][..., 2], rollout["next", "observation"][..., 2]  # steps so far
        assert (clock[0][rows, start] == 0).all()
        assert (clock[1][rows, end] == end - start + 1).all()


def test_a_clock_in_the_observation_excuses_a_fixed_length():
    findings = examine("Counter-v0", terminate_at=30).findings
    assert ("warning", "time limit") not in faults(findings)


def test_torchrl_environments_are_checked_with_torchrls_checker():
    transforms = (
        UnsqueezeTransform(-1, in_keys=["th", "thdot"], out_keys=["th_1", "thdot_1"]),
        CatTensors(["th_1", "thdot_1"], "observation", del_keys=False),
        StepCounter(50),
    )
    findings, rollout = check_environment(EnvFactory(PendulumEnv, transforms=transforms), 2, 120)
    assert faults(findings) == []
    assert episodes_of(rollout)[2].tolist() == [49, 99] * 2

    class Wrong(PendulumEnv):
        def _step(self, tensordict):
            out = super()._step(tensordict)
            return out.set("reward", out["reward"].double())

    findings = check_environment(EnvFactory(Wrong, transforms=transforms), 2, 120).findings
    assert faults(findings) == [("warning", "specs")]


def test_a_slow_environment_makes_fewer_steps_and_is_not_called_endless():
    class Slow(broken_envs.Endless):
        def step(self, action):
            time.sleep(0.005)
            return super().step(action)

    start = time.perf_counter()
    findings, rollout = examine(Slow, seconds=0.5)
    assert 10 < rollout.shape[1] < 30
    assert time.perf_counter() - start < 3
    assert faults(findings) == []


def test_an_episode_longer_than_the_play_is_not_endless():
    assert faults(examine("CartPole-v1", num_steps=5).findings) == []


def test_the_global_generators_are_not_touched():
    before = torch.get_rng_state(), random.getstate()
    examine("CartPole-v1", num_steps=50)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_procgens_time_limit_is_no_finding(monkeypatch):
    env = EnvFactory(broken_envs.Terminating).make(4)
    rollout = random_play(env, 400)
    (warning,) = check_rollout(rollout, env)
    assert warning.check == "time limit"
    monkeypatch.setattr(env, "flags_time_limits", False)
    assert [*check_rollout(rollout, env)] == []


def rollout_of(lengths, num_steps, generator, players=1):
    """Return a rollout of four games with random observations, and episodes of the given lengths."""
    over = torch.zeros(4, num_steps, dtype=torch.bool)
    for row in over:
        end = next(lengths) - 1
        while end < num_steps:
            row[end] = True
            end += next(lengths)
    over = over.repeat_interleave(players, dim=0)
    player = (torch.arange(len(over)) % players).unsqueeze(1).expand(over.shape)
    values = torch.from_numpy(generator.normal(size=(2, *over.shape, 3)))
    following = {"observation": values[1], "done": over, "terminated": over}
    return TensorDict({"observation": values[0], "player": player, "next": following}, over.shape)


def random_lengths(generator):
    """Yield lengths of one of seven kinds of random episodes."""
    kind, size = generator.integers(7), int(generator.integers(2, 60))
    start, chance = int(generator.integers(1, 60)), generator.uniform(0.01, 0.5)
    few = generator.integers(1, 60, int(generator.integers(2, 6)))
    draws = (
        lambda: generator.integers(start, start + size),
        lambda: generator.geometric(chance),
        lambda: start + generator.binomial(size, chance),
        lambda: start + generator.poisson(size),
        lambda: start + max(generator.integers(0, size, 3)),
        lambda: generator.choice(few),
        lambda: 5 * generator.integers(1, size + 1),
    )
    while True:
        yield int(draws[kind]())


def limited(lengths, limit):
    return (min(length, limit) for length in lengths)


def test_random_ends_are_no_time_limit_and_planted_time_limits_are_found():
    alarms = 0
    for seed in range(400):
        generator = np.random.default_rng(seed)
        rollout = rollout_of(random_lengths(generator), int(generator.integers(100, 1200)), generator)
        alarms += bool([*check_time_limits(rollout)])
    assert alarms <= 2
    for seed in range(20):
        generator = np.random.default_rng(seed)
        limit = int(generator.integers(20, 200))
        chance = generator.uniform(0, 2 / limit)  # of a natural end at each step
        natural = iter(functools.partial(generator.geometric, chance), None)
        assert [*check_time_limits(rollout_of(limited(natural, limit), 1200, generator))], seed


NEVER = 999
# Three games with episodes of 10 to 29 steps, each length once.
SHORTER = [*range(29, 24, -1), NEVER, *range(24, 18, -1), NEVER, *range(18, 9, -1), NEVER]


@pytest.mark.parametrize("players", [1, 3])
@pytest.mark.parametrize(
    ("lengths", "num_steps", "found"),
    [
        ([30, NEVER] * 4, 60, True),
        ([30, NEVER] * 4, 61, False),  # the second episode is longer, and goes on
        ([30, NEVER] * 2 + [10, 25, NEVER] + [12, 20, NEVER], 60, False),  # two ends, whatever the players
        ([30, NEVER] * 2 + [NEVER] * 2, 140, False),
        ([30] * 5 + [NEVER] + SHORTER, 150, False),  # all in one game
        ([30] * 4 + [NEVER] * 4, 140, False),
    ],
)
def test_a_time_limit_needs_four_ends_in_two_games(players, lengths, num_steps, found):
    rollout = rollout_of(iter(lengths), num_steps, np.random.default_rng(0), players)
    assert bool([*check_time_limits(rollout)]) == found


CLEAN = [
    ("CartPole-v1", "vectorized", {}),
    ("CartPole-v1", "torch", {}),
    ("CartPole-v1", "envpool", {}),
    ("FrozenLake-v1", "envpool", {}),
    ("HalfCheetah-v4", "gymnasium", {}),
    ("HalfCheetah-v4", "envpool", {}),
    ("ALE/Pong-v5", "gymnasium", {}),
    ("ALE/Pong-v5", "envpool", {}),
    ("ALE/Breakout-v5", "envpool", {}),
    ("starpilot", "procgen", {"num_threads": 0}),
    ("coinrun", "procgen", {"num_threads": 0}),
    pytest.param("dm_control/cheetah-run-v0", "gymnasium", {}, marks=needs_dm_control),
    ("CheetahRun-v1", "envpool", {}),
    ("MiniGrid-MemoryS7-v0", "envpool", {}),
    ("MiniGrid-Empty-5x5-v0", "envpool", {}),
]


@pytest.mark.integration
@pytest.mark.parametrize(("env_id", "backend", "env_kwargs"), CLEAN, ids=lambda part: str(part))
def test_every_backend_is_clean(env_id, backend, env_kwargs):
    if backend == "procgen":
        pytest.importorskip("procgen", reason=NO_PROCGEN)
    findings, rollout = examine(env_id, backend, **env_kwargs)
    assert faults(findings) == [], [*map(str, findings)]
    assert rollout is not None


def test_the_first_rollout_of_fit_names_a_fault(fit, recwarn):
    faults = {broken_envs.Terminating: "terminate at exactly step 60", broken_envs.Missed: "leaves its space"}
    for env_id in (*faults, Walk):
        recwarn.clear()
        fit({"env_id": env_id, "num_envs": 4, "num_steps": 128, "total_timesteps": 1024})
        said = [str(warned.message) for warned in recwarn if "environment: " in str(warned.message)]
        assert len(said) == (env_id in faults) and all(faults[env_id] in text for text in said)


@pytest.mark.parametrize(
    ("low", "high", "warned"), [(5, 9, 1), (-6, -2, 1), (-9, 99, 1), (0, 1, 0), (-3, 3, 0)]
)
def test_actions_far_from_0_are_named(low, high, warned):
    findings = [*check_action_bounds(Bounded(low, high, (2,)))]
    assert len(findings) == warned


def test_fit_is_the_same_without_the_check(fit, monkeypatch):
    from ppo_lightning.callbacks.guards import RolloutGuard

    data = {"env_id": broken_envs.Unseeded, "num_envs": 2, "num_steps": 64, "total_timesteps": 256}

    def weights():
        broken_envs.random.seed(5)
        return list(fit(data).parameters())

    with_check = weights()
    monkeypatch.delattr(RolloutGuard, "on_train_batch_start")
    assert all(map(torch.equal, with_check, weights()))
