"""Bundled recipes: found by name, and listed with their measured results."""

import statistics
import tomllib
from pathlib import Path

from ppo_lightning.commands.arguments import Arguments
from ppo_lightning.commands.recipes import bundled_recipes, recipe_path, table
from ppo_lightning.experiments.jobs import jobs_of
from ppo_lightning.experiments.report import read_csv
from tests.helpers import RECIPE as CARTPOLE
from tests.helpers import ROOT


def test_a_recipe_is_found_by_name():
    assert recipe_path("classic/cartpole") == CARTPOLE
    flags = ["--name", "classic/cartpole"]
    words = Arguments(["fit", *flags, "--config", "classic/cartpole"]).words()
    assert words == ["fit", f"--config={CARTPOLE}", *flags]
    (job,) = jobs_of([Path("classic/cartpole")], [1], [], ())
    assert str(job.recipe) == CARTPOLE


def test_a_file_has_precedence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "classic").mkdir()
    (tmp_path / "classic/cartpole").write_text("data: {num_envs: 2}")
    assert recipe_path("classic/cartpole") == "classic/cartpole"
    assert recipe_path("data: {num_envs: 2}") == "data: {num_envs: 2}", "--config takes YAML, too"


def test_the_table_has_every_recipe_and_the_means_of_its_runs():
    rows = {name: (env_id, steps, measured) for name, env_id, steps, measured, _ in table()}
    assert rows.keys() == bundled_recipes().keys()
    runs = read_csv(ROOT / "benchmarks/results/mujoco/runs.csv")
    returns = [float(run["episodic_return"]) for run in runs if run["recipe"] == "hopper"]
    expected = f"{statistics.mean(returns):.1f} ± {statistics.stdev(returns):.1f} (3 seeds)"
    assert rows["mujoco/hopper"] == ("Hopper-v4", "1 000 000", expected)
    assert rows["rnd/montezuma"] == ("ALE/MontezumaRevenge-v5", "2 000 000 000", ""), "not measured"
    assert sum(bool(measured) for *_, measured in rows.values()) >= 16


def test_the_documented_results_are_those_of_the_table():
    page = (ROOT / "docs/benchmarks.md").read_text()
    rows = {name: measured for name, _, _, measured, _ in table()}
    for name in ("classic/acrobot", "mujoco/walker2d", "mujoco/pusher", "memory/minigrid"):
        measured = rows[name].removesuffix(" (3 seeds)")
        line = next(line for line in page.splitlines() if line.startswith(f"| [`{name}`]"))
        assert f"| {measured}" in line


def test_the_runs_that_recipes_name_are_in_the_wheel():
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    lines = [line for path in bundled_recipes().values() for line in path.read_text().splitlines()]
    named = {line.removeprefix("# Measured: ") for line in lines if line.startswith("# Measured: ")}
    assert named == {path for path in wheel["only-include"] if path.startswith("benchmarks/")}
