"""Doctor: a callback that diagnoses common failures of training."""

import math
import statistics
import time
from collections import defaultdict, deque
from typing import Any, NamedTuple

import lightning as L
import torch
from tensordict import TensorDictBase

from ppo_lightning.callbacks.symptoms import CHECKS, ITERATIONS, RunSnapshot
from ppo_lightning.rollouts.learner import Learner


class Finding(NamedTuple):
    """A symptom, what was observed, the likely cause and a remedy."""

    symptom: str
    observation: str
    cause: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.symptom}: {self.observation}. Likely cause: {self.cause}. Try: {self.remedy}."


class Doctor(L.Callback):
    """Callback that diagnoses a run at regular intervals, on rank 0, and prints each symptom once.

    Symptoms: an initial ratio other than 1, a large KL divergence, a clip fraction that is 0 or large,
    an entropy collapse, a negative explained variance, unscaled observations, actions beyond their
    bounds, time limits treated as terminations, dead units, and a falling speed. ``findings`` maps each
    symptom to its :class:`Finding`. Training is not changed.

    Args:
        every: Iterations between two checks.

    Example:
        >>> doctor = Doctor(every=10)
        >>> trainer = L.Trainer(callbacks=[doctor])
        >>> doctor.findings
        {}
    """

    def __init__(self, every: int = 10) -> None:
        self.every = every
        self.findings: dict[str, Finding] = {}

    def on_fit_start(self, *args: Any) -> None:
        """Forget the previous run."""
        self.findings.clear()
        self._recent: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=ITERATIONS))
        self._first_entropy = math.nan
        self._iterations = 0
        self._speeds: list[float] = []  # environment steps per second, median of some iterations
        self._seconds: list[float] = []  # duration of each iteration since then
        self._clock = math.nan

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: Learner, batch: TensorDictBase, batch_idx: int
    ) -> None:
        """Check the run before the update and print new findings."""
        if not trainer.is_global_zero or not self._iterations or self._iterations % self.every:
            return
        metrics = {name: sum(values) / len(values) for name, values in self._recent.items()}
        if len(self._seconds) >= ITERATIONS:
            self._speeds.append(pl_module.data.frames_per_rollout / statistics.median(self._seconds))
            self._seconds.clear()
        history = self._iterations, self._first_entropy, self._speeds
        snapshot = RunSnapshot(pl_module, batch, metrics, *history)
        with torch.no_grad():
            for symptom, check in CHECKS.items():
                if symptom not in self.findings and (diagnosis := check(snapshot)):
                    finding = self.findings[symptom] = Finding(symptom, *diagnosis)
                    print(f"\ndoctor, after {pl_module.env_steps} environment steps: {finding}", flush=True)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Learner, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the metrics and the duration of the iteration, including data collection."""
        self._iterations += 1
        before, self._clock = self._clock, time.perf_counter()
        if not math.isnan(before):
            self._seconds.append(self._clock - before)
        for name, value in trainer.callback_metrics.items():
            if name.startswith("losses/") and math.isfinite(value):
                self._recent[name.removeprefix("losses/")].append(float(value))
        if math.isnan(self._first_entropy):
            self._first_entropy = float(trainer.callback_metrics.get("losses/entropy", math.nan))

    def on_validation_end(self, *args: Any) -> None:
        """Exclude the duration of an evaluation."""
        self._clock = time.perf_counter()
