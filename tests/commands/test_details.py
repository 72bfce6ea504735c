"""The manifest of the implementation details, and `benchmarks/ablate.py`."""

from pathlib import Path

import pytest

from benchmarks.ablate import FULL, SWITCHES, jobs_without, recipe_manifest
from ppo_lightning import ConfigError
from ppo_lightning.algorithms.manifest import DETAILS
from ppo_lightning.commands.details import places

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPES = {
    "ppo/classic.yaml": [],
    "ppo/mujoco.yaml": [],
    "ppo/atari.yaml": ["--data.num_envs", "1"],
}


@pytest.fixture(scope="module")
def manifests():
    return {
        name: recipe_manifest(["--config", str(CONFIGS / name), *flags]) for name, flags in RECIPES.items()
    }


def test_every_comment_in_the_code_has_an_entry_and_every_entry_a_comment():
    assert places().keys() == DETAILS.keys()
    for place in places().values():
        path, line = place.rsplit(":", 1)
        assert (CONFIGS.parent / path).read_text().splitlines()[int(line) - 1].strip(), (
            "points at the code, not at the comment"
        )
    assert places()["13"] == places()["26"]


def test_a_number_of_environments_that_is_left_out_has_its_value():
    assert recipe_manifest(["--data.env_id", "CartPole-v1"])["1"] == 8


def test_a_detail_has_the_value_of_its_setting(manifests):
    cartpole, hopper, breakout = manifests.values()
    assert cartpole["1"] == cartpole["6"] == 4 and cartpole["7"] is cartpole["13"] is True
    assert breakout["13"] is False, "one network for actor and critic"
    assert cartpole["14"] is cartpole["33"] is None, "settings of other environments and agents"
    assert cartpole["28"] is cartpole["30"] is False
    assert hopper["28"] is hopper["30"] is True
    assert breakout["14"] == 30 and breakout["15"] == breakout["20"] == 4 and breakout["16"] is True
    assert cartpole["12"] is hopper["24"] is breakout["21"] is True
    for manifest in manifests.values():
        assert manifest.keys() == DETAILS.keys()


@pytest.mark.parametrize("name", RECIPES)
def test_a_switch_changes_its_detail(name, manifests):
    """All switches of a recipe are set at once, except those that share an option."""
    manifest, flags, switched = manifests[name], [], []
    for number, switch in SWITCHES.items():
        if manifest[number] not in (None, False) and switch[0] not in flags:
            flags += switch
            switched.append(number)
    without = recipe_manifest(["--config", str(CONFIGS / name), *RECIPES[name], *flags])
    assert len(switched) >= 7
    for number in switched:
        assert without[number] != manifest[number], number


def test_the_command_prints_the_table_of_a_recipe(output_of, tmp_path):
    out = output_of("details", "--config", "ppo/classic", "--model.norm_adv", "false")
    assert "| 7 | advantage normalization | off | ppo_lightning/algorithms/losses.py:" in out
    assert list(tmp_path.iterdir()) == [], "and leaves no file"


def test_a_recipe_may_have_callbacks_that_write(output_of):
    flags = [f"--trainer.callbacks+={name}" for name in ("ModelCheckpoint", "LearningRateMonitor")]
    assert "| 7 | advantage normalization | on |" in output_of("details", "--config", "ppo/classic", *flags)


# Ablation


def test_an_ablation_trains_with_and_without_each_detail():
    jobs = jobs_without(CONFIGS / "ppo/classic.yaml", [1, 2], ["7", "9"], ("--data.num_envs", "2"))
    assert [(job.label, job.seed, job.flags) for job in jobs[:3]] == [
        (FULL, 1, ("--data.num_envs", "2")),
        ("without 7, advantage normalization", 1, ("--data.num_envs", "2", "--model.norm_adv", "false")),
        ("without 9, clipped value loss", 1, ("--data.num_envs", "2", "--model.clip_vloss", "false")),
    ]
    assert [job.seed for job in jobs] == [1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize(
    ("number", "message"),
    [
        ("99", "there is no such detail"),
        ("28", "is off in this recipe"),
        ("2", "has no switch"),
        ("14", "does not apply to this recipe"),
    ],
)
def test_what_cannot_be_switched_off_is_refused(number, message):
    with pytest.raises(ConfigError, match=message):
        jobs_without(CONFIGS / "ppo/classic.yaml", [1], [number], ())
