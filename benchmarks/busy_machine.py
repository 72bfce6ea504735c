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


def run_one(program: str, workload: str, seconds: float) -> None:
    """Run one program in this process and print its throughput."""
    warnings.simplefilter("ignore")
    env_id, kind, _, num_envs, num_steps, _ = speed.WORKLOADS[workload]
    watch = peers.Stopwatch(seconds)
    if program == SB3:
        sps = peers.stable_baselines3(env_id, speed.RECIPES[kind], num_envs, num_steps, seconds)
    else:
        speed.train(workload, watch, OURS[program], accelerator="cpu")
        sps = watch.rate(num_envs * num_steps)
    print("RESULT", sps)


def measure(program: str, workload: str, busy: int, seconds: float) -> float:
    """Return the environment steps per second of a fresh process beside ``busy`` busy processes."""
    busy_processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    try:
        command = [sys.executable, __file__, "--one", program]
        command += ["--workloads", workload, "--seconds", str(seconds)]
        completed = subprocess.run(command, capture_output=True, text=True, check=True)
    finally:
        for process in busy_processes:
            process.kill()
    sps = float(completed.stdout.rsplit("RESULT", 1)[1])
    print(f"{workload}, {busy} busy: {program} {sps:.0f}", file=sys.stderr, flush=True)
    return sps


def report(results: Results) -> None:
    """Print medians, and the ratio of the default to the better of one and two threads, run by run."""
    print("| workload | busy processes | | SPS, median | ratio to the better of 1 and 2 threads | x SB3 |")
    print("|---|---|---|---|---|---|")
    for workload, by_busy in results.items():
        for busy, runs in by_busy.items():
            for program, rates in runs.items():
                ratio = against_sb3 = ""
                if f"{program}, 1 thread" in runs:
                    one_thread = runs[f"{program}, 1 thread"]
                    two_threads = runs[f"{program}, 2 threads"]
                    best = [max(pair) for pair in zip(one_thread, two_threads, strict=True)]
                    ratio = f"{statistics.median(a / b for a, b in zip(rates, best, strict=True)):.2f}"
                if SB3 in runs and program != SB3:
                    pairs = zip(rates, runs[SB3], strict=True)
                    against_sb3 = f"{statistics.median(a / b for a, b in pairs):.2f}"
                sps = f"{statistics.median(rates):.0f}"
                print(f"| {workload} | {busy} | {program} | {sps} | {ratio} | {against_sb3} |")


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
        name: {busy: {program: [] for program in args.who} for busy in args.busy} for name in args.workloads
    }
    for workload, by_busy in results.items():
        for busy, runs in by_busy.items():
            for _ in range(args.repeats):
                for program, rates in runs.items():
                    if program != SB3 or workload != "cartpole-2048x128":  # one rollout takes minutes there
                        rates.append(measure(program, workload, busy, args.seconds))
            by_busy[busy] = {program: rates for program, rates in runs.items() if rates}
            if args.json:
                args.json.write_text(json.dumps({"command": sys.argv, "runs": results}, indent=1) + "\n")
    report(results)


if __name__ == "__main__":
    main()
