"""Entries of an observation: names, columns, and the choice for actor and critic."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torchrl.data import TensorSpec

from ppo_lightning.errors import ConfigError
from ppo_lightning.spaces.pictures import describe_picture, is_picture
from ppo_lightning.spaces.specs import columns, is_mask, stored

PRIVILEGED = "privileged_"  # prefix of the entries that only a simulator knows
Rows = TypeVar("Rows", Tensor, np.ndarray)


class ChosenEntries(NamedTuple):
    """Entries of an observation that actor and critic read, as names with sizes, in the order of the row.

    Example:
        >>> print(ChosenEntries({"state": 48}, {"privileged_state": 123, "state": 48}))
        The actor reads state (48), the critic reads privileged_state (123), state (48).
    """

    actor: dict[str, int]
    critic: dict[str, int]
    pictures: Mapping[str, Sequence[int]] = {}  # shapes, which a convolutional network reads

    def __str__(self) -> str:
        actor, critic = (describe(entries, self.pictures) for entries in (self.actor, self.critic))
        if actor == critic:
            return f"Actor and critic read {actor}."
        return f"The actor reads {actor}, the critic reads {critic}."


def describe(entries: dict[str, int], pictures: Mapping[str, Sequence[int]] = {}) -> str:
    """Return the names of entries with their numbers of columns, or the shape and network of a picture.

    Example:
        >>> describe({"camera": 12288, "velocity": 2}, pictures={"camera": (64, 64, 3)})
        'camera (64 x 64 x 3 picture, Nature network), velocity (2)'
    """
    sizes = entries | {name: describe_picture(shape, "nature") for name, shape in pictures.items()}
    return ", ".join(f"{name} ({sizes[name]})" for name in entries)


def entry_columns(spec: TensorSpec) -> dict[str, slice]:
    """Return the columns of each named entry of an observation in its row, without the action mask.

    An observation without names, such as a ``Box``, has no entries.
    """
    return {name: place for name, _, place in columns(spec) if name and not is_mask(name)}


def choose_entries(
    spec: TensorSpec, actor_keys: Sequence[str] | None, critic_keys: Sequence[str] | None
) -> ChosenEntries | None:
    """Return the entries that actor and critic read, or None for an observation without names.

    ``actor_keys`` are names of entries, or of dictionaries of entries, None: all entries except
    ``privileged_...``. ``critic_keys`` are the same for the critic, None: all entries.
    """
    sizes = {name: place.stop - place.start for name, place in entry_columns(spec).items()}
    public = {name for name in sizes if not name.startswith(PRIVILEGED)}
    read_by_actor = public if actor_keys is None else _matching(sizes, "actor_keys", actor_keys)
    read_by_critic = set(sizes) if critic_keys is None else _matching(sizes, "critic_keys", critic_keys)
    actor, critic = (
        {name: size for name, size in sizes.items() if name in names}
        for names in (read_by_actor, read_by_critic)
    )
    if sizes and not actor:
        raise ConfigError(f"All entries are privileged ({', '.join(sizes)}): set model.agent.actor_keys.")
    pictures = {name: tuple(part.shape) for name, part, _ in columns(spec) if is_picture(part)}
    return ChosenEntries(actor, critic, pictures) if sizes else None


def _matching(known: Iterable[str], field: str, keys: Sequence[str]) -> set[str]:
    """Return the known names that the keys select."""
    listed = ", ".join(known)
    entries = f"the entries of the observation are {listed}" if listed else "the observation has no entries"
    if isinstance(keys, str) or not keys:
        raise ConfigError(f"model.agent.{field} is {keys!r}: it must be a list of names, and {entries}.")
    selected = set()
    for key in keys:
        matches = {name for name in known if f"{name}.".startswith(f"{key}.")}
        if not matches:
            raise ConfigError(f"model.agent.{field} names {key!r}, and {entries}.")
        selected |= matches
    return selected


def row_columns(spec: TensorSpec, names: Collection[str]) -> list[slice] | None:
    """Return the columns of some entries in the row, merged where adjacent. None: all, or without names."""
    places = entry_columns(spec)
    merged: list[slice] = []
    for name, place in places.items():
        if name not in names:
            continue
        if merged and merged[-1].stop == place.start:
            place = slice(merged.pop().start, place.stop)
        merged.append(place)
    whole = slice(0, stored(spec).shape.numel())  # with the action mask
    return None if merged in ([], [whole]) else merged


def take_columns(rows: Rows, places: Sequence[slice]) -> Rows:
    """Return some columns of rows [B, D], a view if they are adjacent."""
    parts: Any = [rows[..., place] for place in places]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim=-1) if isinstance(rows, Tensor) else np.concatenate(parts, axis=-1)
