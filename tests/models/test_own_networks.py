"""Networks of users: what is no agent ends in one sentence that names the contract."""

import functools

import gymnasium
import numpy as np
import pytest
import torch
from torch import nn

from ppo_lightning import PPO, ActorCritic, ConfigError, MLPAgent, RecurrentPPO, RolloutDataModule, make_env
from ppo_lightning.models import MLP, makers
from ppo_lightning.spaces.specs import mask_columns, stored

CONTRACT = makers.CONTRACT.format("ActorCritic")


class Net(nn.Module):
    def __init__(self, observation_spec=None, action_spec=None):
        super().__init__()
        self.policy, self.value = nn.Linear(4, 2), nn.Linear(4, 1)

    def forward(self, observation):
        return self.policy(observation), self.value(observation)


class TakesNothing(ActorCritic):
    def __init__(self):
        raise AssertionError("is not called")


class WithBody(ActorCritic):
    def __init__(self, observation_spec, action_spec, width=8):
        super().__init__(action_spec, lambda: MLP(4, [width]))
        self.save_hyperparameters(ignore=["observation_spec", "action_spec"])


class SavesNothing(ActorCritic):
    def __init__(self, observation_spec, action_spec):
        super().__init__(action_spec, lambda: MLP(4, [8]))


class Causal(ActorCritic):
    def __init__(self, observation_spec, action_spec):
        super().__init__(action_spec, lambda: MLP(4, [8]))
        self.save_hyperparameters(ignore=["observation_spec", "action_spec"])
        self.register_buffer("causal", torch.full((3, 3), -torch.inf).triu(1))


class NoWidth(ActorCritic):
    def __init__(self, observation_spec, action_spec):
        super().__init__(action_spec, lambda: nn.Sequential(nn.Linear(4, 8)))


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        (Net, f"model.agent is Net: it must be {CONTRACT}."),
        (functools.partial(Net, None), f"model.agent is Net: it must be {CONTRACT}."),
        (Net(), f"model.agent is an object of Net: it must be {CONTRACT}."),
        ("net.MyAgent", "it must be a class or a function, such as functools.partial(MyAgent, width=64)."),
        ({"class_path": "net.MyAgent"}, "it must be a class or a function, such as functools.partial("),
    ],
)
def test_what_makes_no_agent_is_refused_at_once(agent, message):
    with pytest.raises(ConfigError) as raised:
        PPO(agent=agent)
    assert message in str(raised.value)


def test_an_agent_in_place_of_its_class_is_refused_at_once(env):
    agent = MLPAgent(*env("CartPole-v1").agent_specs)
    with pytest.raises(ConfigError, match=r"makes its own: give the class, MLPAgent, or functools.partial"):
        PPO(agent=agent)


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        (lambda observation, action: (Net(), Net()), f"makes a tuple: it must be or make {CONTRACT}."),
        (lambda observation, action: nn.Sequential(), f"makes a Sequential: it must be or make {CONTRACT}."),
        (lambda: None, f"2 were given): it must be {CONTRACT}."),
        (TakesNothing, f"3 were given): it must be {CONTRACT}."),
        (SavesNothing, "SavesNothing.__init__ must call self.save_hyperparameters("),
        (Causal, "Causal has the infinite buffer or weight causal, and checkpoints take finite ones"),
        (NoWidth, "The body of NoWidth is a Sequential whose out_features is None: it must be the number"),
    ],
)
def test_what_is_made_is_refused_before_the_first_rollout(agent, message, make_trainer):
    with pytest.raises(ConfigError) as raised:
        make_trainer().fit(PPO(agent=agent), RolloutDataModule())
    assert message in str(raised.value)


class Choices(gymnasium.Env):
    """Three actions, the last of which is never allowed."""

    observation_space = gymnasium.spaces.Dict(
        place=gymnasium.spaces.Box(-1, 1, (4,)), action_mask=gymnasium.spaces.MultiBinary(3)
    )
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation(), {}

    def observation(self):
        place = self.np_random.uniform(-1, 1, 4).astype(np.float32)
        return {"place": place, "action_mask": np.array([1, 1, 0], np.int8)}

    def step(self, action):
        assert action != 2
        return self.observation(), 1.0, self.np_random.random() < 0.1, False, {}


class OfRows(ActorCritic):
    def __init__(self, observation_spec, action_spec, masked=True, memory=None):
        size = stored(observation_spec).shape[0]
        mask = mask_columns(observation_spec) if masked else None
        super().__init__(action_spec, lambda: MLP(size, [8]), mask=mask, memory=memory)
        self.save_hyperparameters(ignore=["observation_spec", "action_spec"])


def test_an_own_agent_reads_the_action_mask_or_is_refused(fit, tmp_path):
    data = {"env_id": Choices, "total_timesteps": 1024}
    for algorithm, memory in ((PPO, None), (RecurrentPPO, "lstm")):
        agent = functools.partial(OfRows, masked=False, memory=memory)
        with pytest.raises(ConfigError, match=r"OfRows, which would ignore the action_mask .*: pass mask="):
            fit(data, {"agent": agent}, ppo=algorithm)
    fit(data, {"agent": OfRows}).trainer.save_checkpoint(tmp_path / "last.ckpt")
    module = PPO.load_from_checkpoint(tmp_path / "last.ckpt")
    assert module.agent.mask == slice(4, 7)


def test_an_own_agent_with_arguments_trains(fit):
    module = fit({"total_timesteps": 512}, {"agent": functools.partial(WithBody, width=16)})
    assert module.agent.actor_body.out_features == 16


class Negative(MLPAgent):
    def __init__(self, observation_spec, action_spec):
        super().__init__(observation_spec, action_spec)
        self.head.linear.weight.data *= 100
        self.actor_body.activation = torch.neg


class Capped(nn.Linear):
    def forward(self, features):
        return super().forward(features).clamp(-0.01, 0.01)


class CappedHead(MLPAgent):
    def __init__(self, observation_spec, action_spec):
        super().__init__(observation_spec, action_spec)
        self.head.linear = Capped(64, 2)


class Normed(MLPAgent):
    def __init__(self, observation_spec, action_spec):
        super().__init__(observation_spec, action_spec)
        self.actor_body.layers.append(nn.LayerNorm(64))


@pytest.mark.parametrize("kind", [Negative, CappedHead, Normed])
def test_an_agent_acts_with_layers_and_an_activation_of_its_own(kind):
    env = make_env("CartPole-v1", 2)
    agent = kind(*env.agent_specs)
    observation, noise = torch.randn(64, 4), agent.noise((64,))
    action = agent.array_policy()(observation.numpy(), noise.numpy(), None)[0]
    assert action.tolist() == agent.act(observation, noise)[0].tolist()


class Scaled(MLPAgent):
    def normalize(self, observation):
        return super().normalize(observation) / 100


def test_a_normalization_that_rollouts_would_ignore_is_refused(fit):
    with pytest.raises(ConfigError, match="Scaled overrides normalize, which rollouts do not call"):
        fit({"total_timesteps": 512}, {"agent": Scaled})
