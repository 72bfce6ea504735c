"""Recipes: ``ppo-lightning recipes``, the bundled ones by name, and reading of YAML."""

import csv
import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from ppo_lightning.commands.options import parser_of
from ppo_lightning.errors import ConfigError, nearest
from ppo_lightning.utils.bundled import DATA, ZOO

NAME = re.compile(r"[\w./\\-]+")  # anything else is YAML text, which --config accepts, too
HEADER = ("recipe", "environment", "steps", "measured return", "agent")


def bundled_recipes() -> dict[str, Path]:
    """Return the file of each bundled recipe by name, for example ``classic/cartpole``."""
    folder = DATA / "configs"
    paths = sorted(folder.rglob("*.yaml"))
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in paths}


def recipe_path(value: str) -> str:
    """Return the file of a recipe by its name; a file that exists, or YAML text, is returned as it is."""
    if not NAME.fullmatch(value) or Path(value).exists():  # YAML text may be longer than a name of a file
        return value
    recipes = bundled_recipes()
    if value in recipes:
        return str(recipes[value])
    name = value.removeprefix("configs/").removesuffix(".yaml")
    classic = [recipe for recipe in recipes if recipe.startswith("classic/")]
    ends = {recipe.rpartition("/")[2]: recipe for recipe in (*reversed(recipes), *classic)}
    guess = nearest(name, {recipe: recipe for recipe in recipes} | ends)
    guess = guess or "; ppo-lightning recipes lists all names."
    raise ConfigError(f"There is neither a file nor a bundled recipe {value!r}{guess}")


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


def measured_return(recipe: Path, env_id: str) -> str:
    """Return the mean ± standard deviation over seeds that a recipe's comment ``# Measured: FILE`` names.

    The file may have runs in other environments, too (``--env_ids``).
    """
    named = re.search(r"^# Measured: (\S+)$", recipe.read_text(encoding="utf-8"), re.MULTILINE)
    if named is None:
        return ""
    names = recipe.stem, f"{recipe.stem} {env_id}"
    with open(DATA / named[1], encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["recipe"] in names]
    returns = [float(row.get("episodic_return") or row["return_last_100"]) for row in rows]
    mean, std = statistics.mean(returns), statistics.stdev(returns)
    digits = 3 if abs(mean) < 10 else 1
    return f"{mean:.{digits}f} ± {std:.{digits}f} ({len(returns)} seeds)"


def table() -> Iterator[tuple[str, ...]]:
    """Yield a row for each bundled recipe, as ``HEADER`` names it."""
    for name, path in bundled_recipes().items():
        data: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))["data"]
        steps = f"{data['total_timesteps']:,}".replace(",", " ")
        agent = "play" if (ZOO / name).is_dir() else ""
        yield name, data["env_id"], steps, measured_return(path, data["env_id"]), agent


def main(args: Sequence[str]) -> None:
    """Run ``ppo-lightning recipes``: print the table of the bundled recipes."""
    parser = parser_of(
        "recipes",
        "ppo-lightning fit --config NAME trains one of them. The measured return is the mean ± standard"
        " deviation over seeds of the return of the last 100 training episodes. It is empty for a recipe"
        " without such runs. The documentation has other results. Where the last column says so,"
        " ppo-lightning play NAME shows a trained agent.",
    )
    parser.parse_args(args)
    rows = [HEADER, *table()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, tuple("-" * width for width in widths))
    for row in rows:
        name, env_id, steps, measured, agent = map(str.ljust, row, widths)
        print("  ".join((name, env_id, steps.strip().rjust(widths[2]), measured, agent)).rstrip())
