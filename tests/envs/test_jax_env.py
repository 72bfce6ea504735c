"""Simulators written in JAX: episodes, seeds and training. They are not among the extras of ``dev``."""

import sys
from typing import NamedTuple

import pytest
import torch

from ppo_lightning import MLPAgent
from ppo_lightning.commands import cli
from ppo_lightning.envs.jax_env import JaxEnv, make_brax, make_playground
from ppo_lightning.envs.specs import specs_of
from ppo_lightning.errors import ConfigError
from ppo_lightning.rollouts.tensor_collector import TensorCollector
from tests.documented import ROOT


class WalkState(NamedTuple):
    obs: object
    reward: object
    done: object


class Walk:
    """Point that starts at a random place in [0, 1), moves by the action and arrives at 2."""

    action_size = 1

    @property
    def observation_size(self):
        return {"state": (1,), "privileged_state": (2,)}

    def reset(self, key):
        import jax

        return self.see(jax.random.uniform(key, (1,)))

    def step(self, state, action):
        return self.see(state.obs["state"] + action)

    def see(self, place):
        obs = {"state": place, "privileged_state": place.repeat(2)}
        return WalkState(obs, place[0], (place[0] > 2).astype("float32"))


def walk(seeds, max_episode_steps=5):
    pytest.importorskip("jax")
    return JaxEnv(Walk(), seeds, max_episode_steps)


def steps(env, speed, count):
    """Return the transitions [N, T] of environments that always move by their speed."""
    carrier = env.reset()
    collected = []
    for _ in range(count):
        carrier["action"] = speed[:, None]
        step, carrier = env.step_and_maybe_reset(carrier)
        collected.append(step.clone())
    return torch.stack(collected, dim=1)


def test_terminations_time_limits_and_final_observations():
    rollout = steps(walk([1, 2]), torch.tensor([0.0, 1.0]), 12)
    still, moving = rollout["observation"][..., 0]
    ends = rollout["next", "truncated"][0, :, 0]
    assert ends.tolist() == [False, False, False, False, True] * 2 + [False, False]
    assert not rollout["next", "terminated"][0].any()
    assert len({*still.tolist()}) == 3, "another initial state in each episode"
    assert torch.equal(rollout["next", "observation"][0], rollout["observation"][0])
    arrived = rollout["next", "terminated"][1, :, 0]
    assert arrived.tolist() == (rollout["next", "observation"][1, :, 0] > 2).tolist() and arrived.any()
    assert (moving < 2).all(), "the final observation is not acted on"
    assert not rollout["next", "truncated"][1].any()


def test_episodes_depend_on_the_seed_of_the_environment_alone():
    speed = torch.tensor([0.0, 0.3, 0.9, 1.0])
    together = steps(walk([1, 2, 3, 4]), speed, 20)
    for rows in (slice(0, 2), slice(2, 4)):
        apart = steps(walk([1, 2, 3, 4][rows]), speed[rows], 20)
        for key, values in apart.items(True, True):
            assert torch.equal(values, together[rows][key]), key


def test_privileged_observations_are_for_the_critic():
    env = walk([1, 2])
    agent = MLPAgent(*specs_of(env))
    assert set(agent.entries.actor) == {"state"}
    assert TensorCollector(env, agent, 4).rollout()["observation"].shape == (2, 4, 3)


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "brax", None)
    monkeypatch.setitem(sys.modules, "mujoco_playground", None)
    with pytest.raises(ConfigError, match=r"pip install 'ppo-lightning\[brax\]'"):
        make_brax("ant", [1])
    with pytest.raises(ConfigError, match="pip install playground"):
        make_playground("CheetahRun", [1])


@pytest.mark.slow
@pytest.mark.parametrize("library", ["brax", "mujoco_playground"])
def test_it_trains(library, tmp_path, monkeypatch, capsys):
    pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    recipe = {"brax": "brax_pendulum", "mujoco_playground": "playground_cheetah"}[library]
    small = ["--data.num_envs", "4", "--data.num_steps", "32", "--data.total_timesteps", "384"]
    small += ["--data.env_kwargs.max_episode_steps", "50", "--data.eval_episodes", "2"]
    if library == "mujoco_playground":
        small += ["--data.env_kwargs.task", "CartpoleBalance", "--trainer.accelerator", "cpu"]
    cli.main(["fit", "--config", str(ROOT / f"configs/ppo/{recipe}.yaml"), *small])
    assert "for 384 environment steps" in capsys.readouterr().out
