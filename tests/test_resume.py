"""Runs that go on: with the episodes they were in, and after being asked to end or killed."""

import functools

import lightning as L
import pytest
import torch

from ppo_lightning import MLPAgent
from ppo_lightning.models import CNNAgent


class SaveAfter(L.Callback):
    """Saves in the middle of a run, as ``ModelCheckpoint`` and a preemption do."""

    def __init__(self, path, rollouts):
        self.path, self.rollouts = path, rollouts

    def on_train_batch_end(self, trainer, pl_module, *args):
        if pl_module.rollouts_done == self.rollouts:
            trainer.save_checkpoint(self.path)


RUNS = {
    "CartPole-v1": {},
    "CartPole-v1 x 8": {"num_envs": 8},
    "Acrobot-v1": {"env_kwargs": {"max_episode_steps": 30}},
    "Pendulum-v1": {},
    "MountainCarContinuous-v0": {},
    "Hopper-v5": {},
    "HalfCheetah-v5": {"env_kwargs": {"max_episode_steps": 30}},
    "Humanoid-v5": {},
    "Pusher-v5": {},
    "ALE/Breakout-v5": {"env_kwargs": {"screen_size": 36, "repeat_action_probability": 0.25}},
}


@pytest.mark.parametrize("name", RUNS)
def test_an_interrupted_run_ends_as_the_uninterrupted_one_to_the_bit(name, fit, tmp_path, capsys):
    env_id = name.split()[0]
    data = {"env_id": env_id, "num_envs": 3, "num_steps": 20} | RUNS[name]
    data["total_timesteps"] = data["num_envs"] * 20 * 5
    atari = env_id.startswith("ALE/")
    agent = functools.partial(CNNAgent) if atari else functools.partial(MLPAgent, norm_obs=True)
    model = {"agent": agent, "norm_reward": not atari, "num_minibatches": 2, "update_epochs": 2, "learning_rate": 1e-3}
    whole = fit(data, model, callbacks=[SaveAfter(tmp_path / "middle.ckpt", 2)])
    resumed = fit(data, model, ckpt_path=tmp_path / "middle.ckpt")
    assert "goes on with its episode, to the bit" in capsys.readouterr().out
    assert resumed.rollouts_done == whole.rollouts_done == 5
    for key, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[key]), key
    assert list(resumed.episode_returns) == list(whole.episode_returns)
    metrics = [{k: v for k, v in run.trainer.callback_metrics.items() if k != "charts/SPS"} for run in (whole, resumed)]
    assert metrics[0] == metrics[1] or not whole.episode_returns
