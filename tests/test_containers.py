"""The container and the workflow: linted, and the steps of the Dockerfile run in a fresh directory."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.helpers import ROOT

WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())


def instructions():
    """Return the instructions of the Dockerfile with continued lines joined: (keyword, arguments)."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    return [tuple(line.split(maxsplit=1)) for line in text.replace("\\\n", " ").splitlines() if line]


def included():
    """Return the paths that .dockerignore leaves in the build context."""
    return [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]


def test_hadolint_has_no_complaint():
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("hadolint has wheels for Linux on x86-64 only")
    done = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_container_is_pinned_and_has_no_root():
    found = instructions()
    installs = [args for word, args in found if word == "RUN" and "pip install" in args]
    assert len(installs) == 3
    assert all("--constraint" in args or "==" in args for args in installs)
    assert all("--no-cache-dir" in args for args in installs)
    users = [args for word, args in found if word == "USER"]
    last = max(found.index(("RUN", command)) for command in installs)
    assert users == ["1000"] and found.index(("USER", "1000")) > last
    copied = {path for word, args in found if word == "COPY" for path in args.split()[:-1]}
    assert copied <= set(included()) and all((ROOT / path).exists() for path in included())
    (hatchling,) = re.findall(r"^hatchling==.*", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert hatchling in installs[0]


@pytest.mark.slow
def test_the_steps_of_the_dockerfile_run_in_a_fresh_directory(tmp_path):
    """RUN, COPY and WORKDIR, with pip in a new virtual environment, as far as they need no root."""
    context, root = tmp_path / "context", tmp_path / "root"
    for path in included():
        copy = shutil.copytree if (ROOT / path).is_dir() else shutil.copy
        (context / path).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / path, context / path)
    arguments: dict[str, str] = {}
    folder = root
    folders = {"dist": root / "build/dist", "tmp": root / "tmp"}
    for word, args in instructions():
        if word == "FROM":
            venv = root / f"venv{len(arguments)}"
            subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        elif word == "ARG":
            name, _, default = args.partition("=")
            arguments[name] = "https://pypi.org/simple" if name == "TORCH_INDEX" else default
        elif word == "WORKDIR":
            folder = root / args.lstrip("/")
            folder.mkdir(parents=True)
        elif word == "COPY":
            *sources, target = args.split()
            target = folder / target if not target.startswith("/") else root / target.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            for source in sources:
                copy = shutil.copytree if (context / source).is_dir() else shutil.copy
                copy(context / source, target)
        elif word == "RUN" and not args.startswith("useradd"):  # needs root
            command = re.sub(r"--mount=\S+", "", args)
            command = re.sub(r"(?<![\w/])/(dist|tmp)/", lambda match: f"{folders[match[1]]}/", command)
            env = {name: value for name, value in os.environ.items() if name.startswith("PIP_")} | arguments
            env |= {"PATH": f"{venv}/bin:/usr/local/bin:/usr/bin:/bin", "HOME": str(tmp_path)}
            subprocess.run(["bash", "-ec", command], cwd=folder, env=env, check=True)
    shutil.rmtree(context)
    entrypoint, command = (
        yaml.safe_load(args) for word, args in instructions() if word in ("ENTRYPOINT", "CMD")
    )
    script = str(venv / "bin" / entrypoint[0])
    listed = subprocess.run([script, *command], cwd=folder, check=True, capture_output=True, text=True).stdout
    assert "classic/cartpole" in listed
    fit = [script, "fit", "--config", "classic/cartpole", "--data.total_timesteps", "2048"]
    assert "wall time:" in subprocess.run(fit, cwd=folder, check=True, capture_output=True, text=True).stdout
    subprocess.run([venv / "bin/python", "-m", "pip", "check"], check=True)


def test_the_workflow_has_the_steps_of_ci():
    steps = [step.get("run") for step in WORKFLOW["jobs"]["linux"]["steps"]]
    lines = [line for line in (ROOT / ".ci/run").read_text().splitlines() if line.startswith("make ")]
    assert [step for step in steps if step] == lines
    systems = {entry["os"] for entry in WORKFLOW["jobs"]["others"]["strategy"]["matrix"]["include"]}
    assert systems == {"macos-latest", "windows-latest"}


def test_the_files_that_the_workflow_names_are_there():
    text = (ROOT / ".github/workflows/ci.yml").read_text()
    assert all((ROOT / path).is_file() for path in re.findall(r"--ignore (\S+)", text))
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"run: make ([\w-]+)", text)) <= set(targets)
    classifiers = (ROOT / "pyproject.toml").read_text()
    assert all(f"Python :: {python}" in classifiers for python in re.findall(r'"(3\.\d+)"', text))
