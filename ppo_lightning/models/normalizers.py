"""Running statistics of observations and rewards: buffers of the model, so that they are in every checkpoint.

The moments are those of all data seen so far, merged batch by batch in float64 (Chan, Golub and LeVeque,
"Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979). Unlike Gymnasium's
``RunningMeanStd``, no pseudo-observations are mixed in: after one batch they are the moments of that batch.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ppo_lightning.utils import collectives
from ppo_lightning.utils.scans import add_following

Summary = tuple[float, np.ndarray, np.ndarray | float]  # size, mean, sum of squared deviations
EPSILON = 1e-8  # added to a variance before its root is taken


class Moments(nn.Module):
    """Count, mean and sum of squared deviations of everything seen so far.

    The fast collector works on :meth:`arrays` and gives them back with :meth:`store`, once a rollout.

    Args:
        shape: Of one entry.
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
        """Moves to another device, and never to another precision: a sum over millions of steps needs float64.

        Apple's GPUs (MPS) have no float64. There the statistics stay on the CPU.
        """
        for name, buffer in self._buffers.items():
            assert buffer is not None
            device = fn(torch.empty(0, device=buffer.device)).device
            if device.type != "mps":
                self._buffers[name] = buffer.to(device)
        return self

    def arrays(self) -> "ArrayMoments":
        """Returns a copy as NumPy arrays."""
        return ArrayMoments(
            self.count.item(), *(buffer.numpy(force=True).copy() for buffer in (self.mean, self.m2))
        )

    def store(self, moments: "ArrayMoments") -> None:
        """Takes the values of a copy that has seen more data."""
        for buffer, array in ((self.count, moments.count), (self.mean, moments.mean), (self.m2, moments.m2)):
            buffer.copy_(torch.from_numpy(np.asarray(array)))

    @property
    def std(self) -> Tensor:
        """The standard deviation, with epsilon; 1 before any data."""
        return torch.where(self.count > 0, self.m2 / self.count.clamp(min=1) + EPSILON, 1.0).sqrt()


class ArrayMoments:
    """:class:`Moments` as NumPy arrays, for loops that run thousands of times a second."""

    def __init__(self, count: float, mean: np.ndarray, m2: np.ndarray) -> None:
        self.count, self.mean, self.m2 = count, mean, m2

    def update(self, batch: np.ndarray) -> None:
        """Merges a batch [B, ...]."""
        self.merge(*summary(batch))

    def merge(self, size: float, mean: np.ndarray, m2: np.ndarray | float) -> None:
        """Merges a batch by its size, mean and sum of squared deviations."""
        before = self.count
        self.count = before + size
        delta = mean - self.mean
        self.mean += delta * (size / self.count)
        delta *= delta
        delta *= before * size / self.count
        self.m2 += delta
        if size > 1:
            self.m2 += m2

    def update_each(self, batches: np.ndarray) -> np.ndarray:
        """Merges batches of scalars [T, B] of all ranks, one after the other; returns the std after each, [T]."""
        means = batches.mean(axis=1)
        own = np.stack([means, np.square(batches - means[:, None]).sum(axis=1)])
        of_ranks = collectives.gather_array(own)  # [W, 2, T]
        size, means = batches.shape[1] * len(of_ranks), of_ranks[:, 0].mean(axis=0)
        between = batches.shape[1] * np.square(of_ranks[:, 0] - means).sum(axis=0)
        counts = self.count + size * np.arange(1, len(batches) + 1)
        mean_after = (self.mean * self.count + size * np.cumsum(means)) / counts
        delta = means - np.concatenate([[self.mean], mean_after[:-1]])
        steps = of_ranks[:, 1].sum(axis=0) + between + delta * delta * ((counts - size) * size / counts)
        m2 = self.m2 + np.cumsum(steps)
        self.count, self.mean, self.m2 = counts[-1], mean_after[-1], m2[-1]
        return np.sqrt(m2 / counts + EPSILON)

    @property
    def std(self) -> np.ndarray:
        """The standard deviation, with epsilon; 1 before any data."""
        return np.sqrt(self.m2 / self.count + EPSILON) if self.count else np.ones_like(self.m2)


def summary(batch: np.ndarray) -> Summary:
    """Returns size, mean and sum of squared deviations of a batch [B, ...] over its rows."""
    size = len(batch)
    if size == 1:
        return 1, batch[0], 0.0
    mean = np.add.reduce(batch, axis=0, dtype=np.float64) / size
    deviation = batch - mean
    return size, mean, np.add.reduce(deviation * deviation, axis=0)


def summaries_of_ranks(batches: Sequence[np.ndarray]) -> list[list[Summary]]:
    """Returns the summaries of a step's observations, and of those after the resets, of every rank that has any.

    Args:
        batches: This rank's, one or two; a rank without resets waits for those of the others all the same.
    """
    shape = batches[0].shape[1:]
    flat = np.zeros((2, 1 + 2 * int(np.prod(shape))))
    for row, batch in zip(flat, batches, strict=False):
        size, mean, m2 = summary(batch)
        row[0], row[1:] = size, np.stack([mean, np.broadcast_to(m2, shape)]).ravel()
    return [
        [(row[0], *row[1:].reshape(2, *shape)) for row in of_ranks if row[0]]
        for of_ranks in collectives.gather_array(flat).swapaxes(0, 1)
    ]


class ObservationNormalizer(Moments):
    """Shifts and scales observations by their running mean and standard deviation, and clips.

    Args:
        shape: Of one observation.
        clip: Bound of the absolute value of a normalised observation.
        leave: Columns of rows [D] that stay as they are.
    """

    def __init__(self, shape: tuple[int, ...], clip: float = 10.0, leave: Sequence[slice] = ()) -> None:
        super().__init__(shape)
        self.clip, self.leave = clip, leave

    def forward(self, observation: Tensor) -> Tensor:
        """Normalizes raw observations [B, ...] by the present statistics, to float32 on their device."""
        raw = observation.to(self.mean.device).double()
        normalized = (
            ((raw - self.mean) / self.std).clamp(-self.clip, self.clip).float().to(observation.device)
        )
        for its in self.leave:
            normalized[..., its] = observation[..., its]
        return normalized

    def normalize_arrays(
        self, moments: ArrayMoments, batches: Sequence[np.ndarray], update: bool
    ) -> list[np.ndarray]:
        """Does what :meth:`forward` does, with the collector's own copy of the statistics.

        Args:
            moments: From :meth:`arrays`.
            batches: Raw observations, each [B, ...]: those of a step, and perhaps those that follow resets.
            update: Merge each batch into ``moments`` before it is normalised, as CleanRL's wrappers do at
                each step; on several ranks those of all, which all call this together.

        Returns:
            [B, ...] float64, of each batch.
        """
        # detail 28
        if not update:
            merges: list[list[Summary]] = [[] for _ in batches]
        elif collectives.world_size() == 1:
            merges = [[summary(batch)] for batch in batches]
        else:
            merges = summaries_of_ranks(batches)
        normalized = []
        for i, summaries in enumerate(merges):
            for each in summaries:
                moments.merge(*each)
            if i < len(batches):
                scaled = batches[i] - moments.mean
                scaled /= moments.std
                # detail 29
                normalized.append(
                    np.minimum(np.maximum(scaled, -self.clip, out=scaled), self.clip, out=scaled)
                )
                for its in self.leave:
                    scaled[:, its] = batches[i][:, its]
        return normalized


class RewardScaler(Moments):
    """Divides rewards by the running standard deviation of the discounted return, and clips.

    Args:
        gamma: The discount of PPO's returns.
        clip: Bound of the absolute value of a scaled reward.
    """

    def __init__(self, gamma: float, clip: float = 10.0) -> None:
        super().__init__(())
        self.gamma, self.clip = gamma, clip

    def scale_array(
        self, moments: ArrayMoments, reward: np.ndarray, done: np.ndarray, discounted: np.ndarray
    ) -> np.ndarray:
        """Scales rewards, those of each step after their discounted sums are merged into the statistics.

        Args:
            moments: From :meth:`arrays`.
            reward: [T, N].
            done: Whether the episode ended with this step, for whatever reason, [T, N] bool.
            discounted: The discounted sum of the rewards of each episode before the first step, [N]; brought
                up to date.

        Returns:
            [T, N] float64.
        """
        # detail 30
        sums, keep = np.array(reward, dtype=np.float64), self.gamma * ~done[:-1]
        sums[0] += self.gamma * discounted
        add_following(sums[::-1], keep[::-1])  # backwards in time, what follows is what came before
        discounted[:] = np.where(done[-1], 0, sums[-1])
        scaled = reward / moments.update_each(sums)[:, None]
        # detail 31
        return np.minimum(np.maximum(scaled, -self.clip), self.clip)
