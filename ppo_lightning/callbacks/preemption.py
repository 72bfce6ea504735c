"""Preemption: end a run that receives a signal without losing a step."""

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
    """At SIGTERM, and at SIGUSR1 under SLURM, save at the end of the iteration and end the process with code 143.

    The command line adds this callback. From Python, pass it to the Trainer.

    The signal may reach any rank: all ranks agree at the end of each iteration. ``fit --auto_resume`` resumes from the
    checkpoint, ``preempted.ckpt`` beside those of ``ModelCheckpoint``; without that callback nothing is saved. A rank ends
    when the process that started it ends, whatever it waits for.

    Lightning's own handler is replaced during training: it exchanges data with the other ranks inside the handler, where
    they may be in the middle of another exchange, and under SLURM it saves there, too.

    Example:
        >>> trainer = L.Trainer(max_epochs=-1, callbacks=[Preemption()])
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Replace Lightning's handler, which it registers before training."""
        self.asked = False
        end_with_the_launcher()
        if stage == "fit":
            lightning_private.set_sigterm_handler(trainer, self._ask)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Register the handler, in the main thread: no other may."""
        if threading.current_thread() is not threading.main_thread():
            return
        signals = [signal.SIGTERM] + [signal.SIGUSR1] * ("SLURM_JOB_ID" in os.environ)
        self._before = {number: signal.signal(number, self._ask) for number in signals}

    def _ask(self, number: int, frame: Any) -> None:
        self.asked = True

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        """Save and end if any rank received a signal.

        Raises:
            SystemExit: With code 143.
        """
        if not collectives.gather(torch.tensor(self.asked)).any():
            return
        folder, said = (
            getattr(trainer.checkpoint_callback, "dirpath", None),
            "no checkpoint: there is no ModelCheckpoint",
        )
        if folder is not None:
            path = Path(folder) / "preempted.ckpt"
            trainer.save_checkpoint(path)
            said = str(path)
        if trainer.is_global_zero:
            print(f"\nAsked to end after {pl_module.env_steps} environment steps: {said}", flush=True)
        raise SystemExit(EXIT_CODE)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Restore the handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Restore the handlers."""
        self.on_train_end(trainer, pl_module)
