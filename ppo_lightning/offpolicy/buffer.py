"""Replay buffers on preallocated tensors."""

from typing import Any

import torch
from torch import Tensor

from ppo_lightning.algorithms.minibatches import Minibatch

SPARE = 1.05  # frames per transition of a full buffer: an episode begins with a whole stack
STACKS = ("observation", "next_observation")  # keys of stacks


class ReplayBuffer:
    """The newest transitions, numbered in the order in which they were added.

    To add a transition and gather 256 takes a sixth of the time of TorchRL's ``ReplayBuffer``.

    Args:
        capacity: Largest number of transitions.

    Example:
        >>> buffer = ReplayBuffer(capacity=3)
        >>> buffer.add({"reward": torch.tensor([0, 1])})
        >>> buffer.add({"reward": torch.tensor([2, 3])})
        >>> buffer.gather(torch.tensor([0, 1, 2]))["reward"]
        tensor([1, 2, 3])
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.sizes = [capacity]  # of a checkpoint that fits
        self.added = 0  # transitions since the buffer was made
        self.oldest = 0  # number of the oldest transition
        self.columns: Minibatch = {}  # each [capacity, ...], after the first transitions

    def __len__(self) -> int:
        return self.added - self.oldest

    def add(self, transitions: Minibatch) -> None:
        """Add at most ``capacity`` transitions, tensors [K, ...], in place of the oldest ones."""
        start, count = self.added % self.capacity, len(next(iter(transitions.values()), ()))
        end = min(start + count, self.capacity)
        for key, rows in transitions.items():
            if key not in self.columns:
                self.columns[key] = rows.new_zeros(self.capacity, *rows.shape[1:])
            self.columns[key][start:end] = rows[: end - start]
            self.columns[key][: start + count - end] = rows[end - start :]
        self.added += count
        self.oldest = max(self.oldest, self.added - self.capacity)

    def gather(self, indices: Tensor) -> Minibatch:
        """Return the transitions at indices [K]: 0 is the oldest one."""
        places = (indices + self.oldest) % self.capacity
        return {key: column.index_select(0, places) for key, column in self.columns.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the transitions on the CPU, without empty places."""
        rows = {key: column[: self.added].cpu() for key, column in self.columns.items()}
        if self.added < self.capacity:  # `torch.save` writes whole storages
            rows = {key: column.clone() for key, column in rows.items()}
        return {"sizes": self.sizes, "added": self.added, "oldest": self.oldest, "rows": rows}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Restore on a device what :meth:`state_dict` of a buffer of the same ``sizes`` returned."""
        self.added = 0
        ReplayBuffer.add(self, {key: rows.to(device) for key, rows in state["rows"].items()})
        self.added, self.oldest = state["added"], state["oldest"]


class FrameBuffer(ReplayBuffer):
    """The newest transitions with observations that are stacks of frames, [C, H, W].

    A transition holds the numbers of its frames. A frame that the next observation, or the next transition of
    the same environment, shares is stored once: a million transitions of Atari take 7.5 GB instead of 56 GB.
    Stacks are compared, so that any rule for the stack after a reset is reproduced. If short episodes, which
    begin with a whole stack, use up the frames, the oldest transitions are dropped.
    """

    def __init__(self, capacity: int, num_envs: int, channels: int) -> None:
        super().__init__(capacity)
        self.num_envs = num_envs
        self.reach = channels * (channels + 1) * num_envs  # largest number of frames of C steps
        self.frames = ReplayBuffer(int(capacity * SPARE) + 2 * self.reach)
        self.sizes.append(self.frames.capacity)

    def add(self, transitions: Minibatch) -> None:
        """Add transitions, tensors [K, ...]: the steps of N environments one after the other."""
        numbers: Any = torch.zeros(0)
        if len(self) >= self.num_envs:
            newest = torch.arange(self.added - self.num_envs, self.added) % self.capacity
            numbers = self.columns["next_observation"][newest]
        pairs = []
        for stacks in zip(*(transitions[key].split(self.num_envs) for key in STACKS), strict=True):
            first = self._store(stacks[0], numbers)
            numbers = self._store(stacks[1], first[:, 1:])
            pairs.append((first, numbers))
        columns = map(torch.cat, zip(*pairs, strict=True))
        super().add(transitions | dict(zip(STACKS, columns, strict=True)))
        # A later transition may have older frames, by at most those of C steps.
        kept = self.frames.added - self.frames.capacity + self.reach
        while len(self) and self.columns["observation"][self.oldest % self.capacity].min() < kept:
            self.oldest += 1

    def gather(self, indices: Tensor) -> Minibatch:
        """Return the transitions at indices [K] with their stacks."""
        minibatch = super().gather(indices)
        return minibatch | {key: self._stacks(minibatch[key]) for key in STACKS}

    def _store(self, stacks: Tensor, known: Tensor) -> Tensor:
        """Return the numbers of the frames of stacks [N, C, H, W], after storing the new ones, [N, C].

        A stack that continues its environment's last one begins with the ``known`` frames, [N, <= C].
        """
        numbers = torch.full(stacks.shape[:2], -1, device=stacks.device)
        if len(known) == len(stacks):
            kept = known.shape[1]
            continues = (stacks[:, :kept] == self._stacks(known)).flatten(1).all(1, keepdim=True)
            numbers[:, :kept] = known.where(continues, -1)
        new = numbers < 0
        before = self.frames.added
        self.frames.add({"frame": stacks[new]})
        numbers[new] = torch.arange(before, self.frames.added, device=stacks.device)
        return numbers

    def _stacks(self, numbers: Tensor) -> Tensor:
        """Return the frames of numbers [N, C], [N, C, H, W]."""
        places = numbers.flatten() % self.frames.capacity
        return self.frames.columns["frame"].index_select(0, places).unflatten(0, numbers.shape)

    def state_dict(self) -> dict[str, Any]:
        """Return the transitions and the frames on the CPU."""
        return super().state_dict() | {"frames": self.frames.state_dict()}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Restore on a device what :meth:`state_dict` of a buffer of the same ``sizes`` returned."""
        super().load_state_dict(state, device)
        self.frames.load_state_dict(state["frames"], device)
