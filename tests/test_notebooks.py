"""The notebooks run from top to bottom, with small budgets."""

import shutil
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"

# Notebook -> replacements that shorten it, the number of pictures, and a text in the outputs.
QUICK = {
    "1_cartpole.ipynb": ({"total_timesteps=500_000": "total_timesteps=2_048"}, 2, "wall time"),
    "2_details.ipynb": (
        {"TOTAL = 40_000": "TOTAL = 2_048", "seeds = (1, 2)": "seeds = (1,)"},
        2,
        "largest distance",
    ),
    "3_your_own.ipynb": ({"TOTAL = 60_000": "TOTAL = 1_024"}, 3, "wall time"),
    "4_benchmark.ipynb": ({'TOTAL = "20000"': 'TOTAL = "1024"'}, 1, "difference [95 %]"),
    "5_use_an_agent.ipynb": ({"TOTAL = 40_000": "TOTAL = 1_024"}, 1, "onnxruntime:"),
}


@pytest.mark.integration
@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path, monkeypatch):
    # EnvPool, which other tests import, disables matplotlib's pictures.
    monkeypatch.delenv("MPLBACKEND", raising=False)
    notebook = nbformat.read(path, as_version=4)
    shorter, pictures, text = QUICK[path.name]
    for long, short in shorter.items():
        assert sum(cell.source.count(long) for cell in notebook.cells) == 1
        for cell in notebook.cells:
            cell.source = cell.source.replace(long, short)
    for folder in ("configs", "benchmarks/results/compare"):
        shutil.copytree(NOTEBOOKS.parent / folder, tmp_path / folder)
    NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    images = [output for output in outputs if {"image/png", "image/gif"} & set(output.get("data", {}))]
    assert len(images) >= pictures
    assert text in str(outputs)


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook_is_committed_with_its_pictures(path):
    notebook = nbformat.read(path, as_version=4)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any(output.output_type == "error" for output in outputs)
