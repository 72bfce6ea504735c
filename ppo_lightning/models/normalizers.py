"""Running statistics of observations and rewards: buffers of the model, so that they are in every checkpoint.

The moments are those of all data seen so far, merged batch by batch in float64 (Chan, Golub and LeVeque, "Updating
Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979). Unlike Gymnasium's ``RunningMeanStd``, no
pseudo-observations are mixed in: after one batch they are the moments of that batch.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

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
        """Moves to another device, and never to another precision: a sum over millions of steps needs float64."""
        for name, buffer in self._buffers.items():
            assert buffer is not None
            self._buffers[name] = buffer.to(fn(buffer).device)
        return self

    def arrays(self) -> "ArrayMoments":
        """Returns a copy as NumPy arrays."""
        return ArrayMoments(self.count.item(), *(buffer.numpy(force=True).copy() for buffer in (self.mean, self.m2)))

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
        size, before = len(batch), self.count
        self.count = before + size
        batch_mean = batch[0] if size == 1 else np.add.reduce(batch, axis=0, dtype=np.float64) / size
        delta = batch_mean - self.mean
        self.mean = self.mean + delta * (size / self.count)
        self.m2 = self.m2 + delta * delta * (before * size / self.count)
        if size > 1:
            deviation = batch - batch_mean
            self.m2 += np.add.reduce(deviation * deviation, axis=0)

    def update_each(self, batches: np.ndarray) -> np.ndarray:
        """Merges batches of scalars [T, B], one after the other; returns the standard deviation after each, [T]."""
        size = batches.shape[1]
        means = batches.mean(axis=1)
        counts = self.count + size * np.arange(1, len(batches) + 1)
        mean_after = (self.mean * self.count + size * np.cumsum(means)) / counts
        delta = means - np.concatenate([[self.mean], mean_after[:-1]])
        steps = np.square(batches - means[:, None]).sum(axis=1) + delta * delta * ((counts - size) * size / counts)
        m2 = self.m2 + np.cumsum(steps)
        self.count, self.mean, self.m2 = counts[-1], mean_after[-1], m2[-1]
        return np.sqrt(m2 / counts + EPSILON)

    @property
    def std(self) -> np.ndarray:
        """The standard deviation, with epsilon; 1 before any data."""
        return np.sqrt(self.m2 / self.count + EPSILON) if self.count else np.ones_like(self.m2)


class ObservationNormalizer(Moments):
    """Shifts and scales observations by their running mean and standard deviation, and clips.

    Args:
        shape: Of one observation.
        clip: Bound of the absolute value of a normalised observation.
    """

    def __init__(self, shape: tuple[int, ...], clip: float = 10.0) -> None:
        super().__init__(shape)
        self.clip = clip

    def forward(self, observation: Tensor) -> Tensor:
        """Normalises raw observations [B, ...] by the present statistics, to float32."""
        return ((observation.double() - self.mean) / self.std).clamp(-self.clip, self.clip).float()

    def normalize_array(self, moments: ArrayMoments, observation: np.ndarray, update: bool) -> np.ndarray:
        """Does what :meth:`forward` does, with the collector's own copy of the statistics.

        Args:
            moments: From :meth:`arrays`.
            observation: Raw, [B, ...].
            update: Merge the observations into ``moments`` first, as CleanRL's wrappers do at each step.

        Returns:
            [B, ...] float64.
        """
        # detail 28
        if update:
            moments.update(observation)
        normalized = (observation - moments.mean) / moments.std
        # detail 29
        return np.minimum(np.maximum(normalized, -self.clip), self.clip)


class RewardScaler(Moments):
    """Divides rewards by the running standard deviation of the discounted return, and clips.

    Args:
        gamma: The discount of PPO's returns.
        clip: Bound of the absolute value of a scaled reward.
    """

    def __init__(self, gamma: float, clip: float = 10.0) -> None:
        super().__init__(())
        self.gamma, self.clip = gamma, clip

    def scale_array(self, moments: ArrayMoments, reward: np.ndarray, done: np.ndarray, discounted: np.ndarray) -> np.ndarray:
        """Scales rewards, those of each step after their discounted sums are merged into the statistics.

        Args:
            moments: From :meth:`arrays`.
            reward: [T, N].
            done: Whether the episode ended with this step, for whatever reason, [T, N] bool.
            discounted: The discounted sum of the rewards of each episode before the first step, [N]; brought up to date.

        Returns:
            [T, N] float64.
        """
        # detail 30
        sums, keep = np.array(reward, dtype=np.float64), self.gamma * ~done
        sums[0] += self.gamma * discounted
        for t in range(1, len(sums)):
            sums[t] += keep[t - 1] * sums[t - 1]
        discounted[:] = np.where(done[-1], 0, sums[-1])
        scaled = reward / moments.update_each(sums)[:, None]
        # detail 31
        return np.minimum(np.maximum(scaled, -self.clip), self.clip)
