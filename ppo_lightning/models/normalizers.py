"""Running statistics of observations and rewards.

The statistics are buffers of the model, so that every checkpoint has them. They are the moments of all data,
merged batch by batch in float64. Unlike Gymnasium's ``RunningMeanStd``, they include no pseudo-observations:
after one batch they are the moments of this batch.

Source: Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances"
(1979).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ppo_lightning.utils import collectives
from ppo_lightning.utils.scans import add_following

Summary = tuple[float, np.ndarray, np.ndarray | float]  # size, mean, sum of squared deviations
EPSILON = 1e-8  # added to a variance before the square root


class Moments(nn.Module):
    """Count, mean and sum of squared deviations of all data.

    The fast collector works on a copy from :meth:`arrays` and writes it back with :meth:`store`, once per
    rollout.

    Args:
        shape: Shape of one entry.

    Example:
        >>> moments = Moments(())
        >>> arrays = moments.arrays()
        >>> arrays.update(np.array([1.0, 3.0]))
        >>> moments.store(arrays)
        >>> moments.mean.item(), round(moments.std.item(), 4)
        (2.0, 1.0)
    """

    count: Tensor
    mean: Tensor
    m2: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("m2", torch.zeros(shape, dtype=torch.float64))

    def _apply(self, fn: Any, recurse: bool = True) -> "Moments":
        """Move to another device, but never to another precision: a sum over millions of steps needs float64.

        Apple GPUs (MPS) have no float64. There the statistics stay on the CPU.
        """
        for name, buffer in self.named_buffers(recurse=False):
            device = fn(torch.empty(0, device=buffer.device)).device
            if device.type != "mps":
                setattr(self, name, buffer.to(device))
        return self

    def arrays(self) -> "ArrayMoments":
        """Return a copy as NumPy arrays."""
        return ArrayMoments(
            self.count.item(), *(buffer.numpy(force=True).copy() for buffer in (self.mean, self.m2))
        )

    def store(self, moments: "ArrayMoments") -> None:
        """Store the values of an updated copy.

        Args:
            moments: Copy from :meth:`arrays`.
        """
        for buffer, array in ((self.count, moments.count), (self.mean, moments.mean), (self.m2, moments.m2)):
            buffer.copy_(torch.from_numpy(np.asarray(array)))

    @property
    def std(self) -> Tensor:
        """Standard deviation, including epsilon. It is 1 before any data."""
        return torch.where(self.count > 0, self.m2 / self.count.clamp(min=1) + EPSILON, 1.0).sqrt()


class ArrayMoments:
    """NumPy version of :class:`Moments` for loops that run thousands of times per second.

    Args:
        count: Number of entries.
        mean: Mean of the entries.
        m2: Sum of squared deviations.

    Example:
        >>> moments = ArrayMoments(0.0, np.zeros(()), np.zeros(()))
        >>> moments.update(np.array([1.0, 3.0]))
        >>> float(moments.mean)
        2.0
    """

    def __init__(self, count: float, mean: np.ndarray, m2: np.ndarray) -> None:
        self.count = count
        self.mean = mean
        self.m2 = m2

    def update(self, batch: np.ndarray) -> None:
        """Merge a batch [B, ...]."""
        self.merge(*summarize(batch))

    def merge(self, size: float, mean: np.ndarray, m2: np.ndarray | float) -> None:
        """Merge a batch, given its size, mean and sum of squared deviations."""
        old_count = self.count
        self.count = old_count + size
        delta = mean - self.mean
        self.mean += delta * (size / self.count)
        delta *= delta
        delta *= old_count * size / self.count
        self.m2 += delta
        if size > 1:
            self.m2 += m2

    def update_each(self, batches: np.ndarray) -> np.ndarray:
        """Merge batches of scalars of all ranks, one after the other.

        Args:
            batches: Batches of this rank, [T, B].

        Returns:
            Standard deviation after each batch, [T].
        """
        means = batches.mean(axis=1)
        local = np.stack([means, np.square(batches - means[:, None]).sum(axis=1)])
        gathered = collectives.gather_array(local)  # [W, 2, T]
        size = batches.shape[1] * len(gathered)
        means = gathered[:, 0].mean(axis=0)
        between = batches.shape[1] * np.square(gathered[:, 0] - means).sum(axis=0)
        counts = self.count + size * np.arange(1, len(batches) + 1)
        new_means = (self.mean * self.count + size * np.cumsum(means)) / counts
        delta = means - np.concatenate([[self.mean], new_means[:-1]])
        increments = gathered[:, 1].sum(axis=0) + between + delta * delta * ((counts - size) * size / counts)
        m2 = self.m2 + np.cumsum(increments)
        self.count = counts[-1]
        self.mean = new_means[-1]
        self.m2 = m2[-1]
        return np.sqrt(m2 / counts + EPSILON)

    def update_each_counted(self, batches: np.ndarray, counted: np.ndarray) -> np.ndarray:
        """Merge parts of batches of scalars of all ranks, see :meth:`update_each`.

        Args:
            batches: Batches of this rank, [T, B].
            counted: Which scalars to merge, [T, B] bool.

        Returns:
            Standard deviation after each batch, [T].
        """
        gathered = collectives.gather_array(np.stack([batches, counted]))  # [W, 2, T, B]
        stds = np.zeros(len(batches))
        for t in range(len(batches)):
            scalars = gathered[:, 0, t][gathered[:, 1, t] > 0]
            if len(scalars):
                self.update(scalars)
            stds[t] = self.std
        return stds

    @property
    def std(self) -> np.ndarray:
        """Standard deviation, including epsilon. It is 1 before any data."""
        return np.sqrt(self.m2 / self.count + EPSILON) if self.count else np.ones_like(self.m2)


def summarize(batch: np.ndarray) -> Summary:
    """Return size, mean and sum of squared deviations of a batch [B, ...] over its rows."""
    size = len(batch)
    if size == 1:
        return 1, batch[0], 0.0
    mean = np.add.reduce(batch, axis=0, dtype=np.float64) / size
    deviation = batch - mean
    return size, mean, np.add.reduce(deviation * deviation, axis=0)


def gather_summaries(batches: Sequence[np.ndarray]) -> list[list[Summary]]:
    """Gather the summaries of a step's batches from all ranks.

    The first batch holds the observations of the step, the second the observations after resets. This is a
    collective: a rank without resets participates, too.

    Args:
        batches: One or two batches of this rank.

    Returns:
        Two lists with the summaries of all ranks that have this batch.
    """
    shape = batches[0].shape[1:]
    flat = np.zeros((2, 1 + 2 * int(np.prod(shape))))
    for row, batch in zip(flat, batches, strict=False):
        size, mean, m2 = summarize(batch)
        row[0] = size
        row[1:] = np.stack([mean, np.broadcast_to(m2, shape)]).ravel()
    return [
        [(row[0], *row[1:].reshape(2, *shape)) for row in rank_rows if row[0]]
        for rank_rows in collectives.gather_array(flat).swapaxes(0, 1)
    ]


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

    def __init__(self, shape: tuple[int, ...], clip: float = 10.0, leave: Sequence[slice] = ()) -> None:
        super().__init__(shape)
        self.clip = clip
        self.leave = leave

    def forward(self, observation: Tensor) -> Tensor:
        """Normalize raw observations [B, ...] by the current statistics, to float32 on their device."""
        return self.normalize_by(self.mean, self.std, observation)

    def normalize_by(self, mean: Tensor, std: Tensor, observation: Tensor) -> Tensor:
        """Normalize raw observations [B, ...] by other statistics, to float32 on their device."""
        raw = observation.to(mean.device).double()
        normalized = ((raw - mean) / std).clamp(-self.clip, self.clip).float().to(observation.device)
        for excluded in self.leave:
            normalized[..., excluded] = observation[..., excluded]
        return normalized

    def normalize_arrays(
        self, moments: ArrayMoments, batches: Sequence[np.ndarray], update: bool
    ) -> list[np.ndarray]:
        """Normalize batches of arrays with the collector's copy of the statistics.

        Args:
            moments: Copy from :meth:`arrays`.
            batches: Raw observations, each [B, ...]: those of a step and optionally those after resets.
            update: Merge each batch into ``moments`` before normalizing it, as CleanRL's wrappers do at each
                step. With several ranks this is a collective that merges the batches of all ranks.

        Returns:
            Normalized batches, each [B, ...] float64.
        """
        # detail 28
        if not update:
            merges: list[list[Summary]] = [[] for _ in batches]
        elif collectives.world_size() == 1:
            merges = [[summarize(batch)] for batch in batches]
        else:
            merges = gather_summaries(batches)
        normalized = []
        for i, summaries in enumerate(merges):
            for summary in summaries:
                moments.merge(*summary)
            if i < len(batches):
                scaled = batches[i] - moments.mean
                scaled /= moments.std
                # detail 29
                normalized.append(
                    np.minimum(np.maximum(scaled, -self.clip, out=scaled), self.clip, out=scaled)
                )
                for excluded in self.leave:
                    scaled[:, excluded] = batches[i][:, excluded]
        return normalized


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

    def __init__(self, gamma: float, clip: float = 10.0) -> None:
        super().__init__(())
        self.gamma = gamma
        self.clip = clip

    def scale_array(
        self,
        moments: ArrayMoments,
        reward: np.ndarray,
        done: np.ndarray,
        discounted: np.ndarray,
        counted: np.ndarray | None = None,
    ) -> np.ndarray:
        """Scale rewards, after merging the discounted returns of each step into the statistics.

        Args:
            moments: Copy from :meth:`arrays`.
            reward: Rewards, [T, N].
            done: ``terminated | truncated``, [T, N] bool.
            discounted: Discounted return of each running episode before the first step, [N]. Updated in
                place.
            counted: Steps that enter the statistics, [T, N] bool. None: all. All ranks pass it, or none.

        Returns:
            Scaled rewards, [T, N] float64.
        """
        # detail 30
        sums = np.array(reward, dtype=np.float64)
        keep = self.gamma * ~done[:-1]
        sums[0] += self.gamma * discounted
        add_following(sums[::-1], keep[::-1])  # reversed time turns the scan into a sum over past rewards
        discounted[:] = np.where(done[-1], 0, sums[-1])
        stds = moments.update_each(sums) if counted is None else moments.update_each_counted(sums, counted)
        scaled = reward / stds[:, None]
        # detail 31
        return np.minimum(np.maximum(scaled, -self.clip), self.clip)
