"""Print how the settings of another library differ, and write the recipe that does the same."""

import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from ppo_lightning.algorithms.ppo import PPO
from ppo_lightning.commands.against import cleanrl, rl_games, rsl_rl, sb3, skrl
from ppo_lightning.commands.against.files import read_settings
from ppo_lightning.commands.against.translation import Row, Translation, plain
from ppo_lightning.errors import ConfigError, first_line, nearest
from ppo_lightning.models import CNNAgent, MLPAgent
from ppo_lightning.rollouts.datamodule import RolloutDataModule

LIBRARIES: dict[str, ModuleType] = {
    "rsl_rl": rsl_rl,
    "sb3": sb3,
    "skrl": skrl,
    "rl_games": rl_games,
    "cleanrl": cleanrl,
}
WIDTH = 110  # of a line of the recipe
NEEDED = ("data.env_id", "data.num_envs", "data.total_timesteps")


def translate(library: str, path: Path, overrides: Mapping[str, Any]) -> Translation:
    """Translate a file of another library.

    Args:
        library: Name of the library, a key of ``LIBRARIES``.
        path: File with the library's settings.
        overrides: Values of our settings, by flag.

    Returns:
        The translation. Its recipe has the overrides.

    Raises:
        ConfigError: The library is unknown, or the file cannot be read as settings of this library.
    """
    if library not in LIBRARIES:
        known = ", ".join(LIBRARIES)
        guess = nearest(library, list(LIBRARIES), limit=1)
        raise ConfigError(f"--against {library}: the library must be one of {known}{guess or '.'}")
    settings = read_settings(path)
    try:
        translation: Translation = LIBRARIES[library].translate(settings, overrides)
    except ConfigError:
        raise
    except (AttributeError, TypeError, ValueError, LookupError, ArithmeticError) as error:
        raise ConfigError(
            f"--against {library}: a setting of {path} has an unexpected form ({first_line(error)})."
        ) from error
    translation.recipe |= overrides
    return translation


def flags_to_settings(flags: Sequence[str]) -> dict[str, Any]:
    """Return the values of ``--data.NAME VALUE`` and ``--model.NAME VALUE``, by flag without dashes.

    Raises:
        ConfigError: A flag is another one, or has no value.

    Example:
        >>> flags_to_settings(["--data.num_envs", "8", "--data.env_id=Ant-v4"])
        {'data.num_envs': 8, 'data.env_id': 'Ant-v4'}
    """
    parts = [part for flag in flags for part in (flag.split("=", 1) if flag.startswith("--") else [flag])]
    found = {}
    for name, value in zip(parts[::2], [*parts[1::2], *[""] * (len(parts) % 2)], strict=True):
        if not name.startswith(("--data.", "--model.")) or not value:
            raise ConfigError(
                f"--against takes --data.NAME VALUE and --model.NAME VALUE beside its flags, not {name!r}."
            )
        found[name.removeprefix("--")] = plain(yaml.safe_load(value))
    return found


def settings_here(recipe: Path | None) -> dict[str, Any]:
    """Return our settings by flag: the defaults, overridden by a recipe."""
    found: dict[str, Any] = {}
    for prefix, owner in (("data", RolloutDataModule), ("model", PPO), ("model.agent", MLPAgent)):
        for name, parameter in inspect.signature(owner).parameters.items():
            found[f"{prefix}.{name}"] = parameter.default
    found["model.agent.shared"] = False  # what None means for MLPAgent
    if recipe is not None:
        config = yaml.safe_load(recipe.read_text(encoding="utf-8"))
        model = (config.get("model") or {}).get("init_args") or {}
        agent = (model.get("agent") or {}).get("init_args") or {}
        groups = {"data": config.get("data") or {}, "model": model, "model.agent": agent}
        for prefix, values in groups.items():
            found |= {f"{prefix}.{name}": plain(value) for name, value in values.items()}
    return found


def lines(translation: Translation, here: Mapping[str, Any], column: str) -> Iterator[str]:
    """Yield the report: a table of settings, the differences that remain, and settings without a translation.

    Args:
        translation: Of the library's file.
        here: Our settings by flag, to compare with.
        column: Title of their column.
    """
    yield f"| {translation.library} | value | setting here | same meaning | {column} | |"
    yield "|---|---|---|---|---|---|"
    for row in translation.rows:
        present = shown(here.get(row.ours)) if row.ours else ""
        ours = shown(row.our_value) if row.ours else ""
        mark = "**" if row.ours and present != ours else ""
        value = (shown(row.value) + ("" if row.given else " (default)")) if _is_setting(row) else ""
        yield f"| {row.theirs} | {value} | {row.ours} | {mark}{ours}{mark} | {present} | {row.note} |"
    if translation.remaining:
        yield "\nDifferences that no setting removes:"
        yield from (f"- {sentence}" for sentence in translation.remaining)
    if translation.unread():
        yield f"\nNot translated: {', '.join(translation.unread())}."


def _is_setting(row: Row) -> bool:
    return row.given or row.value != ""


def shown(value: Any) -> str:
    """Return a value as YAML in one line; numbers that are equal look equal."""
    if isinstance(value, float) and value == int(value) and abs(value) < 1e15:
        value = int(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(shown, value))}]"
    if isinstance(value, dict) and ":serialized:" in value:  # an object in a saved model
        return str(value.get("value_schedule", value.get(":type:", "")))
    if isinstance(value, dict):
        return ", ".join(f"{name} {shown(item)}".strip() for name, item in value.items())
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), f"{value}")


def recipe_text(translation: Translation, source: str) -> str:
    """Return the recipe as YAML.

    Raises:
        ConfigError: The file and the flags name no environment, number of environments, or length of the run.
    """
    missing = [name for name in NEEDED if name not in translation.recipe]
    if missing:
        flags = ", ".join(f"--{name}" for name in missing)
        raise ConfigError(f"No recipe is written: the file does not say {flags}. Give them as flags.")
    recipe: dict[str, Any] = {
        "model": {"class_path": translation.classes["model"], "init_args": {}},
        "data": {},
        "trainer": {"accelerator": "auto"},
    }
    known = inspect.signature(CNNAgent).parameters
    agent: dict[str, Any] = {"class_path": translation.classes["model.agent"], "init_args": {}}
    for name, value in translation.recipe.items():
        group, _, key = name.rpartition(".")
        if group == "model.agent":
            if agent["class_path"].endswith("MLPAgent") or key in known:
                agent["init_args"][key] = value
        elif group == "model":
            recipe["model"]["init_args"][key] = value
        else:
            recipe["data"][key] = value
    recipe["model"]["init_args"]["agent"] = agent
    header = [f"{source}, settings of {translation.library}."]
    if translation.remaining:
        header += ["Differences that no setting removes:", *translation.remaining]
    comments = [
        textwrap.fill(sentence, WIDTH, initial_indent=indent, subsequent_indent="#   ")
        for sentence, indent in zip(header, ["# ", "# ", *["# - "] * len(header)], strict=False)
    ]
    return "\n".join([*comments, yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)])


def main(library: str, path: Path, flags: Sequence[str], output: Path | None, config: str | None) -> None:
    """Run ``ppo-lightning details --against``: print the report and write the recipe.

    Args:
        library: Name of the library.
        path: File with its settings.
        flags: Further arguments, ``--data.NAME VALUE`` and ``--model.NAME VALUE``.
        output: File of the recipe. None: the file's name with the library's name, in the current folder.
        config: Recipe to compare with. None: our defaults.

    Raises:
        ConfigError: The file cannot be translated, or the recipe would overwrite it.
    """
    translation = translate(library, path, flags_to_settings(flags))
    here = settings_here(None if config is None else Path(config))
    print("\n".join(lines(translation, here, "default here" if config is None else Path(config).name)))
    text = recipe_text(translation, path.name)
    output = output or Path(f"{path.stem}_{library}.yaml")
    if output.exists() and output.samefile(path):
        raise ConfigError(f"--output {output} is the file of --against: choose another name.")
    output.write_text(text, encoding="utf-8")
    print(f"\nWritten: {output}. Train with: ppo-lightning fit --config {output}")
