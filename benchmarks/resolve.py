"""Show which extras can be installed with which Python: python benchmarks/resolve.py [--newest]

pip resolves the extras with the versions of constraints.txt, or, with --newest, with the newest versions that
pyproject.toml admits, and says on stderr why an extra cannot be installed. Nothing is installed. Needs pip 24
or newer, and Linux.
"""

import argparse
import functools
import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
TOGETHER = ",".join(
    name for name in EXTRAS if name != "procgen"
)  # which needs older packages than the others
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
SHOWN = ("envpool", "mujoco", "torch", "torchrl", "tensordict", "lightning", "gymnasium", "numpy")
# pip chooses wheels for another Python, but compares markers and Requires-Python with the one it runs in.
# 99: the newest patch release.
PIP = """
import sys
from pip._internal.cli.main import main
from pip._internal.resolution.resolvelib import factory
from pip._vendor.packaging import markers

python = sys.argv[1]
environment, requires = markers.default_environment, factory.RequiresPythonCandidate
markers.default_environment = lambda: {
    **environment(), "python_version": python, "python_full_version": python + ".99"
}
factory.RequiresPythonCandidate = lambda _: requires((*map(int, python.split(".")), 99))
sys.exit(main(sys.argv[2:]))
"""


@functools.cache
def resolve(extras: str, python: str, newest: bool) -> dict[str, str] | str:
    """Return the versions that pip chooses, or the reason why there is no solution."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-c", PIP, python, "install", "--dry-run", "--ignore-installed"]
        command += ["--use-feature", "fast-deps", "--python-version", python, "--only-binary", ":all:"]
        command += ["--target", folder, "--report", str(report), f".[{extras}]"]
        command += [] if newest else ["--constraint", "constraints.txt"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
            return "\n".join([*errors, done.stdout.partition("The conflict is caused by:")[2].rstrip()])
        packages = [package["metadata"] for package in json.loads(report.read_text())["install"]]
        return {package["name"].lower(): package["version"] for package in packages}


def missing(extra: str, python: str) -> list[str]:
    """Return the packages of an extra that its markers leave out on a Python."""
    wanted = {Requirement(text).name: False for text in EXTRAS[extra]}
    for requirement in map(Requirement, EXTRAS[extra]):
        marker = requirement.marker
        wanted[requirement.name] |= marker is None or marker.evaluate({"python_version": python})
    return [name for name, applies in wanted.items() if not applies]


def cell(extra: str, python: str, newest: bool) -> str:
    """Return what the table says of an extra with a Python."""
    # What can be installed together can be installed alone.
    is_together = extra != "procgen" and isinstance(resolve(TOGETHER, python, newest), dict)
    found = {} if is_together else resolve(extra, python, newest)
    if isinstance(found, str):
        print(f"{extra} with Python {python}: {found}", file=sys.stderr)
        return "no"
    absent = ", ".join(missing(extra, python))
    return f"yes, without {absent}" if absent else "yes"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--newest", action="store_true")
    options = parser.parse_args()
    print(f"| extra | {' | '.join(PYTHONS)} |", f"|---{'|---' * len(PYTHONS)}|", sep="\n")
    for name in EXTRAS:
        cells = [cell(name, python, options.newest) for python in PYTHONS]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    print("\nVersions of all extras together:")
    for python in PYTHONS:
        found = resolve(TOGETHER, python, options.newest)
        if isinstance(found, dict):
            print(f"{python}:", ", ".join(f"{name} {found[name]}" for name in SHOWN if name in found))
