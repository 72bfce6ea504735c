"""Networks of other widths."""

import functools
import pickle

import pytest
import torch
from torchrl.data import Bounded, Categorical, Unbounded

from ppo_lightning import MLPAgent

SPEC = Bounded(-1, 1, shape=(3,), dtype=torch.float32)
OBSERVATIONS = Unbounded((5,))


def test_the_options_reach_their_networks():
    sizes = {"hidden_sizes": (32, 32, 32), "critic_hidden_sizes": (8, 4)}
    agent = MLPAgent(OBSERVATIONS, SPEC, **sizes)
    assert [layer.out_features for layer in agent.actor_body.layers] == [32, 32, 32]
    assert [layer.out_features for layer in agent.critic_body.layers] == [8, 4]
    assert MLPAgent(OBSERVATIONS, SPEC, log_std_init=-2.0).head.log_std.tolist() == [-2.0] * 3
    recurrent = functools.partial(MLPAgent, OBSERVATIONS, SPEC, memory="lstm")
    assert recurrent().critic_body is None, "policy and value share body and memory"
    assert recurrent(critic_hidden_sizes=(8,)).critic_body.out_features == 8


def test_a_policy_without_hidden_layers_is_linear():
    agent = MLPAgent(OBSERVATIONS, Categorical(3, shape=()), hidden_sizes=())
    observation = torch.randn(2, 5)
    assert torch.equal(agent.evaluate(observation, torch.tensor([0, 1])).features, observation)


def test_an_observation_may_be_one_number():
    agent = MLPAgent(Unbounded(()), SPEC)
    assert agent.evaluate(torch.randn(4), torch.zeros(4, 3)).value.shape == (4,)


@pytest.mark.parametrize("activation", ["tanh", "relu", "elu"])
def test_an_agent_can_be_pickled(activation):
    agent = MLPAgent(Unbounded((3,)), Categorical(2), activation=activation)
    copied = pickle.loads(pickle.dumps(agent))
    assert torch.equal(copied.value(torch.ones(2, 3)), agent.value(torch.ones(2, 3)))
