"""Workers that step Gymnasium environments: processes, or actors on a Ray cluster."""

from ppo_lightning.envs.workers.processes import Worker, WorkerEnv

__all__ = ["Worker", "WorkerEnv"]
