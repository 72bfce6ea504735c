"""Logger guard: environment steps as the x axis, and no crash if a logger fails."""

import functools
import shutil
import sys
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.trainer.states import TrainerFn

from ppo_lightning.callbacks.guards import Guard
from ppo_lightning.private import forget_writer
from ppo_lightning.rollouts.learner import Learner

GUARDED = ("log_metrics", "log_hyperparams", "save", "after_save_checkpoint", "finalize")
SPARE = 2**20  # bytes that stay free on the disk


class LoggerGuard(Guard):
    """Callback that logs all metrics over environment steps and survives failing loggers.

    Lightning's own x axis counts batches, also for ``LearningRateMonitor`` and ``DeviceStatsMonitor``.

    A failure, for example a full disk, is printed once on standard error.
    The next metrics are logged again.
    Nothing is written to a nearly full disk: CSVLogger rewrites its file for a new metric, and would lose it.
    """

    def setup(self, trainer: L.Trainer, pl_module: Learner, stage: str) -> None:
        """Wrap the methods of this Trainer's loggers."""
        self._failed: set[tuple[int, str]] = set()  # methods of loggers whose last call failed
        for logger in trainer.loggers:
            for name in GUARDED:
                setattr(logger, name, functools.partial(self._call, pl_module, logger, name))

    def _call(self, module: Learner, logger: Logger, name: str, *args: Any, **kwargs: Any) -> None:
        # The method of the class: that of the instance is wrapped.
        method = getattr(type(logger), name).__get__(logger)
        state = module.trainer.state
        if name == "log_metrics" and state.fn != TrainerFn.PREDICTING and state.stage:  # not after the fit
            args, kwargs = args[:1], kwargs | {"step": module.env_steps}
        try:
            # CSVLogger keeps metrics in memory until it saves.
            if not (isinstance(logger, CSVLogger) and name == "log_metrics"):
                _require_space(logger)
            method(*args, **kwargs)
        except Exception as error:  # a logger may raise anything: files, servers, serialization
            if isinstance(logger, TensorBoardLogger):
                forget_writer(logger)  # a writer that failed once never writes again
            if (id(logger), name) not in self._failed:
                failure = f"METRICS cannot be written by {type(logger).__name__}: {error}."
                print(f"\n{failure} Training continues.", file=sys.stderr, flush=True)
            self._failed.add((id(logger), name))
        else:
            self._failed.discard((id(logger), name))


def _require_space(logger: Logger) -> None:
    """Raise OSError if the disk with the files of a logger is nearly full."""
    folder = Path(getattr(logger, "log_dir", None) or logger.save_dir or "")
    if not folder.is_dir():
        return
    table = folder / "metrics.csv"
    needed = SPARE + (table.stat().st_size if table.is_file() else 0)
    if shutil.disk_usage(folder).free < needed:
        raise OSError(f"the disk of {folder} has less than {needed / 2**20:.0f} MiB left")
