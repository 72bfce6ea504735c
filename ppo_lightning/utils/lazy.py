"""Exports of a package that are imported at first use."""

import ast
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any


def lazy_exports(package: str, file: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package, which imports an exported name when it is first used.

    A run then imports only what it uses. The package imports its names below ``if TYPE_CHECKING:``, where
    type checkers and documentation tools find them, and so does this function.
    """
    modules = {
        alias.name: node.module
        for node in ast.walk(ast.parse(Path(file).read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("ppo_lightning.")
        for alias in node.names
    }

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(modules[name]), name)

    return get
