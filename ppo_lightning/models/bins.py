"""A head with bins for continuous actions."""

import math

import numpy as np
import torch
from torch import Tensor
from torchrl.data import TensorSpec

from ppo_lightning.models.heads import ArraySampler, Head, Parameters, action_bounds


class BinsHead(Head):
    """Independent categorical distributions over evenly spaced values, one per component of the action.

    The first and the last bin are the bounds. Unlike a normal distribution, the distribution can have several
    peaks and is never clipped.

    Sources: Tang and Agrawal, "Discretizing Continuous Action Space for On-Policy Optimization" (2020); Bian
    et al., "RN-D: Discretized Categorical Actors for On-Policy Reinforcement Learning" (2026).

    Args:
        in_features: Width of the features.
        action_spec: Spec of the actions, shape [A] with finite bounds.
        num_bins: Number K of bins per component, at least 2.

    Raises:
        ConfigError: The actions are not a vector, or their bounds are infinite or empty.

    Example:
        >>> from torchrl.data import Bounded
        >>> head = BinsHead(8, Bounded(-1.0, 1.0, shape=(2,)), num_bins=3)
        >>> action, log_prob = head.sample(torch.zeros(1, 8), torch.tensor([[0.1, 0.9]]))
        >>> action.tolist(), round(log_prob.exp().item(), 3)
        ([[-1.0, 1.0]], 0.111)
    """

    low: Tensor
    high: Tensor

    def __init__(self, in_features: int, action_spec: TensorSpec, num_bins: int = 41) -> None:
        low, high = action_bounds(action_spec, math.inf)
        super().__init__(in_features, len(low) * num_bins)
        self.num_bins = num_bins
        self.noise_shape = low.shape
        self.largest_entropy = len(low) * math.log(num_bins)
        self.register_buffer("low", low, persistent=False)
        self.register_buffer("high", high, persistent=False)

    def table(self, features: Tensor) -> Tensor:
        """Return the log-probabilities of the bins, [B, A, K]."""
        return self.linear(features).unflatten(-1, (-1, self.num_bins)).log_softmax(-1)

    def noise(self, batch_shape: tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        """Draw uniform noise from [0, 1), [*batch_shape, A].

        A bin is sampled by the inverse of the distribution function.
        """
        return torch.rand(*batch_shape, *self.noise_shape, generator=generator)

    def sample(
        self, features: Tensor, noise: Tensor | None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Sample actions [B, A] within the bounds, see :meth:`Head.sample`."""
        table = self.table(features)
        if noise is None:
            index = table.argmax(-1)
        else:
            sums = table.exp().cumsum(-1)
            # The noise is at most 1 - 2^-24, so that the product is below the last sum, also after rounding.
            index = (sums <= noise.unsqueeze(-1) * sums[..., -1:]).sum(-1)
        return self._value(index), self._log_prob(table, index)

    def _value(self, index: Tensor) -> Tensor:
        return self.low + (self.high - self.low) * (index / (self.num_bins - 1))

    def _log_prob(self, table: Tensor, index: Tensor) -> Tensor:
        return table.gather(-1, index.unsqueeze(-1)).squeeze(-1).sum(-1)

    def array_sampler(self) -> ArraySampler:
        """Return a sampler of arrays, see :meth:`Head.array_sampler`."""
        low, width = self.low.numpy(), (self.high - self.low).numpy()
        bins = self.num_bins

        def choose(logits: np.ndarray, noise: np.ndarray | None) -> np.ndarray:
            table = logits.reshape(len(logits), -1, bins)
            if noise is None:
                index = table.argmax(-1)
            else:
                sums = np.exp(table - table.max(-1, keepdims=True)).cumsum(-1)
                index = (sums <= noise[..., None] * sums[..., -1:]).sum(-1)
            return low + width * (index.astype(np.float32) / np.float32(bins - 1))

        return choose

    def evaluate(
        self, features: Tensor, action: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Parameters]:
        """Evaluate actions, see :meth:`Head.evaluate`. The parameters are log-probabilities [B, A, K]."""
        table = self.table(features)
        position = (action - self.low) / (self.high - self.low)
        index = (position * (self.num_bins - 1)).round().long().clamp(0, self.num_bins - 1)
        entropy = -(table.exp() * table).sum((-2, -1))
        return self._log_prob(table, index), entropy, (table,)

    def kl(self, old: Parameters, new: Parameters) -> Tensor:
        """Return the sum over the components, see :meth:`Head.kl`."""
        (old_log_prob,), (new_log_prob,) = old, new
        return (old_log_prob.exp() * (old_log_prob - new_log_prob)).sum((-2, -1))

    def bars(self, features: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the most probable actions and their positions between the bounds, see :meth:`Head.bars`."""
        action = self.sample(features, None)[0]
        return action, (action - self.low) / (self.high - self.low)
