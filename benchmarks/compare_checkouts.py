"""Throughput of two checkouts, in alternation: has a change made training or its start slower?

`python benchmarks/compare_checkouts.py BEFORE AFTER [--workloads NAME ...] [--repeats 5] [--json PATH]`

The workloads are those of `speed.py` and `offpolicy_speed.py` in environment steps per second
(`NAME,compiled` compiles the update), `import` (the import of all that a run needs) and `start` (the four
statements of README with 1024 steps) in runs per second. Each run is a process of its own that uses the
scripts of its checkout. The table has the ratio of medians (after / before) with a bootstrapped 95 %
interval. A ratio below 0.98 (0.95 of `import` and `start`) is measured again with 15 repeats. The exit code
is 1 if its interval then lies below this mark.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np

WORKLOADS = (
    "cartpole-4x128",
    "cartpole-4x128,compiled",
    "cartpole-64x128",
    "cartpole-64x128,compiled",
    "halfcheetah-1x2048",
    "halfcheetah-16x256",
    "breakout-8x128",
    "sac-halfcheetah,compiled",
    "import",
    "start",
)
REPEATS = 15  # of a workload whose first ratio is too small
RUN = """
import sys, warnings
warnings.simplefilter("ignore")
import peers, speed
name, _, compiled = sys.argv[1].partition(",")
watch = peers.Stopwatch(float(sys.argv[2]))
speed.train(name, watch, {"compile": bool(compiled)}, accelerator="cpu")
print("RESULT", watch.rate(speed.WORKLOADS[name][3] * speed.WORKLOADS[name][4]))
"""
OFF_POLICY = """
import sys, warnings
warnings.simplefilter("ignore")
import offpolicy_speed, peers, torch
torch.set_num_threads(1)
name, _, compiled = sys.argv[1].partition(",")
watch = peers.Stopwatch(float(sys.argv[2]))
offpolicy_speed.ours(name, bool(compiled), watch)
print("RESULT", watch.rate(offpolicy_speed.LAP))
"""
IMPORT = """
import time
started = time.perf_counter()
from ppo_lightning import PPO, RolloutDataModule
import lightning
print("RESULT", 1 / (time.perf_counter() - started))
"""
START = """
import time
started = time.perf_counter()
import lightning as L
from ppo_lightning import PPO, RolloutDataModule
L.seed_everything(1)
data = RolloutDataModule("CartPole-v1", total_timesteps=1024)
trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer.fit(PPO(), data)
print("RESULT", 1 / (time.perf_counter() - started))
"""


def program_of(workload: str) -> str:
    """Return the Python program that measures a workload."""
    if workload in ("import", "start"):
        return IMPORT if workload == "import" else START
    return OFF_POLICY if workload.startswith(("sac-", "td3-", "dqn-")) else RUN


def mark_of(workload: str) -> float:
    """Return the smallest ratio that passes."""
    return 0.95 if workload in ("import", "start") else 0.98


def measure(checkout: Path, workload: str, seconds: float) -> float:
    """Return the rate of a workload in a checkout."""
    folder = checkout / "benchmarks"  # Python imports from the current folder first
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    command = [sys.executable, "-W", "ignore", "-c", program_of(workload), workload, str(seconds)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout.rsplit("RESULT", 1)[1])


def ratio_of(rates: dict[str, list[float]]) -> tuple[float, float, float]:
    """Return the ratio of medians after / before and its bootstrapped 95 % interval."""
    draw = np.random.default_rng(1)
    medians = {
        side: np.median(draw.choice(values, (10_000, len(values))), axis=1) for side, values in rates.items()
    }
    low, high = np.quantile(medians["after"] / medians["before"], [0.025, 0.975])
    return statistics.median(rates["after"]) / statistics.median(rates["before"]), float(low), float(high)


def main() -> None:
    """Print a table, and write every figure as JSON.

    Raises:
        SystemExit: With code 1 if a workload became slower.
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--workloads", nargs="+", default=WORKLOADS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    settings = {"repeats": args.repeats, "seconds": args.seconds}
    runs: dict[str, dict[str, list[float]]] = {name: {"before": [], "after": []} for name in args.workloads}
    for workload, rates in runs.items():
        repeats = args.repeats
        while len(rates["after"]) < repeats:
            for side in ("before", "after"):
                rates[side].append(measure(getattr(args, side).resolve(), workload, args.seconds))
                print(f"{workload} {side} {rates[side][-1]:.4g}", file=sys.stderr, flush=True)
            if args.json:
                args.json.write_text(json.dumps({"settings": settings, "runs": runs}, indent=1) + "\n")
            complete = len(rates["after"]) == args.repeats > 1
            if complete and ratio_of(rates)[0] < mark_of(workload):
                repeats = max(REPEATS, args.repeats)
    print("| workload | before | after | ratio of medians |\n|---|---|---|---|")
    is_slower = False
    for workload, rates in runs.items():
        before, after = (statistics.median(rates[side]) for side in ("before", "after"))
        ratio, low, high = ratio_of(rates)
        is_slower |= high < mark_of(workload)
        print(f"| {workload} | {before:.4g} | {after:.4g} | {ratio:.3f} [{low:.3f}, {high:.3f}] |")
    if is_slower:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
