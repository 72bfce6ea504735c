"""The arguments of ``fit``, ``validate`` and ``test``, read once before Lightning parses them."""

import json
import os
from collections.abc import Sequence
from typing import Any

from ppo_lightning.commands.recipes import find_recipe, parse_yaml, read_yaml
from ppo_lightning.errors import ConfigError

GROUPS = ("--model", "--data", "--trainer")  # options that take a file with the settings of a group
CLASSES = ("--model", "--model.agent")  # options that take a class, whose settings are other options


class Arguments:
    """A command with its recipes and options, from the words of a command line."""

    def __init__(self, words: Sequence[str]) -> None:
        self.command = words[0]
        self.configs: list[str] = []  # files and YAML texts, in their order
        self.options: list[tuple[str, list[str]]] = []  # name and words of each other option, in their order
        self.extend(words[1:])

    def extend(self, words: Sequence[str]) -> None:
        """Add further words. A word that does not begin with dashes is the value of the option before it."""
        name = ""
        for word in words:
            if word.startswith("-c"):
                word = f"--config={value}" if (value := word[2:].removeprefix("=")) else "--config"
            if word.startswith("--") or word == "-h":
                name, equals, value = word.partition("=")
                if name != "--config":
                    self.options.append((name, [word]))
                elif equals:
                    self._add_recipe(value)
            elif name == "--config":
                self._add_recipe(word)
                name = ""
            elif name:
                self.options[-1][1].append(word)
            else:
                self.options.append(("", [word]))  # the parser refuses it
        if name == "--config" and not equals:
            raise ConfigError("--config needs a value: the name of a bundled recipe, or a YAML file.")

    def _add_recipe(self, value: str) -> None:
        path, task = find_recipe(value)
        self.configs += [path] if task is None else [path, json.dumps(task.settings())]

    @property
    def asks_for_help(self) -> bool:
        """Whether the options are to be printed."""
        return any(name in ("--help", "-h") for name, _ in self.options)

    def value(self, *names: str) -> str | None:
        """Return the last value of an option, which may have several names. None if it is not given."""
        values = [_value_of(words) for name, words in self.options if name in names]
        return values[-1] if values else None

    def words(self) -> list[str]:
        """Return the words for Lightning: recipes, files and classes first, because the last word wins."""
        names = [name for name, _ in self.options]

        def rank(option: tuple[str, list[str]]) -> int:
            name, words = option
            if name in GROUPS and os.path.isfile(_value_of(words) or ""):
                return 0
            is_class = name in CLASSES and names.count(name) == 1  # of several, the last one wins
            return 1 + CLASSES.index(name) if is_class else 3

        recipes = [f"--config={config}" for config in self.configs]
        flags = [word for _, words in sorted(self.options, key=rank) for word in words]
        return [self.command, *recipes, *flags]

    def algorithm(self, default: str) -> str:
        """Return the class path of the algorithm that options or recipes name. The last one counts."""
        class_path = default
        for config in self.configs:
            is_file = os.path.isfile(config)
            recipe = read_yaml(config, "--config") if is_file else parse_yaml(config, "--config")
            settings = recipe if isinstance(recipe, dict) else {}
            for group in ("data", "trainer"):
                if not isinstance(settings.get(group, {}), dict | str):
                    raise ConfigError(f"--config {config}: {group} holds no settings.")
            class_path = str(_class_of(settings.get("model")) or class_path)
        return _class_of(self.value("--model", "--model.class_path")) or class_path


def _value_of(words: Sequence[str]) -> str | None:
    """Return the value in the words of an option: after the equals sign, or the next word."""
    _, equals, value = words[0].partition("=")
    return value if equals else next(iter(words[1:]), None)


def _class_of(model: Any) -> str | None:
    """Return the class path of settings of an algorithm: a dictionary, its file, or the class path itself."""
    if isinstance(model, str) and os.path.isfile(model):
        model = read_yaml(model, "--model")
    return model.get("class_path") if isinstance(model, dict) else model
