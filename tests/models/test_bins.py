"""The head with bins for continuous actions, and the residual body."""

import functools
import math

import pytest
import torch
from torchrl.data import Bounded, Categorical, Unbounded

from ppo_lightning import PPG, PPO, ConfigError, MLPAgent, RecurrentPPO
from ppo_lightning.models.bins import BinsHead
from ppo_lightning.models.bodies import ResidualMLP
from ppo_lightning.models.init import orthogonal

LOW, HIGH = torch.tensor([-1.0, 0.0, -0.5]), torch.tensor([1.0, 100.0, 3.0])
SPEC = Bounded(LOW, HIGH, shape=(3,), dtype=torch.float32)
OBSERVATIONS = Unbounded((5,))


@pytest.fixture
def head():
    torch.manual_seed(0)
    made = BinsHead(6, SPEC, num_bins=5)
    torch.nn.init.normal_(made.linear.weight, std=0.5)
    return made


def test_actions_have_the_frequencies_of_their_probabilities(head):
    features = torch.randn(6).expand(40_000, 6)
    action, log_prob = head.sample(features, head.noise((40_000,)))
    reference = torch.distributions.Categorical(logits=head.linear(features[0]).view(3, 5))
    position = (action - LOW) / (HIGH - LOW) * 4
    index = position.round()
    torch.testing.assert_close(position, index, atol=1e-5, rtol=0)
    frequencies = torch.stack([(index == bin_).float().mean(0) for bin_ in range(5)], dim=-1)
    torch.testing.assert_close(frequencies, reference.probs, atol=0.01, rtol=0)
    torch.testing.assert_close(log_prob, reference.log_prob(index).sum(-1))
    entropy = head.evaluate(features, action)[1]
    torch.testing.assert_close(entropy[0], reference.entropy().sum())


@pytest.mark.parametrize("num_bins", [2, 41, 255])
def test_stored_actions_find_their_bins_again(num_bins):
    head = BinsHead(6, SPEC, num_bins)
    torch.nn.init.normal_(head.linear.weight)
    features = torch.randn(500, 6)
    action, log_prob = head.sample(features, head.noise((500,)))
    torch.testing.assert_close(head.evaluate(features, action)[0], log_prob, atol=0, rtol=0)
    assert (action >= LOW).all() and (action <= HIGH).all()
    assert torch.equal(head.for_environment(action), action)


def test_extreme_noise_selects_the_bounds(head):
    """The largest noise is the largest float32 below 1: its product with the last sum is below the sum."""
    features = torch.randn(2000, 6)
    largest = torch.full((2000, 3), 1 - 2.0**-24)
    for noise, bound in ((torch.zeros(2000, 3), LOW), (largest, HIGH)):
        torch.testing.assert_close(head.sample(features, noise)[0], bound.expand(2000, 3))
        logits = head.linear(features).detach().numpy()
        chosen = head.array_sampler()(logits, noise.numpy())
        torch.testing.assert_close(torch.from_numpy(chosen), bound.expand(2000, 3))


def test_the_first_actions_are_nearly_uniform():
    agent = MLPAgent(OBSERVATIONS, SPEC, head="bins")
    evaluation = agent.evaluate(torch.randn(9, 5), LOW.expand(9, 3))
    assert agent.head.largest_entropy == pytest.approx(3 * math.log(41))
    assert evaluation.entropy.min() > 3 * math.log(41) - 1e-3


@pytest.mark.parametrize(
    "options",
    [{}, {"body": "residual", "hidden_sizes": (16, 16)}, {"activation": "relu"}, {"activation": "elu"}],
)
@pytest.mark.parametrize("head_name", ["bins", "gaussian"])
def test_acting_on_arrays_is_acting_on_tensors(options, head_name):
    torch.manual_seed(0)
    agent = MLPAgent(OBSERVATIONS, Bounded(-1, 1, shape=(3,), dtype=torch.float32), head=head_name, **options)
    orthogonal(agent.head.linear, gain=3.0)
    for module in agent.modules():  # other than those of a new layer, which hide a missing one
        if isinstance(module, torch.nn.LayerNorm):
            torch.nn.init.normal_(module.weight)
            torch.nn.init.normal_(module.bias)
    observation, noise = torch.randn(300, 5), agent.noise((300,))
    with torch.inference_mode():
        for drawn in (noise, None):
            arrays = (observation.numpy(), None if drawn is None else drawn.numpy(), None)
            action, log_prob, _ = agent.array_policy()(*arrays)
            assert log_prob is None, "the NumPy policy, not the fallback"
            expected = agent.act(observation, drawn)[0]
            close = torch.isclose(torch.from_numpy(action), expected, atol=1e-5).all(-1)
            # A bin is another one where rounding moves a sum across the noise.
            assert close.float().mean() > 0.99


@pytest.mark.parametrize(
    ("ppo", "options"),
    [
        (PPO, {"norm_obs": True}),
        (PPO, {"norm_obs": True, "log_std_init": -1.0}),
        (PPG, {}),
        (RecurrentPPO, {"memory": "lstm", "shared": True}),
    ],
)
def test_every_algorithm_trains_with_bins_and_residual_bodies(ppo, options, fit):
    agent = functools.partial(MLPAgent, head="bins", body="residual", hidden_sizes=(16, 16), **options)
    data = {"env_id": "Pendulum-v1", "num_envs": 2, "num_steps": 32, "total_timesteps": 192}
    more = {"n_iteration": 2} if ppo is PPG else {}
    module = fit(data, {"agent": agent, "num_minibatches": 2, "learning_rate": 1e-3} | more, ppo=ppo)
    assert module.trainer.callback_metrics["losses/approx_kl"] > 0
    assert isinstance(module.agent.actor_body, ResidualMLP)


def test_the_options_reach_their_networks():
    agent = MLPAgent(
        OBSERVATIONS,
        SPEC,
        head="bins",
        num_bins=7,
        body="residual",
        hidden_sizes=(32, 32, 32),
        critic_hidden_sizes=(8, 4),
    )
    assert agent.head.linear.out_features == 3 * 7
    assert len(agent.actor_body.blocks) == 3 and agent.actor_body.out_features == 32
    assert [layer.out_features for layer in agent.critic_body.layers] == [8, 4]
    spec = Bounded(-1, 1, shape=(3,), dtype=torch.float32)
    assert MLPAgent(OBSERVATIONS, spec, log_std_init=-2.0).head.log_std.tolist() == [-2.0] * 3


def test_a_policy_without_hidden_layers_is_linear():
    agent = MLPAgent(OBSERVATIONS, Categorical(3, shape=()), hidden_sizes=())
    observation = torch.randn(2, 5)
    assert torch.equal(agent.evaluate(observation, torch.tensor([0, 1])).features, observation)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"body": "residual", "hidden_sizes": ()}, "have one width"),
        ({"body": "residual", "hidden_sizes": (64, 32)}, "have one width"),
        ({"shared": True, "critic_hidden_sizes": (64,)}, "no body of its own"),
        ({"critic_hidden_sizes": (0,)}, "critic_hidden_sizes"),
        ({"head": "bins", "num_bins": 1}, "num_bins"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        MLPAgent(OBSERVATIONS, SPEC, **options)


def test_bins_refuse_discrete_actions():
    with pytest.raises(ConfigError, match="continuous ones only"):
        MLPAgent(OBSERVATIONS, Categorical(3, shape=()), head="bins")
