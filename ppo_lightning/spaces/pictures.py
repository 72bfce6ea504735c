"""Pictures among observations, and the reading of their axes."""

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torchrl.data import Bounded, Categorical, Composite, TensorSpec

from ppo_lightning.errors import ConfigError

SMALLEST_PICTURE = 36  # pixels; smaller pictures, such as the cells of a grid, count as vectors
MOST_CHANNELS = 16
LARGEST_PIXEL = 2**16  # larger bounds are placeholders


@dataclasses.dataclass(frozen=True)
class Picture:
    """Reading of a picture's axes, and the function that reads pictures.

    Example:
        >>> picture = read_picture(Unbounded((96, 80, 3), dtype=torch.uint8))
        >>> picture.size, picture(torch.zeros(2, 96 * 80 * 3)).shape
        ((3, 96, 80), torch.Size([2, 3, 96, 80]))
    """

    shape: tuple[int, ...]  # in the environment
    order: tuple[int, ...]  # axes as [..., height, width]; those in front are the channels
    largest: float = 255.0  # largest value of a pixel, by which networks divide

    @property
    def size(self) -> tuple[int, int, int]:
        """Channels, height and width."""
        *channels, height, width = (self.shape[axis] for axis in self.order)
        return math.prod(channels), height, width

    def __call__(self, values: Tensor, num_batch_axes: int = 1) -> Tensor:
        """Read pictures, or rows of their pixels, as [..., C, H, W]."""
        batch, shape = values.shape[:num_batch_axes], values.shape[num_batch_axes:]
        if shape not in (self.shape, (math.prod(self.shape),)):
            raise RuntimeError(f"pictures have shape {tuple(shape)}, not {self.shape}")
        axes = [*range(num_batch_axes), *(num_batch_axes + axis for axis in self.order)]
        return values.reshape(*batch, *self.shape).permute(axes).reshape(*batch, *self.size)


def is_picture(spec: TensorSpec) -> bool:
    """Return whether a part of an observation is a picture, which a convolutional network reads."""
    is_box = not isinstance(spec, Composite | Categorical)
    return is_box and spec.ndim > 1 and sorted(spec.shape)[-2] >= SMALLEST_PICTURE


def has_picture(spec: TensorSpec) -> bool:
    """Return whether an observation is a picture, or a dictionary with one."""
    return any(map(has_picture, spec.values())) if isinstance(spec, Composite) else is_picture(spec)


def read_picture(spec: TensorSpec) -> Picture:
    """Return the reading of a picture's axes.

    The smallest of three axes has the channels, if it is the first or the last one and at most 16. A fourth
    axis in front is a stack of pictures, which becomes channels. Two axes are one gray channel.
    """
    shape = tuple(spec.shape)
    orders = [(0, 1)] if len(shape) == 2 else []
    if len(shape) in (3, 4):
        first, second, third = range(len(shape))[-3:]
        stack = range(len(shape) - 3)
        orders = [(*stack, first, second, third), (*stack, third, first, second)]
    fitting = [order for order in orders if _fits([shape[axis] for axis in order])]
    if len(fitting) != 1:
        raise ConfigError(
            f"env_id has pictures of shape {shape}, which {'both' if fitting else 'none'} of the readings"
            f" [channels, height, width] and [height, width, channels] fit, with at most {MOST_CHANNELS}"
            " channels: change it by gymnasium.wrappers.TransformObservation."
        )
    return Picture(shape, fitting[0], largest_value(spec))


def _fits(lengths: list[int]) -> bool:
    *channels, height, width = lengths
    most = max(channels, default=1)
    return most <= min(height, width) and (not channels or channels[-1] <= MOST_CHANNELS)


def largest_value(spec: TensorSpec) -> float:
    """Return the largest absolute value of a part of an observation, 1 if it is smaller or unknown."""
    if not isinstance(spec, Bounded):
        return 255.0 if spec.dtype == torch.uint8 else 1.0
    largest = max(abs(bound.double()).max().item() for bound in (spec.space.low, spec.space.high))
    return largest if 1 < largest < LARGEST_PIXEL else 1.0


def describe_picture(shape: Sequence[int], network: str) -> str:
    """Return shape and network of a picture in words."""
    return f"{' x '.join(map(str, shape))} picture, {'IMPALA' if network == 'impala' else 'Nature'} network"
