"""Throughput with and without `data.overlap`, in alternation.

`python benchmarks/overlap.py [--workloads NAME ...] [--repeats 5] [--seconds 20] [--compile] [--json PATH]`
needs an idle machine with two cores or more. The workloads are those of `speed.py`.

The bound is what a perfect overlap would gain: collection plus update over the longer of both, in the run
without overlap.
"""

import argparse
import json
import logging
import platform
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import peers
import speed


class StageClock(L.Callback):
    """Callback that measures throughput and the duration of the updates, and then ends the run."""

    def __init__(self, seconds: float) -> None:
        self.watch = peers.Stopwatch(seconds)
        self.updates: list[float] = []
        self._begun = 0.0

    def on_train_batch_start(self, *args: Any) -> None:
        self._begun = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if self.watch.times:
            self.updates.append(time.perf_counter() - self._begun)
        trainer.should_stop = self.watch.lap()

    @property
    def iteration(self) -> float:
        """Mean seconds of an iteration."""
        times = self.watch.times
        return (times[-1] - times[0]) / (len(times) - 1)


def measure(workload: str, overlap: bool, compiled: bool, seconds: float) -> dict[str, float]:
    """Train and return the environment steps per second and the bound."""
    clock = StageClock(seconds)
    speed.train(workload, clock, {"compile": compiled}, overlap=overlap, accelerator="cpu")
    updating = statistics.mean(clock.updates)
    collecting = clock.iteration - updating
    frames = speed.WORKLOADS[workload][3] * speed.WORKLOADS[workload][4]
    return {"sps": frames / clock.iteration, "bound": clock.iteration / max(updating, collecting)}


def main() -> None:
    """Print a table, one row per workload."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = ["halfcheetah-1x2048", "halfcheetah-16x256"]
    parser.add_argument("--workloads", nargs="+", choices=speed.WORKLOADS, default=default)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    runs: dict[str, dict[str, list[dict[str, float]]]] = {}
    for workload in options.workloads:
        runs[workload] = {"off": [], "on": []}
        for repeat in range(options.repeats):
            for kind in ("off", "on") if repeat % 2 == 0 else ("on", "off"):
                result = measure(workload, kind == "on", options.compile, options.seconds)
                runs[workload][kind].append(result)
                print(f"{workload}: {kind} {result['sps']:.0f}", file=sys.stderr, flush=True)
    print("| workload | off | on | on / off | bound |\n|---|---|---|---|---|")
    for workload, kinds in runs.items():
        off, on = ([run["sps"] for run in kinds[kind]] for kind in ("off", "on"))
        ratios = [b / a for a, b in zip(off, on, strict=True)]
        medians = f"{statistics.median(off):.0f} | {statistics.median(on):.0f}"
        spread = f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
        bound = statistics.median(run["bound"] for run in kinds["off"])
        print(f"| {workload} | {medians} | {spread} | {bound:.2f} |")
    if options.json:
        machine = {"machine": platform.processor() or platform.machine(), "command": sys.argv}
        options.json.write_text(json.dumps(machine | {"runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
