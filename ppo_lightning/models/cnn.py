"""Convolutional networks for pictures."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torchrl.data import Categorical, Composite, TensorSpec

from ppo_lightning.errors import ConfigError
from ppo_lightning.models.agent import ActorCritic
from ppo_lightning.models.heads import HeadName
from ppo_lightning.models.init import normed, orthogonal
from ppo_lightning.models.memory import MemoryName
from ppo_lightning.spaces.pictures import SMALLEST_PICTURE, Picture, describe_picture, read_picture
from ppo_lightning.utils.arguments import Range, check_arguments


def scaled(pictures: Tensor, largest: float = 255.0) -> Tensor:
    """Divide pictures [B, C, H, W] by their largest value, in the layout channels last, fastest on a CPU."""
    # detail 22
    if torch.compiler.is_compiling():  # the compiler fuses this into one loop
        return pictures.to(dtype=torch.float32, memory_format=torch.channels_last) / largest
    pixels = pictures.permute(0, 2, 3, 1)
    if not pixels.is_contiguous():  # in a third of the time of a copy with another memory format
        pixels = torch.stack(pictures.unbind(1), dim=-1)
    return pixels.to(torch.float32, copy=True).div_(largest).permute(0, 3, 1, 2)


def channels_last(network: nn.Module) -> nn.Module:
    """Convert the weights of convolutions to the layout channels last in place, and return the network."""
    return network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


class PictureBody(nn.Module):
    """Base class of convolutional bodies: ``convolutions`` and ``linear``."""

    convolutions: nn.Module
    linear: nn.Linear

    def __init__(self, picture: Picture) -> None:
        super().__init__()
        self.picture = picture

    def forward(self, observation: Tensor) -> Tensor:
        """Map pictures [B, ...], or rows of their pixels, to features [B, F]."""
        pixels = scaled(self.picture(observation), self.picture.largest)
        return self.linear(self.convolutions(pixels)).relu()


def nature_convolutions(channels: int, activation: type[nn.Module]) -> nn.Module:
    """Make the three convolutions of Mnih et al. for pictures [B, C, H, W], whose output is [B, D]."""
    layers: list[nn.Module] = []
    # detail 21
    for size in ((channels, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1)):
        layers += orthogonal(nn.Conv2d(*size), gain=math.sqrt(2)), activation()
    return channels_last(nn.Sequential(*layers, nn.Flatten()))


class NatureCNN(PictureBody):
    """Three convolutions and a linear layer.

    Source: Mnih et al., "Human-level control through deep reinforcement learning" (2015).

    Args:
        picture: Reading of the observations, at least 36 x 36 pixels.

    Example:
        >>> network = NatureCNN(read_picture(Unbounded((4, 84, 84), dtype=torch.uint8)))
        >>> network(torch.zeros(2, 4, 84, 84, dtype=torch.uint8)).shape
        torch.Size([2, 512])
    """

    out_features = 512
    microbatch_size = 128

    def __init__(self, picture: Picture) -> None:
        super().__init__(picture)
        self.convolutions = nature_convolutions(picture.size[0], nn.ReLU)
        size = self.convolutions(torch.zeros(1, *picture.size)).shape[1]
        self.linear = orthogonal(nn.Linear(size, self.out_features), gain=math.sqrt(2))


class Residual(nn.Module):
    """Two convolutions with a skip connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, picture: Tensor) -> Tensor:
        """Map a picture [B, C, H, W] to the same shape."""
        return picture + self.second(self.first(picture.relu()).relu())


class ImpalaCNN(PictureBody):
    """Three stages of a convolution, a max pooling and two residual blocks, followed by a linear layer.

    Source: Espeholt et al., "IMPALA" (2018), as used by Cobbe et al. for Procgen (2020), with PyTorch's
    initialization.

    Args:
        picture: Reading of the observations.

    Example:
        >>> network = ImpalaCNN(read_picture(Unbounded((64, 64, 3), dtype=torch.uint8)))
        >>> network(torch.zeros(2, 64, 64, 3, dtype=torch.uint8)).shape
        torch.Size([2, 256])
    """

    out_features = 256
    microbatch_size = 64

    def __init__(self, picture: Picture) -> None:
        super().__init__(picture)
        # detail P1
        stages: list[nn.Module] = []
        for in_channels, out_channels in itertools.pairwise((picture.size[0], 16, 32, 32)):
            stages += [
                nn.Conv2d(in_channels, out_channels, 3, padding=1),
                nn.MaxPool2d(3, stride=2, padding=1),
                Residual(out_channels),
                Residual(out_channels),
            ]
        self.convolutions = channels_last(nn.Sequential(*stages, nn.Flatten(), nn.ReLU()))
        size = self.convolutions(torch.zeros(1, *picture.size)).shape[1]
        self.linear = nn.Linear(size, self.out_features)

    def use_normed_weights(self) -> None:
        """Initialize the weights of each output with one norm, see :func:`~ppo_lightning.models.init.normed`.

        The norm is 1 for the first convolution of a stage and 1.4 for the linear layer. The outputs of all
        residual blocks together have about the size of their input.
        """
        layers: list[Any] = [layer for layer in self.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
        norms = [1.0, *[6**-0.25] * 4] * 3 + [1.4]  # six residual blocks
        for layer, norm in zip(layers, norms, strict=True):
            normed(layer, norm)


class CNNAgent(ActorCritic):
    """Agent for pictures, with one convolutional body for policy and value.

    Args:
        observation_spec: Pictures, whose axes :func:`~ppo_lightning.spaces.pictures.read_picture` reads.
        action_spec: Spec of the actions.
        body: ``nature`` (Atari) or ``impala`` (Procgen).
        shared: Use one body, and one memory, for policy and value instead of one body each. With false, the
            value function has no memory. None: one body.
        head: As for :class:`~ppo_lightning.models.MLPAgent`.
        memory: As for :class:`~ppo_lightning.models.MLPAgent`.
        memory_size: As for :class:`~ppo_lightning.models.MLPAgent`.
        normed_init: Initialize the weights of each output with one norm, as PPG's authors do for ``impala``.

    Raises:
        ConfigError: The observations are no pictures, or too small for the network, or ``normed_init`` is
            true for another body.

    Example:
        >>> from torchrl.data import Categorical, Unbounded
        >>> agent = CNNAgent(Unbounded((4, 84, 84), dtype=torch.uint8), Categorical(6, shape=()))
        >>> agent.mode(torch.zeros(2, 4, 84, 84, dtype=torch.uint8)).shape
        torch.Size([2])
    """

    def __init__(
        self,
        observation_spec: TensorSpec,
        action_spec: TensorSpec,
        body: Literal["nature", "impala"] = "nature",
        shared: bool | None = None,
        head: HeadName | None = None,
        memory: MemoryName | None = None,
        memory_size: Annotated[int, Range(1)] = 128,
        normed_init: bool = False,
    ) -> None:
        check_arguments(CNNAgent.__init__, locals(), "model.agent")
        if isinstance(observation_spec, Composite | Categorical) or observation_spec.ndim < 2:
            raise ConfigError("env_id has no picture: set model.agent to ppo_lightning.MLPAgent.")
        picture = read_picture(observation_spec)
        if body == "nature" and min(picture.size[1:]) < SMALLEST_PICTURE:
            size = f"{picture.size[1]} x {picture.size[2]}, below {SMALLEST_PICTURE} x {SMALLEST_PICTURE}"
            raise ConfigError(f"env_id has pictures of {size}: set model.agent.body to impala.")
        if normed_init and body != "impala":
            raise ConfigError("model.agent.normed_init is true: set model.agent.body to impala.")
        network: Callable[[], PictureBody] = functools.partial(
            NatureCNN if body == "nature" else ImpalaCNN, picture
        )
        shared = shared is None or shared
        super().__init__(action_spec, network, shared, head=head, memory=memory, memory_size=memory_size)
        self.reads = describe_picture(picture.shape, body)
        if normed_init:
            for module in self.modules():
                if isinstance(module, ImpalaCNN):
                    module.use_normed_weights()
            for layer in (*self.head.modules(), self.critic):
                if isinstance(layer, nn.Linear):
                    normed(layer, 0.1)
        self.save_hyperparameters(ignore=["observation_spec", "action_spec"])
