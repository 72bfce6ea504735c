"""The package: metadata, layout, and one place and one test for every implementation detail."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib import resources

import pytest
from packaging.requirements import Requirement

from tests.helpers import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# The 37 details of Huang et al. (2022), four additional ones, and two of Procgen.
DETAILS = [*map(str, range(1, 38)), "A1", "A2", "A3", "A4", "P1", "P2"]


def test_each_detail_has_one_place():
    found = []
    for path in (ROOT / "ppo_lightning").rglob("*.py"):
        found += re.findall(r"^ *# detail (\w+)$", path.read_text(), flags=re.MULTILINE)
    assert sorted(found) == sorted(DETAILS)


def test_each_detail_has_a_test():
    marked = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for decorator in node.decorator_list:
                    marked |= set(re.findall(r"pytest\.mark\.detail\('(\w+)'\)", ast.unparse(decorator)))
    assert marked == set(DETAILS)


@pytest.mark.parametrize(
    ("own", "expected"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "5"}, "5"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_the_openmp_spin_count_is_lowered_unless_the_user_sets_it(own, expected):
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    env = {key: value for key, value in os.environ.items() if key not in names} | own
    code = """import os, sys
import ppo_lightning
print(os.environ.get("GOMP_SPINCOUNT"))
from ppo_lightning.__main__ import main
sys.argv = ["ppo-lightning", "--version"]
main()
print(os.environ.get("GOMP_SPINCOUNT"), "torch" in sys.modules)"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=env | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    imported, _, started = done.stdout.splitlines()
    assert imported == str(own.get("GOMP_SPINCOUNT")), "an import changes nothing"
    assert started.split() == [expected, "False"], "set before PyTorch is there to read it"


@pytest.mark.parametrize("name", ["lightning", "pytorch-lightning"])
def test_the_malicious_lightning_releases_are_not_admitted(name):
    """2.6.2 and 2.6.3 on PyPI stole credentials (GHSA-w37p-236h-pfx3)."""
    requirement = next(r for r in map(Requirement, PROJECT["dependencies"]) if r.name == name)
    assert not requirement.specifier.contains("2.6.2")
    assert not requirement.specifier.contains("2.6.3")
    assert requirement.specifier.contains("2.6.6")


def test_the_constraints_admit_the_dependencies():
    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    )
    pins = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    extras = [r for group in PROJECT["optional-dependencies"].values() for r in group]
    for requirement in map(Requirement, PROJECT["dependencies"] + extras):
        applies = requirement.marker is None or requirement.marker.evaluate({"python_version": "3.11"})
        if requirement.name != "ppo-lightning" and applies:
            pin = pins[requirement.name.lower().replace("_", "-")]
            assert requirement.specifier.contains(pin), requirement


def test_the_package_is_typed():
    assert resources.files("ppo_lightning").joinpath("py.typed").is_file()
