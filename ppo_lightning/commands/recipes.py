"""Recipes: ``ppo-lightning recipes``, the bundled ones by name, and reading of YAML."""

import csv
import functools
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ppo_lightning.commands.options import parser_of
from ppo_lightning.errors import ConfigError, nearest
from ppo_lightning.utils.bundled import DATA, ZOO

NAME = re.compile(r"[\w./\\-]+")  # anything else is YAML text, which --config accepts, too
HEADER = ("measured return", "agent", "arguments of fit")  # the widest last


class Task(NamedTuple):
    """A row of ``configs/tasks.csv``: a task of a bundled recipe that had a recipe of its own until 0.2."""

    alias: str  # former name, of its bundled agent, too
    recipe: str
    run: str  # name of the runs
    flags: str  # of ``fit``, after the recipe

    @property
    def label(self) -> str:
        """Name in the tables of a benchmark."""
        return self.alias.rpartition("/")[2]

    def pairs(self) -> dict[str, str]:
        """Return the flags and their values."""
        words = self.flags.split()
        return dict(zip(words[::2], words[1::2], strict=True))

    def settings(self) -> dict[str, Any]:
        """Return the flags and the name of the run as the content of a recipe."""
        content: dict[str, Any] = {"name": self.run}
        for flag, value in self.pairs().items():
            group, name = flag.removeprefix("--").split(".")
            content.setdefault(group, {})[name] = yaml.safe_load(value)
        return content


@functools.cache
def bundled_tasks() -> dict[str, Task]:
    """Return the tasks of bundled recipes by their aliases, for example ``classic/cartpole``."""
    with open(DATA / "configs/tasks.csv", encoding="utf-8") as file:
        return {row["alias"]: Task(**row) for row in csv.DictReader(file)}


def bundled_recipes() -> dict[str, Path]:
    """Return the file of each bundled recipe by name, for example ``ppo/classic``."""
    folder = DATA / "configs"
    paths = sorted(folder.rglob("*.yaml"))
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in paths}


def bundled_name(value: str) -> str:
    """Return the name that a value like ``configs/ppo/classic.yaml`` may mean."""
    return re.sub(r"^(.*/)?configs/|\.yaml$", "", value)


def find_recipe(value: str) -> tuple[str, Task | None]:
    """Return the file of a recipe by its name, and the task of an alias; a file or YAML text as it is."""
    if not NAME.fullmatch(value) or Path(value).exists():  # YAML text may be longer than a name of a file
        return value, None
    recipes, tasks, name = bundled_recipes(), bundled_tasks(), bundled_name(value)
    if name in recipes:
        return str(recipes[name]), None
    if name in tasks:
        _announce(tasks[name])
        return str(recipes[tasks[name].recipe]), tasks[name]
    shown = {recipe: recipe for recipe in recipes}
    shown |= {task.alias: f"{task.recipe} {task.flags}".strip() for task in tasks.values()}
    ranked = sorted(shown.items(), key=lambda item: item[1].startswith("ppo/"))
    ends = {key.rpartition("/")[2]: form for key, form in ranked}
    guess = nearest(name, ends | shown) or "; ppo-lightning recipes lists all names."
    raise ConfigError(f"There is neither a file nor a bundled recipe {value!r}{guess}")


@functools.cache  # once, as a study reads its recipes for each trial
def _announce(task: Task) -> None:
    command = f"{task.recipe} {task.flags}".strip()
    print(f"The recipe {task.alias} is now {command}: its old name works until 0.3.", file=sys.stderr)


def read_yaml(path: str, flag: str) -> Any:
    """Read a YAML file that a flag names."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{flag} {path} cannot be read as text in UTF-8: {error}.") from error
    return parse_yaml(text, f"{flag} {path}")


def parse_yaml(text: str, subject: str) -> Any:
    """Parse YAML. The subject names its origin in the message of an error."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{subject} is not YAML: {' '.join(str(error).split())}.") from error


def measured_return(recipe: Path, label: str, env_id: str) -> str:
    """Return the mean ± standard deviation over seeds that a recipe's comment ``# Measured: FILE`` names.

    The file may have runs in other environments, too (``--env_ids``).
    """
    named = re.search(r"^# Measured: (\S+)$", recipe.read_text(encoding="utf-8"), re.MULTILINE)
    if named is None:
        return ""
    with open(DATA / named[1], encoding="utf-8") as file:
        labels = label, f"{label} {env_id}", f"{recipe.stem} {env_id}"
        rows = [row for row in csv.DictReader(file) if row["recipe"] in labels]
    returns = [float(row.get("episodic_return") or row["return_last_100"]) for row in rows]
    if not returns:
        return ""
    mean, std = statistics.mean(returns), statistics.stdev(returns)
    digits = 3 if abs(mean) < 10 else 1
    return f"{mean:.{digits}f} ± {std:.{digits}f} ({len(returns)} seeds)"


def table() -> Iterator[tuple[str, ...]]:
    """Yield a row for each task of each bundled recipe, as ``HEADER`` names it."""
    for name, path in bundled_recipes().items():
        data: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))["data"]
        own = {f"--data.{key}": str(data[key]) for key in ("env_id", "total_timesteps")}
        tasks = [task for task in bundled_tasks().values() if task.recipe == name]
        for task in tasks or [Task(name, name, run="", flags="")]:
            flags = own | task.pairs()
            words = [f"--config {name}", *(f"{flag} {value}" for flag, value in flags.items())]
            measured = measured_return(path, task.label, flags["--data.env_id"])
            yield measured, f"play {task.alias}" if (ZOO / task.alias).is_dir() else "", " ".join(words)


def main(args: Sequence[str]) -> None:
    """Run ``ppo-lightning recipes``: print the table of the bundled recipes."""
    parser = parser_of(
        "recipes",
        "ppo-lightning fit with the arguments of a row trains its task. The measured return is the mean ±"
        " standard deviation over seeds of the return of the last 100 training episodes. It is empty for a"
        " task without such runs. The documentation has other results. Where the second column says so,"
        " ppo-lightning play NAME shows a trained agent.",
    )
    parser.parse_args(args)
    rows = [HEADER, *table()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, tuple("-" * width for width in widths))
    for row in rows:
        print("  ".join(map(str.ljust, row, widths)).rstrip())
