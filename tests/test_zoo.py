"""The bundled agents reach the returns that are recorded for them."""

import csv
import math
import re

import pytest

from benchmarks import zoo
from ppo_lightning import PPO, AgentModule
from ppo_lightning.commands import play, recipes

ROWS = {row["agent"]: row for row in csv.DictReader((zoo.ZOO / "agents.csv").open())}


def test_the_zoo_is_small_and_complete():
    folders = {path.parent.relative_to(zoo.ZOO).as_posix() for path in zoo.ZOO.rglob("model.ckpt")}
    assert folders == set(ROWS) == set(zoo.AGENTS)
    assert sum(path.stat().st_size for path in zoo.ZOO.rglob("*")) < 3_000_000


@pytest.mark.parametrize(
    "name",
    [
        name if name.startswith("classic") else pytest.param(name, marks=pytest.mark.integration)
        for name in ROWS
    ],
)
def test_a_bundled_agent_reaches_its_return(name):
    mean, std, episodes = (float(ROWS[name][key]) for key in ("episodic_return", "std", "episodes"))
    results = zoo.evaluate(zoo.ZOO / name)
    # The episodes are the recorded ones, but simulators differ in the last bits between processors.
    difference = abs(results["eval/episodic_return"] - mean)
    assert difference <= 3 * math.sqrt(2 / episodes) * max(std, results["eval/episodic_return_std"]) + 0.01


def test_a_bundled_agent_is_loaded_and_shown_by_its_name(tmp_path, capsys):
    assert isinstance(PPO.from_pretrained("classic/cartpole"), PPO)
    assert type(AgentModule.from_pretrained("classic/acrobot")) is PPO
    play.main(["classic/cartpole", "--output", str(tmp_path / "video.mp4")])
    assert "returns: 500" in capsys.readouterr().out and (tmp_path / "video.mp4").stat().st_size > 1000
    recipes.main([])
    agents = re.findall(r"  play (\S+)", capsys.readouterr().out)
    names = recipes.bundled_recipes().keys() | recipes.bundled_tasks().keys()
    assert set(agents) == ROWS.keys() & names
