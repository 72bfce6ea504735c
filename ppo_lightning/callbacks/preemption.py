"""Preemption: save a checkpoint and end the run when a signal arrives."""

import os
import signal
import threading
from types import FrameType
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only

from ppo_lightning import private
from ppo_lightning.callbacks.guards import QuietCallback
from ppo_lightning.checkpoints.resume import save_beside_checkpoints
from ppo_lightning.rollouts.learner import Learner
from ppo_lightning.utils import collectives
from ppo_lightning.utils.output import say
from ppo_lightning.utils.watch import end_request, end_with_the_launcher

EXIT_CODE = 128 + signal.SIGTERM  # 143, as shells report a process that SIGTERM ended


class Preemption(QuietCallback):
    """Callback that saves a checkpoint and ends the run after SIGTERM, SIGINT, or SIGUSR1 under SLURM.

    Every fit has this callback, unless the Trainer has one already. docs/long_runs.md lists what each signal
    does. Without a ``ModelCheckpoint``, no checkpoint is saved. A rank also ends when its launcher
    ends. Outside the main thread, Python allows no handlers.

    Lightning's own handlers run collectives, while other ranks may be inside another collective.

    Example:
        >>> trainer = L.Trainer(callbacks=[Preemption()])
    """

    def __init__(self) -> None:
        end_with_the_launcher()  # before the ranks meet
        self._previous_handlers: dict[int, Any] = {}

    def setup(self, trainer: L.Trainer, pl_module: Learner, stage: str) -> None:
        """Replace the handler that Lightning registers before training."""
        end_request.number = 0
        if stage == "fit":
            private.set_sigterm_handler(trainer, self._request)

    def on_train_start(self, trainer: L.Trainer, pl_module: Learner) -> None:
        """Register the handlers. Python allows this in the main thread only."""
        if threading.current_thread() is not threading.main_thread():
            return
        numbers: set[int] = {signal.SIGTERM, signal.SIGINT}
        if "SLURM_JOB_ID" in os.environ:
            numbers |= {signal.SIGUSR1, private.requeue_signal(trainer) or signal.SIGUSR1}
        self._previous_handlers = {number: signal.signal(number, self._request) for number in numbers}

    def _request(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if end_request.number:
                if private.INTERACTIVE:  # the process of a notebook stays
                    raise KeyboardInterrupt
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                signal.raise_signal(signal.SIGINT)
            if rank_zero_only.rank == 0:  # type: ignore[attr-defined]
                # `print` must not be called in a handler
                os.write(2, b"\nInterrupted: saving after this iteration. Interrupt again to end at once.\n")
        end_request.receive(number)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Learner, *args: Any) -> None:
        """Save a checkpoint and end the run if any rank received a signal. This is a collective."""
        if pl_module.rollouts_done < pl_module.data.num_rollouts:  # otherwise the run is complete
            self._end_if_requested(trainer, pl_module)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: Learner) -> None:
        """Save and end as at the end of an iteration: the signal has cut the evaluation of a rank short."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._end_if_requested(trainer, pl_module)

    def _end_if_requested(self, trainer: L.Trainer, pl_module: Learner) -> None:
        if not (number := collectives.largest(end_request.number)):
            return
        interrupted = number == signal.SIGINT
        private.postpone_evaluation(trainer)
        path = save_beside_checkpoints(trainer, "preempted")
        command = "" if private.INTERACTIVE else ", or fit --auto_resume"
        saved = f"{path}\nTo resume: fit(..., ckpt_path={path!r}){command}."
        if path is None:
            saved = "no checkpoint, without a ModelCheckpoint or room for its file."
        if number == private.requeue_signal(trainer):
            private.save_and_requeue(trainer, number)
        what = "Interrupted" if interrupted else "Preempted"
        message = f"{what} after {pl_module.env_steps} environment steps: {saved}"
        if interrupted and private.INTERACTIVE:  # which shows the message below the bar
            raise KeyboardInterrupt(message)
        if trainer.is_global_zero:
            say(message)
        raise SystemExit(128 + signal.SIGINT if interrupted else EXIT_CODE)

    def on_train_end(self, *args: Any) -> None:
        """Restore the handlers."""
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        self._previous_handlers = {}

    on_exception = on_train_end  # type: ignore[assignment]
