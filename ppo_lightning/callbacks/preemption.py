"""Preemption: save a checkpoint and end the run when a signal arrives."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import lightning as L
import torch

from ppo_lightning.utils import collectives, lightning_private
from ppo_lightning.utils.watch import end_with_the_launcher

EXIT_CODE = 128 + signal.SIGTERM  # 143, as shells report a process that SIGTERM ended


class Preemption(L.Callback):
    """Callback that saves a checkpoint and ends the process with code 143 after a signal.

    The signals are SIGTERM and, under SLURM, SIGUSR1.

    The command line adds this callback. From Python, pass it to the Trainer.

    The signal may reach any rank: all ranks agree at the end of each iteration.
    The checkpoint is ``preempted.ckpt``, in the folder of ``ModelCheckpoint``.
    Without ``ModelCheckpoint`` nothing is saved. ``fit --auto_resume`` resumes from ``preempted.ckpt``.
    A rank also ends when its launcher ends, even during a blocking call.

    Lightning's own signal handler is replaced during training. It runs collectives, and under SLURM
    saves a checkpoint, inside the handler, while other ranks may be inside another collective.

    Example:
        >>> trainer = L.Trainer(max_epochs=-1, callbacks=[Preemption()])
    """

    def __init__(self) -> None:
        end_with_the_launcher()  # before the ranks meet
        self.requested = False
        self._previous_handlers: dict[int, Any] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Replace the handler that Lightning registers before training."""
        self.requested = False
        if stage == "fit":
            lightning_private.set_sigterm_handler(trainer, self._request)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Register the handler. Python allows this in the main thread only."""
        if threading.current_thread() is not threading.main_thread():
            return
        signals = [signal.SIGTERM] + [signal.SIGUSR1] * ("SLURM_JOB_ID" in os.environ)
        self._previous_handlers = {number: signal.signal(number, self._request) for number in signals}

    def _request(self, number: int, frame: Any) -> None:
        self.requested = True

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        """End the process after an iteration if any rank received a signal."""
        self.end_if_requested(trainer, pl_module)

    def end_if_requested(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Save a checkpoint and end the process if any rank received a signal. This is a collective.

        An algorithm with long iterations calls this method at each point at which it can resume.

        Raises:
            SystemExit: With code 143.
        """
        if not collectives.gather(torch.tensor(self.requested)).any():
            return
        saved = save_beside_checkpoints(trainer, "preempted")
        if trainer.is_global_zero:
            print(f"\nPreempted after {pl_module.env_steps} environment steps: {saved}", flush=True)
        raise SystemExit(EXIT_CODE)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Restore the handlers."""
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Restore the handlers."""
        self.on_train_end(trainer, pl_module)


def save_beside_checkpoints(trainer: L.Trainer, name: str) -> str:
    """Save a checkpoint in the folder of ``ModelCheckpoint``. This is a collective.

    Args:
        trainer: Trainer in a fit.
        name: Name of the file, without suffix.

    Returns:
        The path, or why nothing was saved.
    """
    folder = getattr(trainer.checkpoint_callback, "dirpath", None)
    if folder is None:
        return "no checkpoint, because there is no ModelCheckpoint"
    path = Path(folder) / f"{name}.ckpt"
    trainer.save_checkpoint(path)
    return str(path)
