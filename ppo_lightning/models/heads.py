"""Action distributions, whose noise is separate from their parameters: collectors draw it in advance."""

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch import distributions as D
from torch.nn import functional as F
from torchrl.data import Bounded, OneHot, TensorSpec

from ppo_lightning.errors import ConfigError
from ppo_lightning.models.init import orthogonal

HeadName = Literal["categorical", "gaussian", "tanh_gaussian"]
# Function of the linear layer's output for N environments and of noise. It returns actions [N, ...].
ArraySampler = Callable[[np.ndarray, np.ndarray | None], np.ndarray]
Parameters = tuple[Tensor, ...]  # parameters of a distribution, each [B, ...]
Sampled = tuple[Tensor, Tensor]  # actions [B, ...] and their log-probabilities [B]
Evaluated = tuple[Tensor, Tensor, Parameters]  # log-probabilities [B], entropies [B] in nats, parameters
LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
# Logit of a forbidden action. It is finite, so that the probability 0 times its logarithm is 0.
INVALID = -1e30


class Float32Linear(nn.Linear):
    """A linear layer that computes in float32 for any ``trainer.precision``.

    The ratio of the policy loss is the exponential of a difference of log-probabilities. Logits of 5 in
    bfloat16 have an error of 0.02, which would be the relative error of the ratio.
    """

    def forward(self, features: Tensor) -> Tensor:
        """Map features [B, F] of any floating dtype to float32."""
        if not torch.is_autocast_enabled(features.device.type):
            return super().forward(features)
        with torch.autocast(features.device.type, enabled=False):
            return super().forward(features.float())


class ActionHead(nn.Module):
    """Base class of what chooses an action by the features of an observation.

    A subclass takes the width of the features and the spec of the actions.

    Args:
        in_features: Width of the features.
        out_features: Width of the linear layer.
    """

    num_choices = 0  # width of the mask: number of discrete actions of all components
    noise_shape: torch.Size  # shape of the noise of one action
    largest_entropy: float | None = None  # nats; None for continuous actions

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.linear = orthogonal(Float32Linear(in_features, out_features), gain=0.01)

    def logits(self, features: Tensor, mask: Tensor | None) -> Tensor:
        """Return the logits of discrete actions, [B, ``num_choices``]. Forbidden actions have no gradient."""
        logits = self.linear(features)
        # detail A4
        return logits if mask is None else logits.masked_fill(~mask, INVALID)

    @abstractmethod
    def noise(self, batch_shape: tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        """Draw the noise for :meth:`choose`, [*batch_shape, *noise_shape].

        Without a generator, PyTorch draws from its default one.
        """

    @abstractmethod
    def choose(self, features: Tensor, noise: Tensor | None, mask: Tensor | None = None) -> Tensor:
        """Return the actions that the noise selects, [B, ...].

        Args:
            features: Features, [B, F].
            noise: Noise from :meth:`noise`. None: the most probable or best action.
            mask: Allowed discrete actions, [B, ``num_choices``] bool. None: all.
        """

    def array_sampler(self) -> ArraySampler | None:
        """Return a NumPy version of :meth:`choose` after the linear layer, for the current weights.

        None, the default: there is no such version, and the collector acts on tensors.
        """
        return None

    def bars(self, features: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Describe the policy for a video: numbers [B, A] and bar lengths [B, A] from 0 to 1.

        By default, A is 0: the video has no bars.
        """
        empty = features.new_zeros(len(features), 0)
        return empty, empty

    def for_environment(self, action: Tensor) -> Tensor:
        """Convert an action [B, ...] to the action that the environment executes."""
        return action


class Head(ActionHead):
    """Base class of distributions over actions, whose log-probabilities an algorithm needs."""

    num_parameters = 1  # tensors of the parameters of :meth:`evaluate`; a CompositeHead asks its parts

    def choose(self, features: Tensor, noise: Tensor | None, mask: Tensor | None = None) -> Tensor:
        """Return the actions of :meth:`sample`."""
        return self.sample(features, noise, mask)[0]

    @abstractmethod
    def sample(self, features: Tensor, noise: Tensor | None, mask: Tensor | None = None) -> Sampled:
        """Return the actions of :meth:`choose`, [B, ...], with their log-probabilities [B]."""

    @abstractmethod
    def evaluate(self, features: Tensor, action: Tensor, mask: Tensor | None = None) -> Evaluated:
        """Evaluate given actions [B, ...], with features and mask as for :meth:`sample`.

        Returns:
            Log-probabilities [B], entropies [B] in nats, and the parameters of the distribution.
        """

    @abstractmethod
    def kl(self, old: Parameters, new: Parameters) -> Tensor:
        """Return the divergence KL(old || new) of parameters from :meth:`evaluate`, [B] in nats."""


class BoxHead(ActionHead):
    """Base class of what chooses vectors of continuous actions between bounds."""

    low: Tensor
    high: Tensor
    width_ratio = 10.0  # maximum ratio of the widest to the narrowest bounds

    def __init__(self, in_features: int, action_spec: TensorSpec) -> None:
        low, high = action_bounds(action_spec, self.width_ratio)
        super().__init__(in_features, len(low))
        self.noise_shape = low.shape
        self.register_buffer("low", low, persistent=False)
        self.register_buffer("high", high, persistent=False)

    def noise(self, batch_shape: tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        """Draw standard normal noise, [*batch_shape, A]."""
        return torch.randn(*batch_shape, *self.noise_shape, generator=generator, dtype=torch.float32)

    def bars(self, features: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the most probable actions and their positions between the bounds."""
        action = self.for_environment(self.choose(features, None))
        return action, (action - self.low) / (self.high - self.low)

    def for_environment(self, action: Tensor) -> Tensor:
        """Clip an action to the bounds, as the environments do during a rollout."""
        return action.clamp(self.low, self.high)


class SquashedHead(BoxHead):
    """Base class of what squashes vectors into any bounds by tanh."""

    width_ratio = math.inf

    def squashed(self, raw: Tensor) -> Tensor:
        """Return the actions between the bounds for any numbers [B, A]."""
        return self.low + (self.high - self.low) * (0.5 + 0.5 * raw.tanh())


# A name, a function of the width of the features and the spec of the actions, or None for the default.
HeadChoice = HeadName | Callable[[int, TensorSpec], ActionHead] | None


class DiscreteHead(Head):
    """Base class of categorical distributions over discrete actions, one or one per component.

    ``noise_shape`` is the shape of :meth:`table`, [A] or [K, A].
    """

    def table(self, features: Tensor, mask: Tensor | None) -> Tensor:
        """Return the logits as a table, [B, *noise_shape]."""
        return self.logits(features, mask)

    def noise(self, batch_shape: tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        """Draw Gumbel noise: the argmax of logits plus Gumbel noise is a sample of the softmax."""
        return gumbel(*batch_shape, *self.noise_shape, generator=generator)

    def sample(self, features: Tensor, noise: Tensor | None, mask: Tensor | None = None) -> Sampled:
        """Sample actions [B] or [B, K]."""
        table = self.table(features, mask)
        action = (table if noise is None else table + noise).argmax(-1)
        return action, self._log_prob(table.log_softmax(-1), action)

    def evaluate(self, features: Tensor, action: Tensor, mask: Tensor | None = None) -> Evaluated:
        """Evaluate actions. The parameters are log-probabilities."""
        log_probs = self.table(features, mask).log_softmax(-1)
        entropy = -self._sum(log_probs.exp() * log_probs)
        return self._log_prob(log_probs, action.long()), entropy, (log_probs,)

    def _log_prob(self, log_probs: Tensor, action: Tensor) -> Tensor:
        chosen = log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)
        return chosen.sum(-1) if len(self.noise_shape) > 1 else chosen  # over the components

    def _sum(self, table: Tensor) -> Tensor:
        return table.sum(tuple(range(-len(self.noise_shape), 0)))

    def kl(self, old: Parameters, new: Parameters) -> Tensor:
        """Return the divergence, the sum over the components."""
        (old_log_prob,), (new_log_prob,) = old, new
        return self._sum(old_log_prob.exp() * (old_log_prob - new_log_prob))


class CategoricalHead(DiscreteHead):
    """A categorical distribution over discrete actions.

    Raises:
        ConfigError: The actions are one-hot encoded.

    Example:
        >>> head = CategoricalHead(8, Categorical(3, shape=()))
        >>> action, log_prob = head.sample(torch.zeros(4, 8), head.noise((4,)))
        >>> action.shape, round(log_prob.exp()[0].item(), 3)
        (torch.Size([4]), 0.333)
    """

    def __init__(self, in_features: int, action_spec: TensorSpec) -> None:
        if isinstance(action_spec, OneHot):
            raise ConfigError("env_id has one-hot actions: make it with categorical_action_encoding=True.")
        self.num_choices = int(action_spec.space.n)
        super().__init__(in_features, self.num_choices)
        self.noise_shape = torch.Size([self.num_choices])
        self.largest_entropy = math.log(self.num_choices)

    def array_sampler(self) -> ArraySampler:
        """Return a sampler of arrays."""
        return lambda logits, noise: (logits if noise is None else logits + noise).argmax(-1)

    def bars(self, features: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the probabilities."""
        probabilities = self.logits(features, mask).softmax(-1)
        return probabilities, probabilities


class GaussianHead(BoxHead, Head):
    """A normal distribution over vectors of continuous actions.

    The head does not clip actions, and a rollout stores them unclipped. Only the environment clips. The
    log-probability must belong to the sampled action (pitfall vwxyzjn/cleanrl#240).

    Example:
        >>> head = GaussianHead(8, Bounded(-1.0, 1.0, shape=(2,)))
        >>> head.sample(torch.zeros(4, 8), head.noise((4,)))[0].shape
        torch.Size([4, 2])
    """

    num_parameters = 2

    def __init__(self, in_features: int, action_spec: TensorSpec) -> None:
        super().__init__(in_features, action_spec)
        # detail 24
        self.log_std = nn.Parameter(torch.zeros(len(self.low)))

    def sample(self, features: Tensor, noise: Tensor | None, mask: Tensor | None = None) -> Sampled:
        """Sample unclipped actions [B, A]."""
        mean = self.linear(features)
        # detail 23
        action = self.squashed(mean if noise is None else mean + self.log_std.exp() * noise)
        return action, self._log_prob(mean, action)

    def squashed(self, raw: Tensor) -> Tensor:
        """Return the actions for samples of the normal distribution: here, the samples."""
        return raw

    def _log_prob(self, mean: Tensor, action: Tensor) -> Tensor:
        standardized = (action - mean) * (-self.log_std).exp()
        # detail 25
        return (-0.5 * standardized.square() - self.log_std - LOG_SQRT_2PI).sum(-1)

    def array_sampler(self) -> ArraySampler:
        """Return a sampler of arrays."""
        std = np.exp(self.log_std.detach().numpy())
        return lambda mean, noise: mean if noise is None else mean + std * noise

    def evaluate(self, features: Tensor, action: Tensor, mask: Tensor | None = None) -> Evaluated:
        """Evaluate actions. The parameters are the normal's mean and log standard deviation, each [B, A]."""
        mean = self.linear(features)
        entropy = (self.log_std + (0.5 + LOG_SQRT_2PI)).sum().expand(mean.shape[:-1])
        return self._log_prob(mean, action), entropy, (mean, self.log_std.expand_as(mean))

    def kl(self, old: Parameters, new: Parameters) -> Tensor:
        """Return the divergence. Squashing both distributions does not change it."""
        (old_mean, old_log_std), (new_mean, new_log_std) = old, new
        ratio = (2 * (old_log_std - new_log_std)).exp()
        distance = ((old_mean - new_mean) * (-new_log_std).exp()).square()
        return (new_log_std - old_log_std + 0.5 * (ratio + distance - 1)).sum(-1)


class TanhGaussianHead(SquashedHead, GaussianHead):
    """A normal distribution squashed into the action bounds by tanh.

    At the bounds, tanh has no inverse. There the log-probability is that of a point inside, at a distance of
    1e-6 of the half width, so that it is always finite. The entropy is that of the normal distribution before
    tanh, because the squashed distribution has no closed form.

    Example:
        >>> head = TanhGaussianHead(8, Bounded(-1.0, 1.0, shape=(2,)))
        >>> bool((head.sample(torch.zeros(4, 8), head.noise((4,)))[0].abs() <= 1).all())
        True
    """

    margin = 1e-6

    def _log_prob(self, mean: Tensor, action: Tensor) -> Tensor:
        half_width = 0.5 * (self.high - self.low)
        squashed = ((action - self.low) / half_width - 1).clamp(-1 + self.margin, 1 - self.margin)
        raw = squashed.atanh()
        # log(1 - tanh(x)^2), without cancellation.
        log_slope = 2 * (math.log(2) - raw - F.softplus(-2 * raw)) + half_width.log()
        return super()._log_prob(mean, raw) - log_slope.sum(-1)

    def array_sampler(self) -> ArraySampler:
        """Return a sampler of arrays."""
        sample_normal = super().array_sampler()
        low = self.low.numpy()
        width = (self.high - self.low).numpy()
        return lambda mean, noise: low + width * (0.5 + 0.5 * np.tanh(sample_normal(mean, noise)))


def gumbel(*shape: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw standard Gumbel noise."""
    return -torch.empty(*shape, dtype=torch.float32).exponential_(generator=generator).log()


def action_bounds(spec: TensorSpec, width_ratio: float) -> tuple[Tensor, Tensor]:
    """Return the bounds [A] of continuous actions."""
    shape, low, high = tuple(spec.shape), -1, 1
    if isinstance(spec, Bounded) and shape != (0,):
        low, high = spec.space.low.min().item(), spec.space.high.max().item()
    if len(shape) != 1 or not shape[0] or not spec.dtype.is_floating_point:
        dtype = str(spec.dtype).removeprefix("torch.")
        raise ConfigError(
            f"env_id has actions of shape {shape} and dtype {dtype}, and a Gaussian needs a vector of floats:"
            f" use gymnasium.wrappers.TransformAction(env, lambda action: numpy.resize(action, {shape})"
            f".astype({dtype!r}), gymnasium.spaces.Box({low}, {high}, ({max(1, math.prod(shape))},)))."
        )
    # The width of what is squashed into the bounds must have a square.
    is_wide = isinstance(spec, Bounded) and not (spec.space.high - spec.space.low).square().isfinite().all()
    if not isinstance(spec, Bounded) or (is_wide and math.isinf(width_ratio)):
        raise ConfigError(
            "env_id has actions without finite bounds, to which a Gaussian is clipped: declare them by"
            " gymnasium.wrappers.TransformAction(env, lambda action: action, gymnasium.spaces.Box(-1, 1,"
            f" {shape})), without a ClipAction around it."
        )
    lows, highs = spec.space.low.clone().float(), spec.space.high.clone().float()
    width = highs - lows
    if not (width > 0).all():
        index = int((width <= 0).int().argmax())
        raise ConfigError(
            f"env_id has action bounds [{lows[index]:g}, {highs[index]:g}] in component {index}: use"
            " gymnasium.wrappers.TransformAction(env, lambda action: numpy.clip(action, env.action_space.low,"
            f" env.action_space.high), gymnasium.spaces.Box(-1, 1, {shape}))."
        )
    if width.max() > width_ratio * width.min():
        raise ConfigError(
            f"env_id has action bounds of unequal widths, from {width.min():g} to {width.max():g}, and a"
            " Gaussian starts with the standard deviation 1 in all components: wrap it in"
            " gymnasium.wrappers.RescaleAction(env, -1, 1)."
        )
    return lows, highs


class HeadDistribution(D.Distribution):
    """Distribution of a head for given features, with what losses of other libraries use."""

    def __init__(self, *inputs: Any) -> None:
        super().__init__(validate_args=False)
        self.head, self.features, self.allowed = inputs

    @property
    def mode(self) -> Tensor:
        """The most probable actions, [B, ...]."""
        return self.head.sample(self.features, None, self.allowed)[0]

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-probabilities of actions, [B]."""
        return self.head.evaluate(self.features, value, self.allowed)[0]

    def entropy(self) -> Tensor:
        """Return the entropies, [B], in nats."""
        return self.head.evaluate(self.features, self.mode, self.allowed)[1]
