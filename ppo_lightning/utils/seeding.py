"""Seeds of a run: every source of randomness gets a seed derived from the seed of the run."""

from typing import Literal

import numpy as np

Stream = Literal["train", "eval", "noise", "shuffle"]
_STREAMS: tuple[Stream, ...] = ("train", "eval", "noise", "shuffle")


def derive_seed(seed: int, stream: Stream, index: int = 0) -> int:
    """Derive the seed of one source of randomness.

    The seed of an environment depends on its global index, not on its rank.
    Two runs share a seed only with a probability of 2^-31. With ``seed + index`` instead, environment 1
    of seed 1 would repeat the episodes of environment 0 of seed 2.

    Args:
        seed: Seed of the run.
        stream: Use of the seed: training or evaluation environments, action noise, or shuffling.
        index: Global index of the environment.

    Returns:
        Seed below 2^31.
    """
    return int(np.random.SeedSequence((seed, _STREAMS.index(stream), index)).generate_state(1)[0] >> 1)
