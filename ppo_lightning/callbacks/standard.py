"""The callbacks that every run has."""

import lightning as L

from ppo_lightning.callbacks.bars import use_one_line
from ppo_lightning.callbacks.guards import EqualRanksGuard, LoggerGuard, NonFiniteGuard, RolloutGuard
from ppo_lightning.callbacks.preemption import Preemption
from ppo_lightning.callbacks.summary import RunEnd, RunSummary
from ppo_lightning.callbacks.threads import Threads

FIT = (
    Threads,
    Preemption,
    RunSummary,
    RunEnd,
    RolloutGuard,
    NonFiniteGuard,
    EqualRanksGuard,
)


def missing_callbacks(present: list[L.Callback], fitting: bool) -> list[L.Callback]:
    """Return the callbacks of a run that its Trainer lacks, and replace the default bar."""
    use_one_line(present)
    kinds: tuple[type[L.Callback], ...] = (LoggerGuard, *FIT) if fitting else (LoggerGuard,)
    return [kind() for kind in kinds if not any(isinstance(callback, kind) for callback in present)]
