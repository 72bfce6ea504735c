"""Workers that step Gymnasium environments: processes, or actors on a Ray cluster."""

import functools
from collections.abc import Callable
from typing import Literal

from ppo_lightning.envs.workers.processes import Worker, WorkerEnv

__all__ = ["WorkerEnv", "Workers", "in_workers"]
Workers = Literal["process", "ray"]


def in_workers(
    num_workers: int, kind: Workers = "process", step_timeout: float | None = None
) -> Callable[..., WorkerEnv]:
    """Return a function like :func:`~ppo_lightning.envs.gymnasium.in_process`, for workers.

    Args:
        num_workers: Number of workers.
        kind: ``process``: processes of this machine. ``ray``: actors.
        step_timeout: Maximum duration of a step in seconds; None: no limit.

    Example:
        >>> env = in_workers(2)("CartPole-v1", [1, 2, 3, 4])
        >>> env.reset_arrays().shape
        (4, 4)
        >>> env.close()
    """
    worker: type[Worker] = Worker
    if kind == "ray":
        from ppo_lightning.envs.workers.ray import RayWorker

        worker = RayWorker
    return functools.partial(WorkerEnv, num_workers, worker, step_timeout)
