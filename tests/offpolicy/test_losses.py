"""Losses of the off-policy algorithms, against closed forms, loops in float64 and TorchRL."""

import math

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Bounded, Categorical
from torchrl.modules import QValueActor
from torchrl.objectives import DQNLoss

from ppo_lightning.offpolicy.c51 import DistributionHead, categorical_loss, categorical_target
from ppo_lightning.offpolicy.ddpg import DeterministicHead
from ppo_lightning.offpolicy.dqn import QHead
from ppo_lightning.offpolicy.module import td_target
from ppo_lightning.offpolicy.sac import SquashedGaussianHead, temperature_loss
from ppo_lightning.offpolicy.sac_discrete import SoftmaxHead

SUPPORT = torch.linspace(-10, 10, 51)
SPEC = Bounded(torch.tensor([-1.0, 0.0]), torch.tensor([3.0, 1.0]))


def test_only_a_termination_stops_the_bootstrap():
    target = td_target(torch.tensor([1.0, 1.0]), torch.tensor([0.0, 1.0]), torch.tensor([5.0, 5.0]), 0.9)
    assert target.tolist() == pytest.approx([5.5, 1.0])


def projected(reward, terminated, pmf, support, gamma):
    """Split each shifted atom between its neighbours, in a loop in float64."""
    reward, terminated, pmf, atoms = (x.double().numpy() for x in (reward, terminated, pmf, support))
    target = np.zeros(pmf.shape)
    spacing = (atoms[-1] - atoms[0]) / (len(atoms) - 1)
    for row, k in np.ndindex(*pmf.shape):
        shifted = reward[row] + gamma * (1 - terminated[row]) * atoms[k]
        place = (min(max(shifted, atoms[0]), atoms[-1]) - atoms[0]) / spacing
        below = min(int(place), len(atoms) - 2)
        target[row, below] += pmf[row, k] * (1 - (place - below))
        target[row, below + 1] += pmf[row, k] * (place - below)
    return target


def test_the_projection_is_that_of_the_definition_and_keeps_all_mass():
    generator = torch.Generator().manual_seed(0)
    pmf = torch.rand(64, 51, generator=generator).softmax(-1)
    reward = torch.randn(64, generator=generator) * 8
    reward[:8] = torch.arange(-4.0, 4.0) * 0.4  # on an atom, if the episode terminated
    terminated = (torch.arange(64) % 3 == 0).float()
    terminated[:8] = 1
    found = categorical_target(reward, terminated, pmf, SUPPORT, 0.97)
    assert found.sum(-1).numpy() == pytest.approx(np.ones(64), abs=1e-5)
    expected = projected(reward, terminated, pmf, SUPPORT, 0.97)
    assert found.numpy() == pytest.approx(expected, abs=1e-4)  # places in float32


def test_the_cross_entropy_is_least_at_the_target_and_finite_at_zero():
    target = torch.tensor([[0.25, 0.75]])
    entropy = -sum(p * math.log(p) for p in (0.25, 0.75))
    assert categorical_loss(target, target).item() == pytest.approx(entropy)
    worst = categorical_loss(torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]]))
    assert worst.item() == pytest.approx(-math.log(1e-5), rel=1e-5)


def test_noise_on_actions_is_scaled_and_the_sum_clipped():
    raw = torch.tensor([[-0.5, 0.0], [0.95, 0.0]]).atanh()  # squashed: 0.0 and 2.9 of -1 to 3; 0.5 of 0 to 1
    found = DeterministicHead(1, SPEC).action(raw, torch.tensor([[0.1, 0.1], [0.4, -0.2]]))
    torch.testing.assert_close(found, torch.tensor([[0.2, 0.55], [3.0, 0.4]]))


def test_the_temperature_rises_while_the_entropy_is_too_small():
    log_alpha = torch.tensor(math.log(0.05), requires_grad=True)
    temperature_loss(log_alpha, torch.tensor([[1.0], [3.0]]), 1.0, target_entropy=-1.0).backward()
    assert log_alpha.grad.item() == pytest.approx(-0.05 * (2.0 - 1.0))


def test_the_td_loss_is_that_of_torchrl():
    network = torch.nn.Linear(3, 4)
    actor = QValueActor(network, spec=Categorical(4), in_keys=["observation"], action_space="categorical")
    theirs = DQNLoss(actor, loss_function="l2", delay_value=True, double_dqn=False)
    theirs.make_value_estimator(gamma=0.9)
    torch.nn.init.normal_(next(iter(theirs.target_value_network_params.values(True, True))).data)
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    action = torch.randint(4, (32,), generator=generator)
    terminated = torch.arange(32) % 4 == 0
    following = {
        "observation": draw(32, 3),
        "reward": draw(32, 1),
        "terminated": terminated[:, None],
        "done": terminated[:, None] | (torch.arange(32) % 5 == 0)[:, None],  # time limits bootstrap
    }
    batch = TensorDict({"observation": draw(32, 3), "action": action, "next": following}, [32])
    with torch.no_grad(), theirs.target_value_network_params.to_module(theirs.value_network):
        next_value = theirs.value_network(batch["next"].clone())["action_value"].amax(-1)
    target = td_target(following["reward"][:, 0], terminated.float(), next_value, 0.9)
    values = network(batch["observation"]).gather(1, action[:, None])[:, 0]
    torch.testing.assert_close(torch.nn.functional.mse_loss(values, target), theirs(batch)["loss"])


def test_the_squashed_density_integrates_to_one():
    head = SquashedGaussianHead(1, Bounded(-1.0, 3.0, shape=(1,))).double()
    features = torch.zeros(20001, 1, dtype=torch.float64)
    noise = torch.linspace(-8, 8, 20001, dtype=torch.float64)[:, None]
    with torch.no_grad():
        head.linear.bias[:] = torch.tensor([0.3, 0.1])
        action, log_prob = head.policy(features, noise)
    assert torch.trapezoid(log_prob.exp(), action[:, 0]).item() == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("head", [DeterministicHead, SquashedGaussianHead])
def test_continuous_actions_stay_within_their_bounds_and_zero_noise_is_greedy(head):
    head, features = head(8, SPEC), torch.randn(500, 8)
    noise = head.noise((500,), torch.Generator().manual_seed(0))
    steps = []
    for head.exploration in (0.0, 0.5, None):
        steps.append(head.choose(features, noise))
        with torch.inference_mode():
            arrays = head.array_sampler()(head.linear(features).numpy(), noise.numpy())
        torch.testing.assert_close(torch.from_numpy(arrays), steps[-1])
    for actions in steps:
        assert (actions >= SPEC.space.low).all() and (actions <= SPEC.space.high).all()
    greedy = head.choose(features, None)
    torch.testing.assert_close(greedy, steps[0])
    assert not torch.allclose(greedy, steps[1])
    # Uniformly random: mean and standard deviation of each component.
    low, high = SPEC.space.low, SPEC.space.high
    torch.testing.assert_close(steps[2].mean(0), (low + high) / 2, atol=0.2, rtol=0.1)
    torch.testing.assert_close(steps[2].std(0), (high - low) / math.sqrt(12), atol=0.05, rtol=0.1)


@pytest.mark.parametrize("support", [None, SUPPORT])
def test_epsilon_is_the_share_of_random_actions_and_arrays_agree(support):
    spec, features = Categorical(4, shape=()), torch.randn(4000, 8)
    head = QHead(8, spec) if support is None else DistributionHead(8, spec, support)
    generator = torch.Generator().manual_seed(0)
    noise = [head.noise((4000,), generator) for head.exploration in (0.0, 0.3)]
    best = head.logits(features, None).argmax(-1)
    chosen = [head.choose(features, rows) for rows in noise]
    assert torch.equal(chosen[0], best)
    assert torch.equal(head.choose(features, torch.zeros(4000, 4)), best)
    assert (chosen[1] != best).float().mean().item() == pytest.approx(0.3 * 3 / 4, abs=0.03)
    explores = noise[1].any(1)
    explored = chosen[1][explores].bincount(minlength=4) / explores.sum()
    torch.testing.assert_close(explored, torch.full((4,), 0.25), atol=0.05, rtol=0)
    if support is None:
        head.linear.bias.data = 1e8 * torch.arange(4.0)  # values of any size
        explored = head.choose(features, noise[1])[explores].bincount(minlength=4) / explores.sum()
        torch.testing.assert_close(explored, torch.full((4,), 0.25), atol=0.05, rtol=0)
        head.linear.bias.data.zero_()
        arrays = head.array_sampler()(head.linear(features).detach().numpy(), noise[1].numpy())
        assert np.array_equal(arrays, chosen[1].numpy())
        soft, table = SoftmaxHead(8, spec), torch.tensor([0.1, 0.2, 0.3, 0.4])
        soft.linear.weight.data.zero_()
        soft.linear.bias.data = table.log()
        for soft.exploration, shares in ((1.0, table), (None, torch.full((4,), 0.25))):
            drawn = soft.choose(features, soft.noise((4000,), generator)).bincount(minlength=4) / 4000
            torch.testing.assert_close(drawn, shares, atol=0.03, rtol=0)
    mask = torch.arange(4).expand(4000, 4) != 2
    assert not (head.choose(features, noise[1], mask) == 2).any()
