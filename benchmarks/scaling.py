"""Measure how throughput and memory grow with environments, width and worker processes.

`python benchmarks/scaling.py [--parts NAME ...] [--largest N] [--seconds 5] [--csv FILE] [--plot] [--table]`
needs the extras `benchmark`, `envpool`, `mujoco` and `report`, and an idle machine. Each point is a fresh
process. Points that the file has are not measured again: delete the file, or rows, to measure anew.

Throughput is measured over whole iterations (collection and update) after a warm-up, without start-up and
compilation. Memory is the peak resident size of the process, and what workers do not share with it.
Ours are compiled, with our default number of threads. Workers only collect, as in `collection.py`.
The plot has the ranks that `ranks.py` measures, too.
"""

import argparse
import csv
import json
import re
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
CSV = ROOT / "benchmarks/results/scaling.csv"
RANKS = ROOT / "benchmarks/results/ranks.json"
PLOT = ROOT / "docs/images/scaling.png"
FEW, MANY = [1, 4, 16, 64, 256], [1, 4, 16, 64, 256, 1024, 4096]
WIDTHS = [64, 128, 256, 512, 1024]
SB3 = "stable-baselines3"


class Part(NamedTuple):
    """What grows, the sizes of each program, and what stays the same."""

    unit: str
    series: dict[str, list[int]]
    title: str

    @property
    def sizes(self) -> list[int]:
        """Return the sizes of all programs."""
        return sorted({size for sizes in self.series.values() for size in sizes})


Points = dict[tuple[str, str, int], tuple[float, float]]  # part, series, size -> throughput, memory


PARTS = {
    "environments": Part(
        "environments",
        {"tensors": MANY, "gymnasium": FEW, "envpool": FEW, SB3: FEW},
        "CartPole, 128 steps, 64 units",
    ),
    "width": Part("units", {"ours": WIDTHS, SB3: WIDTHS}, "64 CartPoles, two hidden layers"),
    "workers": Part(
        "worker processes",
        {"ours": [1, 2, 4, 8, 16], f"{SB3}, SubprocVecEnv": [16]},
        "16 environments, steps of 5 ms",
    ),
}


def memory(pid: str = "self", file: str = "status", fields: str = "VmHWM") -> float:
    """Return the peak resident size of this process and the private memory of its descendants in MiB."""
    folder = Path("/proc", pid)
    try:
        sizes = re.findall(rf"^(?:{fields}):\s+(\d+)", (folder / file).read_text(), re.MULTILINE)
        children = [child for path in folder.glob("task/*/children") for child in path.read_text().split()]
    except (FileNotFoundError, ProcessLookupError):  # ended meanwhile
        return 0.0
    private = ("smaps_rollup", "Private_Clean|Private_Dirty")
    return sum(map(int, sizes)) / 1024 + sum(memory(child, *private) for child in children)


def train(backend: str, num_envs: int, width: int, seconds: float) -> dict[str, float]:
    """Train on CartPole and return throughput and memory."""
    import peers
    import speed

    class Watch(peers.Stopwatch):
        mib = 0.0

        def lap(self) -> bool:
            if over := super().lap():
                self.mib = memory()
            return over

    speed.WORKLOADS["scaling"] = ("CartPole-v1", "classic", backend, num_envs, 128, 0)
    watch = Watch(seconds)
    options = {"compile": True, "hidden_sizes": (width, width)}
    speed.train("scaling", watch, options, accelerator="cpu")
    return {"sps": watch.rate(num_envs * 128), "mib": watch.mib}


def train_sb3(num_envs: int, width: int, seconds: float) -> dict[str, float]:
    """Train Stable-Baselines3 on CartPole and return throughput and memory."""
    import peers
    import speed
    import torch

    if width < 512:  # like ours, which has all cores from there on
        torch.set_num_threads(1)
    task = ("CartPole-v1", speed.RECIPES["classic"], num_envs, 128, seconds)
    sps = peers.stable_baselines3(*task, policy_kwargs={"net_arch": [width, width]})
    return {"sps": sps, "mib": memory()}


def collect(series: str, num_workers: int, seconds: float) -> dict[str, float]:
    """Step 16 slow environments and return throughput and memory."""
    import collection

    collection.torch.set_num_threads(1)
    collection.NUM_ENVS = 16
    make = collection.ENVIRONMENTS["sleeps 5 ms"]
    run, close = collection.sb3_collects(make) if SB3 in series else collection.ours(make, num_workers)
    sizes = []
    sps = collection.measure((run, lambda: (sizes.append(memory()), close())), seconds)
    return {"sps": sps, "mib": sizes[0]}


def run_one(part: str, series: str, size: int, seconds: float) -> dict[str, float]:
    """Measure a point in this process."""
    import peers

    warnings.simplefilter("ignore")
    peers.WARM_UP_SECONDS = 120.0  # the two iterations that compile, on a slow machine too
    if part == "workers":
        return collect(series, size, seconds)
    num_envs, width = (size, 64) if part == "environments" else (64, size)
    if series == SB3:
        return train_sb3(num_envs, width, seconds)
    return train({"tensors": "torch", "ours": "vectorized"}.get(series, series), num_envs, width, seconds)


def measure(part: str, series: str, size: int, seconds: float) -> dict[str, float]:
    """Measure a point in a fresh process and print it."""
    command = [sys.executable, "-W", "ignore", __file__, "--seconds", str(seconds)]
    command += ["--one", part, series, str(size)]
    start = time.perf_counter()
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if completed.returncode:
        raise RuntimeError(f"{part}, {series}, {size} failed:\n{completed.stderr}")
    result: dict[str, float] = json.loads(completed.stdout.rsplit("RESULT", 1)[1].splitlines()[0])
    print(f"{part}, {series}, {size}: {result}, {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return result


def read(path: Path) -> Points:
    """Return the points of a file; none if it does not exist."""
    points = {}
    for row in csv.DictReader(path.open()) if path.is_file() else ():
        points[row["part"], row["series"], int(row["size"])] = (float(row["sps"]), float(row["mib"]))
    return points


def print_tables(points: Points) -> None:
    """Print a table for each part: environment steps per second, with the memory in MiB in brackets."""
    for name, part in PARTS.items():
        print(f"| {part.unit} | {' | '.join(part.series)} |\n|---|{'---|' * len(part.series)}")
        for size in part.sizes:
            cells = []
            for series in part.series:
                sps, mib = points.get((name, series, size), (0.0, 0.0))
                cells.append(f"{sps:,.0f} ({mib:,.0f})".replace(",", " ") if sps else "")
            print(f"| {size} | {' | '.join(cells)} |")
        print()


def plot(points: Points, path: Path) -> None:
    """Draw throughput against size, a panel for each part, and one for the ranks."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator

    plt.switch_backend("Agg")
    figure, axes = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
    for axis, (name, part) in zip(axes.flat, PARTS.items(), strict=False):
        for series, sizes in part.series.items():
            line = {n: points[name, series, n][0] for n in sizes if (name, series, n) in points}
            style = {"color": "tab:grey", "marker": "s"} if series.startswith(SB3) else {"marker": "o"}
            axis.plot([*line], [*line.values()], markersize=4, label=series, **style)
        axis.set_visible(any(point[0] == name for point in points))
        axis.set_xscale("log", base=2)
        axis.set_xticks(part.sizes, [str(size) for size in part.sizes])
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}".replace(",", " "))
        axis.minorticks_off()
        axis.set(title=part.title, xlabel=part.unit)
    for workload, runs in json.loads(RANKS.read_text())["runs"].items():
        one, two = map(statistics.median, runs.values())
        axes[1, 1].plot([1, 2], [1, two / one], "o-", markersize=4, label=workload)
    axes[1, 1].set(title="two cores, a thread for each rank", xlabel="ranks", ylabel="relative to one rank")
    axes[1, 1].set(xticks=[1, 2], ylim=(0, 2))
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, frameon=False)
    figure.supylabel("environment steps per second", fontsize=10)
    figure.savefig(path, dpi=110)


def main(args: Sequence[str] | None = None) -> None:
    """Measure the points that the file lacks; draw and print on request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--largest", type=int, help="largest size to measure", default=4096)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement (default: 5)")
    parser.add_argument("--csv", type=Path, default=CSV)
    parser.add_argument("--plot", type=Path, nargs="?", const=PLOT, help="draw, measure nothing")
    parser.add_argument("--table", action="store_true", help="print the tables, measure nothing")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(args)
    if options.one:
        part, series, size = options.one
        print("RESULT", json.dumps(run_one(part, series, int(size), options.seconds)))
        return
    known = read(options.csv)
    if options.plot:
        plot(known, options.plot)
    if options.table:
        print_tables(known)
    if options.plot or options.table:
        return
    with options.csv.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if not known:
            writer.writerow(["part", "series", "size", "sps", "mib"])
        for part in options.parts:
            for point in [(part, series, n) for series, sizes in PARTS[part].series.items() for n in sizes]:
                if point[2] <= options.largest and point not in known:
                    result = measure(*point, options.seconds)
                    writer.writerow([*point, round(result["sps"], 1), round(result["mib"])])
                    file.flush()


if __name__ == "__main__":
    main()
