"""Compare the throughput of two ranks and of one on the same CPU cores, with one thread per rank.

`python benchmarks/ranks.py [--workloads NAME ...] [--repeats 5] [--seconds 10] [--json PATH]` measures
workloads of `speed.py` in the same way. The ranks split the environments, so the algorithm is the same.
"""

import argparse
import json
import statistics
import subprocess
import sys
import warnings
from pathlib import Path

import peers
from speed import WORKLOADS, train


def run_one(workload: str, devices: int, seconds: float) -> None:
    """Train in this process and in those that Lightning starts; rank 0 prints the throughput."""
    warnings.simplefilter("ignore")
    _, _, backend, num_envs, num_steps, min_seconds = WORKLOADS[workload]
    watch = peers.Stopwatch(max(seconds, min_seconds))
    kwargs = {"num_threads": 1} if backend == "envpool" else {}  # threads of EnvPool
    strategy = "ddp" if devices > 1 else "auto"
    trainer = train(
        workload, watch, {"num_threads": 1}, kwargs, accelerator="cpu", devices=devices, strategy=strategy
    )
    if trainer.is_global_zero:
        print("RESULT", watch.rate(num_envs * num_steps))


def main() -> None:
    """Print the throughputs and their ratio, measured in alternation."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--workloads", nargs="+", choices=WORKLOADS, default=["cartpole-64x128", "breakout-8x128"]
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        run_one(args.workloads[0], args.one, args.seconds)
        return
    results: dict[str, dict[int, list[float]]] = {}
    for workload in args.workloads:
        results[workload] = {1: [], 2: []}
        for _ in range(args.repeats):
            for devices, speeds in results[workload].items():
                command = [sys.executable, "-W", "ignore", __file__, "--one", str(devices)]
                command += ["--workloads", workload, "--seconds", str(args.seconds)]
                completed = subprocess.run(command, capture_output=True, text=True, check=True)
                speeds.append(float(completed.stdout.rsplit("RESULT", 1)[1]))
                print(workload, devices, f"{speeds[-1]:.0f}", file=sys.stderr)
        ratios = [two / single for single, two in zip(*results[workload].values(), strict=True)]
        medians = [statistics.median(speeds) for speeds in results[workload].values()]
        ratio = statistics.median(ratios)
        print(
            f"{workload}: one rank {medians[0]:.0f}, two ranks {medians[1]:.0f} steps per second,"
            f" ratio {ratio:.2f}"
        )
        if args.json:
            args.json.write_text(json.dumps({"command": sys.argv, "runs": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
