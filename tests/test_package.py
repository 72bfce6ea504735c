"""The package: metadata, layout, and one place and one test for every implementation detail."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import distributions, requires

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from ppo_lightning.private import CHECKED_VERSIONS
from tests.helpers import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

PYTHONS = [text.split()[-1] for text in PROJECT["classifiers"] if "Python :: 3." in text]

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


def applying(requirements, python):
    """Return those of the requirements whose markers admit a version of Python."""
    return [
        requirement
        for requirement in map(Requirement, requirements)
        if requirement.marker is None or requirement.marker.evaluate({"python_version": python})
    ]


def pins_for(python):
    """Return the versions in constraints.txt for a version of Python: each package has one."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = applying([line for line in lines if not line.startswith("#")], python)
    versions = {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in pins}
    assert len(versions) == len(pins)
    return versions


@pytest.mark.parametrize("python", PYTHONS)
def test_the_constraints_admit_the_dependencies(python):
    pins = pins_for(python)
    extras = [r for group in PROJECT["optional-dependencies"].values() for r in group]
    for requirement in applying(PROJECT["dependencies"] + extras, python):
        if requirement.name != "ppo-lightning":
            assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement


def test_the_installed_packages_admit_the_first_patch_of_this_python():
    """Debian 12 has Python 3.11.2: no pin needs a later patch of it."""
    python = "{}.{}.0".format(*sys.version_info)
    needs = {package.name: package.metadata.get("Requires-Python", "") for package in distributions()}
    assert [name for name, needed in needs.items() if not SpecifierSet(needed).contains(python)] == []


@pytest.mark.parametrize("name", ["torchrl", "tensordict", "lightning"])
def test_an_upper_bound_is_the_minor_release_after_the_one_that_the_tests_run_with(name):
    """Move bound and pin together, once all tests have passed with the newer release."""
    requirement = next(r for r in map(Requirement, PROJECT["dependencies"]) if r.name == name)
    pins = {Version(pins_for(python)[name]) for python in PYTHONS}
    assert {f"{pin.major}.{pin.minor + 1}" for pin in pins} == {bound_of(requirement)}


def test_tensordict_waits_for_torchrl():
    """When this fails, the installed TorchRL admits a newer tensordict: then both bounds may move."""
    (ours,) = (r for r in map(Requirement, PROJECT["dependencies"]) if r.name == "tensordict")
    (theirs,) = (r for r in applying(requires("torchrl"), "3.11") if r.name == "tensordict")
    assert not theirs.specifier.contains(bound_of(ours))


def test_lightning_waits_for_the_versions_whose_private_names_were_checked():
    (ours,) = (r for r in map(Requirement, PROJECT["dependencies"]) if r.name == "lightning")
    assert all(ours.specifier.contains(checked) for checked in CHECKED_VERSIONS)
    assert pins_for("3.11")["lightning"] in CHECKED_VERSIONS


def bound_of(requirement):
    return next(it.version for it in requirement.specifier if it.operator == "<")
