"""Compare the throughput of two ranks and of one on the same CPU cores, with one thread per rank.

`python benchmarks/ranks.py [--checkouts BEFORE AFTER] [--workloads NAME ...] [--devices 1 2] [--repeats 5]
[--seconds 10] [--json PATH]` measures compiled runs of this checkout, or of several, in alternation. The
workloads are those of `speed.py`, one with 256 units, and SAC with two environments, which makes an update
for each step of an environment. The ranks split the environments.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import warnings
from pathlib import Path

import offpolicy_speed
import peers
from speed import WORKLOADS, train

SUFFIX = "-256-units"
SAC = "sac-halfcheetah"
NAMES = ("halfcheetah-16x256", "cartpole-64x128", f"cartpole-64x128{SUFFIX}", "breakout-8x128", SAC)


def run_one(name: str, devices: int, seconds: float) -> None:
    """Train in this process and in those that Lightning starts; rank 0 prints the throughput."""
    warnings.simplefilter("ignore")
    peers.WARM_UP_SECONDS = 120.0  # the iterations that compile
    ranks = {"devices": devices, "strategy": "ddp" if devices > 1 else "auto"}
    if name == SAC:
        watch, frames = peers.Stopwatch(seconds), offpolicy_speed.LAP
        trainer = offpolicy_speed.ours(SAC, True, watch, num_envs=2, **ranks)
    else:
        workload = name.removesuffix(SUFFIX)
        _, _, backend, num_envs, num_steps, min_seconds = WORKLOADS[workload]
        watch, frames = peers.Stopwatch(max(seconds, min_seconds)), num_envs * num_steps
        kwargs = {"num_threads": 1} if backend == "envpool" else {}  # threads of EnvPool
        options = {"compile": True, "num_threads": 1}
        if name.endswith(SUFFIX):
            options["hidden_sizes"] = (256, 256)  # type: ignore[assignment]
        trainer = train(workload, watch, options, kwargs, accelerator="cpu", **ranks)
    if trainer.is_global_zero:
        print("RESULT", watch.rate(frames))


def measure(checkout: Path, name: str, devices: int, seconds: float) -> float:
    """Return the throughput of a checkout, measured by this script in a process of its own."""
    command = [sys.executable, "-W", "ignore", __file__, "--one", str(devices)]
    command += ["--workloads", name, "--seconds", str(seconds)]
    environment = os.environ | {"PYTHONPATH": str(checkout.resolve()), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} on {devices} ranks failed:\n{done.stderr}")
    return float(done.stdout.rsplit("RESULT", 1)[1])


def main() -> None:
    """Print medians, and the ratios to the first column of runs of the same repeat."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkouts", nargs="+", type=Path, default=[Path(__file__).parents[1]])
    parser.add_argument("--workloads", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--devices", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        run_one(args.workloads[0], args.one, args.seconds)
        return
    names = ("before, ", "after, ") if len(args.checkouts) == 2 else ("",) * len(args.checkouts)
    columns = {
        f"{side}{'one rank' if n == 1 else f'{n} ranks'}": (checkout, n)
        for side, checkout in zip(names, args.checkouts, strict=True)
        for n in args.devices
    }
    results: dict[str, dict[str, list[float]]] = {}
    print(f"| steps per second (ratio to {next(iter(columns))}) | {' | '.join(columns)} |")
    print(f"|---|{'---|' * len(columns)}")
    for name in args.workloads:
        results[name] = runs = {column: [] for column in columns}
        for _ in range(args.repeats):
            for column, (checkout, devices) in columns.items():
                runs[column].append(measure(checkout, name, devices, args.seconds))
                print(name, column, f"{runs[column][-1]:.0f}", file=sys.stderr)
        first = next(iter(runs.values()))
        cells = [
            f"{statistics.median(speeds):.0f}"
            f" ({statistics.median(b / a for a, b in zip(first, speeds, strict=True)):.2f})"
            for speeds in runs.values()
        ]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
        if args.json:
            args.json.write_text(json.dumps({"command": sys.argv, "runs": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
