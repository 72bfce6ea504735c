"""Heads for actions with several components: MultiDiscrete, MultiBinary, dictionaries and tuples."""

import itertools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchrl.data import Binary, Categorical, Composite, MultiCategorical, OneHot, TensorSpec

from ppo_lightning.errors import ConfigError
from ppo_lightning.models.heads import (
    INVALID,
    ArraySampler,
    CategoricalHead,
    DiscreteHead,
    Evaluated,
    GaussianHead,
    Head,
    HeadChoice,
    Parameters,
    Sampled,
    TanhGaussianHead,
)
from ppo_lightning.spaces.specs import choice_counts, columns


class MultiCategoricalHead(DiscreteHead):
    """Independent categorical distributions, one per component.

    Actions are integers [K] with a number of choices each, or bits [K]. Log-probabilities and entropies are
    summed over the components.

    Example:
        >>> head = MultiCategoricalHead(8, MultiCategorical([3, 2]))
        >>> action, log_prob = head.sample(torch.zeros(4, 8), head.noise((4,)))
        >>> action.shape, log_prob.shape
        (torch.Size([4, 2]), torch.Size([4]))
    """

    index: Tensor

    def __init__(self, in_features: int, action_spec: TensorSpec) -> None:
        counts = choice_counts(action_spec)
        self.num_choices = sum(counts)
        super().__init__(in_features, self.num_choices)
        # Each component is a row of a table as wide as the largest. Unused cells point past the last logit.
        index = torch.full((len(counts), max(counts)), self.num_choices)
        start = 0
        for row, count in zip(index, counts, strict=True):
            row[:count] = torch.arange(start, start + count)
            start += count
        self.register_buffer("index", index, persistent=False)
        self.noise_shape = index.shape
        self.largest_entropy = sum(map(math.log, counts))

    def table(self, features: Tensor, mask: Tensor | None) -> Tensor:
        """Return the logits as a table [B, K, A].

        Cells without an action, and forbidden actions, have no gradient.
        """
        # detail 37
        return nn.functional.pad(self.logits(features, mask), (0, 1), value=INVALID)[..., self.index]

    def array_sampler(self) -> ArraySampler:
        """Return a sampler of arrays."""
        index = self.index.numpy()

        def choose(logits: np.ndarray, noise: np.ndarray | None) -> np.ndarray:
            padding = np.full((len(logits), 1), INVALID, logits.dtype)
            table = np.concatenate([logits, padding], axis=1)[:, index]
            return (table if noise is None else table + noise).argmax(-1)

        return choose

    def bars(self, features: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the concatenated probabilities of all components."""
        probabilities = self.table(features, mask).softmax(-1)[..., self.index < self.num_choices]
        return probabilities, probabilities


class CompositeHead(Head):
    """Independent distributions, one per entry of a dictionary or tuple.

    An action is one row of floats. ``head`` is the distribution of the entries with continuous actions.

    Example:
        >>> spec = Composite(arm=Categorical(3, shape=()), tool=MultiCategorical([2, 2]))
        >>> head = CompositeHead(8, spec, None)
        >>> head.sample(torch.zeros(4, 8), None)[0].shape
        torch.Size([4, 3])
    """

    def __init__(self, in_features: int, action_spec: Composite, head: HeadChoice) -> None:
        nn.Module.__init__(self)
        leaves = list(columns(action_spec))
        self._shapes = [leaf.shape for _, leaf, _ in leaves]
        self._columns = [leaf_columns for *_, leaf_columns in leaves]
        parts = [
            make_head(head if leaf.dtype.is_floating_point else None, in_features, leaf)
            for _, leaf, _ in leaves
        ]
        self.parts: Any = nn.ModuleList(parts)
        self.num_choices = sum(part.num_choices for part in parts)
        known = [part.largest_entropy for part in parts if part.largest_entropy is not None]
        self.largest_entropy = sum(known) if len(known) == len(parts) else None

    def _masks(self, mask: Tensor | None) -> list[Tensor | None]:
        if mask is None:
            return [None] * len(self.parts)
        masks = mask.split([part.num_choices for part in self.parts], dim=-1)
        return [part_mask if part_mask.shape[-1] else None for part_mask in masks]

    def _row(self, actions: list[Tensor]) -> Tensor:
        pairs = zip(actions, self._shapes, strict=True)
        return torch.cat([(action if shape else action.unsqueeze(-1)).float() for action, shape in pairs], -1)

    def _split(self, row: Tensor) -> list[Tensor]:
        """Split rows [B, A] into the action of each entry."""
        pairs = zip(self._columns, self._shapes, strict=True)
        return [row[..., place] if shape else row[..., place].squeeze(-1) for place, shape in pairs]

    def noise(self, batch_shape: tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        """Draw the noise of all entries in one row, [*batch_shape, ...]."""
        return torch.cat(
            [part.noise(batch_shape, generator).flatten(len(batch_shape)) for part in self.parts], dim=-1
        )

    def sample(self, features: Tensor, noise: Tensor | None, mask: Tensor | None = None) -> Sampled:
        """Sample actions [B, A]."""
        noises: list[Tensor | None] = [None] * len(self.parts)
        if noise is not None:
            rows = noise.split([part.noise_shape.numel() for part in self.parts], dim=-1)
            noises = [row.unflatten(-1, part.noise_shape) for row, part in zip(rows, self.parts, strict=True)]
        parts = zip(self.parts, noises, self._masks(mask), strict=True)
        samples = [part.sample(features, part_noise, allowed) for part, part_noise, allowed in parts]
        log_probs = torch.stack([log_prob for _, log_prob in samples])
        return self._row([action for action, _ in samples]), log_probs.sum(0)

    def evaluate(self, features: Tensor, action: Tensor, mask: Tensor | None = None) -> Evaluated:
        """Evaluate actions. The parameters of all entries are concatenated."""
        parts = zip(self.parts, self._split(action), self._masks(mask), strict=True)
        evaluated = [part.evaluate(features, chosen, allowed) for part, chosen, allowed in parts]
        log_probs, entropies, parameters = zip(*evaluated, strict=True)
        return (
            torch.stack(log_probs).sum(0),
            torch.stack(entropies).sum(0),
            tuple(itertools.chain(*parameters)),
        )

    def kl(self, old: Parameters, new: Parameters) -> Tensor:
        """Return the sum over the entries."""
        divergences = []
        start = 0
        for part in self.parts:
            end = start + part.num_parameters
            divergences.append(part.kl(old[start:end], new[start:end]))
            start = end
        return torch.stack(divergences).sum(0)

    def bars(self, features: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the concatenated bars of all entries."""
        parts = zip(self.parts, self._masks(mask), strict=True)
        bars = [part.bars(features, part_mask) for part, part_mask in parts]
        numbers, lengths = zip(*bars, strict=True)
        return torch.cat(numbers, dim=-1), torch.cat(lengths, dim=-1)

    def for_environment(self, action: Tensor) -> Tensor:
        """Clip the continuous entries to their bounds."""
        parts = zip(self.parts, self._split(action), strict=True)
        return self._row([part.for_environment(part_action) for part, part_action in parts])


def make_head(name: HeadChoice, in_features: int, action_spec: TensorSpec) -> Any:
    """Make the head for a spec of actions: the named one for continuous actions, None for the default."""
    if isinstance(action_spec, Composite):
        return CompositeHead(in_features, action_spec, name)
    if callable(name):
        return name(in_features, action_spec)
    kind = "discrete" if isinstance(action_spec, Categorical | OneHot) else "continuous"
    if name is not None and (name == "categorical") != (kind == "discrete"):
        raise ConfigError(f"env_id has {kind} actions, and model.agent.head is {name}: leave it unset.")
    if isinstance(action_spec, MultiCategorical | Binary):
        return MultiCategoricalHead(in_features, action_spec)
    if kind == "discrete":
        return CategoricalHead(in_features, action_spec)
    return (TanhGaussianHead if name == "tanh_gaussian" else GaussianHead)(in_features, action_spec)
