"""Layers and activations of vectors' agents, and networks of other widths."""

import functools

import pytest
import torch
from torchrl.data import Bounded, Categorical, Unbounded

from ppo_lightning import ConfigError, MLPAgent
from ppo_lightning.models.init import orthogonal

SPEC = Bounded(-1, 1, shape=(3,), dtype=torch.float32)
OBSERVATIONS = Unbounded((5,))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"head": "tanh_gaussian"},
        {"activation": "relu"},
        {"activation": "elu"},
    ],
)
def test_acting_on_arrays_is_acting_on_tensors(options):
    torch.manual_seed(0)
    agent = MLPAgent(OBSERVATIONS, SPEC, **options)
    orthogonal(agent.head.linear, gain=3.0)
    observation, noise = torch.randn(300, 5), agent.noise((300,))
    with torch.inference_mode():
        for drawn in (noise, None):
            arrays = (observation.numpy(), None if drawn is None else drawn.numpy(), None)
            action, log_prob, _ = agent.array_policy()(*arrays)
            assert log_prob is None, "the NumPy policy, not the fallback"
            expected = agent.act(observation, drawn)[0]
            torch.testing.assert_close(torch.from_numpy(action), expected, atol=1e-5, rtol=1e-5)


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


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"shared": True, "critic_hidden_sizes": (64,)}, "no body of its own"),
        ({"critic_hidden_sizes": (0,)}, "critic_hidden_sizes"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        MLPAgent(OBSERVATIONS, SPEC, **options)
