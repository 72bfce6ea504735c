"""One module and one data module over many cells of a notebook: no run leaks into another."""

import copy
import pickle

import gymnasium
import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ppo_lightning import DQN, PPO, RND, SAC, ConfigError, RolloutDataModule
from ppo_lightning.checkpoints.file import read_checkpoint
from tests.helpers import SaveAfter

SMALL = {"num_envs": 2, "num_steps": 16, "total_timesteps": 32 * 12, "eval_episodes": 1}
MODEL = {"num_minibatches": 2, "update_epochs": 1}
LEARNS = {"learning_starts": 10, "batch_size": 8, "buffer_size": 500}


@pytest.mark.parametrize("stage", ["a shorter fit", "a fit of DQN", "a test on other data"])
def test_a_checkpoint_is_of_its_run_whatever_used_the_data_since(make_trainer, tmp_path, stage):
    data = RolloutDataModule(**SMALL | {"num_envs": None})
    L.seed_everything(3, verbose=False)
    module, trainer = PPO(**MODEL), make_trainer(limit_val_batches=1.0)
    trainer.fit(module, data)
    trainer.save_checkpoint(tmp_path / "before.ckpt")
    L.seed_everything(7, verbose=False)
    if stage == "a fit of DQN":
        make_trainer().fit(DQN(**LEARNS), data)
    elif stage == "a shorter fit":
        data.total_timesteps = 256
        shorter = make_trainer()
        shorter.fit(PPO(**MODEL), data)
        shorter.save_checkpoint(tmp_path / "short.ckpt")
        assert RolloutDataModule.load_from_checkpoint(tmp_path / "short.ckpt").total_timesteps == 256
    else:
        other = RolloutDataModule(**SMALL | {"env_kwargs": {"max_episode_steps": 5}})
        trainer.test(module, other, verbose=False)
        make_trainer(limit_val_batches=1.0).validate(module, other, verbose=False)
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    before, after = (read_checkpoint(tmp_path / f"{name}.ckpt") for name in ("before", "after"))
    for key in ("seed", "env_steps", "frames_per_rollout", "evaluation", "datamodule_hyper_parameters"):
        assert before[key] == after[key], key
    assert before["RolloutDataModule"]["progress"] == after["RolloutDataModule"]["progress"]


def test_a_module_trains_after_a_refusal_of_its_agent(make_trainer):
    module = RND(**MODEL, num_iterations_obs_norm_init=1)
    game = RolloutDataModule(**SMALL | {"env_id": "TicTacToe-v1", "backend": "envpool"})
    with pytest.raises(ConfigError, match="players take turns"):
        make_trainer().fit(module, game)
    make_trainer().fit(module, RolloutDataModule(**SMALL))
    assert module.env_steps == 32 * 12 + 32 and module.observation_spec.shape == (4,)


def test_an_agent_is_written_after_predict_and_as_a_copy_with_the_results_of_its_fit(make_trainer, tmp_path):
    module, trainer = PPO(**MODEL), make_trainer(limit_val_batches=1.0)
    trainer.fit(module, RolloutDataModule(**SMALL))
    expected = float(trainer.callback_metrics["eval/episodic_return"])
    copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    other = RolloutDataModule(**SMALL | {"env_kwargs": {"max_episode_steps": 5}})
    make_trainer(limit_val_batches=1.0).validate(module, other, verbose=False)
    make_trainer().predict(module, DataLoader(torch.ones(4, 4)))
    for number, written in enumerate([module, *copies]):
        written.save_pretrained(tmp_path / str(number))
        loaded = PPO.from_pretrained(tmp_path / str(number))
        assert loaded.loaded[0]["evaluation"]["episodic_return"] == expected
        assert loaded.loaded[0]["datamodule_hyper_parameters"]["env_kwargs"] is None


class Failing(gymnasium.Wrapper):
    """Fails in the evaluations to come."""

    fails = False

    def __init__(self):
        super().__init__(gymnasium.make("Pendulum-v1"))

    def step(self, action):
        if self.fails:
            raise ValueError("simulator lost")
        return super().step(action)


class Dropping(SAC):
    """Has dropout, and notes in which mode."""

    def add_networks(self, specs):
        super().add_networks(specs)
        self.dropout, self.modes = nn.Dropout(), set()

    def update_critics(self, minibatch, next_value):
        self.modes.add(self.dropout.training)
        return super().update_critics(minibatch, next_value)


class FailsAt(L.Callback):
    """Let an evaluation of a fit fail, the first time."""

    def __init__(self, number):
        self.number = number

    def on_validation_start(self, trainer, *args):
        self.number -= not trainer.sanity_checking
        Failing.fails = self.number == 0

    def on_exception(self, *args):
        Failing.fails = False


def test_after_an_evaluation_that_fails_the_same_trainer_goes_on(make_trainer, tmp_path):
    data = RolloutDataModule(Failing, num_envs=1, num_steps=10, total_timesteps=100, eval_episodes=1,
                             rollouts_per_epoch=2)  # fmt: skip
    module, save = Dropping(**LEARNS), SaveAfter(tmp_path / "a.ckpt", 6)
    trainer = make_trainer(limit_val_batches=1.0, callbacks=[save, FailsAt(3)])
    with pytest.raises(ValueError, match="simulator lost"):
        trainer.fit(module, data)
    assert module.env_steps == 60
    with pytest.warns(UserWarning, match="no replay buffer"):
        trainer.fit(module, data, ckpt_path=save.path)
    assert module.env_steps == 100 and module.modes == {True}
    Failing.fails = True
    with pytest.raises(ValueError, match="simulator lost"):
        make_trainer(limit_val_batches=1.0).validate(module, data, verbose=False)
    Failing.fails = False
    make_trainer().fit(module, data)
    assert module.modes == {True}


def test_settings_of_sac_may_change_between_fits(make_trainer):
    class Counting(SAC):
        def update_actor(self, minibatch, *args):
            self.updates += 1
            return super().update_actor(minibatch, *args)

    data = RolloutDataModule("Pendulum-v1", num_envs=1, total_timesteps=100)
    module = Counting(**LEARNS, policy_frequency=2, autotune=False)
    counts = []
    for module.hparams.policy_frequency in (2, 4, 1):
        module.updates = 0
        make_trainer().fit(module, data)
        counts.append(module.updates)
        module.hparams.autotune = True
    assert max(counts) - min(counts) <= 4, "as many updates of the policy as of the critics"
    assert module.log_alpha.requires_grad
