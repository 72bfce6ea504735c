"""Observations of several parts: one encoder a part, side by side."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torchrl.data import Binary, Categorical, TensorSpec

from ppo_lightning.models.cnn import NatureCNN
from ppo_lightning.spaces.specs import choices, columns, is_mask, is_picture


class OneHot(nn.Module):
    """From integers to rows of 0 and 1.

    Args:
        numbers: How many values each of the integers can have.
    """

    of_integer: Tensor
    stands_for: Tensor

    def __init__(self, numbers: list[int]) -> None:
        super().__init__()
        self.out_features = sum(numbers)
        # Of each column of the row: which integer it is about, and for which of its values it is 1.
        of_integer = torch.arange(len(numbers)).repeat_interleave(torch.tensor(numbers))
        self.register_buffer("of_integer", of_integer, persistent=False)
        self.register_buffer(
            "stands_for", torch.cat([torch.arange(n) for n in numbers]).float(), persistent=False
        )

    def forward(self, values: Tensor) -> Tensor:
        """Maps integers [B, K], of any type, to floats [B, ``out_features``]."""
        return (values.float().index_select(1, self.of_integer) == self.stands_for).float()


class Numbers(nn.Module):
    """Takes numbers as they are.

    Args:
        size: How many.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.out_features = size

    def forward(self, values: Tensor) -> Tensor:
        """Maps numbers [B, K] of any type to floats [B, K]."""
        return values.float()


class Picture(nn.Module):
    """A :class:`NatureCNN` over pictures in rows.

    Args:
        shape: [C, H, W] or [H, W, C]; the smallest of the three is taken for C.
    """

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.channels = shape, shape.index(min(shape))
        height, width = shape[:2] if self.channels == 2 else shape[1:]
        self.network = NatureCNN(shape[self.channels], height, width)
        self.out_features = self.network.out_features

    def forward(self, values: Tensor) -> Tensor:
        """Maps pictures [B, C * H * W], of bytes or as floats from 0 to 255, to features [B, 512]."""
        return self.network(values.unflatten(-1, self.shape).movedim(1 + self.channels, 1))


class Encoders(nn.Module):
    """Encodes each part of an observation, and passes all together to a body.

    A discrete part becomes a row of 0 and 1, a picture goes through a :class:`NatureCNN`, numbers stay as
    they are; the mask of the actions is left out, for it is the head's.

    Args:
        observation_spec: Of one environment; :func:`~ppo_lightning.spaces.specs.columns` says where its parts
            lie.
        body: Makes what comes behind from the width of the parts together.
    """

    def __init__(self, observation_spec: TensorSpec, body: Callable[[int], nn.Module]) -> None:
        super().__init__()
        every = list(columns(observation_spec))
        parts, self._size = [(part, its) for name, part, its in every if not is_mask(name)], every[-1][2].stop
        self.encoders, self._columns = (
            nn.ModuleList(encoder(part) for part, _ in parts),
            [its for _, its in parts],
        )
        self.body = body(sum(its.out_features for its in self.encoders))  # type: ignore[misc]
        self.out_features = self.body.out_features
        if any(isinstance(its, Picture) for its in self.encoders):
            self.rows_in_cache = NatureCNN.rows_in_cache

    def forward(self, observation: Tensor) -> Tensor:
        """Maps observations [B, ...] to features [B, F].

        Raises:
            RuntimeError: They have another number of columns.
        """
        rows = observation.flatten(1)
        if rows.shape[1] != self._size:
            raise RuntimeError(f"observations have {rows.shape[1]} columns, not {self._size}")
        parts = [encode(rows[:, its]) for encode, its in zip(self.encoders, self._columns, strict=True)]
        return self.body(torch.cat(parts, dim=-1))


def encoder(spec: TensorSpec) -> nn.Module:
    """Returns the encoder of a part of an observation."""
    if isinstance(spec, Categorical) and not isinstance(spec, Binary):
        return OneHot(choices(spec))
    return Picture(spec.shape) if is_picture(spec) else Numbers(spec.shape.numel())
