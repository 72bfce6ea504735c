"""Videos while a run goes on."""

import io
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger

from ppo_lightning.errors import ConfigError, import_extra
from ppo_lightning.video.record import record_video

GIF_FRAMES = 200  # at most, of a video in TensorBoard, which shows GIFs only


class CaptureVideo(L.Callback):
    """Records an episode of the most probable actions every so many iterations, on rank 0: CleanRL's ``--capture_video``.

    The videos are in ``videos/`` of the run's folder, named by the number of environment steps, and in TensorBoard and
    W&B, where those are the loggers. Nothing in the run changes.

    Args:
        every: Iterations from one video to the next.
        max_frames: Of an episode.
        overlay: As for ``ppo-lightning play``.
    """

    def __init__(self, every: int = 100, max_frames: int = 1000, overlay: bool = True) -> None:
        if every < 1:
            raise ConfigError(f"CaptureVideo's every is {every}: it must be at least 1.")
        self.every, self.max_frames, self.overlay = every, max_frames, overlay

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Records."""
        if pl_module.rollouts_done % self.every or not trainer.is_global_zero:
            return
        data = pl_module.data
        path = Path(trainer.log_dir or trainer.default_root_dir, "videos", f"step={pl_module.env_steps}.mp4")
        options = {"seed": data.seed, "overlay": self.overlay, "max_frames": self.max_frames}
        record_video(pl_module.agent, data.factory, path, **options)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                add_to_tensorboard(logger.experiment, path, pl_module.env_steps)
            elif isinstance(logger, WandbLogger):
                logger.log_video("videos/episode", [str(path)], step=pl_module.env_steps)


def add_to_tensorboard(writer: Any, path: Path, step: int) -> None:
    """Writes a video as a GIF among TensorBoard's pictures, the way its own ``add_video`` does with MoviePy."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    imageio = import_extra("imageio.v2", extra="video")
    with imageio.get_reader(path) as reader:
        frames, fps = list(reader.iter_data()), reader.get_meta_data()["fps"]
    skip = -(-len(frames) // GIF_FRAMES)
    gif, (height, width, colours) = io.BytesIO(), frames[0].shape
    imageio.mimwrite(gif, frames[::skip], format="GIF", duration=1000 * skip / fps, loop=0)
    image = Summary.Image(height=height, width=width, colorspace=colours, encoded_image_string=gif.getvalue())
    writer._get_file_writer().add_summary(
        Summary(value=[Summary.Value(tag="videos/episode", image=image)]), step
    )
