"""Provenance of a run: commit, package versions and machine."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

PACKAGES = (
    "ppo-lightning",
    "torch",
    "torchrl",
    "tensordict",
    "lightning",
    "gymnasium",
    "envpool",
    "mujoco",
    "ale-py",
)


def source() -> dict[str, str]:
    """Return the provenance of a run that starts now: commit, versions and machine."""
    machine = f"{processor()}, {os.cpu_count()} processors"
    return {"commit": commit(), "versions": versions(), "machine": machine}


def commit() -> str:
    """Return the commit of the package, marked if files have changed; ``unknown`` outside a repository."""

    def git(*args: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *args]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # an installed package has no commit
        changed = bool(git("status", "--porcelain", ".."))
        return git("rev-parse", "--short=10", "HEAD") + " with changes" * changed
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def versions() -> str:
    """Return the versions of Python and of the packages that affect the results of a run."""
    entries = [f"Python {platform.python_version()}"]
    for name in PACKAGES:
        try:
            entries.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(entries)


def processor() -> str:
    """Return the name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
