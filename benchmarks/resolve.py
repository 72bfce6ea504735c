"""Show which extras can be installed with which Python: python benchmarks/resolve.py --uv path/to/uv

uv reads the metadata of the package index, and nothing is installed.
"""

import argparse
import subprocess
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
SHOWN = ("envpool", "mujoco", "torch", "torchrl", "gymnasium", "numpy")


def resolve(uv: str, extra: str, python: str) -> str:
    """Return the versions of the packages of interest, or the reason why there is no solution."""
    command = [uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate", str(PROJECT)]
    command += ["--extra", extra, "--python-version", python, "--python-platform", "linux"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return " ".join(done.stderr.split())[:300]
    pins = dict(line.split("==") for line in done.stdout.split() if "==" in line)
    return ", ".join(f"{name} {pins[name]}" for name in SHOWN if name in pins)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uv", default="uv")
    options = parser.parse_args()
    for name in tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]:
        for version in PYTHONS:
            print(f"| {name} | {version} | {resolve(options.uv, name, version)} |", flush=True)
