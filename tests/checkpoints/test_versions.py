"""A checkpoint or a saved configuration that names a setting or class which is gone ends in one sentence."""

import contextlib
import sys

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from ppo_lightning import PPO, ConfigError, RolloutDataModule, __version__
from ppo_lightning.commands import cli

SMALL = {"num_envs": 2, "num_steps": 16, "total_timesteps": 64, "eval_episodes": 1}
MODEL, DATA = "hyper_parameters", "datamodule_hyper_parameters"
GONE = {  # what the sentence names -> entry of the checkpoint, its value
    "model.gone": ((MODEL, "gone"), 1),
    "data.gone": ((DATA, "gone"), None),
    "model.agent.gone": (("agent", "init_args", "gone"), 1),
    "ppo_lightning.algorithms.gone.Gone": ((MODEL, "_class_path"), "ppo_lightning.algorithms.gone.Gone"),
    "ppo_lightning.models.mlp.Gone": (("agent", "class_path"), "ppo_lightning.models.mlp.Gone"),
}
COMMANDS = [["fit", "--trainer.logger", "false"], ["validate"], ["export", "--hub", "hub"]]


@pytest.fixture
def trained(fit, tmp_path, monkeypatch):
    """Return the content of a checkpoint, in the folder of the test."""
    monkeypatch.chdir(tmp_path)
    fit(SMALL, callbacks=[ModelCheckpoint(tmp_path, filename="trained")], enable_checkpointing=True)
    return torch.load("trained.ckpt", weights_only=True)


@pytest.fixture
def edited(trained):
    """Return a function that writes a checkpoint of another version with a changed entry."""

    def write(keys, value, version="0.1.0"):
        part = trained
        for key in keys[:-1]:
            part = part[key]
        part[keys[-1]] = value
        trained["ppo_lightning"] = version
        if version is None:
            del trained["ppo_lightning"]
        torch.save(trained, "edited.ckpt")
        return "edited.ckpt"

    return write


def sentence(capsys, *args):
    """Return the error of a command, None if it succeeds."""
    capsys.readouterr()
    try:
        cli.main(args)
    except SystemExit as end:
        assert end.code == 2
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        return line
    return None


def test_a_checkpoint_names_the_version_that_wrote_it(trained):
    assert trained["ppo_lightning"] == __version__


@pytest.mark.parametrize("name", GONE)
def test_a_setting_or_class_that_is_gone_ends_in_one_sentence(name, edited, fit, capsys):
    path = edited(*GONE[name])
    gone = rf"names {name}, which .* does not have: version 0\.1\.0 wrote it"
    with pytest.raises(ConfigError, match=gone):
        fit(SMALL | {"total_timesteps": 128}, ckpt_path=path)
    with pytest.raises(ConfigError, match=gone):
        RolloutDataModule.load_from_checkpoint(path)
    acts = name == "data.gone"  # an agent acts without the settings of rollouts
    with contextlib.nullcontext() if acts else pytest.raises(ConfigError, match=gone):
        PPO.load_from_checkpoint(path)
    for command, *flags in COMMANDS:
        error = sentence(capsys, command, "--ckpt_path", path, *flags)
        if acts and command == "export":
            assert error is None
        else:
            assert f"names {name}, which" in error, command


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        ((MODEL, "anneal_ent_coef"), True),
        ((DATA, "local_num_envs"), 2),
        (("agent", "init_args", "head"), "bins"),
        (("agent", "init_args", "memory"), "gru"),
        (("agent", "init_args", "activation"), "gone"),
        ((MODEL, "learning_rate"), "gone"),
    ],
)
def test_a_setting_or_value_of_version_0_1_0_that_is_gone_is_named_with_the_version(keys, value, edited, fit):
    path = edited(keys, value, version="0.1.0")
    named = value if keys[-1] not in ("anneal_ent_coef", "local_num_envs") else keys[-1]
    with pytest.raises(ConfigError, match=rf"{named}.*version 0\.1\.0 wrote"):
        (RolloutDataModule if keys[0] == DATA else PPO).load_from_checkpoint(path)


def test_a_checkpoint_without_a_version_is_of_an_older_one(edited):
    path = edited(*GONE["model.gone"], version=None)
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
def test_settings_of_a_class_of_the_user_are_known(user_class, fit, tmp_path):
    save = ModelCheckpoint(tmp_path, filename="user")
    fit(SMALL, {"bonus": 2.0}, ppo=user_class, callbacks=[save], enable_checkpointing=True)
    path = tmp_path / "user.ckpt"
    assert type(PPO.load_from_checkpoint(path)) is user_class
    fit(SMALL | {"total_timesteps": 128}, {"bonus": 2.0}, ppo=user_class, ckpt_path=path)
    checkpoint = torch.load(path, weights_only=True)
    checkpoint[MODEL]["gone"] = 1
    checkpoint["ppo_lightning"] = "0.1.0"
    torch.save(checkpoint, path)
    with pytest.raises(ConfigError, match=r"gone.*0\.1\.0 wrote"):
        PPO.load_from_checkpoint(path)
    with pytest.raises(ConfigError, match=r"names model\.gone"):
        fit(SMALL | {"total_timesteps": 128}, {"bonus": 2.0}, ppo=user_class, ckpt_path=path)


@pytest.mark.parametrize("header", [True, False])
def test_a_saved_configuration_names_its_version(header, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ppo-lightning"])
    flags = [word for key, value in SMALL.items() for word in (f"--data.{key}", str(value))]
    cli.main(["fit", *flags, "--trainer.enable_progress_bar", "false"])
    text = next(tmp_path.rglob("cli_config.yaml")).read_text()
    first, text = text.split("\n", 1)
    assert first == f"# ppo_lightning=={__version__}"
    saved = ("# ppo_lightning==0.1.0\n" if header else "") + text.replace("data:\n", "data:\n  gone: 1\n")
    (tmp_path / "saved.yaml").write_text(saved)
    writer = "ppo_lightning 0.1.0" if header else "an older version of ppo_lightning"
    expected = f"error: the key 'data.gone' is unknown ({writer} wrote saved.yaml)"
    assert sentence(capsys, "fit", "--config", "saved.yaml").startswith(expected)
