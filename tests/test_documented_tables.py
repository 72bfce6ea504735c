"""Documented tables equal the output of their scripts, and name settings and recipes that exist."""

import inspect
import re
from pathlib import Path

import pytest

from benchmarks import candidate_table, dm_control_table
from ppo_lightning import PPO, MLPAgent, RolloutDataModule
from ppo_lightning.commands.recipes import bundled_recipes

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize(
    ("script", "page"), [(candidate_table, "best.md"), (dm_control_table, "continuous.md")]
)
def test_a_documented_table_is_that_of_its_script(script, page, capsys):
    script.main([])
    for table in capsys.readouterr().out.split("\n\n"):
        assert table.count("\n") > 4
        assert table in (DOCS / page).read_text()


def test_users_of_other_libraries_find_settings_and_recipes_that_exist():
    text = (DOCS / "coming_from.md").read_text()
    owners = {"data": RolloutDataModule, "model": PPO, "model.agent": MLPAgent}
    known = {
        f"{prefix}.{name}" for prefix, owner in owners.items() for name in inspect.signature(owner).parameters
    }
    named = set(re.findall(r"\b(?:data|model)(?:\.\w+)+", text))
    assert len(named) > 25 and named <= known
    cells = re.findall(r"^\| `\w+\.py`.*?\|(.*?)\|", text, re.MULTILINE)
    recipes = set(re.findall(r"`(\w+/\w+)`", " ".join(cells)))
    assert len(recipes) > 15 and recipes <= bundled_recipes().keys()
