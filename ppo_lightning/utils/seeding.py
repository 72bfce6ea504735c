"""Seeds of a run, derived from one seed, and initial weights that do not depend on the machine's cores."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
import torch

Stream = Literal["train", "eval", "noise", "shuffle", "opponents", "curiosity"]
_STREAMS: tuple[Stream, ...] = ("train", "eval", "noise", "shuffle", "opponents", "curiosity")


def derive_seed(seed: int, stream: Stream, index: int = 0) -> int:
    """Derive the seed of one source of randomness.

    The seed of an environment depends on its global index, not on its rank.
    Two runs share a seed only with a probability of 2^-31. With ``seed + index`` instead, environment 1
    of seed 1 would repeat the episodes of environment 0 of seed 2.

    Args:
        seed: Seed of the run.
        stream: Use of the seed: training or evaluation environments, action noise, shuffling, opponents, or
            random steps before the training.
        index: Global index of the environment.

    Returns:
        Seed below 2^31.
    """
    return int(np.random.SeedSequence((seed, _STREAMS.index(stream), index)).generate_state(1)[0] >> 1)


@dataclass(frozen=True)
class Shard:
    """The environments of a rank among those of the run, and the seed of the run.

    Every rank draws random numbers for all environments and uses its own rows, so that N ranks do what one
    rank with all environments does.

    Attributes:
        seed: Seed of the run.
        first: Global index of the first environment.
        count: Number of environments.
        total: Number of environments of all ranks.

    Example:
        >>> Shard(seed=1, first=2, count=2, total=4).rows
        slice(2, 4, None)
    """

    seed: int
    first: int
    count: int
    total: int

    @classmethod
    def whole(cls, count: int, seed: int = 0) -> Self:
        """Return the only shard of a run.

        Args:
            count: Number of environments.
            seed: Seed of the run.
        """
        return cls(seed, 0, count, count)

    @property
    def rows(self) -> slice:
        """Rows of these environments among all."""
        return slice(self.first, self.first + self.count)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run PyTorch in one thread.

    The rounding of the QR decomposition behind orthogonal weights depends on the number of threads. It
    differs between one process, which uses all cores, and the processes of several ranks.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
