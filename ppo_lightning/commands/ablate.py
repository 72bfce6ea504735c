"""``ppo-lightning ablate``: a recipe, and the recipe without each of some implementation details."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ppo_lightning.commands import benchmark
from ppo_lightning.commands.details import DETAILS, of_recipe, shown
from ppo_lightning.commands.report import curve, decorate, interval, read_csv, save
from ppo_lightning.commands.runner import Job
from ppo_lightning.errors import ConfigError, import_extra

FULL = "the recipe"


def jobs_without(
    recipe: Path, seeds: Sequence[int], numbers: Sequence[str], flags: tuple[str, ...]
) -> list[Job]:
    """Return the runs of the recipe, and of the recipe without each of the details.

    Raises:
        ConfigError: A detail is unknown, is off in the recipe already, or cannot be switched off.
    """
    known, values = (
        {detail.number: detail for detail in DETAILS},
        of_recipe(["--config", str(recipe), *flags]),
    )
    forms = {FULL: flags}
    for number in numbers:
        if number not in known:
            raise ConfigError(
                f"--details {number}: there is no such detail; ppo-lightning details lists them."
            )
        detail = known[number]
        if not detail.off or values[number] in (None, False):
            said = f"is {shown(values[number])} in this recipe" if detail.off else "has no switch"
            raise ConfigError(
                f"--details {number} ({detail.title}) {said.replace('is -', 'has no place')}: leave it out."
            )
        forms[f"without {number}, {detail.title}"] = (*flags, *detail.off)
    return [Job(label, recipe, seed, its) for seed in seeds for label, its in forms.items()]


def draw(folder: Path) -> None:
    """Draw mean learning curves, and final means with intervals: ablation.png and ablation.svg."""
    import_extra("matplotlib", extra="report").use("Agg")
    import matplotlib.pyplot as plt

    points, runs = read_csv(folder / "curves.csv"), read_csv(folder / "runs.csv")
    labels = list(dict.fromkeys(run["recipe"] for run in runs))
    size, widths = (11, 1.8 + 0.35 * len(labels)), (3, 2)
    figure, (left, right) = plt.subplots(1, 2, figsize=size, width_ratios=widths, layout="constrained")
    for index, label in enumerate(labels):
        colour = "black" if label == FULL else f"C{index - 1}"
        seeds: dict[str, list] = {}
        for point in points:
            if point["recipe"] == label:
                seeds.setdefault(point["seed"], []).append(point)
        grid = np.linspace(
            0, min(max(float(row["env_steps"]) for row in rows) for rows in seeds.values()), 101
        )
        mean = np.ma.mean([curve(rows, "env_steps", grid) for rows in seeds.values()], axis=0)
        left.plot(grid, mean, color=colour, linewidth=2.2 if label == FULL else 1.3)
        returns = [float(run["episodic_return"]) for run in runs if run["recipe"] == label]
        low, high = interval(returns)
        right.plot([low, high], [index, index], color=colour, linewidth=2)
        right.plot(returns, [index] * len(returns), "o", color=colour, markersize=3, alpha=0.5)
        right.plot(np.mean(returns), index, "D", color=colour)
    left.set_ylabel("return", fontsize=8)
    decorate(left, "env_steps")
    decorate(right, "return")
    right.set_xlabel("return at the end: mean with its 95 % interval, and each seed", fontsize=8)
    right.set_yticks(range(len(labels)), labels)
    right.invert_yaxis()
    save(figure, folder / "ablation")


def main(args: Sequence[str]) -> None:
    """Run ``ppo-lightning ablate``.

    Args:
        args: The arguments of the command; unknown ones are passed to ``fit``.

    Raises:
        SystemExit: With code 1 if a run failed.
    """
    parser = argparse.ArgumentParser(
        "ppo-lightning ablate",
        description="Train a recipe as it is, and with each of some implementation details switched off.",
        epilog="All other arguments are passed to fit: --data.total_timesteps 200000 ...",
        allow_abbrev=False,
    )
    parser.add_argument("--config", type=Path, required=True, help="the recipe, a YAML file")
    parser.add_argument("--details", nargs="+", required=True, help="see ppo-lightning details")
    benchmark.add_own(parser, "runs/ablation")
    own, flags = parser.parse_known_args(args)
    jobs = jobs_without(own.config, own.seeds, own.details, tuple(flags))
    try:
        benchmark.run(own, jobs, ["ppo-lightning", "ablate", *args])
    finally:
        if (own.output / "curves.csv").exists():
            draw(own.output)
            print(f"{own.output}: ablation.png, ablation.svg")
