"""Segmented scans over time, on arrays and tensors [T, N]."""

from typing import TypeVar

import numpy as np
from torch import Tensor

Rows = TypeVar("Rows", np.ndarray, Tensor)


def add_following(sums: Rows, weight: Rows) -> None:
    """Solve ``x_t = sums_t + weight_t * x_{t+1}`` in place, with ``x_{T-1} = sums_{T-1}``.

    The method is doubling: after iteration k, a row holds the sum over the next 2^k rows.
    This takes log2(T) vector operations instead of a Python loop over T.

    Args:
        sums: Increment of each step, [T, N]; overwritten with x.
        weight: Weight of the following step, [T - 1, N].
    """
    shift = 1
    while shift < len(sums):
        sums[:-shift] += weight * sums[shift:]
        weight = weight[:-shift] * weight[shift:]
        shift *= 2


def running_sum(steps: np.ndarray, done: np.ndarray, carry: np.ndarray) -> np.ndarray:
    """Compute the cumulative sum over time, restarted after each episode end.

    Args:
        steps: Increment of each step, [T, N].
        done: Whether the episode ends at each step, [T, N] bool.
        carry: Sum before the first step, [N]; overwritten with the sum to pass to the next call.

    Returns:
        Sum up to and including each step, [T, N].
    """
    total = np.cumsum(steps, axis=0, dtype=np.float64) + carry
    ends = np.maximum.accumulate(np.where(done, np.arange(len(done))[:, None], -1), axis=0)
    last_end = np.concatenate(
        [np.full((1, len(carry)), -1), ends[:-1]]
    )  # the last episode end before each step
    total -= np.where(last_end < 0, 0, np.take_along_axis(total, last_end, axis=0))
    carry[:] = np.where(done[-1], 0, total[-1])
    return total


def discounted_sum(steps: Tensor, done: Tensor, carry: Tensor, gamma: float = 1.0) -> Tensor:
    """Compute the discounted sum over past steps, restarted after each episode end.

    The device is that of ``carry``.

    Args:
        steps: Increment of each step, [T, N].
        done: Whether the episode ends at each step, [T, N] bool.
        carry: Sum before the first step, [N] float64; overwritten with the sum to pass to the next call.
        gamma: Discount per step. 1: the cumulative sum.

    Returns:
        Sum up to and including each step, [T, N] float64.
    """
    done = done.to(carry.device)
    backwards = steps.to(carry.device).flip(0).double()
    backwards[-1] += gamma * carry
    # Reversed time turns the scan into a sum over past steps.
    add_following(backwards, gamma * (~done[:-1]).flip(0).double())
    sums = backwards.flip(0)
    carry.copy_(sums[-1].masked_fill(done[-1], 0))
    return sums


def before_breaks(broken: np.ndarray, done: np.ndarray) -> np.ndarray:
    """Mark the steps of episodes that end in a failure, up to and including the failed step.

    Args:
        broken: Whether each step failed, [T, N] bool.
        done: Whether the episode ends at each step, failures included, [T, N] bool.

    Returns:
        Whether each step belongs to an episode that fails in this rollout, [T, N] bool.
    """
    marked = broken.copy()
    for t in range(len(marked) - 2, -1, -1):
        marked[t] |= marked[t + 1] & ~done[t]
    return marked
