"""Losses and advantages, against closed forms, independent float64 versions and TorchRL."""

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
    rollout = TensorDict(
        {
            "state_value": columns[0],
            "next": {"state_value": columns[1], "reward": columns[2], "done": columns[3]},
        },
        batch_size=[5, 64],
    )
    rollout["next", "terminated"] = columns[4]
    module = GAE(gamma=0.97, lmbda=0.9, value_network=None, average_gae=False)
    torch.testing.assert_close(ours[0], module(rollout)["advantage"].squeeze(-1), atol=1e-5, rtol=1e-5)


def test_gae_keeps_environments_apart():
    inputs = case("truncated", num_envs=6)
    order = torch.randperm(6)
    advantage, _ = losses.gae(*inputs, 0.99, 0.95)
    permuted, _ = losses.gae(*(x[order] for x in inputs), 0.99, 0.95)
    assert torch.equal(permuted, advantage[order])


def test_gae_gives_the_last_step_a_real_advantage():
    reward, value = torch.ones(2, 9), torch.zeros(2, 9)
    never = torch.zeros(2, 9, dtype=torch.bool)
    advantage, _ = losses.gae(reward, value, value.clone(), never, never, 0.99, 0.95)
    assert (advantage[:, -1] == 1).all()


def minibatch(seed=0, size=32):
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randn(6, size, generator=generator)
    return {
        "log_prob": draws[0] * 0.3 - 1,
        "old_log_prob": draws[1] * 0.3 - 1,
        "advantage": draws[2] * 2 + 1,
        "value": draws[3],
        "old_value": draws[4],
        "target": draws[5],
    }


@pytest.mark.detail("7")
def test_normalize_gives_mean_0_and_unbiased_std_1():
    out = losses.normalize(minibatch()["advantage"]).double().numpy()
    assert abs(out.mean()) < 1e-6
    assert abs(out.std(ddof=1) - 1) < 1e-6
    assert torch.equal(losses.normalize(torch.full((4,), 3.0)), torch.zeros(4)), (
        "epsilon keeps equal advantages finite"
    )


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
        assert losses.value_loss(*arguments, None).item() == pytest.approx(
            0.5 * (value - target) ** 2, abs=1e-6
        )


def test_losses_agree_with_float64_numpy():
    batch = minibatch()
    b = {key: value.double().numpy() for key, value in batch.items()}
    ratio = np.exp(b["log_prob"] - b["old_log_prob"])
    policy = -np.minimum(b["advantage"] * ratio, b["advantage"] * np.clip(ratio, 0.8, 1.2)).mean()
    moved = b["old_value"] + np.clip(b["value"] - b["old_value"], -0.2, 0.2)
    value = 0.5 * np.maximum((b["value"] - b["target"]) ** 2, (moved - b["target"]) ** 2).mean()
    log_ratio = batch["log_prob"] - batch["old_log_prob"]
    assert losses.policy_loss(log_ratio, batch["advantage"], 0.2).item() == pytest.approx(policy, rel=1e-5)
    assert losses.value_loss(
        batch["value"], batch["old_value"], batch["target"], 0.2
    ).item() == pytest.approx(value, rel=1e-5)


@pytest.mark.detail("12")
def test_diagnostics_agree_with_float64_numpy():
    batch = minibatch()
    log_ratio = (batch["log_prob"] - batch["old_log_prob"]).double().numpy()
    out = losses.diagnostics(batch["log_prob"] - batch["old_log_prob"], 0.2)
    assert out["old_approx_kl"].item() == pytest.approx(-log_ratio.mean(), rel=1e-5)
    assert out["approx_kl"].item() == pytest.approx((np.expm1(log_ratio) - log_ratio).mean(), rel=1e-4)
    assert out["clipfrac"].item() == pytest.approx((np.abs(np.exp(log_ratio) - 1) > 0.2).mean())
    assert not any(
        value.requires_grad for value in losses.diagnostics(torch.zeros(3, requires_grad=True), 0.2).values()
    )


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
    loss_module = ClipPPOLoss(
        actor,
        critic,
        clip_epsilon=0.2,
        entropy_coeff=0.01,
        critic_coeff=0.5,
        loss_critic_type="l2",
        normalize_advantage=True,
    )
    observation, action = torch.randn(32, 3), torch.randint(4, (32,))
    batch = minibatch()
    old_log_prob = (
        policy_net(observation).log_softmax(-1)[range(32), action].detach() + 0.3 * batch["log_prob"]
    )
    data = TensorDict(
        {
            "observation": observation,
            "action": action,
            "action_log_prob": old_log_prob,
            "advantage": batch["advantage"].unsqueeze(-1),
            "value_target": batch["target"].unsqueeze(-1),
        },
        batch_size=[32],
    )
    theirs = loss_module(data)
    log_probs = policy_net(observation).log_softmax(-1)
    log_ratio = log_probs[range(32), action] - old_log_prob
    policy = losses.policy_loss(log_ratio, losses.normalize(batch["advantage"]), 0.2)
    # TorchRL's squared error has no factor 0.5
    value = losses.value_loss(value_net(observation).squeeze(-1), torch.zeros(32), batch["target"], None)
    torch.testing.assert_close(policy, theirs["loss_objective"], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(0.5 * 2 * value, theirs["loss_critic"], atol=1e-5, rtol=1e-5)
    assert losses.diagnostics(log_ratio, 0.2)["clipfrac"].item() == pytest.approx(
        theirs["clip_fraction"].item()
    )
