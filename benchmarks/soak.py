"""Measure the memory growth of long runs: train recipes in parallel for hours and fit lines to their memory.

`python benchmarks/soak.py --recipes configs/recurrent_ppo/cartpole_masked_velocity.yaml
configs/recurrent_ppo/minigrid.yaml [--hours 2] [--csv PATH]`. The growth is the slope of the resident memory
after the first quarter, in which caches fill.
"""

import argparse
import csv
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np


def resident(pid: int) -> float:
    """Return the resident memory of a process in MiB; on Linux only."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def growth(hours: list[float], memory: list[float]) -> float:
    """Return the slope in MiB per hour, without the first quarter."""
    start = len(hours) // 4
    return float(np.polyfit(hours[start:], memory[start:], 1)[0])


def main() -> None:
    """Train the recipes, sample their memory and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipes", nargs="+", type=Path, required=True)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--interval", type=float, default=30.0, help="seconds between two samples")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        runs = {}
        for recipe in args.recipes:
            command = [sys.executable, "-W", "ignore", "-m", "ppo_lightning", "fit"]
            command += ["--config", str(recipe.resolve())]
            command += ["--data.total_timesteps", "1000000000", "--trainer.enable_progress_bar", "false"]
            with Path(folder, f"{recipe.stem}.txt").open("w") as log:
                runs[recipe.stem] = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
        started = time.monotonic()
        try:
            while (elapsed := time.monotonic() - started) < 3600 * args.hours:
                time.sleep(args.interval)
                for name, process in runs.items():
                    if process.poll() is not None:
                        raise RuntimeError(f"{name} ended: {Path(folder, f'{name}.txt').read_text()[-2000:]}")
                    hours = round(elapsed / 3600, 4)
                    mib = round(resident(process.pid), 2)
                    rows.append({"recipe": name, "hours": hours, "mib": mib})
                if args.csv:
                    with args.csv.open("w", newline="") as file:
                        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
                        writer.writeheader()
                        writer.writerows(rows)
        finally:
            for process in runs.values():
                process.terminate()
            for process in runs.values():
                process.wait()
        print("| recipe | hours | environment steps | MiB at the start | MiB at the end | MiB per hour |")
        print("|---|---|---|---|---|---|")
        for name in runs:
            samples = [row for row in rows if row["recipe"] == name]
            times = [float(str(row["hours"])) for row in samples]
            memory = [float(str(row["mib"])) for row in samples]
            log_text = Path(folder, f"{name}.txt").read_text()
            steps = log_text.rsplit("Preempted after ", 1)[-1].split(" ")[0]
            print(
                f"| {name} | {times[-1]:.2f} | {steps} | {memory[0]:.0f} | {memory[-1]:.0f}"
                f" | {growth(times, memory):+.2f} |"
            )


if __name__ == "__main__":
    main()
