"""A checkpoint or a saved configuration that names a setting or class which is gone ends in one sentence."""

import contextlib

import pytest
import torch

from ppo_lightning import PPO, ConfigError, RolloutDataModule, __version__
from ppo_lightning.commands import cli
from tests.checkpoints.conftest import DATA, MISSING

SMALL = {"num_envs": 2, "num_steps": 16, "total_timesteps": 64, "eval_episodes": 1}
MODEL = "hyper_parameters"
GONE = {  # what the sentence names -> entry of the checkpoint, its value
    "model.gone": (MODEL, "gone", 1),
    "data.gone": (DATA, "gone", None),
    "model.agent.gone": ("agent", "init_args", "gone", 1),
    "model.agent.body": ("agent", "init_args", "body", "residual"),
    "ppo_lightning.algorithms.gone.Gone": (MODEL, "_class_path", "ppo_lightning.algorithms.gone.Gone"),
    "ppo_lightning.models.mlp.Gone": ("agent", "class_path", "ppo_lightning.models.mlp.Gone"),
}
COMMANDS = [["fit", "--trainer.logger", "false"], ["validate"], ["export", "--hub", "hub"]]


@pytest.mark.parametrize("name", GONE)
def test_a_setting_or_class_that_is_gone_ends_in_one_sentence(name, edited, refusal_of, fit):
    path = edited("ppo_lightning", "0.1.0", source=edited(*GONE[name]))
    gone = rf"names {name}, which .* does not have: version 0\.1\.0 wrote it"
    with pytest.raises(ConfigError, match=gone):
        fit(SMALL | {"total_timesteps": 128}, ckpt_path=path)
    with pytest.raises(ConfigError, match=gone):
        RolloutDataModule.load_from_checkpoint(path)
    acts = name == "data.gone"  # an agent acts without the settings of rollouts
    with contextlib.nullcontext() if acts else pytest.raises(ConfigError, match=gone):
        PPO.load_from_checkpoint(path)
    for command, *flags in COMMANDS:
        if acts and command == "export":
            cli.main([command, "--ckpt_path", path, *flags])
        else:
            assert f"names {name}, which" in refusal_of(command, "--ckpt_path", path, *flags), command


@pytest.mark.parametrize(
    "entry",
    [
        ("agent", "init_args", "head", "bins"),
        ("agent", "init_args", "memory", "gru"),
        ("agent", "init_args", "activation", "gone"),
        (MODEL, "learning_rate", "gone"),
    ],
)
def test_a_value_of_version_0_1_0_that_is_gone_is_named_with_the_version(entry, edited):
    path = edited("ppo_lightning", "0.1.0", source=edited(*entry))
    with pytest.raises(ConfigError, match=rf"{entry[-1]}.*version 0\.1\.0 wrote"):
        PPO.load_from_checkpoint(path)


def test_an_agent_that_names_the_body_that_is_left_acts_and_resumes(edited, fit):
    path = edited("agent", "init_args", "body", "mlp")
    assert PPO.load_from_checkpoint(path).predict(torch.zeros(4)) in (0, 1)
    assert fit(SMALL | {"num_envs": 4, "total_timesteps": 256}, ckpt_path=path).rollouts_done == 4


def test_a_checkpoint_without_a_version_is_of_an_older_one(edited):
    path = edited("ppo_lightning", MISSING, source=edited(*GONE["model.gone"]))
    with pytest.raises(ConfigError, match="an older version wrote it"):
        PPO.load_from_checkpoint(path)


class Popping(PPO):
    """A class whose own setting is not in its signature."""

    def __init__(self, **settings):
        self.bonus = settings.pop("bonus", 0)
        super().__init__(**settings)


class Fixed(PPO):
    """A class that fixes a setting of its base."""

    def __init__(self, bonus: float = 1.0):
        super().__init__(gamma=0.5)


@pytest.mark.parametrize("user_class", [Popping, Fixed])
def test_settings_of_a_class_of_the_user_are_known(user_class, fit, edited, tmp_path):
    path = tmp_path / "user.ckpt"
    fit(SMALL, {"bonus": 2.0}, ppo=user_class).trainer.save_checkpoint(path)
    assert torch.load(path, weights_only=True)["ppo_lightning"] == __version__
    assert type(PPO.load_from_checkpoint(path)) is type(user_class.load_from_checkpoint(path)) is user_class
    fit(SMALL | {"total_timesteps": 128}, {"bonus": 2.0}, ppo=user_class, ckpt_path=path)
    path = edited("ppo_lightning", "0.1.0", source=edited(MODEL, "gone", 1, source=path))
    with pytest.raises(ConfigError, match=r"gone.*0\.1\.0 wrote"):
        PPO.load_from_checkpoint(path)
    refusal = pytest.raises(ConfigError, match=r"names model\.gone")
    with contextlib.nullcontext() if user_class is Popping else refusal:  # which takes any keyword
        fit(SMALL | {"total_timesteps": 128}, {"bonus": 2.0}, ppo=user_class, ckpt_path=path)


def test_an_algorithm_that_nothing_has_imported_is_named(edited):
    path = edited(MODEL, "_class_path", "my_spo.SPO")
    with pytest.warns(UserWarning, match=r"my_spo\.SPO wrote the checkpoint.*this is PPO\."):
        assert type(PPO.load_from_checkpoint(path)) is PPO
