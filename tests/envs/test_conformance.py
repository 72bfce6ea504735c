"""The checks of environments: each fault is named, and correct environments have none."""

import random
import time

import gymnasium
import numpy as np
import pytest
import torch
from torchrl.envs import CatTensors, StepCounter, UnsqueezeTransform
from torchrl.envs.custom import PendulumEnv

from ppo_lightning.envs import EnvFactory, conformance
from ppo_lightning.envs.examination import check_environment
from ppo_lightning.envs.recording import episodes_of, random_action, record, recording_of
from ppo_lightning.errors import ConfigError
from ppo_lightning.spaces.specs import mask_columns
from tests.envs import broken_envs
from tests.envs.broken_envs import BROKEN, Walk


def faults(findings):
    return [(finding.severity, finding.check) for finding in findings if finding.severity != "note"]


def seen(env_id, backend="gymnasium", seconds=3.0, num_steps=1200, **env_kwargs):
    return check_environment(EnvFactory(env_id, backend, env_kwargs), num_steps=num_steps, seconds=seconds)


@pytest.mark.parametrize("env", BROKEN, ids=lambda env: env.__name__)
def test_a_broken_environment_has_the_intended_finding_and_no_other(env):
    findings, _ = seen(env)
    assert faults(findings) == [BROKEN[env]], [*map(str, findings)]


@pytest.mark.parametrize("env_id", [Walk, "CartPole-v1", "Pendulum-v1", "FrozenLake-v1", "Reach-v0"])
def test_a_correct_environment_is_clean(env_id):
    findings, recording = seen(env_id)
    assert findings == []
    assert recording.over.shape == (1200, 4)


def test_a_deterministic_environment_and_sparse_rewards_are_notes():
    findings, _ = seen("ppo_lightning.envs.tasks:Locks-v0")
    assert [(finding.severity, finding.check) for finding in findings] == [("note", "seed")]
    assert "deterministic" in findings[0].what
    findings, _ = seen("MountainCar-v0")
    assert [(finding.severity, finding.check) for finding in findings] == [("note", "reward")]


def test_random_play_obeys_masks():
    factory = EnvFactory("ppo_lightning.envs.tasks:Locks-v0")
    env = factory.make(3)
    observation_spec, action_spec = env.agent_specs
    mask = env.reset_arrays()[:, mask_columns(observation_spec)]
    generator = np.random.default_rng(0)
    actions = np.stack([random_action(action_spec, 3, generator, mask) for _ in range(200)])
    left, right = np.split(mask[0], 2)
    assert set(actions[..., 0].ravel()) == set(np.flatnonzero(left))
    assert set(actions[..., 1].ravel()) == set(np.flatnonzero(right))


def test_a_recording_is_the_rollout_of_torchrl():
    """Both ways to record give the same arrays for the same environment and the same actions."""
    env = EnvFactory("Script-v0").make(2)
    rollout = env.rollout(40, break_when_any_done=False)
    actions = iter(rollout["action"].transpose(0, 1).numpy())
    twin = EnvFactory("Script-v0").make(2)
    step = twin.step_arrays
    twin.step_arrays = lambda _: step(next(actions))
    recording, expected = record(twin, 40), recording_of(rollout)
    for name in ("observation", "reward", "terminated", "truncated", "over", "final"):
        np.testing.assert_array_equal(getattr(recording, name), getattr(expected, name), name)
    assert recording.seconds > 0


def test_whole_episodes_have_lengths_returns_and_final_observations():
    recording = record(EnvFactory("Script-v0").make(2), 60)
    episodes = episodes_of(recording)
    assert len(episodes.length) == recording.over.sum() > 10
    np.testing.assert_array_equal(episodes.final[:, 2], episodes.length)  # the observation is the time
    np.testing.assert_array_equal(episodes.last[:, 2], episodes.length - 1)
    assert episodes.terminated.all()
    total = sum(recording.reward[: np.flatnonzero(recording.over[:, 0])[-1] + 1, 0])
    assert total + sum(recording.reward[: np.flatnonzero(recording.over[:, 1])[-1] + 1, 1]) == pytest.approx(
        episodes.total.sum()
    )


def test_a_clock_in_the_observation_excuses_a_fixed_length():
    findings, _ = seen("Counter-v0", terminate_at=30)
    assert ("warning", "time limit") not in faults(findings)


def test_torchrl_environments_are_checked_with_torchrls_checker():
    transforms = (
        UnsqueezeTransform(-1, in_keys=["th", "thdot"], out_keys=["th_1", "thdot_1"]),
        CatTensors(["th_1", "thdot_1"], "observation", del_keys=False),
        StepCounter(50),
    )
    findings, recording = check_environment(EnvFactory(PendulumEnv, transforms=transforms), 2, 120)
    assert faults(findings) == []
    assert recording.over[[49, 99]].all()

    class Wrong(PendulumEnv):
        def _step(self, tensordict):
            out = super()._step(tensordict)
            return out.set("reward", out["reward"].double())

    findings, _ = check_environment(EnvFactory(Wrong, transforms=transforms), 2, 120)
    assert faults(findings) == [("warning", "specs")]


def test_an_autoreset_at_the_next_step_is_a_note():
    findings, _ = seen(lambda: gymnasium.wrappers.Autoreset(Walk()))
    assert [(finding.severity, finding.check) for finding in findings] == [("note", "autoreset")]


def test_a_slow_environment_makes_fewer_steps():
    class Slow(Walk):
        def step(self, action):
            time.sleep(0.005)
            return super().step(action)

    start = time.perf_counter()
    _, recording = seen(Slow, seconds=0.5)
    assert 10 < len(recording.over) < 25
    assert time.perf_counter() - start < 3


def test_the_global_generators_are_not_touched():
    before = torch.get_rng_state(), random.getstate()
    seen("CartPole-v1", num_steps=50)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_an_environment_that_does_not_exist_is_a_setting_error():
    with pytest.raises(ConfigError, match="did you mean CartPole-v1"):
        seen("CartPol-v1")


def test_play_that_was_cut_short_cannot_tell_whether_episodes_end():
    recording = record(EnvFactory(broken_envs.Endless).make(2), 20)
    assert [finding.severity for finding in conformance.check_episode_ends(recording)] == ["warning"]
    assert [finding.severity for finding in conformance.check_episode_ends(recording, planned=30)] == ["note"]
    assert [*conformance.check_episode_ends(recording, limit=30)] == []


def test_procgens_time_limit_is_a_note():
    recording = record(EnvFactory(broken_envs.Terminating).make(4), 400)
    (warning,) = conformance.check_time_limits(recording)
    (note,) = conformance.check_time_limits(recording, flags_time_limits=False)
    assert (warning.severity, note.severity) == ("warning", "note")


CLEAN = [
    ("CartPole-v1", "vectorized", {}),
    ("CartPole-v1", "torch", {}),
    ("CartPole-v1", "envpool", {}),
    ("FrozenLake-v1", "envpool", {}),
    ("HalfCheetah-v4", "gymnasium", {}),
    ("HalfCheetah-v4", "envpool", {}),
    ("ALE/Pong-v5", "gymnasium", {}),
    ("ALE/Pong-v5", "envpool", {}),
    ("ALE/Pong-v5", "ale", {}),
    ("ALE/Breakout-v5", "envpool", {}),
    ("starpilot", "procgen", {"num_threads": 0}),
    ("coinrun", "procgen", {"num_threads": 0}),
    ("dm_control/cheetah-run-v0", "gymnasium", {}),
    ("CheetahRun-v1", "envpool", {}),
    ("MiniGrid-MemoryS7-v0", "envpool", {}),
    ("MiniGrid-Empty-5x5-v0", "envpool", {}),
    ("minigrid:MiniGrid-MemoryS7-v0", "gymnasium", {}),
]
PACKAGES = {
    "envpool": ["envpool"],
    "ale": ["ale_py"],
    "procgen": ["procgen"],
    "HalfCheetah-v4": ["mujoco"],
    "ALE/Pong-v5": ["ale_py", "cv2"],
    "dm_control/cheetah-run-v0": ["dm_control", "shimmy"],
    "minigrid:MiniGrid-MemoryS7-v0": ["minigrid"],
}


@pytest.mark.integration
@pytest.mark.parametrize(("env_id", "backend", "env_kwargs"), CLEAN, ids=lambda part: str(part))
def test_every_backend_is_clean(env_id, backend, env_kwargs):
    for package in PACKAGES.get(backend, []) + PACKAGES.get(env_id, []):
        pytest.importorskip(package)
    findings, recording = seen(env_id, backend, **env_kwargs)
    assert faults(findings) == [], [*map(str, findings)]
    assert recording is not None


def test_the_first_rollout_of_fit_names_a_fault(fit, capsys):
    fit({"env_id": broken_envs.Terminating, "num_envs": 4, "num_steps": 128, "total_timesteps": 1024})
    out = capsys.readouterr().out
    assert out.count("environment: ") == 1
    assert "terminate at exactly step 60" in out
    fit({"env_id": Walk, "num_envs": 4, "num_steps": 128, "total_timesteps": 1024})
    assert "environment: " not in capsys.readouterr().out


def test_fit_is_the_same_without_the_check(fit, monkeypatch):
    from ppo_lightning.callbacks.guards import RolloutGuard

    data = {"env_id": broken_envs.Unseeded, "num_envs": 2, "num_steps": 64, "total_timesteps": 256}

    def weights():
        broken_envs.random.seed(5)
        return list(fit(data).parameters())

    with_check = weights()
    monkeypatch.delattr(RolloutGuard, "on_train_batch_start")
    assert all(map(torch.equal, with_check, weights()))
