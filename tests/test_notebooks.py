"""The notebooks run from top to bottom, in a quick form."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"

# What each notebook trains for, and what the test has it train for.
SHORTER = {"1_cartpole.ipynb": ("total_timesteps=500_000", "total_timesteps=2_048")}


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.delenv("MPLBACKEND", raising=False)  # EnvPool, imported by other tests, switches matplotlib's pictures off
    notebook = nbformat.read(path, as_version=4)
    long, short = SHORTER[path.name]
    assert sum(cell.source.count(long) for cell in notebook.cells) == 1
    for cell in notebook.cells:
        cell.source = cell.source.replace(long, short)
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    pictures = [output for output in outputs if {"image/png", "image/gif"} & set(output.get("data", {}))]
    assert len(pictures) == 2, "a plot of the return and the agent"
    assert "wall time" in str(outputs)


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook_is_committed_with_its_pictures(path):
    outputs = [output for cell in nbformat.read(path, as_version=4).cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any(output.output_type == "error" for output in outputs)
