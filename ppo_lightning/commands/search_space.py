"""Search space of ``tune``: parameters in YAML, and recipes with their values."""

import copy
import importlib
import inspect
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ppo_lightning.commands.config_files import read_yaml
from ppo_lightning.errors import ConfigError

PREFIXES = ("model.", "data.", "trainer.")
ADVICE = "give choices, or low and high (with log: true or step)"


@dataclass(frozen=True)
class Parameter:
    """A parameter of the search space: either choices, or a range of numbers.

    Attributes:
        name: Flag of ``fit`` without dashes, for example ``model.learning_rate``.
        choices: Values to choose from.
        low: Smallest value. The parameter is an integer if ``low`` and ``high`` are.
        high: Largest value.
        log: Whether to sample on a logarithmic scale.
        step: Distance of two values.
        when: Values of earlier parameters for which this parameter is used.

    Example:
        >>> Parameter("model.gamma", low=0.9, high=0.999).contains(0.99)
        True
    """

    name: str
    choices: tuple[Any, ...] = ()
    low: float | None = None
    high: float | None = None
    log: bool = False
    step: float | None = None
    when: tuple[tuple[str, tuple[Any, ...]], ...] = ()

    def active(self, values: Mapping[str, Any]) -> bool:
        """Return whether the parameter is used beside these values of earlier parameters."""
        return all(name in values and values[name] in allowed for name, allowed in self.when)

    def contains(self, value: Any) -> bool:
        """Return whether a value is one that can be sampled."""
        if self.choices:
            return value in self.choices
        return isinstance(value, int | float) and self.low <= value <= self.high  # type: ignore[operator]

    def suggest(self, trial: Any) -> Any:
        """Sample the value for a trial of Optuna."""
        if self.choices:
            # Optuna stores scalars only: a list becomes JSON.
            stored = [stored_value(choice) for choice in self.choices]
            return self.choices[stored.index(trial.suggest_categorical(self.name, stored))]
        if isinstance(self.low, int) and isinstance(self.high, int):
            return trial.suggest_int(self.name, self.low, self.high, step=self.step or 1, log=self.log)
        return trial.suggest_float(self.name, self.low, self.high, step=self.step, log=self.log)


@dataclass(frozen=True)
class Space:
    """Search space and targets of a study.

    Attributes:
        parameters: The parameters, in the order of the file.
        targets: Returns with the scores 0 and 1, by environment.
    """

    parameters: tuple[Parameter, ...]
    targets: dict[str, tuple[float, float]]

    def suggest(self, trial: Any) -> dict[str, Any]:
        """Sample the values of all active parameters for a trial of Optuna."""
        values: dict[str, Any] = {}
        for parameter in self.parameters:
            if parameter.active(values):
                values[parameter.name] = parameter.suggest(trial)
        return values

    def values_of(self, recipes: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        """Return the values in recipes, None if recipes differ or a value cannot be sampled."""
        values: dict[str, Any] = {}
        for parameter in self.parameters:
            found = [value_in(recipe, parameter.name) for recipe in recipes]
            if not parameter.active(values):
                continue
            if any(value != found[0] for value in found) or not parameter.contains(found[0]):
                return None
            values[parameter.name] = found[0]
        return values

    def score(self, env_id: str, episodic_return: float) -> float:
        """Return the score of a return: linear, 0 and 1 at the targets; without targets the return."""
        low, high = self.targets.get(env_id, (0.0, 1.0))
        return (episodic_return - low) / (high - low)


def read_space(path: Path) -> Space:
    """Read a search space.

    Args:
        path: YAML file with ``parameters`` and, for more than one environment, ``targets``.

    Raises:
        ConfigError: The file is not a search space.
    """
    content = read_yaml(str(path), "--space")
    entries = content.get("parameters") if isinstance(content, dict) else None
    if not isinstance(entries, dict) or not entries or set(content) - {"parameters", "targets"}:
        raise ConfigError(f"--space {path} needs the key parameters, and may have targets, and no other key.")
    parameters: list[Parameter] = []
    for name, entry in entries.items():
        try:
            parameters.append(_parameter(str(name), entry, [parameter.name for parameter in parameters]))
        except (ConfigError, TypeError, ValueError) as error:
            raise ConfigError(f"--space {path}: {name}: {error}") from error
    targets = {}
    for env_id, pair in (content.get("targets") or {}).items():
        try:
            low, high = map(float, pair)
        except (TypeError, ValueError):
            low = high = math.nan
        if not low < high:
            raise ConfigError(f"--space {path}: targets of {env_id} must be two returns, the lower first.")
        targets[str(env_id)] = low, high
    return Space(tuple(parameters), targets)


def _parameter(name: str, entry: Any, earlier: Sequence[str]) -> Parameter:
    if not name.startswith(PREFIXES):
        raise ConfigError(f"the name must begin with {', '.join(PREFIXES)}.")
    known = {"choices", "low", "high", "log", "step", "when"}
    if not isinstance(entry, dict) or set(entry) - known or ("choices" in entry) == ("low" in entry):
        raise ConfigError(f"{ADVICE}.")
    when = tuple(
        (str(other), tuple(value) if isinstance(value, list) else (value,))
        for other, value in (entry.get("when") or {}).items()
    )
    if missing := [other for other, _ in when if other not in earlier]:
        raise ConfigError(f"when names {missing[0]}, which must be an earlier parameter.")
    if "choices" in entry:
        if set(entry) - {"choices", "when"} or not isinstance(entry["choices"], list) or not entry["choices"]:
            raise ConfigError(f"{ADVICE}.")
        return Parameter(name, choices=tuple(entry["choices"]), when=when)
    low, high = _number(entry["low"]), _number(entry.get("high"))
    log = entry.get("log", False)
    step = None if entry.get("step") is None else _number(entry["step"])
    if not low < high or (log and low <= 0) or (log and step) or (step is not None and step <= 0):
        raise ConfigError("low must be below high, above 0 for log, and step excludes log.")
    return Parameter(name, low=low, high=high, log=log, step=step, when=when)


def _number(value: Any) -> float:
    """Return a number, also one like ``1e-4``, which is a string for YAML 1.1."""
    if isinstance(value, str):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{value!r} is not a number.")
    return value


def stored_value(value: Any) -> Any:
    """Return a value as Optuna stores it: lists and dictionaries as JSON."""
    return json.dumps(value) if isinstance(value, list | dict) else value


def flags_of(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return values as flags of ``fit``.

    Example:
        >>> flags_of({"model.gamma": 0.9, "model.anneal_lr": False})
        ('--model.gamma', '0.9', '--model.anneal_lr', 'false')
    """
    pairs = (
        (f"--{name}", value if isinstance(value, str) else json.dumps(value))
        for name, value in values.items()
    )
    return tuple(part for pair in pairs for part in pair)


def values_of_flags(flags: Sequence[str]) -> dict[str, Any]:
    """Return the values of flags of ``fit``.

    Raises:
        ConfigError: A flag is not one of ``--model.*``, ``--data.*`` or ``--trainer.*`` with a value.
    """
    parts = [part for flag in flags for part in (flag.split("=", 1) if flag.startswith("--") else [flag])]
    names = parts[::2]
    prefixes = tuple(f"--{prefix}" for prefix in PREFIXES)
    if len(parts) % 2 or any(not name.startswith(prefixes) for name in names):
        raise ConfigError(
            f"{' '.join(flags)}: only --model.*, --data.* and --trainer.* with a value are passed on."
        )
    return {name[2:]: yaml.safe_load(value) for name, value in zip(names, parts[1::2], strict=True)}


def with_values(recipe: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a recipe with other values.

    Args:
        recipe: Content of the YAML file.
        values: Values by flag of ``fit`` without dashes. ``init_args`` is inserted where a class is named.

    Example:
        >>> with_values({"model": {"class_path": "ppo_lightning.PPO"}}, {"model.gamma": 0.9})
        {'model': {'class_path': 'ppo_lightning.PPO', 'init_args': {'gamma': 0.9}}}
    """
    recipe = copy.deepcopy(recipe)
    for name, value in values.items():
        *path, last = name.split(".")
        node = recipe
        for key, inner in zip(path, [*path[1:], last], strict=True):
            node = node.setdefault(key, {})
            if "class_path" in node and inner != "class_path":
                node = node.setdefault("init_args", {})
        node[last] = value
    return recipe


def value_in(recipe: dict[str, Any], name: str) -> Any:
    """Return the value of a flag of ``fit`` in a recipe, by default that of the class; None if unknown."""
    *path, last = name.split(".")
    node: Any = recipe
    owner = {"data": "ppo_lightning.RolloutDataModule", "model": "ppo_lightning.PPO"}.get(path[0])
    for key in path:
        node = node.get(key) if isinstance(node, dict) else None
        if isinstance(node, dict) and "class_path" in node:
            owner = node["class_path"]
            node = node.get("init_args")
        elif key != path[0]:
            owner = None
    if isinstance(node, dict) and last in node:
        return node[last]
    if owner is None:
        return None
    module, _, cls = owner.rpartition(".")
    parameter = inspect.signature(getattr(importlib.import_module(module), cls)).parameters.get(last)
    return None if parameter is None or parameter.default is parameter.empty else parameter.default
