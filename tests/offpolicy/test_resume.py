"""Runs with a replay buffer that signals end, and that the next process resumes."""

import functools
import os
import random
import signal
import time

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from ppo_lightning import DQN, SAC, RolloutDataModule, last_checkpoint
from ppo_lightning.checkpoints import io
from ppo_lightning.offpolicy import SACAgent
from tests.conftest import trainers_in
from tests.helpers import SaveAfter, forks

RUNS = {
    "SAC": (SAC, {"env_id": "Pendulum-v1", "total_timesteps": 500}, {"learning_starts": 100}),
    "DQN": (DQN, {"total_timesteps": 1500}, {"learning_starts": 300}),
}
SMALL_AGENT = {"agent": functools.partial(SACAgent, hidden_sizes=(16, 16), norm_obs=True)}


def train(folder, name):
    """Train a run in a process of its own, from its newest checkpoint if there is one."""
    os.dup2(os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    os.dup2(1, 2)
    torch.set_num_threads(1)
    L.seed_everything(3, verbose=False)
    algorithm, data, model = RUNS[name]
    data = RolloutDataModule(**{"num_envs": 1, "num_steps": 10, "eval_episodes": 1} | data)
    agent = SMALL_AGENT if algorithm is SAC else {}
    module = algorithm(batch_size=16, buffer_size=400, save_buffer=True, **model, **agent)
    saver = ModelCheckpoint(folder, monitor="step", mode="max", save_top_k=2, every_n_train_steps=5)
    trainer = trainers_in(folder)(callbacks=[saver], enable_checkpointing=True)
    trainer.fit(module, data, ckpt_path=last_checkpoint(folder))
    state = module.state_dict(), [optimizer.state_dict()["state"] for optimizer in trainer.optimizers]
    torch.save([*state, module.buffer.state_dict(), list(module.episode_returns)], folder / "end.pt")


def flat(value):
    """Yield the tensors and numbers of a structure."""
    if isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from flat(part)
    else:
        yield torch.as_tensor(value)


@pytest.mark.integration
@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_signals_end_at_random_moments_is_equal_to_the_whole_run(name, tmp_path):
    folders = {kind: tmp_path / kind for kind in ("whole", "killed")}
    for folder in folders.values():
        folder.mkdir()
    process = forks().Process(target=train, args=(folders["whole"], name))
    process.start()
    process.join(300)
    killed, ended = folders["killed"], []
    moments = random.Random(name)
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGTERM, None):
        before = {*killed.glob("*.ckpt")}
        process = forks().Process(target=train, args=(killed, name))
        process.start()
        while number and process.is_alive() and {*killed.glob("*.ckpt")} <= before:
            time.sleep(0.005)
        if number:
            time.sleep(moments.uniform(0, 0.1))
            os.kill(process.pid, number)
        process.join(300)
        ended.append(process.exitcode)
    log = (killed / "log.txt").read_text()
    assert ended == [-9, 143, -9, 143, 0], log
    assert "refill" not in log
    whole, resumed = (list(flat(torch.load(folder / "end.pt"))) for folder in folders.values())
    assert len(whole) == len(resumed)
    assert all(map(torch.equal, whole, resumed))


@pytest.mark.parametrize("write", ["write_beside", "write_atomically", "remove_beside"])
def test_a_kill_before_each_step_of_a_save_leaves_a_pair(write, fit, tmp_path, monkeypatch):
    def kill(*args, **kwargs):
        raise KeyboardInterrupt

    class Killed(SaveAfter):
        def on_train_batch_end(self, trainer, pl_module, *args):
            if pl_module.rollouts_done == self.rollouts:
                monkeypatch.setattr(io, write, kill)
            super().on_train_batch_end(trainer, pl_module, *args)

    path, model = tmp_path / "last.ckpt", {"learning_starts": 20, "buffer_size": 60, "save_buffer": True}
    data = {"num_envs": 1, "num_steps": 10, "total_timesteps": 60}
    with pytest.raises(SystemExit):  # Lightning's answer to an interrupt
        fit(data, model, ppo=DQN, callbacks=[SaveAfter(path, 3), Killed(path, 5)])
    monkeypatch.undo()
    assert last_checkpoint(tmp_path) == str(path)
    steps = torch.load(path)["env_steps"]
    assert steps == (50 if write == "remove_beside" else 30)
    resumed = fit(data, model, ppo=DQN, ckpt_path=path, callbacks=[SaveAfter(path, 6)])
    assert len(resumed.buffer) == 60
    assert [file.name for file in tmp_path.glob("*.replay*")] == ["last.60.replay"]
