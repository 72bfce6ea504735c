"""Measure throughput beside other busy processes, with one PyTorch thread, two threads and the default.

`python benchmarks/busy_machine.py [--busy 0 1 2] [--repeats 3] [--seconds 8] [--json PATH]` needs the extra
`benchmark`. The busy processes are endless Python loops. Every run is a separate process, in alternation.
"""

import argparse
import json
import statistics
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import peers
import speed

WORKLOADS = ("cartpole-64x128", "cartpole-2048x128")
OURS: dict[str, dict[str, Any]] = {
    f"{name}{threads}": {"compile": compiled, "num_threads": count}
    for name, compiled in (("eager", False), ("compiled", True))
    for threads, count in (("", None), (", 1 thread", 1), (", 2 threads", 2))
}
SB3 = "stable-baselines3"
Results = dict[str, dict[int, dict[str, list[float]]]]


def run_one(who: str, workload: str, seconds: float) -> None:
    """Run one program in this process and print its throughput."""
    warnings.simplefilter("ignore")
    env_id, kind, _, num_envs, num_steps, _ = speed.WORKLOADS[workload]
    watch = peers.Stopwatch(seconds)
    if who == SB3:
        sps = peers.stable_baselines3(env_id, speed.RECIPES[kind], num_envs, num_steps, seconds)
    else:
        speed.train(workload, watch, OURS[who], accelerator="cpu")
        sps = watch.rate(num_envs * num_steps)
    print("RESULT", sps)


def measure(who: str, workload: str, busy: int, seconds: float) -> float:
    """Return the environment steps per second of a fresh process beside ``busy`` busy processes."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    try:
        command = [sys.executable, __file__, "--one", who, "--workloads", workload, "--seconds", str(seconds)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    finally:
        for process in others:
            process.kill()
    sps = float(done.stdout.rsplit("RESULT", 1)[1])
    print(f"{workload}, {busy} busy: {who} {sps:.0f}", file=sys.stderr, flush=True)
    return sps


def report(results: Results) -> None:
    """Print medians, and the ratio of the default to the better of one and two threads, run by run."""
    print("| workload | busy processes | | SPS, median | ratio to the better of 1 and 2 threads | x SB3 |")
    print("|---|---|---|---|---|---|")
    for workload, by_busy in results.items():
        for busy, runs in by_busy.items():
            for who, rates in runs.items():
                ratio = against = ""
                if f"{who}, 1 thread" in runs:
                    rounds = zip(rates, runs[f"{who}, 1 thread"], runs[f"{who}, 2 threads"], strict=True)
                    ratio = (
                        f"{statistics.median(default / max(one, two) for default, one, two in rounds):.2f}"
                    )
                if SB3 in runs and who != SB3:
                    pairs = zip(rates, runs[SB3], strict=True)
                    against = f"{statistics.median(a / b for a, b in pairs):.2f}"
                print(
                    f"| {workload} | {busy} | {who} | {statistics.median(rates):.0f} | {ratio} | {against} |"
                )


def main() -> None:
    """Print a table and write all measurements as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument("--busy", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--who", nargs="+", default=[*OURS, SB3])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        run_one(args.one, args.workloads[0], args.seconds)
        return
    results: Results = {
        name: {busy: {who: [] for who in args.who} for busy in args.busy} for name in args.workloads
    }
    for workload, by_busy in results.items():
        for busy, runs in by_busy.items():
            for _ in range(args.repeats):
                for who, rates in runs.items():
                    if who != SB3 or workload != "cartpole-2048x128":  # one rollout takes minutes there
                        rates.append(measure(who, workload, busy, args.seconds))
            by_busy[busy] = {who: rates for who, rates in runs.items() if rates}
            if args.json:
                args.json.write_text(json.dumps({"command": sys.argv, "runs": results}, indent=1) + "\n")
    report(results)


if __name__ == "__main__":
    main()
