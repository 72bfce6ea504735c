"""An algorithm and an agent of the user, given in any form, are read by every command."""

import functools
import importlib
import shlex
import sys

import pytest

from ppo_lightning import PPO, RPO, ConfigError
from tests.helpers import short

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
def forget(tmp_path, monkeypatch):
    """Write the module of the user; return a function that forgets its import, as in a new program."""
    (tmp_path / "users.py").write_text(USERS)
    monkeypatch.syspath_prepend(tmp_path)
    yield lambda: sys.modules.pop("users", None)
    sys.modules.pop("users", None)


@pytest.mark.integration
@pytest.mark.parametrize("form", FORMS)
def test_every_door_reads_every_form(form, forget, fit, output_of, refusal_of, tmp_path):
    by_command, agent, width = FORMS[form]
    if by_command:
        flags = ["--model.agent", agent, "--model.bonus", "2", *short(num_envs=2, num_steps=16)]
        output_of("fit", "--model", "users.MyPPO", *flags)
        (path,) = tmp_path.rglob("*.ckpt")
    else:
        users, path = importlib.import_module("users"), tmp_path / "trained.ckpt"
        model = {"agent": agent(users), "bonus": 2.0}
        fit(SMALL, model, ppo=users.MyPPO).trainer.save_checkpoint(path)
    for command, flags in COMMANDS.items():
        forget()
        error = refusal_of(command, "--ckpt_path", path, *flags)
        assert "model.agent 'users.MyAgent'" in error, command
        shown = shlex.split(error.partition(f"ppo-lightning {command} ")[2])
        remedies = [shown[2 + len(flags) :]]
        if command == "validate" and by_command:
            remedies.append(["--config", path.parents[1] / "cli_config.yaml"])
        for remedy in remedies:
            forget()
            output_of(command, "--ckpt_path", path, *flags, *remedy)
    forget()
    with pytest.raises(ConfigError, match="import that class before loading it"):
        PPO.load_from_checkpoint(path)
    users = importlib.import_module("users")
    for owner in (PPO, users.MyPPO):
        loaded = owner.load_from_checkpoint(path)
        assert type(loaded) is users.MyPPO and loaded.hparams.bonus == 2
        assert type(loaded.agent) is users.MyAgent
        assert loaded.agent.actor_body.out_features == width


def test_validate_reads_an_algorithm_of_ours_from_a_python_run(fit, output_of):
    module = fit(SMALL | {"env_id": "Pendulum-v1"}, {"rpo_alpha": 0.3}, ppo=RPO)
    module.trainer.save_checkpoint("trained.ckpt")
    assert "eval/episodic_return" in output_of("validate", "--ckpt_path", "trained.ckpt")
    loaded = PPO.load_from_checkpoint("trained.ckpt")
    assert type(loaded) is RPO and loaded.hparams.rpo_alpha == 0.3
