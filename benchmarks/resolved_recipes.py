"""Write the settings of every bundled recipe, defaults included, as JSON, to compare two commits.

`python benchmarks/resolved_recipes.py before.json` writes what `fit --print_config` prints for each name, the
name of the run, and the arguments of an agent that the recipe leaves to its algorithm.
"""

import argparse
import inspect
import json
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from ppo_lightning.commands.recipes import bundled_recipes, bundled_tasks
from ppo_lightning.experiments.tune import resolved


def settings_of(name: str) -> dict[str, Any]:
    """Return the settings of a recipe, with the defaults of all classes."""
    settings = yaml.safe_load(resolved(Path(name), []))
    settings["name"] = settings["name"] or name.rpartition("/")[2]
    agent = settings["model"]["init_args"]["agent"]
    if isinstance(agent, str):
        parameters = inspect.signature(pkgutil.resolve_name(agent)).parameters.values()
        defaults = {it.name: it.default for it in parameters if it.default is not it.empty}
        settings["model"]["init_args"]["agent"] = {"class_path": agent, "init_args": defaults}
    return settings


def main(args: Sequence[str] | None = None) -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    output = parser.parse_args(args).output
    sys.argv = sys.argv[:1]  # of which Lightning would warn for each recipe
    recipes = {name: settings_of(name) for name in (*bundled_recipes(), *bundled_tasks())}
    output.write_text(json.dumps(recipes, indent=1, sort_keys=True, default=str) + "\n")


if __name__ == "__main__":
    main()
