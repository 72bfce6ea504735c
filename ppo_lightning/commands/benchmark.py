"""``ppo-lightning benchmark`` and ``ppo-lightning ablate``."""

import argparse
import shlex
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from ppo_lightning.commands.report import write_report
from ppo_lightning.commands.runner import Job, Runner, jobs_of


def add_own(parser: argparse.ArgumentParser, output: str) -> None:
    """Add the arguments that both commands have."""
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], help="default: 1 2 3")
    parser.add_argument("--workers", type=int, default=1, help="number of runs at a time (default: 1)")
    parser.add_argument("--threads", type=int, default=1, help="PyTorch threads of each run (default: 1)")
    parser.add_argument("--output", type=Path, default=Path(output), help=f"a folder (default: {output})")


def main(args: Sequence[str]) -> None:
    """Run ``ppo-lightning benchmark``: recipes by seeds, and a report on them.

    Args:
        args: The arguments of the command; unknown ones are passed to ``fit``.

    Raises:
        SystemExit: With code 1 if a run failed.
    """
    parser = argparse.ArgumentParser(
        "ppo-lightning benchmark",
        description="Train recipes with several seeds, each run in a process of its own; write runs.csv,"
        " curves.csv, report.md and learning curves. The same command resumes an interrupted benchmark.",
        epilog="All other arguments are passed to fit: --model.compile true ...",
        allow_abbrev=False,
    )
    parser.add_argument("--recipes", nargs="+", type=Path, required=True, help="YAML files")
    parser.add_argument(
        "--env_ids", nargs="+", default=[], help="train each recipe in each of these environments"
    )
    add_own(parser, "runs/benchmark")
    own, flags = parser.parse_known_args(args)
    run(
        own, jobs_of(own.recipes, own.seeds, own.env_ids, tuple(flags)), ["ppo-lightning", "benchmark", *args]
    )


def run(own: argparse.Namespace, jobs: Sequence[Job], command: Sequence[str]) -> None:
    """Train, write the report and print the table.

    Raises:
        ConfigError: The folder has runs with other settings.
        SystemExit: With code 1 if a run failed.
    """
    runner = Runner(own.output, own.workers, own.threads)
    runner.require_same_settings(jobs)
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # which a shell lets its background jobs ignore, or which end at once
        signal.signal(number, _interrupt)
    try:
        runner.run(jobs)
    finally:
        print(write_report(runner, jobs, [shlex.quote(part) for part in command]))
    print(
        f"\n{own.output}: runs.csv, curves.csv, report.md, curves_env_steps.png, curves_seconds.png (and .svg)"
    )
    if runner.failed:
        raise SystemExit(1)


def _interrupt(number: int, frame: Any) -> NoReturn:
    raise SystemExit(128 + number)
