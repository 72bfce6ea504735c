"""TorchRL's view of batched environments."""

import gc

import gymnasium
import pytest
import torch
from torchrl.envs import DoubleToFloat, TransformedEnv
from torchrl.envs.utils import check_env_specs

from ppo_lightning import ConfigError, MLPAgent, RolloutCollector, RolloutDataModule, make_env
from ppo_lightning.envs import EnvFactory, TorchRLEnv
from ppo_lightning.rollouts.make_collector import make_collector
from ppo_lightning.video.record import record_video


class Counted(gymnasium.Env):
    """An environment that counts those that are open, and may fail at its second step."""

    observation_space = gymnasium.spaces.Box(-1, 1, (3,))
    action_space = gymnasium.spaces.Discrete(2)
    open = 0

    def __init__(self, fails=False, render_mode=None):
        self.fails, self.steps, self.render_mode = fails, 0, render_mode
        Counted.open += 1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        self.steps += 1
        if self.fails and self.steps > 1:
            raise OSError("the simulator is gone")
        return self.observation_space.sample(), 1.0, False, self.steps % 3 == 0, {"apples": 2.0}

    def close(self):
        Counted.open -= 1


def test_a_view_leaves_its_environments_open_until_it_is_closed():
    arrays = EnvFactory("CartPole-v1").make(2)
    view = TorchRLEnv(arrays)
    view.rollout(2)
    del view
    gc.collect()
    assert not arrays.is_closed
    first, transformed = TorchRLEnv(arrays), TransformedEnv(TorchRLEnv(arrays), DoubleToFloat())
    transformed.close()
    assert arrays.is_closed and first.is_closed and transformed.is_closed


def test_a_view_has_the_public_attributes_of_its_environments():
    arrays = EnvFactory("CartPole-v1").make(2)
    view = TorchRLEnv(arrays)
    assert view.agent_specs is arrays.agent_specs and view.envs is arrays.envs
    for name in ("_observation", "unknown"):
        with pytest.raises(AttributeError, match=name):
            getattr(view, name)


def test_a_view_restores_the_episodes_of_its_environments():
    view = make_env("CartPole-v1", 2)
    view.reset_arrays()
    state = view.get_state()
    view.reset_arrays()
    assert str(view.get_state()) != str(state)
    view.set_state(state)
    assert str(view.get_state()) == str(state)


def test_a_view_says_which_steps_do_not_count():
    """A VectorEnv that resets late ignores the action of the step that only resets."""
    wrapper = gymnasium.wrappers.vector.RecordEpisodeStatistics
    view = make_env(lambda num_envs: wrapper(gymnasium.make_vec("CartPole-v1", num_envs, "sync")), 2)
    assert view.resets_late
    check_env_specs(view)
    rollout = view.rollout(60, break_when_any_done=False)
    done, weight = rollout["next", "done"][..., 0], rollout["next", "weight"]
    assert done.sum() > 2
    assert torch.equal(weight[:, 1:] == 0, done[:, :-1]) and weight[:, 0].all()
    assert torch.equal(rollout["next", "reward"][..., 0], weight)


@pytest.mark.parametrize("make", [EnvFactory(Counted).make, lambda num_envs: make_env(Counted, num_envs)])
def test_a_function_may_make_arrays_or_their_view(make):
    env = EnvFactory(lambda num_envs: make(num_envs), log_info=["apples"]).make(4)
    rollout = make_collector(env, MLPAgent(*env.agent_specs), 8).rollout()
    assert (rollout["next", "info"].nan_to_num().amax(dim=(0, 1)) == 2).all()
    with pytest.raises(ConfigError, match="env_id is an environment"):
        RolloutDataModule(make(2))


@pytest.mark.parametrize("fails", ["a transform", "an environment", "the agent"])
def test_what_fails_after_the_environments_were_made_closes_them(fails, tmp_path):
    before = Counted.open
    kwargs = {"fails": fails == "an environment"}
    factory = EnvFactory(Counted, env_kwargs=kwargs, transforms=[DoubleToFloat(in_keys=["observation"])])
    if fails == "the agent":
        agent = MLPAgent(*EnvFactory("CartPole-v1").specs())
        with pytest.raises(ConfigError, match="does not take"):
            record_video(agent, EnvFactory(Counted), tmp_path / "a.mp4")
    elif fails == "an environment":
        with pytest.raises(Exception, match="simulator is gone"):
            factory.make(2)
    else:
        with pytest.raises(ConfigError, match="can be recorded"):
            record_video(None, factory, tmp_path / "a.mp4")
    assert Counted.open == before


def test_a_collector_steps_the_arrays_below_a_view():
    view = make_env("CartPole-v1", 2)
    collector = RolloutCollector(view, MLPAgent(*view.agent_specs), 4)
    assert collector.env is view.arrays
    collector.shutdown()
    assert view.is_closed
