"""Networks and statistics of Random Network Distillation."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torchrl.data import TensorSpec
from torchrl.envs import EnvBase

from ppo_lightning.errors import ConfigError
from ppo_lightning.models.agent import ActorCritic
from ppo_lightning.models.cnn import channels_last
from ppo_lightning.models.heads import Float32Linear
from ppo_lightning.models.init import orthogonal
from ppo_lightning.models.normalizers import Moments, ObservationNormalizer, merge_rows
from ppo_lightning.spaces.specs import is_picture, stored

CLIP = 5.0  # maximum absolute value of a normalized observation
HIDDEN = 128  # width of the layers for rows of numbers
EMBEDDING = 512  # width of the linear layers for pictures


class Curiosity(nn.Module):
    """Novelty of observations, and the value of novelty.

    A predictor learns the output of a fixed random network. The error of the predictor is small for
    observations like those that it was trained on, and large for new ones. The observations are normalized
    and clipped to [-5, 5]. Of stacked frames, the networks see the last one.

    Source: Burda et al., "Exploration by Random Network Distillation" (2018), arXiv:1810.12894. The networks
    for pictures are those of the authors, and of CleanRL's ppo_rnd_envpool.py.

    Args:
        shape: Shape of the networks' input, bytes [C, H, W] or numbers [D].
        critic_features: Width F of the features of the agent's value function.

    Example:
        >>> curiosity = Curiosity((4,), critic_features=64)
        >>> curiosity.error(torch.zeros(3, 4)).shape
        torch.Size([3])
    """

    def __init__(self, shape: tuple[int, ...], critic_features: int) -> None:
        super().__init__()
        self.shape = shape
        self.normalizer = ObservationNormalizer(shape, clip=CLIP)
        self.reward_moments = Moments(())  # of the discounted sums of intrinsic rewards
        self.target = random_features(shape).requires_grad_(False)
        width = HIDDEN if len(shape) == 1 else EMBEDDING
        layers = hidden(width, width), nn.ReLU(), hidden(width, width)
        self.predictor = nn.Sequential(random_features(shape), nn.ReLU(), *layers)
        self.critic = orthogonal(Float32Linear(critic_features, 1), gain=0.01)

    @classmethod
    def of(cls, env: EnvBase, observation_spec: TensorSpec, agent: ActorCritic) -> "Curiosity":
        """Make the networks for an environment, of whose stacked frames they see the last one.

        Args:
            env: The environments. Those of Atari know the number of their frames.
            observation_spec: Spec of one environment.
            agent: The agent, whose features the value of novelty reads.
        """
        shape = tuple(stored(observation_spec).shape)
        if is_picture(observation_spec):
            shape = (shape[0] // getattr(env, "preprocessing", {}).get("frame_stack", 1), *shape[1:])
        else:
            shape = (math.prod(shape),)
        return cls(shape, agent.critic.in_features)

    @classmethod
    def like(cls, state: Mapping[str, Any], existing: "Curiosity | None" = None) -> "Curiosity":
        """Make networks for the weights of a module with an attribute ``curiosity``.

        Args:
            state: Tensors of the module, by name.
            existing: Networks that are returned, if there are some.

        Raises:
            ConfigError: The module has no such networks.
        """
        names = ("curiosity.normalizer.mean", "curiosity.critic.weight")
        if not state.keys() >= set(names):
            raise ConfigError(
                "The checkpoint (ckpt_path) has no networks of novelty: it is not of an RND run. Use the"
                " algorithm of its run."
            )
        mean, weight = (state[name] for name in names)
        return existing or cls(tuple(mean.shape), weight.shape[-1])

    def view(self, observation: Tensor) -> Tensor:
        """Return what the networks see of stored observations [N, T, ...], [N, T, *shape]."""
        if len(self.shape) == 1:
            return observation.flatten(2)
        return observation[:, :, -self.shape[0] :]

    def error(self, observation: Tensor) -> Tensor:
        """Return the mean squared error of the predictor, [B].

        Args:
            observation: From :meth:`view`, not normalized, [B, *shape].
        """
        normalized = self.normalizer(observation)
        # bfloat16 would round the difference away.
        return (self.predictor(normalized).float() - self.target(normalized).float()).square().mean(-1)

    def value(self, critic_features: Tensor) -> Tensor:
        """Return the values of novelty [B] from the features of the agent's value function [B, F]."""
        return self.critic(critic_features).squeeze(-1)

    @torch.no_grad()
    def observe(self, observation: Tensor, valid: Tensor | None = None) -> None:
        """Merge the observations of all ranks into the statistics.

        With several ranks this is a collective.

        Args:
            observation: From :meth:`view`, [N, T, *shape].
            valid: Steps to merge, [N, T] bool. None: all.
        """
        merge_rows(self.normalizer, observation.flatten(0, 1) if valid is None else observation[valid])

    @torch.no_grad()
    def reward_std(self, discounted: Tensor, valid: Tensor | None = None) -> Tensor:
        """Merge discounted sums of intrinsic rewards into their statistics, and return their deviation.

        With several ranks this is a collective.

        Args:
            discounted: Sums of past rewards, [N, T].
            valid: Steps to merge, [N, T] bool. None: all.

        Returns:
            Standard deviation of all sums so far, a scalar in float32.
        """
        rows = discounted.flatten() if valid is None else discounted[valid.to(discounted.device)]
        merge_rows(self.reward_moments, rows)
        return self.reward_moments.std.float()

    def trainable_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the predictor and of the value of novelty."""
        return [*self.predictor.parameters(), *self.critic.parameters()]


def hidden(in_features: int, out_features: int) -> nn.Linear:
    """Make a linear layer with orthogonal weights of gain sqrt(2)."""
    return orthogonal(nn.Linear(in_features, out_features), gain=math.sqrt(2))


def random_features(shape: tuple[int, ...]) -> nn.Sequential:
    """Make the network whose output is predicted, which ends with a linear layer.

    Args:
        shape: Shape of the input, pictures [C, H, W] or numbers [D].
    """
    if len(shape) == 1:
        layers = hidden(shape[0], HIDDEN), hidden(HIDDEN, HIDDEN)
        for layer in layers:
            nn.init.uniform_(layer.bias, -1, 1)
        return nn.Sequential(layers[0], nn.LeakyReLU(), layers[1])
    gain = math.sqrt(2)
    convolutions = channels_last(
        nn.Sequential(
            orthogonal(nn.Conv2d(shape[0], 32, 8, stride=4), gain),
            nn.LeakyReLU(),
            orthogonal(nn.Conv2d(32, 64, 4, stride=2), gain),
            nn.LeakyReLU(),
            orthogonal(nn.Conv2d(64, 64, 3, stride=1), gain),
            nn.LeakyReLU(),
            nn.Flatten(),
        )
    )
    size = convolutions(torch.zeros(1, *shape)).shape[1]
    return nn.Sequential(convolutions, hidden(size, EMBEDDING))
