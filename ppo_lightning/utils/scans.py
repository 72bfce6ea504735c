"""What is counted along episodes, [T, N] at a time."""

from typing import TypeVar

import numpy as np
from torch import Tensor

Rows = TypeVar("Rows", np.ndarray, Tensor)


def add_following(sums: Rows, weight: Rows) -> None:
    """Solves ``x_t = sums_t + weight_t * x_{t+1}`` in place, from ``x_{T-1} = sums_{T-1}``.

    By doubling: after step k, a row holds the sum over the next 2^k rows. That is log2(T) vector operations instead of a
    Python loop over T.

    Args:
        sums: What each step adds, [T, N]; becomes x.
        weight: [T - 1, N].
    """
    shift = 1
    while shift < len(sums):
        sums[:-shift] += weight * sums[shift:]
        weight = weight[:-shift] * weight[shift:]
        shift *= 2


def running_sum(steps: np.ndarray, done: np.ndarray, carry: np.ndarray) -> np.ndarray:
    """Sums over time, starting again after each end of an episode.

    Args:
        steps: What each step adds, [T, N].
        done: [T, N] bool.
        carry: The sum before the first step, [N]; replaced by the one to carry into the next call.

    Returns:
        The sum up to and including each step, [T, N].
    """
    total = np.cumsum(steps, axis=0, dtype=np.float64) + carry
    ends = np.maximum.accumulate(np.where(done, np.arange(len(done))[:, None], -1), axis=0)
    before = np.concatenate([np.full((1, len(carry)), -1), ends[:-1]])  # the last end before each step
    total -= np.where(before < 0, 0, np.take_along_axis(total, before, axis=0))
    carry[:] = np.where(done[-1], 0, total[-1])
    return total


def before_breaks(broken: np.ndarray, done: np.ndarray) -> np.ndarray:
    """Returns which steps belong to an episode that broke, from the first of them in the rollout to the one that failed.

    Args:
        broken: The steps that failed, [T, N] bool.
        done: The ends of episodes, those steps among them, [T, N] bool.
    """
    marked = broken.copy()
    for t in range(len(marked) - 2, -1, -1):
        marked[t] |= marked[t + 1] & ~done[t]
    return marked
