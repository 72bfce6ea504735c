"""Jobs of a benchmark: a recipe with flags and a seed."""

import inspect
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ppo_lightning.commands.arguments import Arguments
from ppo_lightning.commands.recipes import find_recipe, read_yaml
from ppo_lightning.errors import ConfigError
from ppo_lightning.rollouts.datamodule import RolloutDataModule
from ppo_lightning.utils.arguments import as_integer

# A benchmark has these itself, or reads what they move.
FIXED: tuple[str, ...] = ("--config", "-c", "--data", "--trainer", "--seed_everything", "--num_threads")
FIXED += ("--ckpt_path", "--auto_resume", "--name", "--trainer.logger", "--trainer.default_root_dir")
FIXED += ("--print_config",)


@dataclass(frozen=True)
class Job:
    """One training run of a benchmark."""

    label: str  # shared by the runs of all seeds: the recipe, or the change of an ablation
    recipe: Path
    seed: int
    flags: tuple[str, ...] = ()  # of ``fit``, after the recipe

    @property
    def name(self) -> str:
        """Name of the folder of the run."""
        return f"{folder_of(self.label)}-{self.seed}"

    @property
    def algorithm(self) -> str:
        """Class path of the algorithm, that of the last flag or of the recipe. Empty: the default, PPO."""
        return self._arguments.algorithm(default="")

    @property
    def _arguments(self) -> Arguments:
        return Arguments(["fit", f"--config={self.recipe}", *self.flags])

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of ``data``: defaults, those of the recipe, and those of the flags."""
        parameters = inspect.signature(RolloutDataModule).parameters.values()
        data = {parameter.name: parameter.default for parameter in parameters}
        data |= yaml.safe_load(self.recipe.read_text()).get("data", {})
        flags = self._arguments
        for name, _ in flags.options:
            if name.startswith("--data.") and name.count(".") == 1:
                data[name.removeprefix("--data.")] = yaml.safe_load(flags.value(name) or "")
        if isinstance(data["env_id"], dict):  # a class with arguments
            data["env_id"] = data["env_id"]["class_path"]
        return {name: as_integer(value) for name, value in data.items()}


def folder_of(label: str) -> str:
    """Return a label as part of a file name."""
    return re.sub(r"[^\w.-]+", "_", label)


def jobs_of(
    recipes: Iterable[Path], seeds: Iterable[int], env_ids: Sequence[str], flags: tuple[str, ...]
) -> list[Job]:
    """Return a job for each recipe, environment (by default, that of the recipe) and seed."""
    if fixed := [flag for flag in flags if flag.partition("=")[0] in FIXED]:
        raise ConfigError(f"{fixed[0]}: a benchmark has --recipes, --seeds, --threads and --output instead.")
    labelled: dict[str, tuple[Path, tuple[str, ...]]] = {}
    for value in map(str, recipes):
        path, task = find_recipe(value)
        recipe, own = Path(path), task.flags.split() if task else []
        name = task.label if task else recipe.stem
        content = read_yaml(str(recipe), "--recipes")
        if not isinstance(content, dict) or not isinstance(content.get("data", {}), dict):
            raise ConfigError(f"--recipes {recipe} is no recipe: see ppo-lightning recipes.")
        for env_id in env_ids or [""]:
            label = f"{name} {env_id}".strip()
            if folder_of(label) in map(folder_of, labelled):
                raise ConfigError(f"--recipes: two are called {label}: rename one, or run two benchmarks.")
            labelled[label] = recipe, (*own, *flags, *(("--data.env_id", env_id) if env_id else ()))
    seeds = dict.fromkeys(seeds)  # each once
    return [Job(label, recipe, seed, args) for seed in seeds for label, (recipe, args) in labelled.items()]
