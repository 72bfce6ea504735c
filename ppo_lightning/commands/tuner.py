"""Trials of ``tune``: ask Optuna for parameters, train the runs, tell the scores."""

import contextlib
import math
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from ppo_lightning.commands import study as studies
from ppo_lightning.commands.jobs import Job
from ppo_lightning.commands.report import interquartile_mean, results_of
from ppo_lightning.commands.runner import Runner, metrics_of
from ppo_lightning.commands.search_space import Space, flags_of, stored_value, values_of_flags, with_values
from ppo_lightning.errors import ConfigError, import_extra

SHARES = 4  # scores that the pruner sees in each run, after equal shares of data.total_timesteps
AGGREGATES: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": lambda scores: float(np.mean(scores)),
    "median": lambda scores: float(np.median(scores)),
    "iqm": lambda scores: float(interquartile_mean(np.asarray(scores))),
}
POLL = 5.0  # seconds between looks at the metrics of running jobs and at the other processes


@dataclass
class ActiveTrial:
    """A trial of this process.

    Attributes:
        trial: Optuna's trial.
        jobs: Runs of each seed: one for each recipe.
        step: Number of scores that the pruner has had.
        finals: Final scores of the runs.
    """

    trial: Any
    jobs: list[list[Job]]
    step: int = 0
    finals: dict[Job, float] = field(default_factory=dict)


class Tuner:
    """The part of a study that one process does: asks for trials, trains their runs, tells their scores.

    Args:
        study: Optuna's study.
        runner: Runner of the runs of all trials.
        space: Search space and targets.
        recipes: YAML files.
        flags: Flags of ``fit`` for all runs.
        num_seeds: Number of seeds of each trial.
        num_trials: Number of trials of the study, including those of other processes.
        aggregate: Key of ``AGGREGATES``.
    """

    def __init__(
        self,
        study: Any,
        runner: Runner,
        space: Space,
        recipes: Sequence[Path],
        flags: tuple[str, ...],
        num_seeds: int,
        num_trials: int,
        aggregate: str,
    ) -> None:
        self.study = study
        self.runner = runner
        self.space = space
        self.recipes = recipes
        self.flags = flags
        self.num_seeds = num_seeds
        self.num_trials = num_trials
        self.aggregate = AGGREGATES[aggregate]
        self.owner = studies.owner()
        self.active: list[ActiveTrial] = []
        optuna = import_extra("optuna", extra="tune")
        self._states = optuna.trial.TrialState
        self._lost = optuna.exceptions.UpdateFinishedTrialError
        self._stale = studies.StaleTrials(study)
        self._next_ask = self._next_poll = self._next_beat = 0.0
        self._printed: set[int] = set()
        self._killed: set[Job] = set()

    def enqueue_start(self) -> None:
        """Queue the recipes as they are as the first trial, unless the study has it."""
        if any("start" in trial.user_attrs for trial in self.study.get_trials(deepcopy=False)):
            return
        values = values_of_flags(self.flags)
        recipes = [with_values(yaml.safe_load(recipe.read_text()), values) for recipe in self.recipes]
        found = self.space.values_of(recipes)
        # If the space does not contain the values, the sampler does not learn from this trial.
        stored = {name: stored_value(value) for name, value in (found or {}).items()}
        self.study.enqueue_trial(stored, user_attrs={"start": found is not None})

    def run(self) -> None:
        """Run trials until the study has all of them, in this process and in others.

        If this process is interrupted, its runs save checkpoints and its trials return to the queue.

        Raises:
            ConfigError: The recipes fail as they are, or the folder has runs with other settings.
        """
        try:
            while self.active or len(self.finished()) < self.num_trials:
                while len(self.runner.running) < self.runner.workers and (job := self._next_job()):
                    self.runner.start(job)
                time.sleep(0.2)
                ended = self.runner.poll()
                look = time.monotonic() >= self._next_poll
                for active in list(self.active):
                    if look or any(job in ended for jobs in active.jobs for job in jobs):
                        self._advance(active)
                if look:
                    self._next_poll = time.monotonic() + POLL
                    self._look_at_others()
                self.runner.display.show(self._summary(), self.runner.progress())
        finally:
            self.runner.stop(self.runner.running)
            for active in self.active:
                studies.requeue(self.study, self.study.trials[active.trial.number])
            self._print_table()
            self.runner.display.close()

    def finished(self) -> list[Any]:
        """Return the trials of the study that are complete or pruned."""
        states = (self._states.COMPLETE, self._states.PRUNED)
        return self.study.get_trials(deepcopy=False, states=states)

    def _next_job(self) -> Job | None:
        """Return a job of a trial of this process, or the first job of a new trial."""
        for active in [*self.active, None]:
            active = active or self._ask()
            if active is None:
                break
            for job in active.jobs[active.step // SHARES]:
                if not self.runner.is_done(job) and job not in self.runner.running:
                    return job
        return None

    def _ask(self) -> ActiveTrial | None:
        """Return a new trial, or a queued one; None if the study has enough trials."""
        if time.monotonic() < self._next_ask:
            return None
        trials = self.study.get_trials(deepcopy=False)
        taken = [trial for trial in trials if trial.state != self._states.FAIL]
        if len(taken) >= self.num_trials and all(trial.state != self._states.WAITING for trial in taken):
            self._next_ask = time.monotonic() + POLL
            return None
        trial = self.study.ask()
        earlier = [other for other in self.study.get_trials(deepcopy=False) if other.number < trial.number]
        if sum(other.state != self._states.FAIL for other in earlier) >= self.num_trials:
            self.study.tell(trial, state=self._states.FAIL)  # another process asked at the same time
            return None
        trial.set_user_attr("owner", self.owner)
        start = trial.user_attrs.get("start")
        values = {} if start is False else self.space.suggest(trial)
        flags = self.flags if start is not None else (*self.flags, *flags_of(values))
        number = trial.user_attrs.get("runs", trial.number)
        jobs = [
            [Job(f"{recipe.stem} trial {number}", recipe, seed, flags) for recipe in self.recipes]
            for seed in range(1, self.num_seeds + 1)
        ]
        active = ActiveTrial(trial, jobs)
        self.active.append(active)
        self.runner.require_same_settings([job for seed in jobs for job in seed])
        self._advance(active)
        return active if active in self.active else None

    def _advance(self, active: ActiveTrial) -> None:
        """Report the scores that are new, and end the trial if it is complete, hopeless or has failed."""
        try:
            failed = [
                job
                for jobs in active.jobs
                for job in jobs
                if job in self.runner.failed and not self._resumes(job)
            ]
            if failed:
                self._fail(active, f"{failed[0].name} failed")
            while active in self.active and (scores := self._scores(active)) is not None:
                active.step += 1
                score = self.aggregate(scores)
                if math.isfinite(score):
                    active.trial.report(score, active.step)
                if active.step % SHARES == 0 and not math.isfinite(score):
                    self._fail(active, "no episode ended")
                elif active.step == SHARES * self.num_seeds:
                    self._end(active, score, self._states.COMPLETE)
                elif "start" not in active.trial.user_attrs and active.trial.should_prune():
                    self._end(active, None, self._states.PRUNED)
        except self._lost:
            # Another process took the trial up, because this machine did not answer for minutes.
            self._remove(active)

    def _resumes(self, job: Job) -> bool:
        """Return whether a failed job resumes: once after SIGKILL, which is not the parameters' fault."""
        if self.runner.failed[job] != -signal.SIGKILL or job in self._killed:
            return False
        del self.runner.failed[job]
        self._killed.add(job)
        return True

    def _scores(self, active: ActiveTrial) -> list[float] | None:
        """Return the scores of the next step: of finished seeds, and of one seed after a share of its steps.

        Returns:
            None if a run of this seed has not come so far. A score is NaN before the first episode end.
        """
        seed, share = divmod(active.step, SHARES)
        for job in active.jobs[seed]:
            if self.runner.is_done(job) and job not in active.finals:
                row, _ = results_of(job, self.runner.folder_of(job), [])
                active.finals[job] = self.space.score(row["env_id"], row["episodic_return"])
        scores = [active.finals[job] for jobs in active.jobs[:seed] for job in jobs]
        for job in active.jobs[seed]:
            score = (
                active.finals.get(job) if share == SHARES - 1 else self._score_at(job, (share + 1) / SHARES)
            )
            if score is None:
                return None
            scores.append(score)
        return scores

    def _score_at(self, job: Job, share: float) -> float | None:
        """Return the score of a run after a share of its steps, None if it has not come so far."""
        settings = job.settings
        rows = list(metrics_of(self.runner.folder_of(job)))
        steps = share * settings["total_timesteps"]
        if not self.runner.is_done(job) and (not rows or int(rows[-1]["step"]) < steps):
            return None
        returns = [
            float(row["charts/episodic_return"])
            for row in rows
            if row.get("charts/episodic_return") and int(row["step"]) <= steps
        ]
        return self.space.score(settings["env_id"], returns[-1]) if returns else math.nan

    def _fail(self, active: ActiveTrial, reason: str) -> None:
        """End a trial as pruned, so that the sampler avoids its parameters.

        Raises:
            ConfigError: The trial is that of the recipes as they are.
        """
        if "start" in active.trial.user_attrs:
            folder = self.runner.folder / "runs"
            raise ConfigError(f"The recipes fail as they are ({reason}; see log.txt in {folder}).")
        active.trial.set_user_attr("error", reason)
        self._end(active, None, self._states.PRUNED)

    def _end(self, active: ActiveTrial, score: float | None, state: Any) -> None:
        with contextlib.suppress(ValueError):  # another process took the trial up and has finished it
            self.study.tell(active.trial, score, state)
        self._remove(active)

    def _remove(self, active: ActiveTrial) -> None:
        self.active.remove(active)
        running = self.runner.running
        self.runner.stop([job for jobs in active.jobs for job in jobs if job in running])

    def _look_at_others(self) -> None:
        """Show that this process lives, take up trials of processes that ended, and print the table."""
        if time.monotonic() >= self._next_beat:
            self._next_beat = time.monotonic() + studies.BEAT
            for active in list(self.active):
                try:
                    active.trial.set_user_attr("beat", round(time.time()))
                except self._lost:
                    self._remove(active)
        for trial in self._stale.find({active.trial.number for active in self.active}):
            self.runner.display.say(f"trial {trial.number} is taken up again: its process has ended")
            studies.requeue(self.study, trial)
        self._print_table()

    def _summary(self) -> str:
        finished = self.finished()
        pruned = sum(trial.state == self._states.PRUNED for trial in finished)
        return f"{len(finished)} of {self.num_trials} trials done, {pruned} pruned"

    def _print_table(self) -> None:
        """Print a line for each trial of the study that has finished since the last call."""
        for trial in self.finished():
            if trial.number in self._printed:
                continue
            if not self._printed:
                self.runner.display.say(f"{'trial':>5}  {'score':>10}  {'scores':>7}  parameters")
            self._printed.add(trial.number)
            score = (
                "pruned"
                if trial.value is None or trial.state == self._states.PRUNED
                else f"{trial.value:.4f}"
            )
            values = " ".join(f"{name} {_short(value)}" for name, value in trial.params.items())
            note = trial.user_attrs.get("error", "recipes as they are" if "start" in trial.user_attrs else "")
            steps = f"{len(trial.intermediate_values)}/{SHARES * self.num_seeds}"
            line = f"{trial.number:>5}  {score:>10}  {steps:>7}  {values}" + (f"  ({note})" if note else "")
            self.runner.display.say(line.rstrip())


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
