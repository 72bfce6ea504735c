"""Running statistics on tensors, on the device of the statistics, with the numbers of the NumPy versions."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ppo_lightning.models.normalizers import EPSILON, Moments, ObservationNormalizer, RewardScaler
from ppo_lightning.utils import collectives
from ppo_lightning.utils.scans import discounted_sum

TensorSummary = tuple[Tensor | float, Tensor, Tensor]  # size, mean, sum of squared deviations


def merge(moments: Moments, size: Tensor | float, mean: Tensor, m2: Tensor) -> None:
    """Merge a batch, given its size, mean and sum of squared deviations.

    Args:
        moments: Statistics, updated in place.
        size: Number of rows. It may be 0 only if the statistics have data.
        mean: Mean of the rows.
        m2: Sum of squared deviations of the rows.
    """
    old_count = moments.count.clone()
    moments.count += size
    delta = mean - moments.mean
    moments.mean += delta * (size / moments.count)
    moments.m2 += m2 + delta.square() * (old_count * size / moments.count)


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


def summarize(batches: Sequence[Tensor]) -> list[TensorSummary]:
    """Summarize a step's batches over all ranks.

    With several ranks this is a collective: a rank without resets participates, too.

    Args:
        batches: One or two batches of this rank, [B, ...] float64.

    Returns:
        One summary per batch on a single rank. With several ranks two, of which the second may be empty.
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
    return [(totals[i].flatten()[0], pooled[i], deviations[i]) for i in range(2)]


def update_and_normalize(normalizer: ObservationNormalizer, batches: Sequence[Tensor]) -> list[Tensor]:
    """Merge each batch of all ranks into the statistics, then normalize it.

    This is the tensor version of :meth:`ObservationNormalizer.normalize_arrays`, and with several ranks a
    collective.

    Args:
        normalizer: Statistics, updated in place.
        batches: Raw observations, each [B, ...]: those of a step and optionally those after resets.

    Returns:
        Normalized batches, each [B, ...] float32 on its device.
    """
    summaries = summarize([batch.to(normalizer.mean.device).double() for batch in batches])
    normalized = []
    for i, summary in enumerate(summaries):
        merge(normalizer, *summary)
        if i < len(batches):
            normalized.append(normalizer(batches[i]))
    return normalized


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
