"""Replay buffers on preallocated tensors."""

from typing import Any

import torch
from torch import Tensor

from ppo_lightning.algorithms.minibatches import Minibatch

SPARE = 1.05  # frames per transition of a full buffer: an episode begins with a whole stack
STACKS = ("observation", "next_observation")  # keys of stacks


class Ring:
    """The newest rows of a stream, by their numbers in the stream."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.added = 0
        self.rows = torch.zeros(0)

    def add(self, rows: Tensor) -> Tensor:
        """Add at most ``size`` rows [K, ...], and return their numbers [K]."""
        if not len(self.rows):
            self.rows = rows.new_zeros(self.size, *rows.shape[1:])
        numbers = torch.arange(self.added, self.added + len(rows), device=rows.device)
        self.rows[numbers % self.size] = rows
        self.added += len(rows)
        return numbers

    def gather(self, numbers: Tensor) -> Tensor:
        """Return the rows of numbers [...]."""
        return self.rows.index_select(0, numbers.flatten() % self.size).unflatten(0, numbers.shape)

    def state_dict(self) -> dict[str, Any]:
        """Return the rows on the CPU, without empty places."""
        rows = self.rows[: self.added].cpu()
        return {"added": self.added, "rows": rows if len(rows) == self.size else rows.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` of a ring of the same size returned."""
        self.add(state["rows"])
        self.added = state["added"]


class ReplayBuffer:
    """The newest transitions.

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
        self.added = 0  # transitions since the buffer was made
        self.oldest = 0  # number of the oldest transition
        self.rings: dict[str, Ring] = {}

    def __len__(self) -> int:
        return self.added - self.oldest

    def add(self, transitions: Minibatch) -> None:
        """Add at most ``capacity`` transitions, tensors [K, ...], in place of the oldest ones."""
        for key, rows in transitions.items():
            self.rings.setdefault(key, Ring(self.capacity)).add(rows)
        self.added += len(rows)
        self.oldest = max(self.oldest, self.added - self.capacity)

    def gather(self, indices: Tensor) -> Minibatch:
        """Return the transitions at indices [K]: 0 is the oldest one."""
        return {key: ring.gather(indices + self.oldest) for key, ring in self.rings.items()}

    def to(self, device: torch.device) -> None:
        """Move the transitions to a device."""
        for ring in self.rings.values():
            ring.rows = ring.rows.to(device)

    def state_dict(self) -> dict[str, Any]:
        """Return the transitions on the CPU."""
        rings = {key: ring.state_dict() for key, ring in self.rings.items()}
        return {"capacity": self.capacity, "added": self.added, "oldest": self.oldest, "rings": rings}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` of a buffer of the same capacity returned."""
        self.added, self.oldest = state["added"], state["oldest"]
        for key, ring in state["rings"].items():
            self.rings.setdefault(key, Ring(self.capacity)).load_state_dict(ring)


class FrameBuffer(ReplayBuffer):
    """The newest transitions with observations that are stacks of frames, [C, H, W].

    A transition holds the numbers of its frames. A frame that the next observation, or the next transition of
    the same environment, shares is stored once: a million transitions of Atari take 7.5 GB instead of 56 GB.
    Stacks are compared, so that any rule for the stack after a reset is reproduced. If short episodes, which
    begin with a whole stack, use up the frames, the oldest transitions are dropped.

    Args:
        capacity: Largest number of transitions.
        num_envs: Number of environments N, whose transitions alternate.
        channels: Frames C of a stack.
    """

    def __init__(self, capacity: int, num_envs: int, channels: int) -> None:
        super().__init__(capacity)
        self.num_envs = num_envs
        self.reach = channels * (channels + 1) * num_envs  # largest number of frames of C steps
        self.frames = self.rings["frames"] = Ring(int(capacity * SPARE) + 2 * self.reach)

    def add(self, transitions: Minibatch) -> None:
        """Add transitions, tensors [K, ...]: the steps of N environments one after the other."""
        numbers: Any = torch.zeros(0)
        if len(self) >= self.num_envs:
            newest = torch.arange(self.added - self.num_envs, self.added, device=self.frames.rows.device)
            numbers = self.rings["next_observation"].gather(newest)
        pairs = []
        for stacks in zip(*(transitions[key].split(self.num_envs) for key in STACKS), strict=True):
            first = self._store(stacks[0], numbers)
            numbers = self._store(stacks[1], first[:, 1:])
            pairs.append((first, numbers))
        columns = map(torch.cat, zip(*pairs, strict=True))
        super().add(transitions | dict(zip(STACKS, columns, strict=True)))
        # A later transition may have older frames, by at most those of C steps.
        kept = self.frames.added - self.frames.size + self.reach
        while len(self) and self.rings["observation"].gather(torch.tensor([self.oldest])).min() < kept:
            self.oldest += 1

    def _store(self, stacks: Tensor, known: Tensor) -> Tensor:
        """Return the numbers of the frames of stacks [N, C, H, W], after storing the new ones, [N, C].

        A stack that continues its environment's last one begins with the ``known`` frames, [N, <= C].
        """
        numbers = torch.full(stacks.shape[:2], -1, device=stacks.device)
        if len(known) == len(stacks):
            kept = known.shape[1]
            continues = (stacks[:, :kept] == self.frames.gather(known)).flatten(1).all(1, keepdim=True)
            numbers[:, :kept] = known.where(continues, -1)
        numbers[numbers < 0] = self.frames.add(stacks[numbers < 0])
        return numbers

    def gather(self, indices: Tensor) -> Minibatch:
        """Return the transitions at indices [K] with their stacks."""
        numbers = indices + self.oldest
        minibatch = {key: ring.gather(numbers) for key, ring in self.rings.items() if key != "frames"}
        return minibatch | {key: self.frames.gather(minibatch[key]) for key in STACKS}
