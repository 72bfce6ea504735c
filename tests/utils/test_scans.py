"""Scans over time; tests of other parts cover the segmented sums."""

import pytest
import torch

from ppo_lightning.utils.scans import LinearRecurrence, discounted_sum, episode_sums

STEPS = pytest.mark.parametrize("num_steps", [1, 2, 5, 8, 33])


@pytest.mark.parametrize("num_steps", [1, 2, 5, 8, 33, 500])
@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("gamma", [1.0, 0.8])
def test_a_discounted_sum_starts_again_after_each_end(num_steps, share, gamma):
    """The function for arrays has no discount."""
    torch.manual_seed(0)
    steps, done = torch.randn(num_steps, 4, dtype=torch.float64), torch.rand(num_steps, 4) < share
    carry = torch.randn(4, dtype=torch.float64)
    total, array_carry = carry.clone(), carry.numpy().copy()
    sums = discounted_sum(steps, done, carry, gamma)
    if gamma == 1:
        arrays = torch.from_numpy(episode_sums(steps.numpy(), done.numpy(), array_carry))
        torch.testing.assert_close(arrays, sums, atol=1e-11, rtol=0)
        torch.testing.assert_close(torch.from_numpy(array_carry), carry, atol=1e-11, rtol=0)
    for step, end, found in zip(steps, done, sums, strict=True):
        total = gamma * total + step
        torch.testing.assert_close(found, total, atol=1e-12, rtol=0)
        total = total.masked_fill(end, 0)
    torch.testing.assert_close(carry, total, atol=1e-12, rtol=0)


@STEPS
def test_a_linear_recurrence_with_constant_weight_is_a_geometric_sum(num_steps):
    weight, increment, state = 0.9, torch.tensor([[2.0, -1.0]]), torch.tensor([[3.0, 0.5]])
    ones = torch.ones(1, num_steps, 2)
    result = LinearRecurrence.apply(weight * ones, increment * ones, state)
    powers = weight ** torch.arange(1.0, num_steps + 1)[:, None]
    torch.testing.assert_close(result[0], powers * state + (1 - powers) / (1 - weight) * increment)


@STEPS
def test_the_gradients_of_a_linear_recurrence_are_those_of_finite_differences(num_steps):
    """Some weights are 0, as at the first step of an episode."""
    torch.manual_seed(0)
    weight = torch.rand(2, num_steps, 3, dtype=torch.float64)
    weight[0, num_steps // 2] = 0
    increment = torch.randn(2, num_steps, 3, dtype=torch.float64)
    state = torch.randn(2, 3, dtype=torch.float64)
    inputs = tuple(tensor.requires_grad_() for tensor in (weight, increment, state))
    assert torch.autograd.gradcheck(LinearRecurrence.apply, inputs)
