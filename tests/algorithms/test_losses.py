"""Losses and advantages, against closed forms, the definition in float64 and TorchRL."""

import math

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE
from torchrl.objectives.value.functional import generalized_advantage_estimate

from ppo_lightning.algorithms import losses

ENDS = ("terminated", "truncated", "both", "rollout end")


def case(kind, num_envs=3, num_steps=13, seed=0):
    """Return a random rollout; environment 1 ends in the given way at step 5."""
    generator = torch.Generator().manual_seed(seed)
    reward, value, next_value = (torch.randn(num_envs, num_steps, generator=generator) for _ in range(3))
    terminated, truncated = (torch.zeros(num_envs, num_steps, dtype=torch.bool) for _ in range(2))
    terminated[1, 5] = kind in ("terminated", "both")
    truncated[1, 5] = kind in ("truncated", "both")
    # Within an episode, the next observation is the next stored one.
    inside = ~(terminated | truncated)[:, :-1]
    next_value[:, :-1][inside] = value[:, 1:][inside]
    return reward, value, next_value, terminated, terminated | truncated


def slow_gae(reward, value, next_value, terminated, done, gamma, gae_lambda):
    """Sum discounted TD errors forwards from each step in float64, as the definition does."""
    reward, value, next_value = (x.double().numpy() for x in (reward, value, next_value))
    advantage = np.zeros_like(reward)
    for n, t in np.ndindex(*reward.shape):
        weight = 1.0
        for k in range(t, reward.shape[1]):
            bootstrap = 0.0 if terminated[n, k] else next_value[n, k]
            advantage[n, t] += weight * (reward[n, k] + gamma * bootstrap - value[n, k])
            weight *= gamma * gae_lambda
            if done[n, k]:
                break
    return torch.from_numpy(advantage)


@pytest.mark.detail("5")
@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("gae_lambda", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("num_steps", [1, 2, 7, 8, 33])
def test_gae_of_one_reward_and_a_constant_value_has_a_closed_form(gamma, gae_lambda, num_steps):
    constant = 0.7
    reward = torch.zeros(1, num_steps)
    reward[0, -1] = 1.0
    value = torch.full((1, num_steps), constant)
    terminated = torch.zeros(1, num_steps, dtype=torch.bool)
    terminated[0, -1] = True
    advantage, target = losses.gae(reward, value, value.clone(), terminated, terminated, gamma, gae_lambda)
    # The TD error is 1 - c at the last step and (gamma - 1) c before it.
    decay = gamma * gae_lambda
    steps_left = torch.arange(num_steps - 1, -1, -1)
    geometric = torch.tensor([sum(decay**i for i in range(int(k))) for k in steps_left])
    expected = (gamma - 1) * constant * geometric + (1 - constant) * decay**steps_left
    torch.testing.assert_close(advantage[0], expected.float(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(target, advantage + value)


@pytest.mark.detail("5")
@pytest.mark.parametrize("kind", ENDS)
@pytest.mark.parametrize("gae_lambda", [0.0, 0.5, 0.95, 1.0])
def test_gae_treats_each_kind_of_end_as_the_definition_does(kind, gae_lambda):
    inputs = case(kind)
    advantage, _ = losses.gae(*inputs, 0.99, gae_lambda)
    torch.testing.assert_close(advantage.double(), slow_gae(*inputs, 0.99, gae_lambda), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ENDS)
def test_gae_agrees_with_torchrl(kind):
    reward, value, next_value, terminated, done = case(kind, num_envs=5, num_steps=64)
    ours = losses.gae(reward, value, next_value, terminated, done, 0.97, 0.9)
    columns = [x.unsqueeze(-1) for x in (value, next_value, reward, done, terminated)]
    theirs = generalized_advantage_estimate(0.97, 0.9, *columns)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b.squeeze(-1), atol=1e-5, rtol=1e-5)
    names = ("state_value", "reward", "done", "terminated")
    following = dict(zip(names, columns[1:], strict=True))
    rollout = TensorDict({"state_value": columns[0], "next": following}, batch_size=[5, 64])
    module = GAE(gamma=0.97, lmbda=0.9, value_network=None, average_gae=False)
    torch.testing.assert_close(ours[0], module(rollout)["advantage"].squeeze(-1), atol=1e-5, rtol=1e-5)


def draws(count, size=32):
    return torch.randn(count, size, generator=torch.Generator().manual_seed(0))


@pytest.mark.detail("7")
def test_normalize_gives_mean_0_and_unbiased_std_1():
    std, mean = torch.std_mean(losses.normalize(2 * draws(1) + 1).double())
    assert abs(mean) < 1e-6 and abs(std - 1) < 1e-6
    equal = losses.normalize(torch.full((4,), 3.0))
    assert torch.equal(equal, torch.zeros(4)), "epsilon keeps equal advantages finite"
    noise = losses.normalize(draws(1) * 0.03 / draws(1).std(), eps=0.03)
    assert noise.std() == pytest.approx(0.5), "and small ones small"


@pytest.mark.detail("8")
def test_policy_loss_takes_the_worse_of_the_plain_and_the_clipped_objective():
    # (ratio, advantage) -> objective with clip 0.2: clipping only ever removes an incentive to go further
    table = [(1.5, 1.0, 1.2), (0.5, 1.0, 0.5), (1.5, -1.0, -1.5), (0.5, -1.0, -0.8), (1.1, 2.0, 2.2)]
    for ratio, advantage, objective in table:
        loss = losses.policy_loss(torch.tensor([ratio]).log(), torch.tensor([advantage]), 0.2)
        assert loss.item() == pytest.approx(-objective, abs=1e-6)


@pytest.mark.detail("9")
def test_value_loss_takes_the_worse_of_the_plain_and_the_clipped_error():
    # (value, old value, target) -> 0.5 * error with clip 0.2
    table = [(1.0, 0.0, 1.0, 0.5 * 0.8**2), (0.1, 0.0, 1.0, 0.5 * 0.9**2), (-1.0, 0.0, 1.0, 0.5 * 2.0**2)]
    for value, old, target, expected in table:
        arguments = [torch.tensor([x]) for x in (value, old, target)]
        assert losses.value_loss(*arguments, 0.2).item() == pytest.approx(expected, abs=1e-6)
        unclipped = 0.5 * (value - target) ** 2
        assert losses.value_loss(*arguments, None).item() == pytest.approx(unclipped, abs=1e-6)


@pytest.mark.detail("12")
def test_diagnostics_of_the_ratios_1_2_and_a_half():
    log_ratio = torch.tensor([1.0, 2.0, 2.0, 0.5], requires_grad=True).log()
    found = losses.diagnostics(log_ratio, 0.2)
    log_2 = math.log(2)
    assert found["old_approx_kl"].item() == pytest.approx(-log_2 / 4)
    # The mean of r - 1 - log(r)
    assert found["approx_kl"].item() == pytest.approx((2 * (1 - log_2) + (log_2 - 0.5)) / 4)
    assert found["clipfrac"].item() == 0.75
    assert not any(value.requires_grad for value in found.values())


def test_explained_variance():
    target = torch.randn(4, 16)
    assert losses.explained_variance(target, target).item() == 1
    assert losses.explained_variance(torch.zeros(4, 16), target).item() == pytest.approx(0, abs=1e-6)
    assert losses.explained_variance(-target, target).item() == pytest.approx(-3, abs=1e-5)
    assert losses.explained_variance(target, torch.ones(4, 16)).isnan()


def test_losses_agree_with_torchrl():
    """The same network, rollout and coefficients through TorchRL's ClipPPOLoss give the same parts."""
    torch.manual_seed(0)
    policy_net, value_net = torch.nn.Linear(3, 4), torch.nn.Linear(3, 1)
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(policy_net, ["observation"], ["logits"]),
        ProbabilisticTensorDictModule(
            ["logits"], ["action"], distribution_class=torch.distributions.Categorical
        ),
    )
    critic = TensorDictModule(value_net, ["observation"], ["state_value"])
    coefficients = {"clip_epsilon": 0.2, "entropy_coeff": 0.01, "critic_coeff": 0.5}
    loss_module = ClipPPOLoss(actor, critic, **coefficients, loss_critic_type="l2", normalize_advantage=True)
    observation, action = torch.randn(32, 3), torch.randint(4, (32,))
    noise, advantage, target = draws(3)
    old_log_prob = policy_net(observation).log_softmax(-1)[range(32), action].detach() + 0.1 * noise
    rows = {"observation": observation, "action": action, "action_log_prob": old_log_prob}
    rows |= {"advantage": advantage.unsqueeze(-1), "value_target": target.unsqueeze(-1)}
    data = TensorDict(rows, batch_size=[32])
    theirs = loss_module(data)
    log_probs = policy_net(observation).log_softmax(-1)
    log_ratio = log_probs[range(32), action] - old_log_prob
    policy = losses.policy_loss(log_ratio, losses.normalize(advantage), 0.2)
    # TorchRL's squared error has no factor 0.5
    value = losses.value_loss(value_net(observation).squeeze(-1), torch.zeros(32), target, None)
    torch.testing.assert_close(policy, theirs["loss_objective"], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(0.5 * 2 * value, theirs["loss_critic"], atol=1e-5, rtol=1e-5)
    clipfrac = losses.diagnostics(log_ratio, 0.2)["clipfrac"].item()
    assert clipfrac == pytest.approx(theirs["clip_fraction"].item())
    assert 0 < clipfrac < 1
