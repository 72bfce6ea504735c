"""``ppo-lightning benchmark``: train recipes with several seeds and report the results."""

import argparse
import fcntl
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from ppo_lightning.commands.options import at_least, parser_of
from ppo_lightning.errors import ConfigError
from ppo_lightning.experiments.jobs import Job, jobs_of
from ppo_lightning.experiments.report import write_report
from ppo_lightning.experiments.runner import Runner


def add_runner_arguments(parser: argparse.ArgumentParser, output: str) -> None:
    """Add the arguments of the runner, with a default folder for the results."""
    parser.add_argument("--workers", type=at_least(1), default=1, help="runs at a time (default: 1)")
    parser.add_argument("--threads", type=at_least(1), default=1, help="PyTorch threads per run (default: 1)")
    parser.add_argument("--output", type=Path, default=Path(output), help=f"folder (default: {output})")


def main(args: Sequence[str]) -> None:
    """Run ``ppo-lightning benchmark``."""
    parser = parser_of(
        "benchmark",
        "Each run has a process of its own. The command writes runs.csv, curves.csv, report.md and learning"
        " curves, and, given again, resumes an interrupted benchmark. All other arguments are passed to fit:"
        " --model.compile true ...",
    )
    parser.add_argument("--recipes", nargs="+", type=Path, required=True, help="recipes, as for fit --config")
    parser.add_argument("--env_ids", nargs="+", default=[], help="train each recipe in each of these")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], help="seeds (default: 1 2 3)")
    add_runner_arguments(parser, "runs/benchmark")
    options, flags = parser.parse_known_args(args)
    jobs = jobs_of(options.recipes, options.seeds, options.env_ids, tuple(flags))
    run(options, jobs, ["ppo-lightning", "benchmark", *args])


def run(options: argparse.Namespace, jobs: Sequence[Job], command: Sequence[str]) -> None:
    """Train, write the report, which has the command line, and print the table."""
    runner = Runner(options.output, options.workers, options.threads)
    runner.require_same_settings(jobs)
    (options.output / "runs").mkdir(parents=True, exist_ok=True)
    with (options.output / "runs/lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"Another benchmark runs in {options.output}.") from error
        exit_on_signals()
        try:
            runner.run(jobs)
        finally:
            print(write_report(runner, jobs, [shlex.quote(part) for part in command]))
    files = sorted(path.name for path in options.output.glob("*.*") if path.is_file())
    print(f"\n{options.output}: {', '.join(files)}")
    if runner.failed:
        raise SystemExit(1)


def exit_on_signals() -> None:
    """End the process with cleanup after SIGINT and SIGTERM."""
    # A shell makes background jobs ignore SIGINT, and SIGTERM would end the process without cleanup.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
