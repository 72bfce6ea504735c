"""``ppo-lightning tune``: search hyperparameters with Optuna, over several recipes, seeds and processes.

Optuna keeps the study in a database, chooses the parameters and prunes. A process works on one trial at a
time: it trains every recipe with every seed, and reports the mean score after each quarter of a seed.

Takeover: a trial has a heartbeat every 30 seconds. If its process is killed, the trial is stale 60 seconds
after the last heartbeat. Another process then queues it again: before its next trial, or within five seconds
if it waits for the last trials. The runs resume from their checkpoints.
"""

import argparse
import contextlib
import fcntl
import io
import json
import math
import shlex
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from ppo_lightning.commands.arguments import Arguments
from ppo_lightning.commands.options import at_least, parser_of
from ppo_lightning.commands.recipes import read_yaml
from ppo_lightning.errors import ConfigError, import_extra
from ppo_lightning.experiments import benchmark
from ppo_lightning.experiments.compare import compare
from ppo_lightning.experiments.jobs import Job, jobs_of
from ppo_lightning.experiments.runner import Runner, metrics_of

HEARTBEAT = 30  # seconds between two heartbeats of a trial, which is stale after two of them
SHARES = 4  # scores that the pruner sees of each seed, after equal shares of data.total_timesteps
FRESH_SEEDS = 5  # seeds of the comparison, which no trial has used
GAMMAS = [0.95, 0.98, 0.99, 0.995, 0.999]  # of the default space
Targets = dict[str, tuple[float, float]]  # environment -> returns with the scores 0 and 1


class Unfinished(BaseException):
    """End of a trial without a result. Optuna would log a traceback for an ``Exception``."""


def read_space(path: Path) -> tuple[dict[str, Any], Targets]:
    """Read a search space: Optuna's distribution of each parameter, and the targets."""
    content = read_yaml(str(path), "--space")
    name = "parameters"
    space = {}
    targets = {}
    try:
        for name, entry in content["parameters"].items():
            space[name] = _distribution(entry)
        for name, (low, high) in content.get("targets", {}).items():
            targets[name] = float(low), float(high)
            if float(low) >= float(high):
                raise ValueError(f"{low} is not below {high}")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        advice = "parameters need choices, or low and high (with log: true or step); targets need two returns"
        raise ConfigError(f"--space {path}: {name}: {advice} ({error}).") from error
    return space, targets


def default_space(folder: Path, jobs: Sequence[Job]) -> Path:
    """Write the space of a study without ``--space``: learning rates and discount."""
    algorithm = jobs[0].algorithm.rpartition(".")[2]
    rates = ("policy_lr", "q_lr") if "SAC" in algorithm.upper() else ("learning_rate",)
    space: dict[str, Any] = {f"model.{name}": {"low": 1e-4, "high": 1e-2, "log": True} for name in rates}
    (path := folder / "space.yaml").parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump({"parameters": space | {"model.gamma": {"choices": GAMMAS}}}))
    return path


def _distribution(entry: dict[str, Any]) -> Any:
    distributions = import_extra("optuna", extra="tune").distributions
    if "choices" in entry:  # as flags of fit, because Optuna stores scalars only
        choices = [choice if isinstance(choice, str) else json.dumps(choice) for choice in entry["choices"]]
        return distributions.CategoricalDistribution(**entry | {"choices": choices})
    # YAML 1.1 reads 1e-4 as a string.
    entry = {key: float(value) if isinstance(value, str) else value for key, value in entry.items()}
    integers = all(isinstance(entry.get(key, 1), int) for key in ("low", "high", "step"))
    return (distributions.IntDistribution if integers else distributions.FloatDistribution)(**entry)


def resolved(recipe: Path, flags: Sequence[str]) -> str:
    """Return a recipe with flags of ``fit`` and all defaults, in YAML."""
    from ppo_lightning.commands import cli

    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            run = Arguments(["fit", "--config", str(recipe), *flags, "--print_config"])
            cli.run([], run, save_config=False)
    except SystemExit as end:
        if end.code:
            raise
    return output.getvalue()


class Tuner:
    """The part of a study that one process does; ``flags`` of ``fit`` are those of all runs."""

    def __init__(
        self, options: argparse.Namespace, flags: tuple[str, ...], space: dict[str, Any], targets: Targets
    ) -> None:
        self.options = options
        self.seeds = range(options.first_seed, options.first_seed + options.seeds)
        self.flags = flags
        self.space = space
        self.targets = targets
        self.optuna = import_extra("optuna", extra="tune")
        warnings.filterwarnings("ignore", category=self.optuna.exceptions.ExperimentalWarning)
        url = options.storage or f"sqlite:///{options.output}/study.db"
        engine = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else {}  # for its lock
        retry = self.optuna.storages.RetryHeartbeatStaleTrialCallback()
        try:
            self.storage = self.optuna.storages.RDBStorage(
                url, engine, heartbeat_interval=HEARTBEAT, heartbeat_stale_trial_callback=retry
            )
            self.study = self.optuna.create_study(
                storage=self.storage,
                study_name=options.study,
                sampler=self.optuna.samplers.TPESampler(group=True),  # the first trial has no parameters
                pruner=self.optuna.pruners.MedianPruner(),
                direction="maximize",
                load_if_exists=True,
            )
        except (ImportError, import_extra("sqlalchemy.exc", extra="tune").SQLAlchemyError) as error:
            raise ConfigError(f"--storage {url} cannot be opened: {' '.join(str(error).split())}") from error
        files = {options.space.name: options.space.read_text()}
        for job in jobs_of(options.recipes, [1], [], ()):
            files[f"{job.label}.yaml"] = f"{job.recipe.read_text()}# {shlex.join(job.flags)}\n"
        settings = files | {"seeds": options.seeds, "flags": shlex.join(flags)}
        if options.first_seed != 1:
            settings["first_seed"] = options.first_seed
        old = self.study.user_attrs.get("settings", settings)
        if changed := [key for key in {**old, **settings} if settings.get(key) != old.get(key)]:
            advice = "choose another --study and --output"
            raise ConfigError(f"Study {options.study} has other settings ({', '.join(changed)}): {advice}.")
        self.study.set_user_attr("settings", settings)

    def run(self) -> None:
        """Run trials until the study has all of them, in this process and in others."""
        if not any("start" in trial.user_attrs for trial in self.study.trials):
            self.study.enqueue_trial({}, user_attrs={"start": True})
        while True:
            counts = Counter(trial.state.name for trial in self.study.trials)
            missing = self.options.trials - counts["COMPLETE"] - counts["PRUNED"]
            if missing <= 0:
                return
            if not counts["WAITING"] and counts["RUNNING"] >= missing:
                self.optuna.storages.fail_stale_trials(self.study)  # queues those of killed processes again
                time.sleep(HEARTBEAT / 6)
                continue
            try:
                self.study.optimize(self.objective, n_trials=1)
            except Unfinished as end:
                if isinstance(end.__cause__, ConfigError):
                    raise end.__cause__ from None

    def objective(self, trial: Any) -> float:
        """Train the runs of a trial and return its score. If interrupted, the trial gets stale."""
        try:
            return self.train(trial)
        except (ConfigError, self.optuna.exceptions.UpdateFinishedTrialError) as error:
            raise Unfinished from error  # this machine was suspended, and another process has the trial

    def train(self, trial: Any) -> float:
        """Train every recipe with every seed, and report the mean score after each share of a seed."""
        options = self.options
        is_start = "start" in trial.user_attrs
        number = trial.user_attrs.get("runs", trial.number)
        trial.set_user_attr("runs", number)  # for a later attempt, which continues these runs
        folder = options.output / f"trials/{number}"
        flags = self.flags_of(trial)
        seeds = [jobs_of(options.recipes, [seed], [], flags) for seed in self.seeds]
        jobs = [job for seed in seeds for job in seed]
        runner = Runner(folder, options.workers, options.threads)
        runner.require_same_settings(jobs)
        means: list[float] = []

        def report() -> None:
            """Report the scores that are new, and end the trial if it is hopeless or has failed."""
            problem = f"{runner.failed[0].name} failed" if runner.failed else ""
            while not problem and len(means) < SHARES * len(seeds):
                seed, share = divmod(len(means), SHARES)
                scores = [self.score(runner, job, 1.0) for past in seeds[:seed] for job in past]
                scores += [self.score(runner, job, (share + 1) / SHARES) for job in seeds[seed]]
                if None in scores:
                    return
                means.append(sum(scores) / len(scores))
                if math.isfinite(means[-1]):
                    trial.report(means[-1], len(means))
                    if not is_start and trial.should_prune():
                        raise self.optuna.TrialPruned
                elif share == SHARES - 1:
                    problem = "no episode ended"
            if problem and is_start:
                raise ConfigError(f"The recipes fail as they are ({problem}; see log.txt in {folder}).")
            if problem:  # pruned, so that the sampler avoids these parameters
                trial.set_user_attr("problem", problem)
                raise self.optuna.TrialPruned(problem)

        runner.run(jobs, report)
        return means[-1]

    def flags_of(self, trial: Any) -> tuple[str, ...]:
        """Return the flags of ``fit`` of a trial: those of all runs, and the values that Optuna samples."""
        flags = self.flags
        for name, entry in () if "start" in trial.user_attrs else self.space.items():
            if hasattr(entry, "choices"):
                value = trial.suggest_categorical(name, entry.choices)
            else:
                method = trial.suggest_int if isinstance(entry.low, int) else trial.suggest_float
                value = method(name, entry.low, entry.high, step=entry.step, log=entry.log)
            flags += f"--{name}", str(value)
        return flags

    def score(self, runner: Runner, job: Job, share: float) -> Any:
        """Return the score of a run after a share of its steps, None if it has not come so far.

        It is NaN before an episode ends. All trials have the training return after the same steps.
        """
        rows = list(metrics_of(runner.folder_of(job)))
        steps = share * job.settings["total_timesteps"]
        if not runner.is_done(job) and (share == 1.0 or not rows or int(rows[-1]["step"]) < steps):
            return None
        if share == 1.0:  # RND's random steps before the training count, too
            steps = math.inf
        rows = [row for row in rows if row.get("charts/avg_episodic_return") and int(row["step"]) <= steps]
        low, high = self.targets.get(job.settings["env_id"], (0.0, 1.0))
        return (float(rows[-1]["charts/avg_episodic_return"]) - low) / (high - low) if rows else math.nan

    def write_results(self) -> None:
        """Write the recipes of the best trial, and compare them with the start on fresh seeds."""
        options = self.options
        best = self.study.best_trial
        start = next(trial for trial in self.study.trials if trial.values and "start" in trial.user_attrs)
        flags = self.flags_of(best)
        (options.output / "best").mkdir(exist_ok=True)
        for job in jobs_of(options.recipes, [1], [], flags):
            text = f"# {job.recipe.name} with {shlex.join(job.flags)}\n{resolved(job.recipe, job.flags)}"
            (options.output / "best" / f"{job.label}.yaml").write_text(text)
        print(f"Best trial: {best.number} ({best.value:.4f}); the recipes as they are: {start.value:.4f}.")
        if failed := [trial.number for trial in self.study.trials if "problem" in trial.user_attrs]:
            print(f"Failed trials (log.txt in trials/NUMBER): {', '.join(map(str, failed))}.")
        if best.number == start.number:
            print("No trial is better than the recipes as they are.")
            return
        # A study that goes on may find another best trial.
        folders = [options.output / "comparison" / name for name in ("start", f"trial_{best.number}")]
        seeds = map(str, range(self.seeds.stop, self.seeds.stop + FRESH_SEEDS))
        shared = ["--recipes", *map(str, options.recipes), "--seeds", *seeds]
        shared += ["--workers", str(options.workers), "--threads", str(options.threads)]
        for trial, folder in zip((start, best), folders, strict=True):
            benchmark.main([*shared, "--output", str(folder), *self.flags_of(trial)])
        print(f"\nRecipes as they are (before) and best trial (after):\n\n{compare(*folders)[0]}")


def main(args: Sequence[str]) -> None:
    """Run ``ppo-lightning tune``; unknown arguments are passed to ``fit``."""
    parser = parser_of(
        "tune",
        "Each trial trains all recipes with several seeds. The same command resumes the study, and a second"
        " one joins it. All other arguments are passed to fit: --data.total_timesteps 100000 ...",
    )
    parser.add_argument("--recipes", "--config", nargs="+", type=Path, required=True, help="as fit --config")
    parser.add_argument("--space", type=Path, help="search space, YAML (default: learning rates, discount)")
    parser.add_argument("--trials", type=at_least(1), default=100, help="number of trials (default: 100)")
    parser.add_argument(
        "--seeds", type=at_least(1), default=3, help="number of seeds of a trial (default: 3)"
    )
    parser.add_argument("--first_seed", type=at_least(0), default=1, help="the first of them (default: 1)")
    benchmark.add_runner_arguments(parser, "runs/tune")
    parser.add_argument("--storage", help="URL of a database (default: study.db in --output)")
    parser.add_argument("--study", default="tune", help="name of the study in the storage (default: tune)")
    options, flags = parser.parse_known_args(args)
    jobs = jobs_of(options.recipes, [1], [], tuple(flags))
    if options.space is None:
        options.space = default_space(options.output, jobs)
    space, targets = read_space(options.space)
    env_ids = {str(job.settings["env_id"]) for job in jobs}
    for name, entry in space.items():  # before trials fail one by one
        for value in entry.choices if hasattr(entry, "choices") else (entry.low, entry.high):
            for job in jobs_of(options.recipes, [1], [], (*flags, f"--{name}", str(value))):
                resolved(job.recipe, job.flags)
    if (targets or len(env_ids) > 1) and env_ids != set(targets):
        advice = f"targets must name each environment of the recipes, {', '.join(sorted(env_ids))}"
        raise ConfigError(f"--space {options.space}: {advice}: they name {', '.join(targets) or 'none'}.")
    options.output.mkdir(parents=True, exist_ok=True)
    tuner = Tuner(options, tuple(flags), space, targets)
    benchmark.exit_on_signals()
    try:
        tuner.run()
    except SystemExit:
        print(f"Interrupted: the same command resumes the study, and this trial after {2 * HEARTBEAT} s.")
        raise
    with (options.output / "results.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second process waits, and finds all runs finished
        tuner.write_results()
