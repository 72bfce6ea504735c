"""One seed for the run, a seed of its own for everything random in it."""

from typing import Literal

import numpy as np

Stream = Literal["train", "eval", "noise", "shuffle"]
_STREAMS: tuple[Stream, ...] = ("train", "eval", "noise", "shuffle")


def derive_seed(seed: int, stream: Stream, index: int = 0) -> int:
    """Derives a seed.

    An environment's seed belongs to its global index, not to the rank that runs it. Two runs share one only by
    a chance of one in 2^31: with
    ``seed + index``, environment 1 of seed 1 would play the episodes of environment 0 of seed 2.

    Args:
        seed: The run's.
        stream: What it is for: environments of training or of evaluation, action noise, or shuffling.
        index: Global index of the environment.

    Returns:
        A number below 2^31.
    """
    return int(np.random.SeedSequence((seed, _STREAMS.index(stream), index)).generate_state(1)[0] >> 1)
