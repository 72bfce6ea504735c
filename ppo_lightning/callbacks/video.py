"""Videos of episodes during training."""

import tempfile
from pathlib import Path
from typing import Annotated, Any

import lightning as L
from lightning.pytorch.loggers import WandbLogger

from ppo_lightning.rollouts.learner import Learner
from ppo_lightning.utils.arguments import Range, check_arguments
from ppo_lightning.utils.output import accessory
from ppo_lightning.utils.seeding import isolated
from ppo_lightning.video.record import record_video


class CaptureVideo(L.Callback):
    """Callback that records an episode of deterministic actions at regular intervals, on rank 0.

    The videos are written to ``videos/`` in the folder of the run, named by the number of environment
    steps. A W&B logger receives them, too. Training is not changed.

    Args:
        every: Iterations between two videos.
        max_frames: Maximum number of frames of a video.

    Source: CleanRL's ``--capture_video``.

    Example:
        >>> trainer = L.Trainer(callbacks=[CaptureVideo(every=100)])
    """

    def __init__(
        self,
        every: Annotated[int, Range(1)] = 100,
        max_frames: Annotated[int, Range(1)] = 1000,
    ) -> None:
        check_arguments(CaptureVideo.__init__, locals(), "CaptureVideo")
        self.every = every
        self.max_frames = max_frames

    def on_train_start(self, trainer: L.Trainer, pl_module: Learner) -> None:
        """Record one step, so that a run ends at its start if it cannot be recorded."""
        if trainer.is_global_zero:
            with tempfile.TemporaryDirectory() as folder, isolated():
                agent, factory = pl_module.agent, pl_module.data.factory
                record_video(agent, factory, Path(folder, "a.mp4"), overlay=True, max_frames=1)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Learner, *args: Any) -> None:
        """Record a video if the iteration is due."""
        if pl_module.rollouts_done % self.every:
            return
        folder = trainer.log_dir or trainer.default_root_dir  # a collective
        if not trainer.is_global_zero:
            return
        data, step = pl_module.data, pl_module.env_steps
        data.wait()  # the recording uses the global generators, too
        path = Path(folder, "videos", f"step={step}.mp4")
        options: dict[str, Any] = {"seed": data.seed, "overlay": True, "max_frames": self.max_frames}
        with accessory("A video"), isolated():
            record_video(pl_module.agent, data.factory, path, **options)
            for logger in trainer.loggers:
                if isinstance(logger, WandbLogger):
                    logger.log_video("videos/episode", [str(path)], step=step)
