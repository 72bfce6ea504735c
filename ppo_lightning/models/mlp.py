"""Multi-layer perceptrons for vector observations."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torchrl.data import TensorSpec

from ppo_lightning.errors import ConfigError
from ppo_lightning.models.agent import ActorCritic, ArrayPolicy
from ppo_lightning.models.heads import HeadName
from ppo_lightning.models.init import orthogonal
from ppo_lightning.models.normalizers import ObservationNormalizer


class MLP(nn.Module):
    """Linear layers, each followed by tanh.

    Args:
        in_features: Width of the observation.
        hidden_sizes: Widths of the layers.
    """

    def __init__(self, in_features: int, hidden_sizes: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for width in hidden_sizes:
            self.layers.append(orthogonal(nn.Linear(in_features, width), gain=math.sqrt(2)))
            in_features = width
        self.out_features = in_features

    def forward(self, observation: Tensor) -> Tensor:
        """Maps observations [B, D] to features [B, F]."""
        for layer in self.layers:
            observation = layer(observation).tanh()
        return observation


class MLPAgent(ActorCritic):
    """Policy and value as multi-layer perceptrons.

    Args:
        observation_spec: Vectors, shape [D].
        action_spec: The environment's actions.
        hidden_sizes: Widths of the hidden layers.
        shared: One trunk for policy and value, instead of one each.
        head: The action distribution: ``categorical``, ``gaussian`` or ``tanh_gaussian`` (squashed into the bounds); None:
            categorical for discrete actions, Gaussian for continuous ones.
        norm_obs: Normalise the observations by their running mean and standard deviation.
        clip_obs: Bound of the absolute value of a normalised observation.

    Raises:
        ConfigError: The observations are not vectors of numbers, or the head does not fit the actions.
    """

    def __init__(
        self,
        observation_spec: TensorSpec,
        action_spec: TensorSpec,
        hidden_sizes: Sequence[int] = (64, 64),
        shared: bool = False,
        head: HeadName | None = None,
        norm_obs: bool = False,
        clip_obs: float = 10.0,
    ) -> None:
        if len(observation_spec.shape) != 1 or not observation_spec.dtype.is_floating_point:
            raise ConfigError(
                f"env_id has observations of shape {tuple(observation_spec.shape)} and dtype {observation_spec.dtype}, and"
                " MLPAgent takes vectors of floats only: choose another environment, or an agent made for these observations."
            )
        if not all(width >= 1 for width in hidden_sizes):
            raise ConfigError(f"model.agent.hidden_sizes is {list(hidden_sizes)}: every width must be at least 1.")
        if not clip_obs > 0:
            raise ConfigError(f"model.agent.clip_obs is {clip_obs}: it must be above 0.")
        in_features = observation_spec.shape[0]
        normalizer = ObservationNormalizer((in_features,), clip_obs) if norm_obs else None
        super().__init__(action_spec, lambda: MLP(in_features, hidden_sizes), shared, head, normalizer)
        self.save_hyperparameters(ignore=["observation_spec", "action_spec"])

    def array_policy(self) -> ArrayPolicy:
        """See :meth:`ActorCritic.array_policy`: on views of the weights, NumPy acts in less than half of PyTorch's time."""
        if self.critic.weight.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
            return super().array_policy()
        actor, critic = arrays(self.actor_body), arrays(self.critic_body or self.actor_body)
        (to_head, head_bias), (to_value, value_bias) = arrays_of(self.head.linear), arrays_of(self.critic)
        sample = self.head.array_sampler()

        def policy(observation: np.ndarray, noise: Tensor | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            features = through(actor, observation)
            action, log_prob = sample(features @ to_head + head_bias, None if noise is None else noise.numpy())
            features = features if self.critic_body is None else through(critic, observation)
            return action, log_prob, (features @ to_value + value_bias)[:, 0]

        return policy


def arrays_of(layer: nn.Linear) -> tuple[np.ndarray, np.ndarray]:
    """Returns views of a layer's weight [in, out] and bias [out]."""
    return layer.weight.detach().numpy().T, layer.bias.detach().numpy()


def arrays(body: nn.Module) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns views of an MLP's weights and biases."""
    assert isinstance(body, MLP)
    return [arrays_of(layer) for layer in body.layers if isinstance(layer, nn.Linear)]


def through(layers: list[tuple[np.ndarray, np.ndarray]], observation: np.ndarray) -> np.ndarray:
    """Maps observations [N, D] to features [N, F], as :class:`MLP` does."""
    for weight, bias in layers:
        observation = np.tanh(observation @ weight + bias)
    return observation
