"""Run recipes in processes, several at a time; an interrupted benchmark resumes."""

import csv
import functools
import hashlib
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ppo_lightning.commands import provenance
from ppo_lightning.errors import ConfigError
from ppo_lightning.utils.watch import end_with_the_parent

DONE, TRIES = "done.json", "seconds.txt"  # what a finished run left; how long each try took
RECORD = "job.json"  # a run's settings, and where each of its tries comes from


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        label: Name that the runs of all seeds share: the recipe's, or what an ablation changed.
        recipe: A YAML file.
        seed: Of ``seed_everything``.
        flags: For ``fit``, after the recipe.
    """

    label: str
    recipe: Path
    seed: int
    flags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """A folder's name."""
        return re.sub(r"[^\w.-]+", "_", f"{self.label}-{self.seed}")

    @property
    def settings(self) -> dict[str, Any]:
        """What the recipe says about ``data``, and what the flags say instead."""
        data = yaml.safe_load(self.recipe.read_text())["data"]
        flags = [part for flag in self.flags for part in flag.split("=", 1)]
        for name, value in itertools.pairwise(flags):
            if name.startswith("--data.") and name.count(".") == 1:
                data[name.removeprefix("--data.")] = yaml.safe_load(value)
        return data


def jobs_of(
    recipes: Iterable[Path], seeds: Iterable[int], env_ids: Sequence[str], flags: tuple[str, ...]
) -> list[Job]:
    """Returns every recipe (in every environment of ``env_ids``, if there are any) with every seed.

    Raises:
        ConfigError: A recipe is no file, or two of them have the same name.
    """
    labelled: dict[str, tuple[Path, tuple[str, ...]]] = {}
    for recipe in recipes:
        if not recipe.is_file():
            raise ConfigError(f"--recipes: there is no file {recipe}.")
        for env_id in env_ids or [""]:
            label = f"{recipe.stem} {env_id}".strip()
            if label in labelled:
                raise ConfigError(
                    f"--recipes: two are called {label}: rename one, or benchmark them one after the other."
                )
            labelled[label] = recipe, (*flags, *(("--data.env_id", env_id) if env_id else ()))
    return [Job(label, recipe, seed, its) for seed in seeds for label, (recipe, its) in labelled.items()]


class Runner:
    """Runs jobs, each in ``folder/runs/NAME``.

    Finished jobs are skipped, and interrupted jobs resume from the newest checkpoint.

    Args:
        folder: Of the benchmark.
        workers: Number of runs at a time.
        threads: Number of PyTorch's threads of each run.
    """

    def __init__(self, folder: Path, workers: int, threads: int) -> None:
        self.folder, self.workers, self.threads = folder, workers, threads
        self.failed: list[Job] = []
        self._running: dict[Job, tuple[subprocess.Popen, float]] = {}
        self._display = Display(sys.stderr.isatty())

    def run(self, jobs: Sequence[Job]) -> None:
        """Run the jobs in order, also after one failed; ``failed`` has those that did.

        If this process is interrupted (SIGINT, SIGTERM) or killed, running jobs save a checkpoint and end.
        """
        waiting = [job for job in jobs if not (self.of(job) / DONE).exists()]
        finished = len(jobs) - len(waiting)
        try:
            while waiting or self._running:
                while waiting and len(self._running) < self.workers:
                    self._start(waiting.pop(0))
                time.sleep(0.2)
                for job, (process, _) in list(self._running.items()):
                    if process.poll() is not None:
                        self._end(job)
                        finished += job not in self.failed
                self._display.show(
                    finished, len(jobs), len(self.failed), [(job, self.of(job)) for job in self._running]
                )
        finally:
            for process, _ in self._running.values():
                process.terminate()
            for job in list(self._running):
                self._end(job)
            self._display.close()

    def of(self, job: Job) -> Path:
        """Returns a job's folder."""
        return self.folder / "runs" / job.name

    def settings_of(self, job: Job) -> dict[str, Any]:
        """Return everything that decides what a run computes, but for commit, versions and machine."""
        recipe = yaml.safe_load(job.recipe.read_text())
        settings = {"recipe": recipe, "flags": shlex.join(job.flags), "threads": self.threads}
        return json.loads(json.dumps(settings, default=str))  # as the file has them

    def require_same_settings(self, jobs: Sequence[Job]) -> None:
        """Refuse a folder with runs of other settings, which a report would ascribe to the present command.

        Raises:
            ConfigError: A job was started with other settings, or without a record of them.
        """
        for job in jobs:
            folder = self.of(job)
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
        """Return what :meth:`record` wrote about a job."""
        return json.loads((self.of(job) / RECORD).read_text())

    def record(self, job: Job) -> None:
        """Write a job's settings and the hash of the recipe, and add where the job is started from."""
        path, source = self.of(job) / RECORD, provenance.source() | {"workers": self.workers}
        if path.exists():
            record = self.record_of(job)
        else:
            digest = hashlib.sha256(job.recipe.read_bytes()).hexdigest()
            record = {"settings": self.settings_of(job), "recipe_sha256": digest, "sources": []}
        if source not in record["sources"]:
            record["sources"].append(source)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(record, indent=1) + "\n")
        part.replace(path)

    def _start(self, job: Job) -> None:
        folder = self.of(job)
        folder.mkdir(parents=True, exist_ok=True)
        self.record(job)
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "ppo_lightning",
            "fit",
            "--config",
            str(job.recipe.resolve()),
        ]
        command += [
            "--seed_everything",
            str(job.seed),
            "--auto_resume",
            "--trainer.enable_progress_bar",
            "false",
        ]
        command += ["--num_threads", str(self.threads), *job.flags]
        package = str(Path(__file__).parents[2])  # for those who have not installed it
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        env = os.environ | {"OMP_NUM_THREADS": str(self.threads), "PYTHONPATH": path}
        with (folder / "log.txt").open("a") as log:
            options = {"cwd": folder, "env": env, "stdout": log, "stderr": log, "start_new_session": True}
            process = subprocess.Popen(
                command, **options, preexec_fn=functools.partial(end_with_the_parent, signal.SIGTERM)
            )  # type: ignore[call-overload]
        self._running[job] = process, time.perf_counter()

    def _end(self, job: Job) -> None:
        process, started = self._running.pop(job)
        code = process.wait()
        folder = self.of(job)
        with (folder / TRIES).open("a") as file:
            file.write(f"{time.perf_counter() - started:.1f}\n")
        if code == 0:
            seconds = sum(map(float, (folder / TRIES).read_text().split()))
            (folder / DONE).write_text(
                json.dumps({"label": job.label, "seed": job.seed, "wall_seconds": round(seconds, 1)})
            )
        elif code != 143:  # which says that it was asked to end
            self.failed.append(job)
            last = (folder / "log.txt").read_text().strip().splitlines()[-1:]
            self._display.say(f"{job.name} failed with code {code}: {' '.join(last)} ({folder / 'log.txt'})")


def _flat(settings: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings within nested dictionaries with their dotted names."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def metrics_of(folder: Path) -> Iterator[dict[str, str]]:
    """Yields the rows of a run's ``metrics.csv`` in the order of their steps, with ``seconds``; those of a resumed run once.

    ``seconds`` is the time spent training until then, without start-up.
    """
    files = sorted(
        folder.glob("runs/*/version_*/metrics.csv"),
        key=lambda path: int(path.parent.name.removeprefix("version_")),
    )
    tries = [[row for row in csv.DictReader(path.open()) if row["step"]] for path in files]
    tries = [rows for rows in tries if rows]
    seconds_before, steps_before = 0.0, 0
    for rows, following in zip(tries, [*tries[1:], None], strict=True):
        end = int(following[0]["step"]) if following else None
        seconds = seconds_before
        for row in rows:
            if end is not None and int(row["step"]) >= end:
                break
            if row.get("charts/SPS"):  # of this try's steps since its start
                seconds = seconds_before + (int(row["step"]) - steps_before) / float(row["charts/SPS"])
            yield row | {"seconds": f"{seconds:.1f}"}
            last = int(row["step"])
        seconds_before, steps_before = seconds, last


class Display:
    """Says how far the runs are: on a terminal in lines that change, elsewhere in one line for each run that ends."""

    def __init__(self, terminal: bool) -> None:
        self._terminal, self._lines, self._shown, self._finished = terminal, 0, 0.0, -1

    def show(self, finished: int, total: int, failed: int, running: Sequence[tuple[Job, Path]]) -> None:
        """Shows the state, at most once a second on a terminal."""
        said = f"{finished} of {total} runs done" + (f", {failed} failed" if failed else "")
        if not self._terminal:
            if finished + failed != self._finished:
                self._finished = finished + failed
                self.say(said)
            return
        if time.monotonic() - self._shown < 1:
            return
        self._shown = time.monotonic()
        lines = [said, *(f"  {job.name:40.40} {progress(job, folder)}" for job, folder in running)]
        self._clear()
        print("\n".join(lines), file=sys.stderr, flush=True)
        self._lines = len(lines)

    def say(self, line: str) -> None:
        """Prints a line that stays."""
        self._clear()
        print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Takes away the lines that change."""
        self._clear()

    def _clear(self) -> None:
        if self._lines:
            print(f"\x1b[{self._lines}A\x1b[J", end="", file=sys.stderr)
        self._lines = 0


def progress(job: Job, folder: Path) -> str:
    """Returns how far a run is and what it has reached, as its log of metrics, which is written every ten seconds, has it."""
    rows = [row for row in metrics_of(folder) if row.get("charts/episodic_return")]
    if not rows:
        return "starting"
    share, sps = int(rows[-1]["step"]) / job.settings["total_timesteps"], float(rows[-1]["charts/SPS"])
    return f"{100 * share:5.1f} %   return {float(rows[-1]['charts/episodic_return']):10.1f}   {sps:8.0f} steps a second"
