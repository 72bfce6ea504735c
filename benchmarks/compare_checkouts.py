"""Environment steps per second of two checkouts, in alternation: has a change made training slower?

`python benchmarks/compare_checkouts.py BEFORE AFTER [--workloads NAME ...] [--repeats 5] [--json PATH]`

The workloads are those of `speed.py`; `NAME,compiled` compiles the update. Each run is a process of its own
that uses the `speed.py` of its checkout. The exit code is 1 if a ratio of medians (after / before) is below
0.98.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

WORKLOADS = (
    "cartpole-4x128",
    "cartpole-4x128,compiled",
    "cartpole-64x128",
    "halfcheetah-1x2048",
    "breakout-8x128",
)
SLOWEST = 0.98
RUN = """
import sys, warnings
warnings.simplefilter("ignore")
import peers, speed
name, _, compiled = sys.argv[1].partition(",")
watch = peers.Stopwatch(float(sys.argv[2]))
speed.train(name, watch, {"compile": bool(compiled)}, accelerator="cpu")
print("RESULT", watch.rate(speed.WORKLOADS[name][3] * speed.WORKLOADS[name][4]))
"""


def measure(checkout: Path, workload: str, seconds: float) -> float:
    """Return the environment steps per second of a run in a checkout."""
    folder = checkout / "benchmarks"  # Python imports from the current folder first
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    command = [sys.executable, "-W", "ignore", "-c", RUN, workload, str(seconds)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout.rsplit("RESULT", 1)[1])


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
        for _ in range(args.repeats):
            for side in ("before", "after"):
                rates[side].append(measure(getattr(args, side).resolve(), workload, args.seconds))
                print(f"{workload} {side} {rates[side][-1]:.0f}", file=sys.stderr, flush=True)
            if args.json:
                args.json.write_text(json.dumps({"settings": settings, "runs": runs}, indent=1) + "\n")
    print("| workload | before | after | ratio of medians |\n|---|---|---|---|")
    slower = False
    for workload, rates in runs.items():
        before = statistics.median(rates["before"])
        after = statistics.median(rates["after"])
        slower |= after / before < SLOWEST
        print(f"| {workload} | {before:.0f} | {after:.0f} | {after / before:.3f} |")
    if slower:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
