"""Heads of the off-policy agents, whose noise explores by a schedule."""

import math

import torch
from torch import Tensor
from torchrl.data import Categorical, Composite, TensorSpec

from ppo_lightning.errors import ConfigError
from ppo_lightning.models.heads import INVALID, ArraySampler, CategoricalHead, Float32Linear, GaussianHead

RANDOM = 1e6  # noise of random actions, far above all values and far below that of forbidden actions


class QHead(CategoricalHead):
    """Values Q(s, a) of discrete actions, or distributions of them with a support of K atoms."""

    support: Tensor | None
    exploration = 0.0  # epsilon

    def __init__(self, in_features: int, action_spec: TensorSpec, support: Tensor | None = None) -> None:
        if type(action_spec) is not Categorical or action_spec.ndim:
            raise ConfigError(
                f"env_id has actions of kind {type(action_spec).__name__}, and DQN and C51 choose one of"
                " several actions: use SAC, TD3 or DDPG for continuous actions, PPO for several components."
            )
        super().__init__(in_features, action_spec)
        if support is not None:
            self.linear = Float32Linear(in_features, self.num_choices * len(support))
        self.register_buffer("support", support, persistent=False)

    def noise(self, batch_shape: tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        """Draw large noise with the probability epsilon, otherwise zeros, [*batch_shape, A]."""
        uniform = torch.rand(*batch_shape, self.num_choices + 1, generator=generator)
        return RANDOM * (uniform[..., :1] < self.exploration) * uniform[..., 1:]

    def distributions(self, features: Tensor) -> Tensor:
        """Return the probabilities of the atoms, [B, A, K]."""
        return self.linear(features).unflatten(-1, (self.num_choices, -1)).softmax(-1)

    def logits(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return Q(s, a) of all actions, [B, A]."""
        if self.support is None:
            return super().logits(features, mask)
        q_values = self.distributions(features) @ self.support
        return q_values if mask is None else q_values.masked_fill(~mask, INVALID)

    def bars(self, features: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return Q(s, a), and bars that add up to 1."""
        q_values = self.logits(features, mask)
        return q_values, q_values.softmax(-1)

    def array_sampler(self) -> ArraySampler | None:  # type: ignore[override]
        """Return a sampler of arrays for values."""
        return super().array_sampler() if self.support is None else None


class DeterministicHead(GaussianHead):
    """A deterministic policy, squashed into the bounds by tanh. Noise is in units of half their width."""

    width_ratio = math.inf
    outputs_per_action = 1
    exploration = 0.0  # factor of the noise; infinity: uniformly random actions

    def __init__(self, in_features: int, action_spec: TensorSpec) -> None:
        if isinstance(action_spec, Composite) or not action_spec.dtype.is_floating_point:
            raise ConfigError(
                f"env_id has actions of kind {type(action_spec).__name__}, and DDPG, TD3 and SAC take vectors"
                " of continuous actions: use DQN or C51 for discrete actions, PPO for several parts."
            )
        super().__init__(in_features, action_spec)
        del self.log_std
        self.linear = Float32Linear(in_features, self.outputs_per_action * len(self.low))

    def noise(self, batch_shape: tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        """Draw standard normal noise, [*batch_shape, A]."""
        return torch.randn(*batch_shape, len(self.low), generator=generator)

    def squashed(self, raw: Tensor) -> Tensor:
        """Return tanh(raw), scaled to the bounds."""
        return raw.tanh() * (self.high - self.low) / 2 + (self.high + self.low) / 2

    def perturbed(self, outputs: Tensor, noise: Tensor | float) -> Tensor:
        """Return the action for outputs of the linear layer and noise [B, A]."""
        return self.for_environment(self.squashed(outputs) + noise * (self.high - self.low) / 2)

    def choose(self, outputs: Tensor, noise: Tensor | None) -> Tensor:
        """Return the action for outputs of the linear layer and standard normal noise."""
        if noise is None:
            return self.perturbed(outputs, 0.0)
        if math.isinf(self.exploration):
            return self.low + (self.high - self.low) * torch.special.ndtr(noise)
        return self.perturbed(outputs, self.exploration * noise)

    def sample(
        self, features: Tensor, noise: Tensor | None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return actions [B, A] within the bounds, and zeros [B]."""
        return self.choose(self.linear(features), noise), torch.zeros_like(features[:, 0])

    def array_sampler(self) -> ArraySampler:
        """Return a sampler of arrays."""
        tensor = torch.from_numpy
        return lambda x, noise: self.choose(tensor(x), None if noise is None else tensor(noise)).numpy()


class SquashedGaussianHead(DeterministicHead):
    """SAC's squashed normal distribution, whose standard deviation depends on the state."""

    outputs_per_action = 2
    exploration = 1.0

    def moments(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and logarithm of the standard deviation, which lies between -5 and 2, each [B, A]."""
        mean, log_std = outputs.chunk(2, dim=-1)
        return mean, -5 + 3.5 * (log_std.tanh() + 1)

    def perturbed(self, outputs: Tensor, noise: Tensor | float) -> Tensor:
        """Return the action that the noise selects."""
        mean, log_std = self.moments(outputs)
        return self.squashed(mean + log_std.exp() * noise)

    def sample_with_log_prob(self, features: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return the actions [B, A] that normal noise [B, A] selects, and their log-probabilities [B]."""
        mean, log_std = self.moments(self.linear(features))
        raw = mean + log_std.exp() * noise
        slope = (self.high - self.low) / 2 * (1 - raw.tanh().square()) + 1e-6
        log_prob = -noise.square() / 2 - log_std - math.log(2 * math.pi) / 2 - slope.log()
        return self.squashed(raw), log_prob.sum(-1)
