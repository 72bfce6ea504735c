"""Private attributes of Lightning that this package reads or writes, all in one place.

Lightning has no public way to any of them. ``tests/utils/test_lightning_private.py`` names the versions for which they
were checked.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from torch import Tensor

CHECKED_VERSIONS = ("2.6.0", "2.6.1", "2.6.6")


def has_trainer(module: LightningModule) -> bool:
    """Return whether a Trainer runs the module; ``module.trainer`` raises an error otherwise."""
    return module._trainer is not None


def is_compiled(module: LightningModule) -> bool:
    """Return whether the whole module went through ``torch.compile``."""
    return module._compiler_ctx is not None


def remove_step_limit(trainer: Trainer) -> None:
    """Let ``fast_dev_run`` run whole iterations: it also limits the optimizer steps, of which an iteration has many."""
    trainer.fit_loop.epoch_loop.max_steps = -1


def starts_processes(trainer: Trainer) -> bool:
    """Return whether the strategy copies the module into new processes (``ddp_spawn``, ``ddp_notebook``)."""
    return isinstance(trainer.strategy.launcher, _MultiProcessingLauncher)


@contextmanager
def counted_step(optimizer: Any) -> Iterator[None]:
    """Count an optimizer step in ``trainer.global_step`` that does not go through ``LightningOptimizer.step``."""
    optimizer._on_before_step()
    yield
    optimizer._on_after_step()


def publish_metrics(trainer: Trainer, metrics: Mapping[str, Tensor]) -> None:
    """Give metrics to callbacks, as ``self.log`` does in 3.5 ms an iteration (7 % of CartPole's)."""
    trainer.callback_metrics.update(metrics)


def set_sigterm_handler(trainer: Trainer, handler: Callable[..., Any]) -> None:
    """Replace the handler that Lightning registers for SIGTERM before training."""
    trainer._signal_connector._sigterm_notifier_fn = handler  # type: ignore[method-assign]


def saves_by_time(checkpoint: ModelCheckpoint) -> bool:
    """Return whether ``train_time_interval`` is set."""
    return checkpoint._train_time_interval is not None


def steps_between_saves(checkpoint: ModelCheckpoint) -> int:
    """Return ``every_n_train_steps``."""
    return checkpoint._every_n_train_steps
