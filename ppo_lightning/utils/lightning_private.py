"""Access to private attributes of Lightning that have no public equivalent.

``CHECKED_VERSIONS`` lists the versions of Lightning with which the tests were run.
"""

import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from lightning import LightningModule, Trainer
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    RichProgressBar,
    TQDMProgressBar,
)
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from torch import Tensor

CHECKED_VERSIONS = ("2.6.0", "2.6.1", "2.6.6")
INTERACTIVE = hasattr(sys, "ps1")  # a notebook or a Python prompt
LOG_EVERY_N_STEPS, MAX_EPOCHS, NUM_SANITY_VAL_STEPS = 50, 1000, 2  # defaults of the Trainer


def has_trainer(module: LightningModule) -> bool:
    """Return whether the module has a Trainer; ``module.trainer`` raises an error without one."""
    return module._trainer is not None


def is_compiled(module: LightningModule) -> bool:
    """Return whether ``torch.compile`` was applied to the whole module."""
    return module._compiler_ctx is not None


def remove_step_limit(trainer: Trainer) -> None:
    """Remove the limit of optimizer steps, so that ``fast_dev_run`` runs whole iterations."""
    trainer.fit_loop.epoch_loop.max_steps = -1


def starts_processes(trainer: Trainer) -> bool:
    """Return whether the strategy starts the ranks by multiprocessing (``ddp_spawn``, ``ddp_notebook``)."""
    return isinstance(trainer.strategy.launcher, _MultiProcessingLauncher)


@contextmanager
def counted_step(optimizer: Any) -> Iterator[None]:
    """Count an optimizer step in ``trainer.global_step`` without calling ``LightningOptimizer.step``."""
    optimizer._on_before_step()
    yield
    optimizer._on_after_step()


def publish_metrics(trainer: Trainer, metrics: Mapping[str, Tensor], shown: Mapping[str, str]) -> None:
    """Publish metrics to callbacks; ``self.log`` takes 3.5 ms per iteration (7 % of CartPole's).

    Args:
        trainer: Trainer in a fit.
        metrics: Metrics by name.
        shown: Text by name for every progress bar.
    """
    trainer.callback_metrics.update(metrics)
    trainer._logger_connector._progress_bar_metrics.update(shown)  # type: ignore[arg-type]


def limit_refreshes(trainer: Trainer, rollouts: int) -> None:
    """Let Lightning's bar refresh every few rollouts, or Rich's twice a second.

    Args:
        trainer: Trainer in a fit.
        rollouts: Number of rollouts in half a second. A rate that the user set is kept.
    """
    bar = trainer.progress_bar_callback
    if isinstance(bar, TQDMProgressBar) and bar.refresh_rate == 1:
        bar._refresh_rate = rollouts
    if isinstance(bar, RichProgressBar) and bar.progress is not None:
        thread = bar.progress.live._refresh_thread
        if thread is not None:  # beside busy processes, its ten refreshes a second take 12 % of the time
            thread.refresh_per_second = 2


def replace_defaults(trainer: Trainer) -> None:
    """Replace defaults of the Trainer that were made for many short batches.

    Every rollout is logged, ``data.total_timesteps`` ends the run, and no episodes are played before it. The
    Trainer does not tell whether a value was given: a user's 50, 1000 or 2 counts as the default.
    """
    if trainer.log_every_n_steps == LOG_EVERY_N_STEPS:  # type: ignore[attr-defined]
        trainer.log_every_n_steps = 1  # type: ignore[attr-defined]
    if trainer.max_epochs == MAX_EPOCHS:
        trainer.fit_loop.max_epochs = -1
    if trainer.num_sanity_val_steps == NUM_SANITY_VAL_STEPS:
        trainer.num_sanity_val_steps = 0


def requeue_signal(trainer: Trainer) -> int | None:
    """Return the signal at which Lightning requeues the job, None without SLURM and auto-requeue."""
    cluster = trainer._accelerator_connector.cluster_environment
    if isinstance(cluster, SLURMEnvironment) and cluster.auto_requeue:
        return cluster.requeue_signal or signal.SIGUSR1
    return None


def save_and_requeue(trainer: Trainer, number: int) -> None:
    """Save the checkpoint that Lightning finds after a requeue, and call ``scontrol``. A collective."""
    trainer._signal_connector._slurm_sigusr_handler_fn(number, None)  # type: ignore[arg-type]


def end_interrupted(trainer: Trainer, end: BaseException) -> NoReturn:
    """Clean up after SIGINT as Lightning does, and raise another end than its ``sys.exit(1)``."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Lightning ignores it from here on
    for logger in trainer.loggers:
        logger.finalize("failed")
    trainer._teardown()
    trainer.state.stage = None
    raise end from None


def set_sigterm_handler(trainer: Trainer, handler: Callable[..., Any]) -> None:
    """Replace the handler that Lightning registers for SIGTERM before training."""
    trainer._signal_connector._sigterm_notifier_fn = handler  # type: ignore[method-assign]


def saves_by_time(checkpoint: ModelCheckpoint) -> bool:
    """Return whether the callback has a ``train_time_interval``."""
    return checkpoint._train_time_interval is not None


def steps_between_saves(checkpoint: ModelCheckpoint) -> int:
    """Return ``every_n_train_steps`` of the callback."""
    return checkpoint._every_n_train_steps


def average_decay(callback: EMAWeightAveraging) -> float:
    """Return the share of the average that one update keeps."""
    return float(callback._kwargs["avg_fn"](torch.ones(()), torch.zeros(()), 1))
