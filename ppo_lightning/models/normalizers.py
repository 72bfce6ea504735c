"""Running statistics of observations and rewards.

The statistics are buffers of the model, so that every checkpoint has them. They are the moments of all data,
merged batch by batch in float64. Unlike Gymnasium's ``RunningMeanStd``, they include no pseudo-observations:
after one batch they are the moments of this batch.

They are merged as summaries, tensors [3, ...] of size, mean and sum of squared deviations.

Source: Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances"
(1979).
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ppo_lightning.spaces.entries import Rows
from ppo_lightning.spaces.rows import EXACT
from ppo_lightning.utils import collectives
from ppo_lightning.utils.scans import discounted_sum

EPSILON = 1e-8  # added to a variance before the square root
CLIP = 10.0  # as in all reference implementations
PART = 2**20  # numbers that `merge_rows` merges at once


class Moments(nn.Module):
    """Count, mean and sum of squared deviations of all data, whose entries have a shape."""

    count: Tensor
    mean: Tensor
    m2: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("m2", torch.zeros(shape, dtype=torch.float64))

    def _apply(self, fn: Any, recurse: bool = True) -> "Moments":
        """Move to another device that has float64 (not MPS), but never to another precision."""
        for name, buffer in self.named_buffers(recurse=False):
            device = fn(torch.empty(0, device=buffer.device)).device
            if device.type != "mps":
                setattr(self, name, buffer.to(device))
        return self

    @property
    def std(self) -> Tensor:
        """Standard deviation, including epsilon. It is 1 before any data."""
        return deviation(self.count, self.m2)

    @property
    def summary(self) -> Tensor:
        """The statistics as a summary, [3, *shape] float64."""
        return torch.stack([self.count.expand_as(self.mean), self.mean, self.m2])

    def store(self, summary: Tensor) -> None:
        """Store a summary [3, *shape]."""
        self.count.copy_(summary[0].max())
        self.mean.copy_(summary[1])
        self.m2.copy_(summary[2])

    def merge(self, increment: Tensor) -> None:
        """Merge a summary [3, *shape] of each rank, in the order of the ranks. This is a collective."""
        self.store(functools.reduce(merged, collectives.gather(increment), self.summary))


def deviation(count: Tensor, m2: Tensor) -> Tensor:
    """Return the standard deviation, including epsilon, of a size and a sum of squared deviations."""
    return torch.where(count > 0, m2 / count.clamp(min=1) + EPSILON, 1.0).sqrt()


def summary_of(rows: Tensor, mask: Tensor | None = None) -> Tensor:
    """Summarize rows [B, *shape] without a synchronization, [3, *shape] float64.

    ``mask`` selects the rows, [B] or [B, *shape] bool. None: all.
    """
    rows = rows.double()
    if not len(rows):
        return rows.new_zeros(3, *rows.shape[1:])
    if mask is None:
        variance, mean = torch.var_mean(rows, dim=0, correction=0)
        return torch.stack([torch.full_like(mean, len(rows)), mean, variance * len(rows)])
    weight = mask.double().reshape(*mask.shape, *[1] * (rows.ndim - mask.ndim))
    count = weight.sum(dim=0).expand_as(rows[0])
    mean = (rows * weight).sum(dim=0) / count.clamp(min=1)
    return torch.stack([count, mean, ((rows - mean).square() * weight).sum(dim=0)])


def merged(one: Tensor, other: Tensor) -> Tensor:
    """Merge two summaries, each [3, *shape]. A size may be 0."""
    # With sizes a and b, n = a + b and delta = mean_b - mean_a:
    # mean = mean_a + delta * b / n,  M2 = M2_a + M2_b + delta^2 * a * b / n
    size = one[0] + other[0]
    share = other[0] / size.clamp(min=1)
    delta = other[1] - one[1]
    return torch.stack([size, one[1] + delta * share, one[2] + other[2] + delta.square() * one[0] * share])


def merge_rows(moments: Moments, rows: Tensor) -> None:
    """Merge rows of all ranks into statistics.

    With several ranks this is a collective. The number of rows [B, *shape] may differ between ranks.
    """
    local = moments.mean.new_zeros(3, *moments.mean.shape)
    rows_at_once = max(1, PART // max(1, moments.mean.numel()))  # as float64, pictures take eightfold memory
    for part in rows.split(rows_at_once) if len(rows) else ():
        local = merged(local, summary_of(part.to(local.device)))
    moments.merge(local)


class Running:
    """Count, mean and sum of squared deviations, merged in place: arrays, or tensors."""

    def __init__(self, count: float, mean: Any, m2: Any) -> None:
        self.count = count
        self.mean = mean
        self.m2 = m2

    def merge(self, size: float, mean: Any, m2: Any) -> None:
        """Merge a batch, see :func:`summarize`."""
        # `merged`, in place.
        old_count = self.count
        self.count = old_count + size
        delta = mean - self.mean
        self.mean += delta * (size / self.count)
        delta *= delta
        delta *= old_count * size / self.count
        self.m2 += delta
        if size > 1:  # for a single row, m2 is a number, 0
            self.m2 += m2

    @property
    def std(self) -> Any:
        """Standard deviation, including epsilon. It is 1 before any data."""
        return (self.m2 / self.count + EPSILON) ** 0.5 if self.count else 1.0

    @property
    def summary(self) -> Tensor:
        """The values as a summary, [3, *shape] float64."""
        mean, m2 = torch.as_tensor(self.mean), torch.as_tensor(self.m2)
        return torch.stack([torch.full_like(mean, self.count), mean, m2])


class CollectorMoments(Running):
    """A collector's copy of the statistics of observations, merged in place at each step.

    With several ranks, they are the statistics of all ranks up to the last rollout, and of this rank since
    then. The statistics of the module change only with :meth:`store`. On a CPU, NumPy's ``arrays`` take half
    of the time of tensors on the device of the statistics (8 instead of 17 microseconds).
    """

    def __init__(self, normalizer: "ObservationNormalizer", arrays: bool) -> None:
        self._normalizer = normalizer
        self._arrays = arrays
        buffers = [buffer.detach().clone() for buffer in (normalizer.mean, normalizer.m2)]
        super().__init__(normalizer.count.item(), *(x.numpy(force=True) if arrays else x for x in buffers))
        # Accumulated by itself: after many steps, the difference of two totals has lost its digits.
        self._increment = Running(0, self.mean * 0, self.m2 * 0) if collectives.world_size() > 1 else None

    def store(self) -> None:
        """Store the values in the normalizer, merged over all ranks. This is a collective."""
        if self._increment is None:
            self._normalizer.store(self.summary)
        else:
            self._normalizer.merge(self._increment.summary)

    def normalize(
        self, batches: Sequence[Rows], update: bool = True, counted: Sequence[np.ndarray] = ()
    ) -> list[Rows]:
        """Normalize batches of raw observations, to float32 tensors on their device, or float64 arrays.

        Args:
            batches: Observations of a step and optionally those after resets, each [B, ...].
            update: Merge each batch into the statistics before normalizing it, as CleanRL's wrappers do.
            counted: Which rows of each batch are merged, [B] bool. Empty: all.
        """
        # detail 28
        normalized = []
        for i, batch in enumerate(batches):
            rows: Any = batch[counted[i]] if counted else batch
            if update and len(rows):
                summary = summarize(rows if self._arrays else rows.to(self.mean.device))
                self.merge(*summary)
                if self._increment is not None:
                    self._increment.merge(*summary)
            normalized.append(self._normalizer.normalize_by(self.mean, self.std, batch))
        return normalized


def summarize(batch: Any) -> tuple[float, Any, Any]:
    """Return size, mean and sum of squared deviations of rows [B, ...], an array or a tensor."""
    size = len(batch)
    if isinstance(batch, Tensor):
        return size, *summary_of(batch)[1:]
    if size < 2:
        return size, batch[0] if size else 0.0, 0.0
    mean = np.add.reduce(batch, axis=0, dtype=np.float64) / size
    difference = batch - mean
    return size, mean, np.add.reduce(difference * difference, axis=0)


class ObservationNormalizer(Moments):
    """Normalization of observations by their running mean and standard deviation, with clipping.

    Args:
        shape: Shape of one observation.
        clip: Maximum absolute value of a normalized observation.
        leave: Columns of rows [D] that are excluded from normalization.

    Example:
        >>> normalizer = ObservationNormalizer((2,))
        >>> normalizer(torch.tensor([[20.0, -0.5]])).tolist()
        [[10.0, -0.5]]
    """

    def __init__(self, shape: tuple[int, ...], clip: float = CLIP, leave: Sequence[slice] = ()) -> None:
        super().__init__(shape)
        self.clip = clip
        self.leave = leave

    def forward(self, observation: Tensor) -> Tensor:
        """Normalize raw observations [B, ...] by the current statistics, to float32 on their device."""
        return self.normalize_by(self.mean, self.std, observation)

    def normalize_by(self, mean: Any, std: Any, observation: Rows) -> Rows:
        """Normalize raw observations [B, ...] by other statistics, tensors to float32 on their device."""
        normalized: Any
        if isinstance(observation, Tensor):
            raw = observation.to(mean.device).double()
            normalized = ((raw - mean) / std).clamp(-self.clip, self.clip).float().to(observation.device)
        else:
            normalized = observation - mean
            normalized /= std
            # detail 29
            np.minimum(np.maximum(normalized, -self.clip, out=normalized), self.clip, out=normalized)
        for excluded in self.leave:
            normalized[..., excluded] = observation[..., excluded]
        return normalized

    @property
    def is_beyond_float32(self) -> bool:
        """Whether float32 would round raw observations."""
        return bool((self.mean.abs() + self.clip * self.std).max() > EXACT)

    def raw(self, normalized: Tensor) -> Tensor:
        """Return the raw observations of normalized ones."""
        raw = self.mean + self.std * normalized
        for excluded in self.leave:
            raw[..., excluded] = normalized[..., excluded]
        return raw


class RewardScaler(Moments):
    """Division of rewards by the running standard deviation of the discounted return, with clipping.

    Args:
        gamma: Discount factor of PPO's returns.
        clip: Maximum absolute value of a scaled reward.

    Example:
        >>> scaler = RewardScaler(gamma=0.99)
        >>> scaler.std.item()
        1.0
    """

    def __init__(self, gamma: float, clip: float = CLIP) -> None:
        super().__init__(())
        self.gamma = gamma
        self.clip = clip

    def scale(self, reward: Tensor, done: Tensor, discounted: Tensor, weight: Tensor | None = None) -> Tensor:
        """Scale rewards, after merging the discounted returns of each step of all ranks into the statistics.

        With several ranks this is a collective.

        Args:
            reward: Rewards, [T, N].
            done: ``terminated | truncated``, [T, N] bool.
            discounted: Discounted return of each running episode before the first step, [N] float64. Updated
                in place. Its device computes.
            weight: 0 for steps that enter no statistics, [T, N]. None: all do. All ranks pass it, or none.

        Returns:
            Scaled rewards, [T, N] float64.
        """
        device = discounted.device
        # detail 30
        sums = discounted_sum(reward, done, discounted, self.gamma)
        mask = None if weight is None else weight.T.to(device)
        steps = summary_of(sums.T, mask)  # one summary each, [3, T]
        size, mean, m2 = functools.reduce(merged, collectives.gather(steps))
        # All merges at once: `merged` with sums over the steps so far.
        count, old_mean, old_m2 = self.summary.to(device)
        counts = count + size.cumsum(0)
        means = (count * old_mean + (size * mean).cumsum(0)) / counts.clamp(min=1)
        delta = mean - torch.cat([old_mean[None], means[:-1]])
        m2s = old_m2 + (m2 + delta.square() * (counts - size) * size / counts.clamp(min=1)).cumsum(0)
        self.store(torch.stack([counts[-1], means[-1], m2s[-1]]))
        # detail 31
        return (reward.to(device) / deviation(counts, m2s)[:, None]).clamp(-self.clip, self.clip)
