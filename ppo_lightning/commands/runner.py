"""Runner of benchmark jobs: several processes at a time, with resume after an interruption."""

import csv
import functools
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from ppo_lightning.commands import provenance
from ppo_lightning.commands.jobs import Job
from ppo_lightning.errors import ConfigError
from ppo_lightning.utils.watch import end_with_the_parent

DONE = "done.json"  # written when a run has finished
TRIES = "seconds.txt"  # duration of each attempt
RECORD = "job.json"  # settings of a run, and provenance of each attempt


class Runner:
    """Runner of jobs, each in ``folder/runs/NAME``.

    Finished jobs are skipped. Interrupted jobs resume from the newest checkpoint.

    Args:
        folder: Folder of the benchmark.
        workers: Number of runs at a time.
        threads: Number of PyTorch threads per run.

    Example:
        >>> runner = Runner(Path("runs/benchmark"), workers=2, threads=1)
        >>> runner.folder_of(Job("cartpole", Path("cartpole.yaml"), seed=1)).as_posix()
        'runs/benchmark/runs/cartpole-1'
    """

    def __init__(self, folder: Path, workers: int, threads: int) -> None:
        self.folder = folder
        self.workers = workers
        self.threads = threads
        self.failed: dict[Job, int] = {}  # with the code of the process
        self.display = Display(sys.stderr.isatty())
        self._running: dict[Job, tuple[subprocess.Popen, float]] = {}

    def run(self, jobs: Sequence[Job], report: Callable[[], None] = lambda: None) -> None:
        """Run the jobs in order. A failed job is put into ``failed``; the others still run.

        If this process is interrupted (SIGINT, SIGTERM) or killed, running jobs save a checkpoint and end.

        Args:
            jobs: The jobs. Finished ones are skipped.
            report: Called every second and when a job ends. An exception ends the running jobs.
        """
        waiting = [job for job in jobs if not self.is_done(job)]
        finished = len(jobs) - len(waiting)
        last_report = 0.0
        try:
            while waiting or self._running:
                while waiting and len(self._running) < self.workers:
                    self.start(waiting.pop(0))
                time.sleep(0.2)
                ended = [job for job, (process, _) in self._running.items() if process.poll() is not None]
                for job in ended:
                    self._end(job)
                    finished += job not in self.failed
                failed = f", {len(self.failed)} failed" if self.failed else ""
                self.display.show(f"{finished} of {len(jobs)} runs done{failed}", self.progress())
                if ended or time.monotonic() > last_report + 1:
                    report()
                    last_report = time.monotonic()
            report()  # also if all runs finished earlier
        finally:
            for process, _ in self._running.values():
                process.terminate()
            for job in list(self._running):
                self._end(job)
            self.display.close()

    def is_done(self, job: Job) -> bool:
        """Return whether a job has finished, now or in an earlier process."""
        return (self.folder_of(job) / DONE).exists()

    def progress(self) -> Iterator[str]:
        """Yield a line about each running job."""
        for job in self._running:
            yield f"  {job.name:40.40} {progress(job, self.folder_of(job))}"

    def folder_of(self, job: Job) -> Path:
        """Return the folder of a job."""
        return self.folder / "runs" / job.name

    def settings_of(self, job: Job) -> dict[str, Any]:
        """Return all settings that affect the results of a run: recipe, flags and threads."""
        recipe = yaml.safe_load(job.recipe.read_text())
        settings = {"recipe": recipe, "flags": shlex.join(job.flags), "threads": self.threads}
        return json.loads(json.dumps(settings, default=str))  # as JSON stores them

    def require_same_settings(self, jobs: Sequence[Job]) -> None:
        """Refuse a folder whose runs have other settings, because the report would mix them.

        Raises:
            ConfigError: A job was started with other settings, or its settings are not recorded.
        """
        for job in jobs:
            folder = self.folder_of(job)
            if (folder / RECORD).exists():
                old = dict(_flat(self.record_of(job)["settings"]))
            elif any((folder / name).exists() for name in (DONE, "runs")):
                raise ConfigError(f"{folder} has no record of its settings; choose another --output.")
            else:
                continue
            new = dict(_flat(self.settings_of(job)))
            names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
            changes = ", ".join(f"{name} ({old.get(name)!r}, now {new.get(name)!r})" for name in names)
            if changes:
                advice = "keep them, or choose another --output"
                raise ConfigError(f"{folder} has a run with other settings: {changes}; {advice}.")

    def record_of(self, job: Job) -> dict[str, Any]:
        """Return the record of a job that :meth:`record` wrote."""
        return json.loads((self.folder_of(job) / RECORD).read_text())

    def record(self, job: Job) -> None:
        """Write the settings of a job, and add the provenance of this attempt."""
        path = self.folder_of(job) / RECORD
        source = provenance.source()
        new: dict[str, Any] = {"settings": self.settings_of(job), "sources": []}
        record = self.record_of(job) if path.exists() else new
        if source not in record["sources"]:
            record["sources"].append(source)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(record, indent=1) + "\n")
        part.replace(path)

    def start(self, job: Job) -> None:
        """Start the process of a job, which resumes from its newest checkpoint, if any."""
        folder = self.folder_of(job)
        folder.mkdir(parents=True, exist_ok=True)
        self.record(job)
        command = [sys.executable, "-W", "ignore", "-m", "ppo_lightning", "fit"]
        command += ["--config", str(job.recipe.resolve()), "--seed_everything", str(job.seed)]
        command += ["--auto_resume", "--trainer.enable_progress_bar", "false"]
        command += ["--num_threads", str(self.threads), *job.flags]
        package = str(Path(__file__).parents[2])  # works without installing the package
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        env = os.environ | {"OMP_NUM_THREADS": str(self.threads), "PYTHONPATH": path}
        with (folder / "log.txt").open("a") as log:
            options = {"cwd": folder, "env": env, "stdout": log, "stderr": log, "start_new_session": True}
            options["preexec_fn"] = functools.partial(end_with_the_parent, signal.SIGTERM)
            process = subprocess.Popen(command, **options)  # type: ignore[call-overload]
        self._running[job] = process, time.perf_counter()

    def _end(self, job: Job) -> None:
        process, started = self._running.pop(job)
        code = process.wait()
        folder = self.folder_of(job)
        with (folder / TRIES).open("a") as file:
            file.write(f"{time.perf_counter() - started:.1f}\n")
        if code == 0:
            seconds = sum(map(float, (folder / TRIES).read_text().split()))
            (folder / DONE).write_text(
                json.dumps({"label": job.label, "seed": job.seed, "wall_seconds": round(seconds, 1)})
            )
        elif code not in (143, -signal.SIGTERM):  # preempted, or ended by the signal during start or end
            self.failed[job] = code
            last = (folder / "log.txt").read_text().strip().splitlines()[-1:]
            self.display.say(f"{job.name} failed with code {code}: {' '.join(last)} ({folder / 'log.txt'})")


def _flat(settings: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted names and values of the settings in nested dictionaries."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def metrics_of(folder: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of all ``metrics.csv`` files of a run in the order of steps, without duplicates.

    The column ``seconds`` is added: the training time until that step, without start-up.

    Args:
        folder: Folder of the run.
    """
    files = sorted(
        folder.glob("runs/*/version_*/metrics.csv"),
        key=lambda path: int(path.parent.name.removeprefix("version_")),
    )
    tries = [[row for row in csv.DictReader(path.open()) if row["step"]] for path in files]
    tries = [rows for rows in tries if rows]
    seconds_before = 0.0
    steps_before = 0
    for rows, next_rows in itertools.zip_longest(tries, tries[1:]):
        end = int(next_rows[0]["step"]) if next_rows else None
        seconds = seconds_before
        for row in rows:
            if end is not None and int(row["step"]) >= end:
                break
            if row.get("charts/SPS"):  # mean throughput since the start of this attempt
                seconds = seconds_before + (int(row["step"]) - steps_before) / float(row["charts/SPS"])
            yield row | {"seconds": f"{seconds:.1f}"}
            last = int(row["step"])
        seconds_before = seconds
        steps_before = last


class Display:
    """Progress display: changing lines on a terminal, otherwise one line per finished run.

    Args:
        terminal: Whether standard error is a terminal.
    """

    def __init__(self, terminal: bool) -> None:
        self.terminal = terminal
        self._lines = 0
        self._last_shown = 0.0
        self._summary = ""

    def show(self, summary: str, lines: Iterable[str]) -> None:
        """Show a summary and lines about running jobs, at most once per second.

        Without a terminal, only a summary that has changed is printed.
        """
        if not self.terminal:
            if summary != self._summary:
                self._summary = summary
                self.say(summary)
            return
        if time.monotonic() - self._last_shown < 1:
            return
        self._last_shown = time.monotonic()
        text = [summary, *lines]
        self._clear()
        print("\n".join(text), file=sys.stderr, flush=True)
        self._lines = len(text)

    def say(self, line: str) -> None:
        """Print a permanent line."""
        self._clear()
        print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Remove the changing lines."""
        self._clear()

    def _clear(self) -> None:
        if self._lines:
            print(f"\x1b[{self._lines}A\x1b[J", end="", file=sys.stderr)
        self._lines = 0


def progress(job: Job, folder: Path) -> str:
    """Describe the progress of a run by its metrics, which are written every ten seconds."""
    rows = [row for row in metrics_of(folder) if row.get("charts/episodic_return")]
    if not rows:
        return "starting"
    last = rows[-1]
    share = int(last["step"]) / job.settings["total_timesteps"]
    mean_return = float(last["charts/episodic_return"])
    sps = float(last["charts/SPS"])
    return f"{100 * share:5.1f} %   return {mean_return:10.1f}   {sps:8.0f} steps per second"
