"""Runner of benchmark jobs: several processes at a time, with resume after an interruption."""

import csv
import functools
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from ppo_lightning.commands.options import TRAINER_DEFAULTS
from ppo_lightning.errors import ConfigError
from ppo_lightning.experiments import provenance
from ppo_lightning.experiments.jobs import Job
from ppo_lightning.utils.watch import end_with_the_parent

RECORD = "job.json"  # settings of a run, provenance of each attempt, duration of all, and whether it finished


class Runner:
    """Runner of jobs, each in ``folder/runs/NAME``: ``workers`` at a time, with ``threads`` of PyTorch each.

    Finished jobs are skipped. Interrupted jobs resume from the newest checkpoint.
    """

    def __init__(self, folder: Path, workers: int, threads: int) -> None:
        self.folder = folder
        self.workers = workers
        self.threads = threads
        self.failed: list[Job] = []
        self._running: dict[Job, tuple[subprocess.Popen, float]] = {}  # start minus earlier attempts

    def run(self, jobs: Sequence[Job], report: Callable[[], None] = lambda: None) -> None:
        """Run the jobs in order. A failed job is put into ``failed``; a job that a signal ended resumes.

        If this process is interrupted (SIGINT, SIGTERM) or killed, running jobs save a checkpoint and end.
        ``report`` is called every second and when a job ends. An exception of it ends the running jobs.
        """
        waiting = [job for job in jobs if not self.is_done(job)]
        bar = tqdm(total=len(jobs), initial=len(jobs) - len(waiting), unit="run", disable=None, leave=False)
        last_report = 0.0
        try:
            while waiting or self._running:
                while waiting and len(self._running) < self.workers:
                    self.start(waiting.pop(0))
                time.sleep(0.2)
                ended = [job for job, (process, _) in self._running.items() if process.poll() is not None]
                for job in ended:
                    if self._end(job):
                        bar.update()
                    else:
                        waiting.insert(0, job)
                if ended or time.monotonic() > last_report + 1:
                    for job, (_, started) in self._running.items():
                        self.record(job, seconds=round(time.perf_counter() - started, 1))
                    report()
                    last_report = time.monotonic()
            report()  # also if all runs finished earlier
        finally:
            for process, _ in self._running.values():
                process.terminate()
            for job in list(self._running):
                self._end(job)
            bar.close()

    def is_done(self, job: Job) -> bool:
        """Return whether a job has finished, now or in an earlier process."""
        return self.record_of(job).get("finished", False)

    def folder_of(self, job: Job) -> Path:
        """Return the folder of a job."""
        return self.folder / "runs" / job.name

    def settings_of(self, job: Job) -> dict[str, Any]:
        """Return all settings that affect a run, as JSON stores them: recipe, flags, threads."""
        recipe = yaml.safe_load(job.recipe.read_text())
        settings = {"recipe": recipe, "flags": shlex.join(job.flags), "threads": self.threads}
        return json.loads(json.dumps(settings, default=str))

    def require_same_settings(self, jobs: Sequence[Job]) -> None:
        """Refuse a folder with runs of other settings or jobs, which the report would mix or leave out."""
        for job in jobs:
            settings, record = self.settings_of(job), self.record_of(job)
            changed = [name for name in settings if record and settings[name] != record["settings"].get(name)]
            if changed:
                advice = f"({', '.join(changed)}): keep them, or choose another --output"
                raise ConfigError(f"{self.folder_of(job)} has a run with other settings {advice}.")
        runs = {path.parent for path in self.folder.glob(f"runs/*/{RECORD}")}
        if others := sorted(path.name for path in runs - {self.folder_of(job) for job in jobs}):
            runs_of_others = f"{self.folder} has runs that the report would leave out ({', '.join(others)})"
            raise ConfigError(f"{runs_of_others}: add their recipes and seeds, or choose another --output.")

    def record_of(self, job: Job) -> dict[str, Any]:
        """Return the record of a job, which is empty before the first attempt."""
        path = self.folder_of(job) / RECORD
        return json.loads(path.read_text()) if path.exists() else {}

    def record(self, job: Job, **entries: Any) -> None:
        """Write entries into the record of a job."""
        path = self.folder_of(job) / RECORD
        part = path.with_suffix(".part")
        part.write_text(json.dumps(self.record_of(job) | entries, indent=1) + "\n")
        part.replace(path)

    def record_attempt(self, job: Job) -> None:
        """Write the settings of a job, and add the provenance of this attempt."""
        source = provenance.source()
        sources = self.record_of(job).get("sources", [])
        new = [] if source in sources else [source]
        self.record(job, settings=self.settings_of(job), sources=[*sources, *new])

    def start(self, job: Job) -> None:
        """Start the process of a job, which resumes from its newest checkpoint, if any."""
        folder = self.folder_of(job)
        folder.mkdir(parents=True, exist_ok=True)
        self.record_attempt(job)
        command = [sys.executable, "-W", "ignore", "-m", "ppo_lightning", "fit"]
        command += ["--config", str(job.recipe.resolve()), "--seed_everything", str(job.seed)]
        command += ["--auto_resume", "--trainer.enable_progress_bar", "false"]
        # Before the flags, which may add loggers to these.
        command += ["--trainer.logger", json.dumps(TRAINER_DEFAULTS["logger"])]
        command += ["--num_threads", str(self.threads), *job.flags]
        # Not by the working directory: relative paths of recipes and flags mean what they mean for `fit`.
        command += ["--trainer.default_root_dir", str(folder.resolve())]
        package = str(Path(__file__).parents[2])  # works without installing the package
        path = os.pathsep.join(filter(None, [package, os.getcwd(), os.environ.get("PYTHONPATH")]))
        env = os.environ | {"OMP_NUM_THREADS": str(self.threads), "PYTHONPATH": path}
        with (folder / "log.txt").open("a") as log:
            options = {"env": env, "stdout": log, "stderr": log, "start_new_session": True}
            options["preexec_fn"] = functools.partial(end_with_the_parent, signal.SIGTERM)
            process = subprocess.Popen(command, **options)  # type: ignore[call-overload]
        self._running[job] = process, time.perf_counter() - self.record_of(job).get("seconds", 0.0)

    def _end(self, job: Job) -> bool:
        """Record the end of a process, and return whether the job is over: not after a signal."""
        process, started = self._running.pop(job)
        code = process.wait()
        self.record(job, seconds=round(time.perf_counter() - started, 1), finished=code == 0)
        if code == 0:
            tqdm.write(f"{job.name} has finished", file=sys.stderr)
        elif code not in (143, -signal.SIGTERM):  # preempted, or ended by the signal during start or end
            self.failed.append(job)
            log = self.folder_of(job) / "log.txt"
            last = log.read_text().strip().splitlines()[-1:]
            message = f"{job.name} failed with code {code}: {' '.join(last)} ({log})"
            tqdm.write(message, file=sys.stderr)
        return code == 0 or job in self.failed


def metrics_of(folder: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of all ``metrics.csv`` files of a run in the order of steps, without duplicates.

    The column ``seconds`` is added: the training time until that step, without start-up.
    """
    folders = [path.parent for path in folder.glob("runs/*/version_*/cli_config.yaml")]  # of `fit`
    folders.sort(key=lambda path: int(path.name.removeprefix("version_")))
    files = [path / "metrics.csv" for path in folders]
    tries = [[x for x in csv.DictReader(path.open()) if x["step"]] for path in files if path.exists()]
    seconds_before = 0.0
    steps_before = 0
    # An attempt that begins with the evaluation of the one before keeps its rows.
    starts = [next((int(row["step"]) for row in rows if row.get("charts/SPS")), math.inf) for rows in tries]
    for number, rows in enumerate(tries, 1):
        end = min(starts[number:], default=math.inf)  # a later attempt may begin before the next one
        seconds, last = seconds_before, steps_before
        for row in rows:
            if int(row["step"]) >= end:
                break
            if row.get("charts/SPS"):  # mean throughput since the start of this attempt
                seconds = seconds_before + (int(row["step"]) - steps_before) / float(row["charts/SPS"])
            yield row | {"seconds": f"{seconds:.1f}"}
            last = int(row["step"])
        seconds_before = seconds
        steps_before = last
