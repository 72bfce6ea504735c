"""Read settings from the files of other libraries. No file is unpickled, imported or executed."""

import ast
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ppo_lightning.errors import ConfigError

LARGEST = 10_000_000  # bytes of settings; saved models have weights, which are not read


class _PlainLoader(yaml.SafeLoader):
    """YAML loader that reads the tags of Python objects as plain data."""


def _plain(loader: yaml.SafeLoader, suffix: str, node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return loader.construct_mapping(node, deep=True)
    if isinstance(node, yaml.SequenceNode):
        items = loader.construct_sequence(node, deep=True)
        if suffix.endswith("OrderedDict") and items:  # RL Zoo: an OrderedDict of one list of pairs
            return dict(items[0])
        return items
    return loader.construct_scalar(node)


_PlainLoader.add_multi_constructor("tag:yaml.org,2002:python/", _plain)
_PlainLoader.add_multi_constructor("!", _plain)


def read_settings(path: Path) -> dict[str, Any]:
    """Read the settings of a run.

    Args:
        path: YAML or JSON file, Python file (values of its classes, calls and ``add_argument``), or a model
            that Stable-Baselines3 saved (.zip).

    Returns:
        Nested settings. Those of a Python file have the key ``modules``, too: names that the file uses.

    Raises:
        ConfigError: The file cannot be read, or has no settings.
    """
    try:
        if path.suffix == ".zip":
            settings = json.loads(_member(path, "data"))
        elif path.suffix == ".py":
            settings = _python_settings(ast.parse(_text(path)))
        else:
            settings = yaml.load(_text(path), _PlainLoader)
    except (OSError, UnicodeDecodeError, zipfile.BadZipFile, KeyError) as error:
        raise ConfigError(f"--against: {path} cannot be read: {error}.") from error
    except (yaml.YAMLError, json.JSONDecodeError, SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError(f"--against: {path} has no settings: {' '.join(str(error).split())}.") from error
    if not isinstance(settings, dict) or not settings:
        raise ConfigError(f"--against: {path} has no settings: its content is no mapping of names to values.")
    return settings


def _text(path: Path) -> str:
    if path.stat().st_size > LARGEST:
        raise OSError(f"it has more than {LARGEST} bytes")
    return path.read_text(encoding="utf-8")


def _member(path: Path, name: str) -> bytes:
    with zipfile.ZipFile(path) as archive, archive.open(name) as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise OSError(f"{name} has more than {LARGEST} bytes")
    return content


def _python_settings(tree: ast.Module) -> dict[str, Any]:
    """Return the literal values that a file assigns in classes, passes to calls, or sets as defaults."""
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for statement in node.body:
                target = getattr(statement, "target", None) or next(
                    iter(getattr(statement, "targets", ())), None
                )
                value = getattr(statement, "value", None)
                if isinstance(target, ast.Name) and value is not None:
                    _store(found, target.id, value)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument" and node.args:
            default = next((key.value for key in node.keywords if key.arg == "default"), None)
            if isinstance(node.args[0], ast.Constant) and default is not None:
                _store(found, str(node.args[0].value).lstrip("-").replace("-", "_"), default)
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return found | {"modules": sorted(used)} if found else {}


def _store(found: dict[str, Any], name: str, node: ast.expr) -> None:
    """Store a literal, or the keyword arguments of a call; leave out everything else."""
    if isinstance(node, ast.Call) and node.keywords:
        inner: dict[str, Any] = {}
        for keyword in node.keywords:
            _store(inner, keyword.arg or "", keyword.value)
        found[name] = inner
        return
    try:
        found[name] = ast.literal_eval(node)
    except ValueError:
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("int", "float") and node.args:
            _store(found, name, node.args[0])


def keyword_arguments(text: Any) -> dict[str, Any]:
    """Return the arguments of ``dict(...)`` in a text, as RL Zoo writes them. Names become their last part.

    Args:
        text: A text, or a mapping, which is returned.

    Raises:
        ConfigError: The text is neither ``dict(...)`` nor a literal mapping.

    Example:
        >>> keyword_arguments("dict(activation_fn=nn.ReLU, net_arch=dict(pi=[64], vf=[64]))")
        {'activation_fn': 'ReLU', 'net_arch': {'pi': [64], 'vf': [64]}}
    """
    if isinstance(text, Mapping):
        return dict(text)
    if not text:
        return {}

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "dict" and not node.args:
            return {keyword.arg: value(keyword.value) for keyword in node.keywords}
        if isinstance(node, ast.Attribute):
            return node.attr
        return node.id if isinstance(node, ast.Name) else ast.literal_eval(node)

    try:
        found = value(ast.parse(str(text).strip(), mode="eval").body)
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"--against: {text!r} is not a mapping: write dict(name=value, ...).") from error
    return found if isinstance(found, dict) else {}
