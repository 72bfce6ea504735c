"""The aggregate of benchmarks/best.py, and the figures of benchmarks/best.md that come from it."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from benchmarks import best
from ppo_lightning.experiments.report import interval
from tests.helpers import ROOT


def test_twice_the_reference_is_2():
    references = [np.array([1.0, 3.0]), np.array([-30.0, -30.0])]
    result = best.aggregate([np.array([4.0, 4.0]), np.array([-15.0, -15.0])], references)
    assert result["iqm"] == pytest.approx(2)
    assert result["improvement"] == 1
    low, high = result["interval"]
    assert low < 2 < high, "the reference of the first task is resampled"


def test_the_probability_of_improvement():
    assert best.probability_of_improvement([1, 2], [3, 4]) == 1
    assert best.probability_of_improvement([1, 2], [1, 2]) == 0.5
    assert best.probability_of_improvement([3, 3], [1, 4]) == 0.5


def test_the_shaded_interval_is_that_of_the_seeds_with_a_value():
    axis = Figure().subplots()
    curves = np.ma.masked_invalid([[0.0, 1.0, np.nan], [2.0, 1.0, 3.0], [7.0, 1.0, 4.0]])
    best.shade_interval(axis, np.array([0.0, 10.0, 20.0]), curves, "tab:blue")
    (path,) = axis.collections[0].get_paths()
    for point, values in ((0, [0.0, 2.0, 7.0]), (10, [1.0, 1.0, 1.0]), (20, [3.0, 4.0])):
        edges = path.vertices[path.vertices[:, 0] == point, 1]
        assert (edges.min(), edges.max()) == pytest.approx(interval(values))


def test_the_documented_figures_are_those_of_the_script(capsys, tmp_path):
    best.main(["--images", str(tmp_path)])
    assert all((tmp_path / name).stat().st_size > 10_000 for name in ("best.png", "best_others.png"))
    out = capsys.readouterr().out
    docs = (ROOT / "benchmarks/best.md").read_text()
    best_table, best_aggregate, common_table, common_aggregate = out.strip().split("\n\n")
    assert best_table.count("\n") == 1 + len(best.MUJOCO + best.CLASSIC + best.DM_CONTROL)
    assert common_table.count("\n") == 1 + len(best.MUJOCO)
    assert all(f"{table}\n\n" in docs for table in (best_table, common_table))
    sentences = " ".join(docs.split())
    for aggregate in (best_aggregate, common_aggregate):
        iqm, low, high, improvement = (
            word.strip("[],") for word in aggregate.split() if word.strip("[],")[0].isdigit()
        )
        assert f"is {iqm} with a 95 % interval of {low} to {high}" in sentences
        assert f"is better than a run of the reference is {improvement}." in sentences
