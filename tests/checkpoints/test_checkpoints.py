"""Checkpoints: plain types, loading without an environment, and resumed runs."""

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torchrl.envs import InitTracker

from ppo_lightning import PPO, ConfigError, MLPAgent, RolloutDataModule, evaluate, make_env
from ppo_lightning.checkpoints.file import read_checkpoint
from ppo_lightning.rollouts.make_collector import make_collector
from tests.helpers import RecordedPPO, require_same, weights

SMALL = {"num_envs": 4, "num_steps": 16, "total_timesteps": 4 * 16 * 6, "eval_episodes": 2}
EVERY_2 = {
    "enable_checkpointing": True,
    "limit_val_batches": 1,
    "val_check_interval": 2,
    "check_val_every_n_epoch": None,
}


@pytest.fixture
def saved(fit, tmp_path):
    """Return a run and its checkpoints of every two rollouts."""
    callback = ModelCheckpoint(dirpath=tmp_path / "saved", save_top_k=-1, filename="{step}")
    module = fit(SMALL, callbacks=[callback], **EVERY_2)
    paths = sorted((tmp_path / "saved").iterdir(), key=lambda path: int(path.stem.split("=")[1]))
    assert [path.name for path in paths] == ["step=128.ckpt", "step=256.ckpt", "step=384.ckpt"]
    return module, paths


class Remembers(L.Callback):
    def __init__(self, something):
        self.something = something

    def state_dict(self):
        return {"it": [self.something]}


def test_numbers_of_numpy_are_saved_as_pythons(fit, tmp_path):
    model = {"learning_rate": np.float64(1e-3), "update_epochs": np.int64(2)}
    data = SMALL | {"num_envs": np.int64(4), "step_timeout": np.float64(30)}
    module = fit(data, model, callbacks=[Remembers(np.float32(0.5))])
    module.trainer.save_checkpoint(tmp_path / "it.ckpt")
    assert PPO.load_from_checkpoint(tmp_path / "it.ckpt").hparams.learning_rate == 1e-3
    assert read_checkpoint(tmp_path / "it.ckpt")["callbacks"]["Remembers"] == {"it": [0.5]}


@pytest.mark.parametrize("something", [np.zeros(2), torch.relu, nn.ReLU], ids=["array", "function", "class"])
def test_what_no_reader_loads_is_not_saved(fit, tmp_path, something):
    module = fit(SMALL, callbacks=[Remembers(something)])
    with pytest.raises(ConfigError, match=r"No checkpoint was written: it would hold .*(numpy|torch)"):
        module.trainer.save_checkpoint(tmp_path / "it.ckpt")
    assert not list(tmp_path.glob("*ckpt*")) and not list(tmp_path.glob("*part*"))


def test_a_resumed_run_continues_all_counts(saved, fit):
    whole, paths = saved
    resumed = fit(SMALL, ckpt_path=paths[0], **EVERY_2)
    require_same(whole, resumed)
    assert resumed.trainer.global_step == 6 * 16 and resumed.env_steps == 384
    metrics = resumed.trainer.callback_metrics
    for name, last in (("return", whole.episode_returns), ("length", whole.episode_lengths)):
        assert last.maxlen == 100 and len(last) > 5
        assert metrics[f"charts/avg_episodic_{name}"] == pytest.approx(sum(last) / len(last))


def test_validating_a_checkpoint_repeats_the_logged_return_and_changes_nothing(saved, make_trainer):
    module, paths = saved
    logged = {key: value for key, value in module.trainer.callback_metrics.items() if key.startswith("eval/")}
    assert len(logged) == 8
    L.seed_everything(1, verbose=False)
    again = PPO()
    result = make_trainer(limit_val_batches=1.0).validate(
        again, RolloutDataModule(**SMALL), ckpt_path=paths[-1]
    )[0]
    assert result == pytest.approx({key: value.item() for key, value in logged.items()})
    checkpoint = torch.load(paths[-1], weights_only=True)["state_dict"]
    assert all(torch.equal(value, checkpoint[key]) for key, value in again.state_dict().items())


def test_evaluation_plays_one_whole_episode_in_each_environment():
    env = make_env("Script-v0", 20, seed=3)
    agent = MLPAgent(*env.agent_specs)
    state = torch.get_rng_state()
    episodes = evaluate(agent, env, num_steps=4)
    assert torch.equal(torch.get_rng_state(), state)
    fresh = make_env("Script-v0", 20, seed=3)
    fresh.reset_arrays()
    lengths = [single.unwrapped.length for single in fresh.envs]
    assert episodes["step_count"].tolist() == lengths
    # The reward is action + 0.5, and the mode of the policy is a whole number.
    assert ((episodes["episode_reward"] - 0.5 * episodes["step_count"]) % 1 == 0).all()


def test_evaluation_is_the_same_through_both_collectors(fit):
    options = {"limit_val_batches": 1, "val_check_interval": 3, "check_val_every_n_epoch": None}
    runs = [
        fit({**SMALL, "transforms": t}, {"learning_rate": 1e-12}, **options) for t in (None, [InitTracker()])
    ]
    plain, wrapped = (run.trainer.callback_metrics for run in runs)
    keys = [key for key in plain if key.startswith("eval/")]
    assert len(keys) == 8
    assert {key: plain[key] for key in keys} == {key: wrapped[key] for key in keys}


def test_an_evaluation_episode_that_never_ends_is_cut_and_counted(monkeypatch):
    monkeypatch.setattr("ppo_lightning.rollouts.evaluation.MAX_EPISODE_STEPS", 200)
    env = make_env("Counter-v0", 2)
    agent = MLPAgent(*env.agent_specs)
    with pytest.warns(UserWarning, match="2 episodes of the evaluation have not ended within 256 steps"):
        episodes = evaluate(agent, env)
    assert episodes["step_count"].tolist() == [256, 256]
    assert episodes["episode_reward"].tolist() == [256, 256]


@pytest.mark.parametrize(("anneal_lr", "first"), [(True, 0.5 * 4 / 6), (False, 0.5)])
def test_a_resumed_run_uses_the_new_learning_rate_and_epsilon(saved, fit, anneal_lr, first):
    model = {"learning_rate": 0.5, "adam_eps": 1e-3, "anneal_lr": anneal_lr}
    module = fit(SMALL, model, ppo=RecordedPPO, ckpt_path=saved[1][0])
    assert module.learning_rates[0] == pytest.approx(first)
    assert len(module.learning_rates) == 4
    assert module.trainer.optimizers[0].param_groups[0]["eps"] == 1e-3


def test_a_run_does_not_resume_with_rollouts_of_another_size(saved, fit):
    with pytest.raises(ConfigError, match=r"num_envs \* data.num_steps = 64, and now it is 128"):
        fit({**SMALL, "num_envs": 8}, ckpt_path=saved[1][0])


def test_the_collectors_count_is_the_same_on_any_number_of_ranks():
    agent = MLPAgent(*make_env("CartPole-v1").agent_specs)
    whole, half = (make_collector(make_env("CartPole-v1", n), agent, 8, 4) for n in (4, 2))
    next(iter(whole))
    half.load_state_dict(whole.state_dict() | {"running": []})
    assert len(list(half)) == 3


def test_a_loaded_agent_is_checked_against_new_environments_and_starts_a_new_count(saved, make_trainer):
    module = PPO.load_from_checkpoint(saved[1][-1])
    with pytest.raises(ConfigError, match=r"data\.env_id has"):
        make_trainer().fit(module, RolloutDataModule(**{**SMALL, "env_id": "Acrobot-v1"}))
    module = RecordedPPO.load_from_checkpoint(saved[1][-1])
    assert module.env_steps == 384
    make_trainer().fit(module, RolloutDataModule(**SMALL))
    assert module.env_steps == 384, "not 768"
    assert torch.equal(module.initial, weights(saved[0]))


def test_a_data_module_starts_fresh_environments_after_an_error(make_trainer):
    class Interrupted(PPO):
        def training_step(self, rollout, batch_idx):
            first.append(rollout["observation"][:, 0].clone())
            raise RuntimeError("interrupted")

    data, first = RolloutDataModule(**SMALL), []
    for _ in range(2):
        L.seed_everything(1, verbose=False)
        with pytest.raises(RuntimeError, match="interrupted"):
            make_trainer().fit(Interrupted(), data)
    assert torch.equal(*first)


def test_an_agents_class_inside_a_function_trains_and_resumes_but_no_file_can_name_it(
    fit, make_trainer, tmp_path
):
    class Inner(MLPAgent):
        pass

    callback = ModelCheckpoint(dirpath=tmp_path / "saved", save_top_k=-1, filename="{step}")
    with pytest.warns(UserWarning, match="inside a function: .* define it at the top of a module"):
        module = fit(SMALL, {"agent": Inner}, callbacks=[callback], **EVERY_2)
    make_trainer().fit(module, RolloutDataModule(**SMALL))
    resumed = fit(SMALL, {"agent": Inner}, ckpt_path=tmp_path / "saved/step=128.ckpt", **EVERY_2)
    assert resumed.env_steps == 384
    with pytest.raises(ConfigError, match=r"Inner: define it at the top of a module"):
        PPO.load_from_checkpoint(tmp_path / "saved/step=128.ckpt")


def test_hyperparameters_of_a_loaded_module_come_from_the_call_or_from_the_file(saved):
    _, (path, *_) = saved
    loaded = PPO.load_from_checkpoint(path, clip_coef=0.1)
    assert (loaded.hparams.gamma, loaded.hparams.clip_coef) == (0.99, 0.1)
    assert loaded.training and loaded.agent.training
    with open(path, "rb") as file:
        loaded = PPO.load_from_checkpoint(file, map_location="meta")
    assert loaded.device.type == "meta", "on the device that is asked"
