"""Gather, weight and split minibatches (dictionaries of tensors [B, ...])."""

import functools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from ppo_lightning.algorithms import losses
from ppo_lightning.models.normalizers import merged, summary_of
from ppo_lightning.utils import collectives

Minibatch = dict[str, Tensor]


def equal_parts(minibatch: Minibatch, rows: int) -> Sequence[Minibatch]:
    """Split a minibatch [B, ...] into equal parts of at most ``rows`` rows, as few as possible.

    The minibatch is not split if equal parts need more than twice the minimum number.
    """
    size = len(next(iter(minibatch.values())))
    fewest = -(-size // rows)
    count = next((more for more in range(fewest, 2 * fewest + 1) if size % more == 0), 1)
    if count == 1:
        return [minibatch]
    split = zip(*(tensor.chunk(count) for tensor in minibatch.values()), strict=True)
    return [dict(zip(minibatch, tensors, strict=True)) for tensors in split]


def take(rows: Tensor, order: np.ndarray) -> Tensor:
    """Return ``rows[order]``, [B, ...]. On the CPU, NumPy needs a tenth of PyTorch's time for short rows."""
    if rows.device.type == "cpu":
        return torch.from_numpy(rows.numpy().take(order, axis=0))
    return rows.index_select(0, torch.from_numpy(order).to(rows.device))


def with_weight(rollout: TensorDictBase, keys: Sequence[str]) -> list[str]:
    """Return keys of a rollout and, if the rollout has it, ``weight``."""
    return [*keys, *(("weight",) if "weight" in rollout.keys() else ())]  # noqa: SIM118  (a TensorDict)


def mean_of(metrics: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Average dictionaries of scalars with the same names."""
    stacked = torch.stack([scalars[key] for scalars in metrics for key in metrics[0]])
    means = stacked.view(len(metrics), -1).mean(dim=0)
    return dict(zip(metrics[0], means.unbind(), strict=True))


def deal_sequences(keys: Tensor, count: int) -> Tensor:
    """Return a random order of N sequences that deals them out to ``count`` minibatches.

    Each minibatch gets one of every ``count`` neighbouring sequences, so that the minibatches of several
    ranks, which have consecutive sequences, are together the minibatch of one rank.

    Example:
        >>> deal_sequences(torch.tensor([0.1, 0.2, 0.9, 0.8]), count=2).tolist()
        [0, 3, 1, 2]
    """
    first = torch.arange(0, len(keys), count)[:, None]
    return (keys.view(-1, count).argsort(dim=1) + first).T.flatten()


def split_epoch(epoch: Minibatch, count: int, norm_adv: bool, adv_eps: float = 1e-8) -> Iterator[Minibatch]:
    """Split a shuffled epoch into minibatches and normalize their advantages over all ranks.

    Args:
        epoch: Tensors [rows, ...] in the order of the minibatches. An optional ``weight`` [rows, ...],
            0 for steps that do not count and 1 elsewhere, is scaled to a mean of 1 over the minibatch of all
            ranks.
        count: Number of minibatches.
        norm_adv: Normalize the advantages.
        adv_eps: Added to their standard deviation.

    Yields:
        Minibatches [B, ...]. All ranks skip a minibatch in which fewer than two steps count.
    """
    kept = [*range(count)]
    by_minibatch = epoch["advantage"].reshape(count, -1)
    weights = epoch["weight"].reshape(count, -1) if "weight" in epoch else None
    pooled = over_ranks(by_minibatch, weights) if norm_adv or weights is not None else None
    if weights is not None:
        counts = weights.sum(-1) if pooled is None else pooled[0].to(weights.dtype)
        kept = (counts >= 2).nonzero().flatten().tolist()  # one step has no standard deviation
        # weight_i / mean(weight): the mean over a minibatch is then that over the steps that count.
        steps = weights.shape[-1] * collectives.world_size()
        epoch["weight"] = (weights * (steps / counts.clamp(min=1))[:, None]).view_as(epoch["weight"])
    if norm_adv:
        normalized = losses.normalize(by_minibatch, weights, pooled, adv_eps)
        epoch["advantage"] = normalized.view_as(epoch["advantage"])
    parts = {key: tensor.chunk(count) for key, tensor in epoch.items()}
    for i in kept:
        yield {key: chunks[i] for key, chunks in parts.items()}


def over_ranks(rows: Tensor, weight: Tensor | None = None) -> Tensor | None:
    """Summarize rows [count, B] of all ranks, [3, count]. None on a single rank, which has all rows.

    ``weight`` is 0 or 1, [count, B] or [B]. With several ranks this is a collective.
    """
    if collectives.world_size() == 1:
        return None
    mask = None if weight is None else weight.t() > 0
    return functools.reduce(merged, collectives.gather(summary_of(rows.t(), mask)))
