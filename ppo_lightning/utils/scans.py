"""Scans over time."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

MOST_SEGMENTS = 16  # between episode ends: more of them, one after the other, take longer than a scan


def add_following(sums: Tensor, weight: Tensor) -> None:
    """Solve ``x_t = sums_t + weight_t * x_{t+1}`` in place, with ``x_{T-1} = sums_{T-1}``.

    The increments ``sums`` [T, N] are overwritten. ``weight`` is that of the following step, [T - 1, N].
    After iteration k, a row holds the sum over the next 2^k rows: log2(T) vector operations replace a loop.
    """
    shift = 1
    while shift < len(sums):
        sums[:-shift] += weight * sums[shift:]
        weight = weight[:-shift] * weight[shift:]
        shift *= 2


def discounted_sum(steps: Tensor, done: Tensor, carry: Tensor, gamma: float = 1.0) -> Tensor:
    """Compute the discounted sum up to each step, [T, N] float64, restarted after each episode end.

    Args:
        steps: Increment of each step, [T, N].
        done: Whether the episode ends at each step, [T, N] bool.
        carry: Sum before the first step, [N] float64; overwritten with the sum to pass to the next call. Its
            device computes.
        gamma: Discount per step. 1: the cumulative sum.
    """
    done = done.to(carry.device)
    backwards = steps.to(carry.device).flip(0).double()
    backwards[-1] += gamma * carry
    # Reversed time turns the scan into a sum over past steps.
    add_following(backwards, gamma * (~done[:-1]).flip(0).double())
    sums = backwards.flip(0)
    carry.copy_(sums[-1].masked_fill(done[-1], 0))
    return sums


def episode_sums(steps: np.ndarray, done: np.ndarray, carry: np.ndarray) -> np.ndarray:
    """Compute the arrays that :func:`discounted_sum` computes without a discount.

    A rollout of ten steps takes a sixth of the time.
    """
    ends = (np.flatnonzero(done.any(axis=1)) + 1).tolist()
    if len(ends) > MOST_SEGMENTS:
        tensor = torch.from_numpy
        return discounted_sum(tensor(steps), tensor(done), tensor(carry)).numpy()
    sums = np.empty(steps.shape)
    start = 0
    for end in dict.fromkeys((*ends, len(steps))):
        np.cumsum(steps[start:end], axis=0, out=sums[start:end])
        sums[start:end] += carry
        carry[:] = sums[end - 1]
        carry[done[end - 1]] = 0
        start = end
    return sums


def tensor_episode_sums(steps: Tensor, done: Tensor, carry: Tensor) -> Tensor:
    """Compute :func:`discounted_sum` without a discount, on the CPU by :func:`episode_sums`."""
    if carry.device.type != "cpu":
        return discounted_sum(steps, done, carry)
    return torch.from_numpy(episode_sums(*(tensor.numpy(force=True) for tensor in (steps, done, carry))))


class LinearRecurrence(torch.autograd.Function):
    """Solve ``h_t = weight_t * h_{t-1} + increment_t`` with ``h_{-1} = state``.

    Forward and backward pass take log2(T) vector operations each. A compiler can trace both.
    """

    @staticmethod
    def forward(weight: Tensor, increment: Tensor, state: Tensor) -> Tensor:
        """Return h after each step for weights and increments, each [n, T, H], and the state before, [n, H].

        With a weight of 0, a step does not depend on earlier steps.
        """
        first = torch.addcmul(increment[:, 0], weight[:, 0], state)
        return add_preceding(torch.cat([first[:, None], increment[:, 1:]], dim=1), weight[:, 1:])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Keep what the backward pass needs."""
        weight, _, state = inputs
        ctx.save_for_backward(weight, state, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients with respect to the inputs, by the same recurrence in reversed time."""
        weight, state, output = ctx.saved_tensors
        grad = add_preceding(grads[0].flip(1), weight[:, 1:].flip(1)).flip(1)
        previous = torch.cat([state[:, None], output[:, :-1]], dim=1)
        return grad * previous, grad, grad[:, 0] * weight[:, 0]


def add_preceding(sums: Tensor, weight: Tensor) -> Tensor:
    """Solve ``x_t = sums_t + weight_{t-1} * x_{t-1}`` with ``x_0 = sums_0``, as :func:`add_following` does.

    The increments ``sums`` are [n, T, H], and the weights of steps in the next one [n, T - 1, H].
    New tensors instead of operations in place make a compiled graph 1.4 to 1.8 times as fast on a CPU.
    """
    shift = 1
    while shift < sums.shape[1]:
        added = torch.addcmul(sums[:, shift:], weight, sums[:, :-shift])
        sums = torch.cat([sums[:, :shift], added], dim=1)
        weight = weight[:, shift:] * weight[:, :-shift]
        shift *= 2
    return sums
