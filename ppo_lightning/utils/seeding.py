"""Seeds of a run, derived from one seed, and modes of the process, which code of users may set."""

import contextlib
import hashlib
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

import numpy as np
import torch

# All uses of random numbers. The numbers are a function of the run's seed, the use, and the index of the
# environment or the number of the rollout, so that a resumed run needs no generator's state.
Stream = Literal[
    "train",  # training environments
    "eval",  # evaluation environments
    "noise",  # action noise of a rollout
    "shuffle",  # minibatches
    "mean",  # RPO's noise on the mean
    "predictor",  # steps that train RND's predictor
    "auxiliary",  # minibatches of PPG's auxiliary phase
    "curiosity",  # RND's random steps before the training, a run of their own
    "replay",  # minibatches of a replay buffer and the noise of their update
    "global",  # the global generators of a rank
    "worker",  # environments of a worker that was made anew
]


def derive_seed(seed: int, stream: Stream, index: int = 0) -> int:
    """Derive the seed of an environment, or of a run within the run, below 2^31.

    Two environments share a seed only with a probability of 2^-31. With ``seed + index`` instead, environment
    1 of seed 1 would repeat the episodes of environment 0 of seed 2. ``index`` is the global index of the
    environment, the same on any number of ranks.
    """
    entropy = (seed, get_args(Stream).index(stream), index)
    return int(np.random.SeedSequence(entropy).generate_state(1)[0] >> 1)


def seed_globally(seed: int) -> None:
    """Seed the global generators of Python, NumPy and PyTorch, from which an environment may draw.

    ``torch.initial_seed()``, the seed of later runs of this process, stays.
    """
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    _set_state(torch.Generator().manual_seed(seed).get_state(), torch.initial_seed())
    torch.cuda.manual_seed(seed)


def _set_state(state: torch.Tensor, initial_seed: int) -> None:
    state[:8] = torch.from_numpy(np.array([initial_seed], np.uint64).view(np.uint8))
    torch.set_rng_state(state)


_modes_of_users: dict[str, Any] = {}  # those that code of users has set


def _modes() -> dict[str, Any]:
    return {"dtype": torch.get_default_dtype(), "errors": np.geterr(), "filters": warnings.filters[:]}


def _set_modes(modes: dict[str, Any]) -> None:
    torch.set_default_dtype(modes["dtype"])
    np.seterr(**modes["errors"])
    if warnings.filters != modes["filters"]:
        warnings.filters[:] = modes["filters"]  # type: ignore[index]


@contextlib.contextmanager
def user_modes() -> Iterator[None]:
    """Run code of a user, such as an environment, with gradients and in the modes that it has set before.

    Modes that it sets stay with it: the default dtype, NumPy's error handling, the filters of warnings. The
    initial seed of PyTorch, which is that of later runs of this process, stays, too.
    """
    ours, seed = _modes(), torch.initial_seed()
    theirs = ours | _modes_of_users
    try:
        with torch.inference_mode(False):
            if _modes_of_users:
                _set_modes(theirs)
            yield
    finally:
        left = _modes()
        _modes_of_users.update({name: mode for name, mode in left.items() if mode != theirs[name]})
        if left != ours:
            _set_modes(ours)
        if torch.initial_seed() != seed:
            _set_state(torch.get_rng_state(), seed)


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Keep the global generators of Python, NumPy and PyTorch, which an environment may seed or draw from.

    The block is in :func:`user_modes`. Lightning's ``isolate_rng`` does not restore them after an error.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    states = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng([*devices]), user_modes():
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])  # noqa: NPY002


def extend_seeds(seeds: list[int], count: int) -> list[int]:
    """Return the first seeds, and further ones if there are not enough."""
    return seeds[:count] + [derive_seed(seeds[-1], "eval", index) for index in range(count - len(seeds))]


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
        """Return the only shard of a run."""
        return cls(seed, 0, count, count)

    @property
    def rows(self) -> slice:
        """Rows of these environments among all."""
        return slice(self.first, self.first + self.count)

    def generator(self, stream: Stream, *numbers: int) -> torch.Generator:
        """Return a new generator, the same on all ranks.

        Args:
            stream: Use of the random numbers.
            *numbers: Number of the rollout and, if there are several, of the draw in it.
        """
        # A SeedSequence of NumPy takes as long as the shuffle that the generator is for.
        name = repr((self.seed, stream, *numbers)).encode()
        digest = hashlib.blake2b(name, digest_size=4).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


@contextlib.contextmanager
def initial_weights(seed: int = 0) -> Iterator[None]:
    """Draw initial weights, float32 on the CPU, which depend on the seed alone.

    The rounding of the QR decomposition behind orthogonal weights depends on the number of threads. It
    differs between one process, which uses all cores, and the processes of several ranks.
    """
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"), torch.random.fork_rng([]):
            torch.default_generator.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
