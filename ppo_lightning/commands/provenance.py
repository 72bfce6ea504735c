"""Where the runs of a benchmark come from: commit, versions and machine."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

PACKAGES = ("torch", "torchrl", "tensordict", "lightning", "gymnasium", "envpool", "mujoco", "ale-py")


def source() -> dict[str, str]:
    """Return what a run that starts now consists of: the package's commit, the versions and the machine."""
    machine = f"{processor()}, {os.cpu_count()} processors"
    return {"commit": commit(), "versions": versions(), "machine": machine}


def commit() -> str:
    """Return the commit of the package, marked if files differ; ``unknown`` outside of a repository."""

    def git(*args: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *args]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = bool(git("status", "--porcelain", ".."))
        return git("rev-parse", "--short=10", "HEAD") + " with changes" * changed
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def versions() -> str:
    """Return the versions of Python and of the packages that decide what a run computes."""
    found = [f"Python {platform.python_version()}"]
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def processor() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
