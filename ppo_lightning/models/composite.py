"""Actions of several components: MultiDiscrete, MultiBinary, and dictionaries and tuples of all kinds."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torchrl.data import Binary, Categorical, Composite, MultiCategorical, OneHot, TensorSpec

from ppo_lightning.models.heads import (
    INVALID,
    ArraySampler,
    CategoricalHead,
    GaussianHead,
    Head,
    HeadName,
    Parameters,
    TanhGaussianHead,
)
from ppo_lightning.spaces.specs import choices, columns


class MultiCategoricalHead(Head):
    """Independent categorical distributions, one a component, whose log-probabilities and entropies are summed.

    Args:
        in_features: Width of the features.
        action_spec: The environment's actions: integers [K], each below its own number; or [K] of 0 and 1.
    """

    index: Tensor

    def __init__(self, in_features: int, action_spec: TensorSpec) -> None:
        numbers = choices(action_spec)
        self.num_choices, self.num_components = sum(numbers), len(numbers)
        super().__init__(in_features, self.num_choices)
        # Components stand side by side in a table as wide as the largest; its empty places point behind the last logit.
        index, start = torch.full((len(numbers), max(numbers)), self.num_choices), 0
        for row, number in zip(index, numbers, strict=True):
            row[:number] = torch.arange(start, start + number)
            start += number
        self.register_buffer("index", index, persistent=False)
        self.noise_shape, self.largest_entropy = index.shape, sum(map(math.log, numbers))

    def table(self, features: Tensor, mask: Tensor | None) -> Tensor:
        """Returns the logits [B, K, A], those of actions that do not exist or are not allowed without gradient."""
        # detail 37
        return nn.functional.pad(self.logits(features, mask), (0, 1), value=INVALID)[..., self.index]

    def noise(self, batch_shape: tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        """Draws standard Gumbel noise [*batch_shape, K, A]."""
        return -torch.empty(*batch_shape, *self.index.shape).exponential_(generator=generator).log()

    def sample(
        self, features: Tensor, noise: Tensor | None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`Head.sample`; actions [B, K]."""
        table = self.table(features, mask)
        action = (table if noise is None else table + noise).argmax(-1)
        return action, table.log_softmax(-1).gather(-1, action.unsqueeze(-1)).squeeze(-1).sum(-1)

    def array_sampler(self) -> ArraySampler:
        """See :meth:`Head.array_sampler`."""
        index = self.index.numpy()

        def choose(logits: np.ndarray, noise: np.ndarray | None) -> np.ndarray:
            table = np.concatenate([logits, np.full((len(logits), 1), INVALID, logits.dtype)], axis=1)[
                :, index
            ]
            return (table if noise is None else table + noise).argmax(-1)

        return choose

    def evaluate(
        self, features: Tensor, action: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Parameters]:
        """See :meth:`Head.evaluate`; the parameters are log-probabilities [B, K, A]."""
        log_prob = self.table(features, mask).log_softmax(-1)
        entropy = -(log_prob.exp() * log_prob).sum((-2, -1))
        return log_prob.gather(-1, action.long().unsqueeze(-1)).squeeze(-1).sum(-1), entropy, (log_prob,)

    def kl(self, old: Parameters, new: Parameters) -> Tensor:
        """See :meth:`Head.kl`."""
        (old_log_prob,), (new_log_prob,) = old, new
        return (old_log_prob.exp() * (old_log_prob - new_log_prob)).sum((-2, -1))

    def bars(self, features: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See :meth:`Head.bars`: the probabilities of all components, one after the other."""
        probabilities = self.table(features, mask).softmax(-1)[..., self.index < self.num_choices]
        return probabilities, probabilities


class CompositeHead(Head):
    """Independent distributions, one an entry of a dictionary or a tuple; an action is one row of floats.

    Args:
        in_features: Width of the features.
        action_spec: The environment's actions.
        head: Of the entries with continuous actions.
    """

    def __init__(self, in_features: int, action_spec: Composite, head: HeadName | None) -> None:
        nn.Module.__init__(self)
        leaves = list(columns(action_spec))
        self.parts = nn.ModuleList(
            make_head(head if leaf.dtype.is_floating_point else None, in_features, leaf)
            for _, leaf, _ in leaves
        )
        self._leaves = [(leaf, its) for _, leaf, its in leaves]
        self.num_choices = sum(part.num_choices for part in self._heads)
        largest = [part.largest_entropy for part in self._heads]
        self.largest_entropy = None if None in largest else sum(its for its in largest if its is not None)

    @property
    def _heads(self) -> list[Head]:
        return list(self.parts)  # type: ignore[arg-type]

    def _masks(self, mask: Tensor | None) -> list[Tensor | None]:
        if mask is None:
            return [None] * len(self.parts)
        masks = mask.split([part.num_choices for part in self._heads], dim=-1)
        return [its if part.num_choices else None for part, its in zip(self._heads, masks, strict=True)]

    def _row(self, actions: list[Tensor]) -> Tensor:
        rows = [
            action.unsqueeze(-1) if not leaf.shape else action
            for (leaf, _), action in zip(self._leaves, actions, strict=True)
        ]
        return torch.cat([row.float() for row in rows], dim=-1)

    def _split(self, row: Tensor) -> list[Tensor]:
        """Returns each entry's action from rows [B, A]."""
        actions = [row[..., its] for _, its in self._leaves]
        return [
            action if leaf.dtype.is_floating_point else (action if leaf.shape else action.squeeze(-1)).long()
            for (leaf, _), action in zip(self._leaves, actions, strict=True)
        ]

    def noise(self, batch_shape: tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        """Draws what the entries need, [*batch_shape, ...] in one row."""
        return torch.cat(
            [part.noise(batch_shape, generator).flatten(len(batch_shape)) for part in self._heads], dim=-1
        )

    def sample(
        self, features: Tensor, noise: Tensor | None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`Head.sample`; actions [B, A]."""
        noises: list[Tensor | None] = [None] * len(self.parts)
        if noise is not None:
            rows = noise.split([part.noise_shape.numel() for part in self._heads], dim=-1)
            noises = [
                row.unflatten(-1, part.noise_shape) for row, part in zip(rows, self._heads, strict=True)
            ]
        parts = zip(self._heads, noises, self._masks(mask), strict=True)
        drawn = [part.sample(features, its, allowed) for part, its, allowed in parts]
        return self._row([action for action, _ in drawn]), torch.stack(
            [log_prob for _, log_prob in drawn]
        ).sum(0)

    def array_sampler(self) -> ArraySampler:
        """There is none: an agent with this head acts through :meth:`sample`."""
        raise AssertionError("a composite head has no single linear layer")

    def evaluate(
        self, features: Tensor, action: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Parameters]:
        """See :meth:`Head.evaluate`; the parameters are those of the entries, one after the other."""
        parts = zip(self._heads, self._split(action), self._masks(mask), strict=True)
        evaluated = [part.evaluate(features, chosen, allowed) for part, chosen, allowed in parts]
        log_probs, entropies, parameters = zip(*evaluated, strict=True)
        return (
            torch.stack(log_probs).sum(0),
            torch.stack(entropies).sum(0),
            tuple(itertools.chain(*parameters)),
        )

    def kl(self, old: Parameters, new: Parameters) -> Tensor:
        """See :meth:`Head.kl`: the sum over the entries."""
        divergences, start = [], 0
        for part in self._heads:
            end = start + (2 if isinstance(part, GaussianHead) else 1)
            divergences.append(part.kl(old[start:end], new[start:end]))
            start = end
        return torch.stack(divergences).sum(0)

    def bars(self, features: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See :meth:`Head.bars`, of one entry after the other."""
        bars = [part.bars(features, its) for part, its in zip(self._heads, self._masks(mask), strict=True)]
        numbers, lengths = zip(*bars, strict=True)
        return torch.cat(numbers, dim=-1), torch.cat(lengths, dim=-1)

    def for_environment(self, action: Tensor) -> Tensor:
        """Clips the continuous entries to their bounds."""
        return self._row(
            [part.for_environment(its) for part, its in zip(self._heads, self._split(action), strict=True)]
        )


def make_head(name: HeadName | None, in_features: int, action_spec: TensorSpec) -> Head:
    """Makes the head for the environment's actions; ``name`` chooses where there is a choice, which continuous ones have."""
    if isinstance(action_spec, Composite):
        return CompositeHead(in_features, action_spec, name)
    if isinstance(action_spec, MultiCategorical | Binary) and name in (None, "categorical"):
        return MultiCategoricalHead(in_features, action_spec)
    if name is None:
        name = "categorical" if isinstance(action_spec, Categorical | OneHot) else "gaussian"
    heads: dict[str, Callable[[int, TensorSpec], Head]] = {
        "categorical": CategoricalHead,
        "gaussian": GaussianHead,
        "tanh_gaussian": TanhGaussianHead,
    }
    return heads[name](in_features, action_spec)
