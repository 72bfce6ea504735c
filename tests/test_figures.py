"""The pictures of benchmarks/figures.py, and the aggregate of benchmarks/tables.py."""

import numpy as np
import pytest
from matplotlib import image
from matplotlib.figure import Figure

from benchmarks import figures, tables
from ppo_lightning.experiments.report import interval
from tests.helpers import ROOT


def test_twice_the_reference_is_2():
    references = [np.array([1.0, 3.0]), np.array([-30.0, -30.0])]
    result = tables.aggregate([np.array([4.0, 4.0]), np.array([-15.0, -15.0])], references)
    assert result["iqm"] == pytest.approx(2)
    assert result["improvement"] == 1
    low, high = result["interval"]
    assert low < 2 < high, "the reference of the first task is resampled"


def test_the_probability_of_improvement():
    assert tables.probability_of_improvement([1, 2], [3, 4]) == 1
    assert tables.probability_of_improvement([1, 2], [1, 2]) == 0.5
    assert tables.probability_of_improvement([3, 3], [1, 4]) == 0.5


def test_the_shaded_interval_is_that_of_the_seeds_with_a_value():
    axis = Figure().subplots()
    curves = np.ma.masked_invalid([[0.0, 1.0, np.nan], [2.0, 1.0, 3.0], [7.0, 1.0, 4.0]])
    figures.shade_interval(axis, np.array([0.0, 10.0, 20.0]), curves, "tab:blue")
    (path,) = axis.collections[0].get_paths()
    for point, values in ((0, [0.0, 2.0, 7.0]), (10, [1.0, 1.0, 1.0]), (20, [3.0, 4.0])):
        edges = path.vertices[path.vertices[:, 0] == point, 1]
        assert (edges.min(), edges.max()) == pytest.approx(interval(values))


def test_the_documented_figures_are_those_of_the_script(capsys):
    tables.main(["best"])
    out = capsys.readouterr().out
    docs = (ROOT / "benchmarks/best.md").read_text()
    best_table, best_aggregate, common_table, common_aggregate = out.strip().split("\n\n")
    assert best_table.count("\n") == 1 + len(tables.MUJOCO + tables.CLASSIC + tables.DM_CONTROL)
    assert common_table.count("\n") == 1 + len(tables.MUJOCO)
    assert all(f"{table}\n\n" in docs for table in (best_table, common_table))
    sentences = " ".join(docs.split())
    for aggregate in (best_aggregate, common_aggregate):
        iqm, low, high, improvement = (
            word.strip("[],") for word in aggregate.split() if word.strip("[],")[0].isdigit()
        )
        assert f"is {iqm} with a 95 % interval of {low} to {high}" in sentences
        assert f"is better than a run of the reference is {improvement}." in sentences


@pytest.mark.integration
def test_every_picture_is_drawn_at_twice_the_width_of_its_place(tmp_path):
    figures.main(["--output", str(tmp_path)])
    for name in figures.FIGURES:
        height, width, _ = image.imread(tmp_path / f"{name}.png").shape
        assert width == 1600 and height > 500, name
        assert (ROOT / f"docs/images/{name}.png").is_file(), name
