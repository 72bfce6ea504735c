"""Action distributions. Each draws its noise apart from its parameters, so that the collector can draw it ahead."""

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchrl.data import Bounded, Categorical, Composite, OneHot, TensorSpec

from ppo_lightning.errors import ConfigError
from ppo_lightning.models.init import orthogonal

HeadName = Literal["categorical", "gaussian", "tanh_gaussian"]
# What the linear layer gives for N environments, and noise, to actions [N, ...].
ArraySampler = Callable[[np.ndarray, np.ndarray | None], np.ndarray]
Parameters = tuple[Tensor, ...]  # of a distribution, each [B, ...]
LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
INVALID = (
    -1e9
)  # the logit of an action that is not allowed: its probability is 0, and 0 times its logarithm is 0, too


class Float32Linear(nn.Linear):
    """A linear layer that computes in float32, whatever ``trainer.precision`` makes of the layers before it.

    The ratio of the policy loss is the exponential of a difference of log-probabilities: logits of 5 in
    bfloat16 are wrong by 0.02, and so would the ratio be.
    """

    def forward(self, features: Tensor) -> Tensor:
        """Maps features [B, F] of any precision to float32."""
        if not torch.is_autocast_enabled(features.device.type):
            return super().forward(features)
        with torch.autocast(features.device.type, enabled=False):
            return super().forward(features.float())


class Head(nn.Module):
    """From features to a distribution over actions.

    Args:
        in_features: Width of the features.
        out_features: Width of the layer that parametrises the distribution.
    """

    num_choices = 0  # width of a mask: discrete actions, of all components together
    noise_shape: torch.Size  # of one action
    largest_entropy: float | None = None  # where there is one: of discrete actions

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.linear = orthogonal(Float32Linear(in_features, out_features), gain=0.01)

    def logits(self, features: Tensor, mask: Tensor | None) -> Tensor:
        """Returns the logits of discrete actions [B, ``num_choices``]; those that are not allowed get no gradient."""
        logits = self.linear(features)
        # detail A4
        return logits if mask is None else logits.masked_fill(~mask, INVALID)

    @abstractmethod
    def noise(self, batch_shape: tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        """Draws what :meth:`sample` needs, [*batch_shape, ...]."""

    @abstractmethod
    def sample(
        self, features: Tensor, noise: Tensor | None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns the action [B, ...] that the noise selects (the mode when None), and its log-probability [B].

        A mask [B, ``num_choices``] says which discrete actions are allowed; None: all.
        """

    @abstractmethod
    def array_sampler(self) -> ArraySampler:
        """Returns a function of NumPy arrays that draws as :meth:`sample` does after the linear layer.

        It holds for the present weights, and is used under inference mode.
        """

    @abstractmethod
    def evaluate(
        self, features: Tensor, action: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Parameters]:
        """Return the log-probability of the action and the entropy, both [B], and the parameters of the distribution."""

    @abstractmethod
    def kl(self, old: Parameters, new: Parameters) -> Tensor:
        """Return the Kullback-Leibler divergence of distributions from old ones, KL(old || new), [B] in nats.

        Args:
            old: From :meth:`evaluate`.
            new: From :meth:`evaluate`.
        """

    @abstractmethod
    def bars(self, features: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns what a picture of the distribution shows: numbers [B, A], and lengths of bars [B, A] from 0 to 1."""

    def for_environment(self, action: Tensor) -> Tensor:
        """Returns what the environment gets for an action [B, ...]."""
        return action


class CategoricalHead(Head):
    """A categorical distribution over discrete actions.

    Args:
        in_features: Width of the features.
        action_spec: The environment's actions.

    Raises:
        ConfigError: The actions are not discrete, or not given as indices.
    """

    def __init__(self, in_features: int, action_spec: TensorSpec) -> None:
        if isinstance(action_spec, OneHot):
            raise ConfigError(
                "env_id has one-hot actions: make the environment with categorical_action_encoding=True."
            )
        if not isinstance(action_spec, Categorical):
            raise ConfigError(
                f"env_id has continuous actions of shape {tuple(action_spec.shape)} and the categorical head takes discrete"
                " ones only: choose an environment with discrete actions, or leave model.agent.head to the environment."
            )
        self.num_actions = self.num_choices = int(action_spec.space.n)
        super().__init__(in_features, self.num_actions)
        self.noise_shape, self.largest_entropy = torch.Size([self.num_actions]), math.log(self.num_actions)

    def noise(self, batch_shape: tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        """Draws standard Gumbel noise [*batch_shape, A]: the argmax of logits plus it is a sample of the softmax."""
        return -torch.empty(*batch_shape, self.num_actions).exponential_(generator=generator).log()

    def sample(
        self, features: Tensor, noise: Tensor | None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`Head.sample`."""
        logits = self.logits(features, mask)
        action = (logits if noise is None else logits + noise).argmax(-1)
        return action, logits.log_softmax(-1).gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def array_sampler(self) -> ArraySampler:
        """See :meth:`Head.array_sampler`."""
        return lambda logits, noise: (logits if noise is None else logits + noise).argmax(-1)

    def evaluate(
        self, features: Tensor, action: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Parameters]:
        """See :meth:`Head.evaluate`; the parameters are log-probabilities [B, A]."""
        log_prob = self.logits(features, mask).log_softmax(-1)
        entropy = -(log_prob.exp() * log_prob).sum(-1)
        return log_prob.gather(-1, action.unsqueeze(-1)).squeeze(-1), entropy, (log_prob,)

    def kl(self, old: Parameters, new: Parameters) -> Tensor:
        """See :meth:`Head.kl`."""
        (old_log_prob,), (new_log_prob,) = old, new
        return (old_log_prob.exp() * (old_log_prob - new_log_prob)).sum(-1)

    def bars(self, features: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See :meth:`Head.bars`: the probabilities."""
        probabilities = self.logits(features, mask).softmax(-1)
        return probabilities, probabilities


class GaussianHead(Head):
    """A normal distribution over vectors of continuous actions.

    Its actions are not clipped, and neither are those that a rollout stores: the environment clips them
    (pitfall of vwxyzjn/cleanrl#240: the log-probability must be that of the action that was drawn).

    Args:
        in_features: Width of the features.
        action_spec: The environment's actions, shape [A] with finite bounds.

    Raises:
        ConfigError: The actions are not a vector, or their bounds are infinite, empty or of very different
            widths.
    """

    low: Tensor
    high: Tensor
    width_ratio = 10.0  # of the widest bounds to the narrowest

    def __init__(self, in_features: int, action_spec: TensorSpec) -> None:
        low, high = _bounds(action_spec, self.width_ratio)
        super().__init__(in_features, len(low))
        self.noise_shape = low.shape
        # detail 24
        self.log_std = nn.Parameter(torch.zeros(len(low)))
        self.register_buffer("low", low, persistent=False)
        self.register_buffer("high", high, persistent=False)

    def noise(self, batch_shape: tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        """Draws standard normal noise [*batch_shape, A]."""
        return torch.randn(*batch_shape, len(self.log_std), generator=generator)

    def sample(
        self, features: Tensor, noise: Tensor | None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`Head.sample`; actions [B, A]."""
        mean = self.linear(features)
        # detail 23
        action = mean if noise is None else mean + self.log_std.exp() * noise
        return action, self._log_prob(mean, action)

    def _log_prob(self, mean: Tensor, action: Tensor) -> Tensor:
        standardised = (action - mean) * (-self.log_std).exp()
        # detail 25
        return (-0.5 * standardised.square() - self.log_std - LOG_SQRT_2PI).sum(-1)

    def array_sampler(self) -> ArraySampler:
        """See :meth:`Head.array_sampler`."""
        std = np.exp(self.log_std.detach().numpy())
        return lambda mean, noise: mean if noise is None else mean + std * noise

    def evaluate(
        self, features: Tensor, action: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Parameters]:
        """See :meth:`Head.evaluate`; the parameters are means and log standard deviations, both [B, A]."""
        mean = self.linear(features)
        entropy = (self.log_std + (0.5 + LOG_SQRT_2PI)).sum().expand(mean.shape[:-1])
        return self._log_prob(mean, action), entropy, (mean, self.log_std.expand_as(mean))

    def kl(self, old: Parameters, new: Parameters) -> Tensor:
        """See :meth:`Head.kl`; squashing both distributions alike does not change it."""
        (old_mean, old_log_std), (new_mean, new_log_std) = old, new
        ratio = (2 * (old_log_std - new_log_std)).exp()
        distance = ((old_mean - new_mean) * (-new_log_std).exp()).square()
        return (new_log_std - old_log_std + 0.5 * (ratio + distance - 1)).sum(-1)

    def bars(self, features: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See :meth:`Head.bars`: the most probable actions, and where they stand between their bounds."""
        action = self.for_environment(self.sample(features, None)[0])
        return action, (action - self.low) / (self.high - self.low)

    def for_environment(self, action: Tensor) -> Tensor:
        """Clips to the bounds, as the environments do with the actions of a rollout."""
        return action.clamp(self.low, self.high)


class TanhGaussianHead(GaussianHead):
    """A normal distribution squashed into the action bounds by tanh.

    At the bounds themselves, where tanh has no inverse, the log-probability is that of a point 1e-6 of the
    half width inside, so that it is finite everywhere. The entropy is that of the normal distribution before
    tanh; the one after has no closed form.
    """

    margin = 1e-6
    width_ratio = math.inf  # it scales itself

    def sample(
        self, features: Tensor, noise: Tensor | None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`Head.sample`; actions [B, A] within the bounds."""
        mean = self.linear(features)
        raw = mean if noise is None else mean + self.log_std.exp() * noise
        action = self.low + (self.high - self.low) * (0.5 + 0.5 * raw.tanh())
        return action, self._squashed_log_prob(mean, action)

    def _squashed_log_prob(self, mean: Tensor, action: Tensor) -> Tensor:
        half_width = 0.5 * (self.high - self.low)
        squashed = ((action - self.low) / half_width - 1).clamp(-1 + self.margin, 1 - self.margin)
        raw = squashed.atanh()
        # log(1 - tanh(x)^2), without the cancellation
        log_slope = 2 * (math.log(2) - raw - F.softplus(-2 * raw)) + half_width.log()
        return self._log_prob(mean, raw) - log_slope.sum(-1)

    def array_sampler(self) -> ArraySampler:
        """See :meth:`Head.array_sampler`."""
        normal, low, width = super().array_sampler(), self.low.numpy(), (self.high - self.low).numpy()
        return lambda mean, noise: low + width * (0.5 + 0.5 * np.tanh(normal(mean, noise)))

    def evaluate(
        self, features: Tensor, action: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Parameters]:
        """See :meth:`Head.evaluate`; the parameters are those of the normal distribution before tanh."""
        mean = self.linear(features)
        _, entropy, parameters = super().evaluate(features, action)
        return self._squashed_log_prob(mean, action), entropy, parameters


def _bounds(spec: TensorSpec, width_ratio: float) -> tuple[Tensor, Tensor]:
    """Returns the bounds [A] of continuous actions, or says why a Gaussian cannot draw them."""
    if isinstance(spec, Categorical | OneHot):
        count = "" if spec.shape else f"{spec.space.n} "
        raise ConfigError(
            f"env_id has {count}discrete actions and the Gaussian head takes continuous ones only: choose an"
            " environment with continuous actions, or leave model.agent.head to the environment."
        )
    if isinstance(spec, Composite) or len(spec.shape) != 1 or not spec.dtype.is_floating_point:
        raise ConfigError(
            f"env_id has actions of shape {tuple(spec.shape)} and dtype {spec.dtype}: PPO needs vectors of floats."
        )
    wrap = "wrap it in gymnasium.wrappers.RescaleAction"
    if not isinstance(spec, Bounded):
        raise ConfigError(
            f"env_id has actions without finite bounds, which a Gaussian cannot be clipped to: {wrap}."
        )
    low, high = spec.space.low.clone(), spec.space.high.clone()
    width = high - low
    if not (width > 0).all():
        index = int((width <= 0).int().argmax())
        raise ConfigError(
            f"env_id has action bounds [{low[index]:g}, {high[index]:g}] in component {index}: {wrap}."
        )
    if width.max() > width_ratio * width.min():
        raise ConfigError(
            f"env_id has action bounds of unequal widths, from {width.min():g} to {width.max():g}, and a Gaussian starts with"
            f" the same standard deviation 1 in all: {wrap}."
        )
    return low, high
