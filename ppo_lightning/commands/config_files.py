"""Recipes on the command line: their place before the flags, and validation of the YAML files."""

import argparse
from collections.abc import Sequence
from typing import Any

import yaml

from ppo_lightning.errors import ConfigError


class _UniqueKeys(yaml.SafeLoader):
    """YAML loader that refuses duplicate keys, as the YAML standard does; PyYAML keeps the last value."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = set()
        for key, _ in node.value:
            if key.value in keys:
                line = key.start_mark.line + 1
                raise ConfigError(f"has the key {key.value!r} twice (line {line}): remove one.")
            keys.add(key.value)
        return super().construct_mapping(node, deep)


def split_configs(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the values of all ``--config``, and the other arguments, both in their order."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("-c", "--config", action="append", default=[])
    try:
        options, others = parser.parse_known_args(args)
    except argparse.ArgumentError:
        raise ConfigError("--config needs a value: the name of a bundled recipe, or a YAML file.") from None
    return options.config, others


def with_configs_first(args: Sequence[str]) -> list[str]:
    """Move every ``--config`` before the flags: the parser lets a later value win, and flags shall.

    Args:
        args: Command and its arguments.
    """
    if not args or args[0].startswith("-"):
        return list(args)
    configs, others = split_configs(args)
    return [others[0], *(f"--config={config}" for config in configs), *others[1:]]


def read_yaml(path: str, flag: str) -> Any:
    """Read a YAML file with unique keys.

    Args:
        path: The file.
        flag: Flag that names the file, for messages.

    Raises:
        ConfigError: The file is not text, is not YAML, or has a key twice.
    """
    try:
        with open(path, encoding="utf-8") as file:
            return yaml.load(file.read(), _UniqueKeys)
    except (UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{flag} {path} cannot be read as text in UTF-8: {error}.") from error
    except ConfigError as error:
        raise ConfigError(f"{flag} {path} {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{flag} {path} is not YAML: {' '.join(str(error).split())}.") from error
