"""The core stays small and names no guest: the ten files that a reader of PPO reads."""

import ast
import inspect
import io
import re
import tokenize
from pathlib import Path

import pytest

from ppo_lightning import AgentModule
from ppo_lightning.envs.batched import BatchedEnv

PACKAGE = Path(__file__).parents[1] / "ppo_lightning"
CORE = [
    *(f"algorithms/{name}.py" for name in ("ppo", "losses", "minibatches", "update", "agent_module")),
    *(f"rollouts/{name}.py" for name in ("datamodule", "base", "collector")),
    *(f"models/{name}.py" for name in ("actor", "agent")),
]
GUESTS = "mover sign player opponent restart worker replay hub spawn foreign"
WORDS = {word + ending for word in GUESTS.split() for ending in ("", "s")}
SETTINGS = {"num_workers", "worker_backend"}  # of RolloutDataModule: their names, docstring and hand-over
LARGEST = 2400  # lines: 2 300, and 100 for what comes after
GUARDS = 0.05  # of the lines of the core
CONFIG_ERRORS = 181  # ratchet: lower it with each refusal that goes
METHODS = {AgentModule: 26, BatchedEnv: 10}  # ratchet


def words_of(text: str) -> list[str]:
    """Return the whole words of a text or name, split at underscores and capitals, in lower case."""
    parts = re.findall(r"[A-Za-z]+", text)
    return [word.lower() for part in parts for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", part)]


def guests_of(source: str) -> list[tuple[int, str]]:
    """Return the lines and words in names, comments and docstrings that name a guest of the core."""
    found = []
    setting = 0  # last line of the docstring's part on an exempt setting
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME and token.string in SETTINGS:
            continue
        is_docstring = token.type == tokenize.STRING and token.string.startswith('"""')
        if not (token.type in (tokenize.NAME, tokenize.COMMENT) or is_docstring):
            continue
        for number, line in enumerate(token.string.splitlines(), token.start[0]):
            if is_docstring and re.match(r" {8}\w+: ", line):  # an argument's part begins
                setting = number if line.strip().split(":")[0] in SETTINGS else 0
            if not setting:
                found += [(number, word) for word in words_of(line) if word in WORDS]
        setting = 0
    return found


def guard_lines(source: str) -> int:
    """Return how many lines refuse, warn or document an error: `raise` and the `if` above it, and so on."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        if isinstance(node, ast.Raise):
            lines.update(range(node.lineno, node.end_lineno + 1))
        elif isinstance(node, ast.If) and isinstance(body[-1], ast.Raise):
            lines.update(range(node.lineno, body[-1].end_lineno + 1))
        elif isinstance(node, ast.Expr | ast.Assign) and isinstance(node.value, ast.Call):
            name = ast.unparse(node.value.func).rpartition(".")[2]
            if name.startswith(("check_", "require_")) or "warn" in name:
                lines.update(range(node.lineno, node.end_lineno + 1))
        elif isinstance(node, ast.FunctionDef) and node.name.startswith(("check_", "require_", "_warn")):
            lines.update(range(node.lineno, node.end_lineno + 1))
    is_errors = False
    for number, line in enumerate(source.splitlines(), 1):
        is_errors = line.strip() == "Raises:" or (is_errors and bool(line.strip()) and '"""' not in line)
        if is_errors:
            lines.add(number)
    return len(lines)


def methods_of(kind: type) -> list[str]:
    """Return the methods and properties that a class and its bases in this package define."""
    owners = [base for base in kind.__mro__ if base.__module__.startswith("ppo_lightning")]
    kinds = staticmethod | classmethod | property
    return sorted(
        {
            name
            for owner in owners
            for name, member in vars(owner).items()
            if inspect.isfunction(member) or isinstance(member, kinds) or hasattr(member, "func")
        }
    )


@pytest.mark.parametrize("path", CORE)
def test_the_core_names_no_guest(path):
    assert guests_of((PACKAGE / path).read_text()) == []


def test_the_words_are_found_where_they_stand():
    source = '"""A player.\n\n        num_workers: Number of workers.\n        other: The hub.\n"""\n'
    source += "class ReplayBuffer:  # design signals\n    num_workers = movers_of = 1  # two workers\n"
    words = [word for _, word in guests_of(source)]
    assert words == ["player", "hub", "replay", "movers", "workers"]


def test_the_core_is_short():
    assert sum(len((PACKAGE / path).read_text().splitlines()) for path in CORE) <= LARGEST


def test_the_core_has_few_guards():
    sources = [(PACKAGE / path).read_text() for path in CORE]
    assert sum(map(guard_lines, sources)) <= GUARDS * sum(len(source.splitlines()) for source in sources)


def test_refusals_do_not_grow():
    sources = [path.read_text() for path in PACKAGE.rglob("*.py")]
    assert sum(source.count("ConfigError(") for source in sources) <= CONFIG_ERRORS


@pytest.mark.parametrize("kind", METHODS, ids=lambda kind: kind.__name__)
def test_the_contracts_stay_small(kind):
    methods = methods_of(kind)
    assert len(methods) <= METHODS[kind], methods
