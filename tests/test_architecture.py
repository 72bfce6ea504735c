"""The imports between the subpackages: each one imports only from those below it."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "ppo_lightning"
# From the bottom up: a subpackage imports only from itself and from the ones before it.
FLOORS = (
    "errors",
    "private",
    "utils",
    "spaces",
    "envs",
    "models",
    "checkpoints",
    "video",
    "rollouts",
    "callbacks",
    "export",
    "algorithms",
    "offpolicy",
    "games",
    "commands",
    "experiments",
)
# Modules of a room above that a function imports on first use.
DOORS = {("envs.factory", "games.make"), ("envs.functions", "games.make")}
ENTRANCES = ("__init__", "__main__")  # which import lazily from all subpackages
HIDDEN = """
import sys

hidden = ("envpool", "ale_py", "procgen", "mujoco", "dm_control", "shimmy", "minigrid", "cv2")
hidden = (*hidden, "pettingzoo", "mpe2", "multi_agent_ale_py", "pygame")
hidden = (*hidden, "gymnasium.envs.mujoco", "jax", "brax", "mujoco_playground")
sys.modules.update(dict.fromkeys(hidden))  # as if they were not installed
import ppo_lightning.algorithms
import ppo_lightning.commands.cli
import lightning

lightning.seed_everything(1)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
trainer = lightning.Trainer(max_epochs=-1, **quiet)
data = ppo_lightning.RolloutDataModule(num_envs=2, num_steps=8, total_timesteps=16)
trainer.fit(ppo_lightning.PPO(num_minibatches=2), data)
"""


def imports() -> dict[str, set[str]]:
    """Return module -> modules of the package that it imports anywhere in the file."""
    names = {
        path: ".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in PACKAGE.rglob("*.py")
    }
    modules = {name.removesuffix(".__init__") for name in names.values()}
    found: dict[str, set[str]] = {}
    for path, name in names.items():
        if name in ENTRANCES:
            continue
        module = name.removesuffix(".__init__")
        found.setdefault(module, set())
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ppo_lightning."):
                source = node.module.removeprefix("ppo_lightning.")
                inner = {f"{source}.{alias.name}" for alias in node.names} & modules
                found[module] |= inner or {source}
    return found


def hidden_imports(path: Path) -> set[str]:
    """Return the arguments of ``import_module`` that are text, or are put together from text."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "resolve_name")):
            argument = node.args[0]
            found |= set() if isinstance(argument, ast.Name) else {ast.unparse(argument)}
    return found


def test_a_backend_is_imported_in_plain_sight():
    """``imports`` reads imports inside functions, and would not see a module that a text names."""
    sources = imports()["envs.factory"]
    assert {"envs.envpool", "envs.procgen", "envs.torch_env", "envs.vector", "envs.workers"} <= sources
    assert not set().union(*map(hidden_imports, (PACKAGE / "envs").rglob("*.py")))


def test_every_room_has_a_floor():
    assert {module.partition(".")[0] for module in imports()} == set(FLOORS)


@pytest.mark.parametrize("room", FLOORS)
def test_no_room_imports_from_a_floor_above(room):
    height = FLOORS.index(room)
    upwards = {
        (module, source)
        for module, sources in imports().items()
        if module.partition(".")[0] == room
        for source in sources
        if FLOORS.index(source.partition(".")[0]) > height
    }
    assert upwards == {door for door in DOORS if door[0].partition(".")[0] == room}


def test_no_modules_import_each_other_in_a_circle():
    graph = {
        module: {source for source in sources if source != module} for module, sources in imports().items()
    }
    while leaves := {module for module, sources in graph.items() if not sources & graph.keys()}:
        graph = {module: sources for module, sources in graph.items() if module not in leaves}
    assert not graph


def private_names(path: Path) -> set[str]:
    """Return the imports and attributes with a leading underscore in a file that are not this package's."""
    tree = ast.parse(path.read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            source = getattr(node, "module", None) or ""
            names = [f"{source}.{alias.name}" for alias in node.names]
            ours = source.split(".")[0] in ("ppo_lightning", "__future__")
            found |= {name for name in names if not ours and "._" in f".{name}"}
        elif isinstance(node, ast.Attribute) and re.match("_[a-z]", node.attr):
            is_own = ast.unparse(node.value) in ("self", "cls", "super()") and node.attr in OWN
            found |= set() if is_own or node.attr in DOCUMENTED else {ast.unparse(node)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            is_private = node.value in PRIVATE_STRINGS or re.fullmatch(r"[\w.]+\._[\w.]+", node.value)
            found |= {node.value} if is_private else set()
    return found


def own_names() -> set[str]:
    """Return the names that a class or module of this package defines, or sets on ``self``."""
    names = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names |= {node.attr} if ast.unparse(node.value) in ("self", "cls") else set()
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
    return names


OWN = own_names()
DOCUMENTED = ("_replace", "_exit")  # of named tuples and `os`, in Python's documentation
PRIVATE_STRINGS = ("_hparams", "_elapsed_steps", "_has_reset", "unsafe_marked_cacheable_functions")


def test_private_names_of_other_libraries_are_in_one_file():
    paths = [path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "private.py"]
    found = {str(path.relative_to(PACKAGE)): names for path in paths if (names := private_names(path))}
    assert not found
    assert len(private_names(PACKAGE / "private.py")) > 20, "the search finds them"


def test_the_core_trains_without_any_backend():
    command = [sys.executable, "-W", "ignore", "-c", HIDDEN]
    done = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
