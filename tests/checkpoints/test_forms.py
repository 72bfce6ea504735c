"""An algorithm and an agent of the user, given in any form, are read by every command."""

import functools
import importlib
import sys

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from ppo_lightning import PPO, RPO, ConfigError
from ppo_lightning.commands import cli

USERS = """
from ppo_lightning import PPO, MLPAgent


class MyAgent(MLPAgent):
    def __init__(self, observation_spec, action_spec, width: int = 5):
        super().__init__(observation_spec, action_spec, hidden_sizes=[width])
        self.save_hyperparameters(ignore=["observation_spec", "action_spec"])


class MyPPO(PPO):
    def __init__(self, bonus: float = 1.0, **kwargs):
        super().__init__(**kwargs)
        self.save_hyperparameters()
"""
SMALL = {"num_envs": 2, "num_steps": 16, "total_timesteps": 64, "eval_episodes": 1}
# Form of `agent` -> whether the command line trains, the value, and the width of the agent.
FORMS = {
    "text": (True, "users.MyAgent", 5),
    "dictionary": (True, '{"class_path": "users.MyAgent", "init_args": {"width": 7}}', 7),
    "class": (False, lambda users: users.MyAgent, 5),
    "partial": (False, lambda users: functools.partial(users.MyAgent, width=7), 7),
}
COMMANDS = {
    "validate": ["--trainer.enable_progress_bar", "false"],
    "play": ["--max_frames", "3", "--output", "a.gif"],
    "export": ["--onnx", "a.onnx"],
    "fit": ["--data.total_timesteps", "128", "--trainer.logger", "false"],
}


@pytest.fixture
def train(fit, tmp_path, monkeypatch):
    """Return a function that trains in the form of ``FORMS`` and returns the checkpoint."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "users.py").write_text(USERS)
    monkeypatch.syspath_prepend(tmp_path)

    def run(form):
        by_command, agent, _ = FORMS[form]
        if by_command:
            data = [word for key, value in SMALL.items() for word in (f"--data.{key}", str(value))]
            given = ["--model.agent", agent, "--model.bonus", "2"]
            cli.main(["fit", "--model", "users.MyPPO", *given, *data])
            (path,) = tmp_path.rglob("*.ckpt")
        else:
            users = importlib.import_module("users")
            save = ModelCheckpoint(tmp_path, filename="trained")
            model = {"agent": agent(users), "bonus": 2.0}
            fit(SMALL, model, ppo=users.MyPPO, callbacks=[save], enable_checkpointing=True)
            path = tmp_path / "trained.ckpt"
        forget()
        return path

    def forget():
        sys.modules.pop("users", None)  # as in a new program

    yield run, forget
    forget()


@pytest.mark.integration
@pytest.mark.parametrize("form", FORMS)
def test_every_door_reads_every_form(form, train, capsys):
    run, forget = train
    path = run(form)
    for command, flags in COMMANDS.items():
        forget()
        with pytest.raises(SystemExit):
            cli.main([command, "--ckpt_path", str(path), *flags])
        error = capsys.readouterr().err
        assert "pass --trust_checkpoint" in error and "model.agent 'users.MyAgent'" in error, command
        remedies = [["--trust_checkpoint"]]
        if "or give the run's recipe by --config" in error and FORMS[form][0]:
            remedies.append(["--config", str(path.parent.parent / "cli_config.yaml")])
        for remedy in remedies:
            forget()
            cli.main([command, "--ckpt_path", str(path), *flags, *remedy])
            assert "error" not in capsys.readouterr().err, command
    forget()
    with pytest.raises(ConfigError, match="import that class before loading the checkpoint"):
        PPO.load_from_checkpoint(path)
    users = importlib.import_module("users")
    for owner in (PPO, users.MyPPO):
        loaded = owner.load_from_checkpoint(path)
        assert type(loaded) is users.MyPPO and loaded.hparams.bonus == 2
        assert type(loaded.agent) is users.MyAgent
        assert loaded.agent.actor_body.out_features == FORMS[form][2]


def test_validate_reads_an_algorithm_of_ours_from_a_python_run(fit, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save = ModelCheckpoint(tmp_path, filename="trained")
    data = SMALL | {"env_id": "Pendulum-v1"}
    fit(data, {"rpo_alpha": 0.3}, ppo=RPO, callbacks=[save], enable_checkpointing=True)
    cli.main(["validate", "--ckpt_path", str(tmp_path / "trained.ckpt")])
    assert "eval/episodic_return" in capsys.readouterr().out
    loaded = PPO.load_from_checkpoint(tmp_path / "trained.ckpt")
    assert type(loaded) is RPO and loaded.hparams.rpo_alpha == 0.3
