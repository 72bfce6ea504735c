"""Encoders for observations with several parts."""

from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn
from torchrl.data import Binary, Categorical, TensorSpec

from ppo_lightning.models.cnn import NatureCNN
from ppo_lightning.models.normalizers import ObservationNormalizer
from ppo_lightning.spaces.entries import row_columns
from ppo_lightning.spaces.pictures import is_picture, largest_value, read_picture
from ppo_lightning.spaces.specs import (
    choice_counts,
    columns,
    has_numbers_only,
    is_mask,
    not_measured,
    stored,
)


class OneHot(nn.Module):
    """One-hot encoding of several integers in one row, from the number of values of each."""

    source: Tensor
    value: Tensor

    def __init__(self, numbers: list[int]) -> None:
        super().__init__()
        self.out_features = sum(numbers)
        # Each column of the row is 1 if the integer `source` equals `value`.
        # From a list, because agents are also built on the device `meta`, which cannot repeat.
        source = torch.tensor([index for index, number in enumerate(numbers) for _ in range(number)])
        self.register_buffer("source", source, persistent=False)
        self.register_buffer("value", torch.cat([torch.arange(n) for n in numbers]).float(), persistent=False)

    def forward(self, values: Tensor) -> Tensor:
        """Map integers [B, K] of any dtype to floats [B, ``out_features``]."""
        return (values.float().index_select(1, self.source) == self.value).float()


class Numbers(nn.Module):
    """Conversion of ``size`` numbers to floats, divided by the ``largest`` value of bytes."""

    def __init__(self, size: int, largest: float = 1.0) -> None:
        super().__init__()
        self.out_features = size
        self.largest = largest

    def forward(self, values: Tensor) -> Tensor:
        """Map numbers [B, K] of any dtype to floats [B, K]."""
        return values.float() if self.largest == 1 else values.float() / self.largest


class Encoders(nn.Module):
    """One encoder per part of an observation, or per named part, followed by a body for their total width.

    A discrete part is one-hot encoded, a picture goes through a :class:`NatureCNN`, bytes are divided by the
    largest value of their space unless they are normalized, and other numbers are unchanged. The action mask
    is excluded, because only the head uses it.
    """

    def __init__(
        self,
        observation_spec: TensorSpec,
        body: Callable[[int], nn.Module],
        names: Collection[str] | None = None,
        normalized: bool = False,
    ) -> None:
        super().__init__()
        parts = [
            (part, part_columns)
            for name, part, part_columns in columns(observation_spec)
            if not is_mask(name) and (names is None or name in names)
        ]
        self._size = stored(observation_spec).shape.numel()
        self.encoders = nn.ModuleList(make_encoder(part, normalized) for part, _ in parts)
        self._columns = [part_columns for _, part_columns in parts]
        self.body = body(sum(encoder.out_features for encoder in self.encoders))  # type: ignore[misc]
        self.out_features: int = self.body.out_features  # type: ignore[assignment]
        if any(isinstance(encoder, NatureCNN) for encoder in self.encoders):
            self.microbatch_size = NatureCNN.microbatch_size

    def forward(self, observation: Tensor) -> Tensor:
        """Map observations [B, ...] to features [B, F]."""
        rows = observation.reshape(observation.shape[0], -1)
        if rows.shape[1] != self._size:
            raise RuntimeError(f"observations have {rows.shape[1]} columns, not {self._size}")
        encoders = zip(self.encoders, self._columns, strict=True)
        parts = [encoder(rows[:, part_columns]) for encoder, part_columns in encoders]
        return self.body(torch.cat(parts, dim=-1))


def make_body(
    observation_spec: TensorSpec,
    network: Callable[..., nn.Module],
    names: Collection[str] | None,
    normalized: bool,
) -> nn.Module:
    """Make the body for a vector, or for several parts with the arguments of :class:`Encoders`.

    The ``network`` of a vector is made from the number of columns and the ``columns`` to read.
    """
    if has_numbers_only(observation_spec):
        size = stored(observation_spec).shape[0]
        return network(size, columns=row_columns(observation_spec, names or ()))
    return Encoders(observation_spec, network, names, normalized)


def make_normalizer(observation_spec: TensorSpec) -> ObservationNormalizer:
    """Make the statistics of observations, of which discrete parts and pictures are excluded."""
    excluded = not_measured(observation_spec)
    return ObservationNormalizer(tuple(stored(observation_spec).shape), leave=excluded)


def make_encoder(spec: TensorSpec, normalized: bool = False) -> nn.Module:
    """Make the encoder of a part of an observation."""
    if isinstance(spec, Categorical) and not isinstance(spec, Binary):
        return OneHot(choice_counts(spec))
    if is_picture(spec):
        return NatureCNN(read_picture(spec))
    are_bytes = spec.dtype == torch.uint8 and not normalized
    return Numbers(spec.shape.numel(), largest_value(spec) if are_bytes else 1.0)
