"""The aggregate of benchmarks/best.py, and the figures of docs/best.md that come from it."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks import best

ROOT = Path(__file__).parents[1]


def test_twice_the_reference_is_2():
    references = [np.array([1.0, 3.0]), np.array([-30.0, -30.0])]
    result = best.aggregate([np.array([4.0, 4.0]), np.array([-15.0, -15.0])], references)
    assert result["iqm"] == pytest.approx(2)
    assert result["improvement"] == 1
    low, high = result["interval"]
    assert low < 2 < high, "the reference of the first task is resampled"


def test_the_documented_figures_are_those_of_the_script(capsys, tmp_path):
    best.main(["--images", str(tmp_path)])
    assert all((tmp_path / name).stat().st_size > 10_000 for name in ("best.png", "best_others.png"))
    lines = capsys.readouterr().out.splitlines()
    docs = (ROOT / "docs/best.md").read_text()
    rows = [line.strip("|").split(" | ", 1) for line in lines if line.startswith("| ") and "±" in line]
    assert len(rows) == len(best.MUJOCO + best.OTHERS)
    for task, figures in rows:
        assert any(line.startswith(f"|{task}") and f"| {figures}|" in line for line in docs.splitlines()), (
            task,
            figures,
        )
    aggregate = next(line for line in lines if line.startswith("Interquartile mean"))
    iqm, low, high, improvement = (
        word.strip("[],") for word in aggregate.split() if word.strip("[],")[0].isdigit()
    )
    sentences = " ".join(docs.split())
    assert f"is {iqm} with a 95 % interval of {low} to {high}" in sentences
    assert f"is better than a run of the reference is {improvement}." in sentences
