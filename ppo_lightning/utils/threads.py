"""CPU cores of this process, and its share of them."""

import os

from ppo_lightning.utils.collectives import world_size


def threads_of(num_threads: int, num_envs: int) -> int:
    """Return the number of threads. Ranks share the cores where EnvPool (0) would choose all of them."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))
    if num_threads == 0 and ranks > 1:
        num_threads = max(1, processors() // ranks)
    return min(num_threads, num_envs)


def processors() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
