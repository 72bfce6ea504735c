"""Bundled recipes: found by name, and listed with their measured results."""

import json
import statistics
import tomllib
from pathlib import Path

import pytest
import yaml

from ppo_lightning.commands import recipes
from ppo_lightning.commands.arguments import Arguments
from ppo_lightning.commands.recipes import bundled_recipes, bundled_tasks, find_recipe, measured_return, table
from ppo_lightning.experiments.jobs import jobs_of
from ppo_lightning.experiments.report import read_csv
from tests.helpers import RECIPE as CARTPOLE
from tests.helpers import ROOT


@pytest.mark.parametrize("name", ["ppo/classic", "configs/ppo/classic.yaml", "a/configs/ppo/classic.yaml"])
def test_a_recipe_is_found_by_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_recipe(name) == (CARTPOLE, None)
    flags = ["--name", "ppo/classic"]
    words = Arguments(["fit", *flags, "--config", name]).words()
    assert words == ["fit", f"--config={CARTPOLE}", *flags]
    (job,) = jobs_of([Path(name)], [1], [], ())
    assert str(job.recipe) == CARTPOLE


def test_a_file_has_precedence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "classic").mkdir()
    (tmp_path / "classic/cartpole").write_text("data: {num_envs: 2}")
    assert find_recipe("classic/cartpole") == ("classic/cartpole", None)
    assert find_recipe("data: {num_envs: 2}") == ("data: {num_envs: 2}", None), "--config takes YAML, too"


# Aliases


@pytest.mark.parametrize("name", ["rpo/hopper", "configs/rpo/hopper.yaml"])
def test_an_alias_is_a_recipe_with_flags_that_others_override_and_a_sentence_says_so(name, output_of, capsys):
    recipes._announce.cache_clear()
    more = json.dumps({"model": {"gamma": 0.9}, "data": {"total_timesteps": 4096}})
    flags = ["--config", name, "--config", more, "--data.num_envs", "3", "--print_config"]
    settings = yaml.safe_load(output_of("fit", *flags))
    model, data = settings["model"]["init_args"], settings["data"]
    assert (settings["name"], data["env_id"], data["num_envs"]) == ("rpo_hopper", "Hopper-v4", 3)
    assert (model["rpo_alpha"], model["gamma"], data["total_timesteps"]) == (0.01, 0.9, 4096)
    assert model["num_minibatches"] == 32, "of the recipe"
    recipes._announce.cache_clear()
    (job,) = jobs_of([Path(name)], [1], [], ("--data.num_envs=3",))
    assert (job.label, job.recipe) == ("hopper", ROOT / "configs/rpo/mujoco.yaml")
    assert (job.settings["env_id"], job.settings["num_envs"]) == ("Hopper-v4", 3)
    command = "rpo/mujoco --data.env_id Hopper-v4 --model.rpo_alpha 0.01"
    sentence = f"The recipe rpo/hopper is now {command}: its old name works until 0.3.\n"
    assert capsys.readouterr().err == sentence
    find_recipe(name)
    assert capsys.readouterr().err == "", "once"


def test_an_alias_names_no_recipe_of_today():
    assert len(bundled_recipes()) <= 60
    assert not bundled_recipes().keys() & bundled_tasks().keys()
    assert {task.recipe for task in bundled_tasks().values()} <= bundled_recipes().keys()


# The table


def measured_returns():
    """Return the measured return of each row, by the arguments of fit."""
    return {arguments: measured for measured, _, arguments in table()}


def test_the_table_has_every_task_and_the_means_of_its_runs():
    rows = measured_returns()
    assert (
        len(rows)
        == len([*table()])
        == len(bundled_tasks())
        + len(bundled_recipes().keys() - {task.recipe for task in bundled_tasks().values()})
    )
    runs = read_csv(ROOT / "benchmarks/results/mujoco/runs.csv")
    returns = [float(run["episodic_return"]) for run in runs if run["recipe"] == "hopper"]
    expected = f"{statistics.mean(returns):.1f} ± {statistics.stdev(returns):.1f} (3 seeds)"
    assert rows["--config ppo/mujoco --data.env_id Hopper-v4 --data.total_timesteps 1000000"] == expected
    pong = "--config sac/pong --data.env_id ALE/Pong-v5 --data.total_timesteps 5000000"
    assert rows[pong] == "", "not measured"
    assert sum(map(bool, rows.values())) >= 16


def test_the_documented_results_are_those_of_the_table():
    page = (ROOT / "docs/benchmarks.md").read_text()
    for name in ("classic/acrobot", "mujoco/walker2d", "mujoco/pusher", "memory/minigrid"):
        task = bundled_tasks()[name]
        measured = measured_return(bundled_recipes()[task.recipe], task.label, "")
        line = next(line for line in page.splitlines() if line.startswith(f"| [`{name}`]"))
        assert f"| {measured.removesuffix(' (3 seeds)')}" in line


def test_the_runs_that_recipes_name_are_in_the_wheel():
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    lines = [line for path in bundled_recipes().values() for line in path.read_text().splitlines()]
    named = {line.removeprefix("# Measured: ") for line in lines if line.startswith("# Measured: ")}
    assert named == {path for path in wheel["only-include"] if path.startswith("benchmarks/")}
