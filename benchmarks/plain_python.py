"""Compare the throughput of four statements of Python with that of the command line.

`python benchmarks/plain_python.py [--busy 0 2] [--repeats 5] [--steps 200000] [--json PATH]` trains CartPole
with the same settings, in alternation, beside busy processes, which are endless Python loops.
Each program prints its own throughput, from the first rollout to the last evaluation.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

PYTHON = """
import lightning as L
from ppo_lightning import PPO, RolloutDataModule

L.seed_everything(1)
data = RolloutDataModule("CartPole-v1", total_timesteps={steps})
trainer = L.Trainer(accelerator="cpu")
trainer.fit(PPO(), data)
"""
COMMAND = ["-m", "ppo_lightning", "fit", "--data.total_timesteps", "{steps}", "--trainer.accelerator", "cpu"]
PROGRAMS = {"python": ["-c", PYTHON], "command line": COMMAND}


def measure(program: str, steps: int, busy: int) -> float:
    """Return the environment steps per second of a new process beside ``busy`` busy processes."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    command = [sys.executable, *(part.format(steps=steps) for part in PROGRAMS[program])]
    try:
        with tempfile.TemporaryDirectory() as folder:
            run = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    said = re.search(r"(\d+) steps per second", run.stdout)
    assert said is not None, run.stdout
    print(f"{busy} busy processes: {program} {said[1]}", file=sys.stderr, flush=True)
    return float(said[1])


def main() -> None:
    """Print a table, and write all measurements as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--busy", nargs="+", type=int, default=[0, 2])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    runs: dict[int, dict[str, list[float]]] = {}
    print("| busy processes | Python | command line | ratio, median of pairs |")
    print("|---|---|---|---|")
    for busy in args.busy:
        runs[busy] = {program: [] for program in PROGRAMS}
        for _ in range(args.repeats):
            for program, rates in runs[busy].items():
                rates.append(measure(program, args.steps, busy))
        python, command = runs[busy].values()
        ratio = statistics.median(a / b for a, b in zip(python, command, strict=True))
        print(
            f"| {busy} | {statistics.median(python):.0f} | {statistics.median(command):.0f} | {ratio:.2f} |"
        )
    if args.json:
        args.json.write_text(json.dumps({"command": sys.argv, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
