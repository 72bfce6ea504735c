"""Train a recipe with implementation details switched off, one at a time.

`python benchmarks/ablate.py --config configs/ppo/classic.yaml --details 4 5 7` trains the recipe as it
is, and once without each of the details. It writes the files of `ppo-lightning benchmark`, and draws learning
curves and final returns to `ablation.png`. It needs the extra `report`.
"""

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np

from ppo_lightning.algorithms.manifest import DETAILS, Value, manifest
from ppo_lightning.commands import cli
from ppo_lightning.commands.arguments import Arguments
from ppo_lightning.commands.details import format_value
from ppo_lightning.commands.options import QUIET
from ppo_lightning.errors import ConfigError, import_extra
from ppo_lightning.experiments import benchmark
from ppo_lightning.experiments.curves import curve, decorate, save
from ppo_lightning.experiments.jobs import Job
from ppo_lightning.experiments.report import interval, read_csv

FULL = "the recipe"
SCALING = ("--model.norm_reward", "false")
SWITCHES = {  # number of a detail -> flags that switch it off
    "3": ("--model.adam_eps", "1e-8"),
    "4": ("--model.anneal_lr", "false"),
    "5": ("--model.gae_lambda", "1.0"),
    "7": ("--model.norm_adv", "false"),
    "8": ("--model.clip_coef", "1000000.0", "--model.clip_vloss", "false"),
    "9": ("--model.clip_vloss", "false"),
    "10": ("--model.ent_coef", "0.0"),
    "11": ("--model.max_grad_norm", "1000000.0"),
    "14": ("--data.env_kwargs.noop_max", "0"),
    "15": ("--data.env_kwargs.frame_skip", "1"),
    "16": ("--data.env_kwargs.episodic_life", "false"),
    "17": ("--data.env_kwargs.fire_reset", "false"),
    "19": ("--data.env_kwargs.clip_reward", "false"),
    "28": ("--model.agent.norm_obs", "false"),
    "30": SCALING,
    "A1": ("--model.anneal_clip_coef", "false"),
    "A3": ("--model.target_kl", "null"),
    "P2": SCALING,
}


class ManifestReader(L.Callback):
    """Callback that reads the details of a run before training, and ends the run."""

    values: dict[str, Value]

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Read the details."""
        self.values = manifest(pl_module)
        raise SystemExit(0)


def recipe_manifest(args: Sequence[str]) -> dict[str, Value]:
    """Return the details of a run with these arguments of ``fit``, without training it."""
    reader = ManifestReader()
    with contextlib.suppress(SystemExit):
        cli.run([reader], Arguments(["fit", *args, *QUIET]), save_config=False)
    return reader.values


def jobs_without(
    recipe: Path, seeds: Sequence[int], numbers: Sequence[str], flags: tuple[str, ...]
) -> list[Job]:
    """Return the runs of a recipe and of its variants, each without one detail.

    Args:
        recipe: YAML file.
        seeds: Seeds of each variant.
        numbers: Numbers of the details to switch off.
        flags: Flags of ``fit`` for all runs.

    Raises:
        ConfigError: A detail is unknown, already off in the recipe, or cannot be switched off.
    """
    values = recipe_manifest(["--config", str(recipe), *flags])
    variants = {FULL: flags}
    for number in numbers:
        if number not in DETAILS:
            raise ConfigError(f"--details {number}: there is no such detail (see ppo-lightning details).")
        switch, (title, _) = SWITCHES.get(number), DETAILS[number]
        if switch is None or values[number] in (None, False):
            reason = f"is {format_value(values[number])} in this recipe" if switch else "has no switch"
            reason = reason.replace("is - in", "does not apply to")
            raise ConfigError(f"--details {number} ({title}) {reason}: leave it out.")
        variants[f"without {number}, {title}"] = (*flags, *switch)
    return [Job(label, recipe, seed, options) for seed in seeds for label, options in variants.items()]


def draw(folder: Path) -> None:
    """Draw mean learning curves and final means with intervals to ablation.png and ablation.svg."""
    import_extra("matplotlib", extra="report").use("Agg")
    import matplotlib.pyplot as plt

    points = read_csv(folder / "curves.csv")
    runs = read_csv(folder / "runs.csv")
    labels = list(dict.fromkeys(run["recipe"] for run in runs))
    size = (11, 1.8 + 0.35 * len(labels))
    figure, (left, right) = plt.subplots(1, 2, figsize=size, width_ratios=(3, 2), layout="constrained")
    for index, label in enumerate(labels):
        color = "black" if label == FULL else f"C{index - 1}"
        seeds: dict[str, list] = {}
        for point in points:
            if point["recipe"] == label:
                seeds.setdefault(point["seed"], []).append(point)
        grid = np.linspace(
            0, min(max(float(row["env_steps"]) for row in rows) for rows in seeds.values()), 101
        )
        mean = np.ma.mean([curve(rows, "env_steps", grid) for rows in seeds.values()], axis=0)
        left.plot(grid, mean, color=color, linewidth=2.2 if label == FULL else 1.3)
        returns = [float(run["episodic_return"]) for run in runs if run["recipe"] == label]
        low, high = interval(returns)
        right.plot([low, high], [index, index], color=color, linewidth=2)
        right.plot(returns, [index] * len(returns), "o", color=color, markersize=3, alpha=0.5)
        right.plot(np.mean(returns), index, "D", color=color)
    left.set_ylabel("return", fontsize=8)
    decorate(left, "env_steps")
    decorate(right, "return")
    right.set_xlabel("final return: each seed, mean and 95 % interval of the mean", fontsize=8)
    right.set_yticks(range(len(labels)), labels)
    right.invert_yaxis()
    save(figure, folder / "ablation")


def main() -> None:
    """Train and draw. Unknown arguments are passed to ``fit``."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="All other arguments are passed to fit: --data.total_timesteps 200000 ...",
        allow_abbrev=False,
    )
    parser.add_argument("--config", type=Path, required=True, help="recipe, a YAML file")
    parser.add_argument(
        "--details", nargs="+", required=True, help="numbers of the details, see ppo-lightning details"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], help="seeds (default: 1 2 3)")
    benchmark.add_runner_arguments(parser, "runs/ablation")
    options, flags = parser.parse_known_args()
    jobs = jobs_without(options.config, options.seeds, options.details, tuple(flags))
    try:
        benchmark.run(options, jobs, ["python", "benchmarks/ablate.py", *sys.argv[1:]])
    finally:
        if (options.output / "curves.csv").exists():
            draw(options.output)
            print(f"{options.output}: ablation.png, ablation.svg")


if __name__ == "__main__":
    main()
