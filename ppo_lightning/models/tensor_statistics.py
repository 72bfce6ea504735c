"""Running statistics on tensors, on the device of the statistics, with the numbers of the NumPy versions."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ppo_lightning.models.normalizers import EPSILON, Moments, ObservationNormalizer, RewardScaler
from ppo_lightning.utils import collectives
from ppo_lightning.utils.scans import discounted_sum

PART = 2**20  # numbers that are merged at once
TensorSummary = tuple[float, Tensor, Tensor]  # size, mean, sum of squared deviations


class TensorMoments:
    """Tensor version of :class:`~ppo_lightning.models.normalizers.ArrayMoments`, for observations.

    Args:
        normalizer: Normalizer whose statistics are copied. They lie on its device.

    Example:
        >>> normalizer = ObservationNormalizer((1,))
        >>> moments = TensorMoments(normalizer)
        >>> moments.update_and_normalize([torch.tensor([[1.0], [3.0]])])
        [tensor([[-1.],
                [ 1.]])]
        >>> moments.store()
        >>> normalizer.mean.item()
        2.0
    """

    def __init__(self, normalizer: ObservationNormalizer) -> None:
        self.normalizer = normalizer
        self.count = normalizer.count.item()
        self.mean = normalizer.mean.clone()
        self.m2 = normalizer.m2.clone()

    def store(self) -> None:
        """Store the statistics in the normalizer."""
        self.normalizer.count.fill_(self.count)
        self.normalizer.mean.copy_(self.mean)
        self.normalizer.m2.copy_(self.m2)

    def merge(self, size: float, mean: Tensor, m2: Tensor) -> None:
        """Merge a batch, given its size, mean and sum of squared deviations."""
        old_count = self.count
        self.count = old_count + size
        delta = mean - self.mean
        self.mean.add_(delta, alpha=size / self.count)
        self.m2.add_(m2).addcmul_(delta, delta, value=old_count * size / self.count)

    def normalize(self, observation: Tensor) -> Tensor:
        """Normalize raw observations [B, ...] to float32 on their device."""
        std = self.m2.div(self.count).add_(EPSILON).sqrt_()
        return self.normalizer.normalize_by(self.mean, std, observation)

    def update_and_normalize(self, batches: Sequence[Tensor]) -> list[Tensor]:
        """Merge each batch of all ranks into the statistics, then normalize it.

        With several ranks this is a collective, as
        :meth:`~ppo_lightning.models.normalizers.ObservationNormalizer.normalize_arrays` is.

        Args:
            batches: Raw observations, each [B, ...]: those of a step and optionally those after resets.

        Returns:
            Normalized batches, each [B, ...] float32 on its device.
        """
        summaries = summarize([batch.to(self.mean.device).double() for batch in batches])
        normalized = []
        for i, summary in enumerate(summaries):
            self.merge(*summary)
            if i < len(batches):
                normalized.append(self.normalize(batches[i]))
        return normalized


def update_each(moments: Moments, batches: Tensor) -> Tensor:
    """Merge batches of scalars of all ranks, one after the other.

    Args:
        moments: Statistics of scalars, updated in place.
        batches: Batches of this rank, [T, B] float64 on the device of the statistics.

    Returns:
        Standard deviation after each batch, [T].
    """
    variances, means = torch.var_mean(batches, dim=1, correction=0)
    gathered = collectives.gather(torch.stack([means, variances * batches.shape[1]]))  # [W, 2, T]
    size = batches.shape[1] * len(gathered)
    means = gathered[:, 0].mean(dim=0)
    between = batches.shape[1] * (gathered[:, 0] - means).square().sum(dim=0)
    old_counts = moments.count + size * torch.arange(len(batches), device=batches.device)
    counts = old_counts + size
    new_means = (moments.mean * moments.count + size * means.cumsum(0)) / counts
    delta = means - torch.cat([moments.mean[None], new_means[:-1]])
    increments = gathered[:, 1].sum(dim=0) + between + delta.square() * (old_counts * size / counts)
    m2 = moments.m2 + increments.cumsum(0)
    moments.count.copy_(counts[-1])
    moments.mean.copy_(new_means[-1])
    moments.m2.copy_(m2[-1])
    return (m2 / counts + EPSILON).sqrt()


def merge_rows(moments: Moments, rows: Tensor) -> None:
    """Merge rows of all ranks into statistics.

    With several ranks this is a collective. The number of rows may differ between ranks.

    Args:
        moments: Statistics, updated in place.
        rows: Rows of this rank, [B, *shape].
    """
    local = moments.mean.new_zeros(3, *moments.mean.shape)
    rows_at_once = max(1, PART // max(1, moments.mean.numel()))  # as float64, pictures take eightfold memory
    for part in rows.split(rows_at_once) if len(rows) else ():
        local = merged(local, summary_of(part.to(local.device)))
    total = stacked(moments)
    for summary in collectives.gather(local):
        total = merged(total, summary)
    store(moments, total)


def stacked(moments: Moments) -> Tensor:
    """Return statistics as a summary, [3, *shape] float64: count, mean, sum of squared deviations."""
    return torch.stack([moments.count.expand_as(moments.mean), moments.mean, moments.m2])


def store(moments: Moments, summary: Tensor) -> None:
    """Store a summary [3, *shape] in statistics."""
    moments.count.copy_(summary[0].max())
    moments.mean.copy_(summary[1])
    moments.m2.copy_(summary[2])


def summary_of(rows: Tensor, mask: Tensor | None = None) -> Tensor:
    """Summarize rows without a synchronization, [3, *shape] float64.

    Args:
        rows: Rows, [B, *shape].
        mask: Rows to summarize, [B] bool. None: all.
    """
    rows = rows.double()
    if mask is None:
        variance, mean = torch.var_mean(rows, dim=0, correction=0)
        return torch.stack([torch.full_like(mean, len(rows)), mean, variance * len(rows)])
    weight = mask.double().reshape(-1, *[1] * (rows.ndim - 1))
    count = weight.sum(dim=0).expand_as(rows[0])
    mean = (rows * weight).sum(dim=0) / count.clamp(min=1)
    return torch.stack([count, mean, ((rows - mean).square() * weight).sum(dim=0)])


def merged(one: Tensor, other: Tensor) -> Tensor:
    """Merge two summaries, each [3, *shape]: size, mean, sum of squared deviations. A size may be 0."""
    size = one[0] + other[0]
    share = other[0] / size.clamp(min=1)
    delta = other[1] - one[1]
    return torch.stack([size, one[1] + delta * share, one[2] + other[2] + delta.square() * one[0] * share])


def summarize(batches: Sequence[Tensor]) -> list[TensorSummary]:
    """Summarize a step's batches over all ranks.

    With several ranks this is a collective: a rank without resets participates, too.

    Args:
        batches: One or two batches of this rank, [B, ...] float64.

    Returns:
        One summary per batch, the second one only if a rank has it.
    """
    local: list[TensorSummary] = []
    for batch in batches:
        variance, mean = torch.var_mean(batch, dim=0, correction=0)
        local.append((len(batch), mean, variance * len(batch)))
    if collectives.world_size() == 1:
        return local
    flat = batches[0].new_zeros(2, 3, *batches[0].shape[1:])
    for row, summary in zip(flat, local, strict=False):
        for target, value in zip(row, summary, strict=True):
            target[...] = value
    sizes, means, m2s = collectives.gather(flat).unbind(dim=2)  # each [W, 2, ...]
    totals = sizes.sum(dim=0)
    pooled = (sizes * means).sum(dim=0) / totals.clamp(min=1)
    deviations = (m2s + sizes * (means - pooled).square()).sum(dim=0)
    counts = totals.flatten(1)[:, 0].tolist()
    return [(counts[i], pooled[i], deviations[i]) for i in range(2) if counts[i]]


def scale(scaler: RewardScaler, reward: Tensor, done: Tensor, discounted: Tensor) -> Tensor:
    """Scale rewards, after merging the discounted returns of each step into the statistics.

    This is the tensor version of :meth:`RewardScaler.scale_array`.

    Args:
        scaler: Statistics, updated in place.
        reward: Rewards, [T, N].
        done: ``terminated | truncated``, [T, N] bool.
        discounted: Discounted return of each running episode before the first step, [N] float64 on the device
            of the statistics. Updated in place.

    Returns:
        Scaled rewards, [T, N] float64 on the device of the statistics.
    """
    std = update_each(scaler, discounted_sum(reward, done, discounted, scaler.gamma))
    return (reward.to(std.device) / std[:, None]).clamp(-scaler.clip, scaler.clip)
