"""The wheel and the sdist: their content, and training from a wheel outside of the checkout."""

import os
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import ppo_lightning
from tests.helpers import ROOT

pytest.importorskip("hatchling", reason="in the extra dev")
pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def wheel(dist):
    return next(dist.glob("*.whl"))


def test_the_wheel_has_the_package_and_its_data(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {f"ppo_lightning/{path.relative_to(ROOT / 'ppo_lightning')}" for path in files("ppo_lightning")}
    recipes = {
        f"ppo_lightning/{path.relative_to(ROOT)}" for name in ("configs", "zoo") for path in files(name)
    }
    assert {"ppo_lightning/py.typed", "ppo_lightning/experiments/published.csv"} <= package
    assert package | recipes <= names
    others = {name for name in names - package - recipes if ".dist-info/" not in name}
    assert others and all(name.startswith("ppo_lightning/benchmarks/results/") for name in others)
    assert wheel.stat().st_size < 4_000_000


def files(folder):
    return [path for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix != ".pyc"]


def test_the_metadata_is_complete(wheel):
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(archive.read(name))
    assert metadata["Version"] == ppo_lightning.__version__
    fields = "Name Summary Author License-Expression License-File Requires-Python Keywords"
    assert all(metadata[field] for field in fields.split()), metadata.keys()
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "# ppo_lightning" in metadata.get_payload()
    assert {"Typing :: Typed", "Operating System :: POSIX :: Linux"} <= set(metadata.get_all("Classifier"))


def test_the_sdist_builds_the_same_wheel(dist, wheel, tmp_path):
    sdist = next(dist.glob("*.tar.gz"))
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "again")]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    again = zipfile.ZipFile(tmp_path / "again" / wheel.name)
    assert {it.filename: it.CRC for it in again.infolist()} == {
        it.filename: it.CRC for it in zipfile.ZipFile(wheel).infolist()
    }


def test_an_unpacked_wheel_trains_in_an_empty_directory(wheel, tmp_path):
    """The recipe and its measured runs come from the wheel."""
    site, empty = tmp_path / "site", tmp_path / "empty"
    zipfile.ZipFile(wheel).extractall(site)
    empty.mkdir()
    env = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}

    def run(*args):
        command = [sys.executable, "-P", *args]
        return subprocess.run(command, cwd=empty, env=env, check=True, capture_output=True, text=True).stdout

    data = run("-c", "from ppo_lightning.commands.recipes import DATA; print(DATA)")
    assert Path(data.strip()) == site / "ppo_lightning"
    assert "500.0 ± 0.0 (3 seeds)" in run("-m", "ppo_lightning", "recipes")
    flags = ("--config", "classic/cartpole", "--data.total_timesteps", "2048")
    assert "wall time:" in run("-m", "ppo_lightning", "fit", *flags)
    assert (empty / "runs/cartpole/version_0/cli_config.yaml").is_file()
