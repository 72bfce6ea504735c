"""Resumed runs: running episodes, preemption and killed processes."""

import contextlib
import functools
import itertools
import os
import random
import signal
import time
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torchrl.envs import GymEnv, InitTracker, TransformedEnv, VecNormV2

from ppo_lightning import ConfigError, MLPAgent
from ppo_lightning.checkpoints.resume import folders_of_runs
from ppo_lightning.errors import NonFiniteError
from ppo_lightning.models import CNNAgent
from tests.helpers import (
    RecordedPPO,
    SaveAfter,
    environment_of,
    finish,
    left_of,
    start,
    wait_for_a_checkpoint,
    weights,
)

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
    "ALE/Breakout-v5": {  # of which games end
        "env_kwargs": {"screen_size": 36, "repeat_action_probability": 0.25, "max_episode_frames": 120}
    },
}


@pytest.mark.parametrize("name", RUNS)
def test_an_interrupted_run_ends_as_the_uninterrupted_one_to_the_bit(name, fit_and_resume, capsys):
    env_id = name.split()[0]
    data = {"env_id": env_id, "num_envs": 3, "num_steps": 20} | RUNS[name]
    data["total_timesteps"] = data["num_envs"] * 20 * 5
    atari = env_id.startswith("ALE/")
    agent = functools.partial(CNNAgent) if atari else functools.partial(MLPAgent, norm_obs=True)
    model = {"agent": agent, "norm_reward": not atari, "learning_rate": 1e-3}
    model |= {"num_minibatches": 2, "update_epochs": 2}
    fit_and_resume(2, data, model)
    assert "resumes its episode, to the bit" in capsys.readouterr().out


class NoEpoch(L.Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        raise AssertionError("the run is done")


def test_settings_that_differ_are_named(fit, tmp_path):
    path = tmp_path / "middle.ckpt"
    data = {"num_steps": 16, "total_timesteps": 4 * 16 * 2}
    fit(data, callbacks=[SaveAfter(path, 1)])
    with pytest.raises(ConfigError, match=r"^model.norm_reward was false in the run and is true now: give"):
        fit(data, {"norm_reward": True}, ckpt_path=path)
    agent = functools.partial(MLPAgent, hidden_sizes=(32, 32), norm_obs=True)
    words = r"^model.agent.hidden_sizes was \[64, 64\] in the run and is \[32, 32\] now, model.agent.norm_obs"
    with pytest.raises(ConfigError, match=words):
        fit(data, {"agent": agent}, ckpt_path=path)


def test_a_finished_run_that_was_interrupted_has_nothing_to_do(fit, tmp_path):
    """Lightning's count of batches falls behind by one at each checkpoint within an iteration."""
    data = {"num_envs": 2, "num_steps": 16, "total_timesteps": 32 * 4, "eval_episodes": 1}
    model = {"num_minibatches": 2}
    paths = [tmp_path / f"{name}.ckpt" for name in ("middle", "end")]
    options = {"limit_val_batches": 1, "check_val_every_n_epoch": None, "val_check_interval": 3}
    fit(data, model, callbacks=[SaveAfter(paths[0], 2)], **options)
    end = fit(data, model, ckpt_path=paths[0], callbacks=[SaveAfter(paths[1], 4)], **options)
    again = fit(data, model, ckpt_path=paths[1], callbacks=[NoEpoch()], **options)
    assert again.env_steps == end.env_steps == 128
    assert torch.equal(weights(again), weights(end))


@pytest.mark.parametrize(
    ("before", "after"),
    [("gymnasium", "envpool"), ("gymnasium", "torch"), ("torch", "gymnasium"), ("gymnasium", "VecNorm"),
     ("VecNorm", "gymnasium"), ("VecNorm", "InitTracker")],
)  # fmt: skip
def test_another_backend_starts_fresh_episodes_and_other_transforms_are_refused(
    fit, tmp_path, capsys, before, after
):
    transforms = {"VecNorm": [VecNormV2(["observation"])], "InitTracker": [InitTracker()]}
    data = {"num_envs": 3, "num_steps": 20, "total_timesteps": 240}
    first, second = (
        data | ({"transforms": transforms[name]} if name in transforms else {"backend": name})
        for name in (before, after)
    )
    path = tmp_path / "middle.ckpt"
    fit(first, {"num_minibatches": 2}, callbacks=[SaveAfter(path, 2)])
    if {before, after} == set(transforms):
        with pytest.raises(ConfigError, match=r"^data.transforms are other than in the run"):
            fit(second, {"num_minibatches": 2}, ckpt_path=path)
        return
    resumed = fit(second, {"num_minibatches": 2}, ckpt_path=path)
    assert "the environments start fresh episodes" in capsys.readouterr().out
    assert resumed.rollouts_done == 4


def one_cartpole():
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def one_normalized_cartpole():
    return TransformedEnv(one_cartpole(), VecNormV2(["observation"]))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("make", [one_cartpole, one_normalized_cartpole])
def test_a_run_of_copies_of_a_torchrl_environment_resumes(fit, tmp_path, make, overlap):
    data = {"env_id": make, "num_envs": 2, "num_steps": 16, "total_timesteps": 128, "overlap": overlap}
    first, last = saves = [SaveAfter(tmp_path / f"{done}.ckpt", done) for done in (2, 4)]
    fit(data, {"num_minibatches": 2}, callbacks=saves)
    resumed = fit(data, {"num_minibatches": 2}, ckpt_path=first.path, callbacks=[last])
    assert resumed.env_steps == 128
    state = torch.load(last.path, weights_only=True)["RolloutDataModule"]["collector"]["env"]
    if make is one_normalized_cartpole:
        counts = [part["_extra_state"]["count.-|-.observation"] for part in state.values()]
        assert len(counts) == 2 and min(counts) > 64, "the statistics go on"


def test_a_resumed_run_draws_new_numbers_from_the_global_generators(fit, tmp_path):
    data = {"env_id": "tests.environments:Drawn-v0", "num_envs": 2, "num_steps": 16, "total_timesteps": 128}
    path = tmp_path / "middle.ckpt"
    whole = fit(data, {"num_minibatches": 2}, ppo=RecordedPPO, callbacks=[SaveAfter(path, 2)])
    resumed = fit(data, {"num_minibatches": 2}, ppo=RecordedPPO, ckpt_path=path)
    first, later = ({*module.rollouts[0]["observation"].flatten().tolist()} for module in (whole, resumed))
    assert len(first) == 32 and not first & later


@pytest.mark.parametrize("reward", [None, np.nan])
def test_a_checkpoint_of_a_rollout_that_failed_resumes_with_fresh_episodes(
    fit, tmp_path, capsys, monkeypatch, reward
):
    data = {"num_envs": 2, "num_steps": 16, "total_timesteps": 192}
    step, calls = CartPoleEnv.step, itertools.count(1)

    def fails(env, action):
        if next(calls) != 60:
            return step(env, action)
        if reward is None:
            raise RuntimeError
        observation, _, *rest = step(env, action)
        return observation, reward, *rest

    monkeypatch.setattr(CartPoleEnv, "step", fails)
    save = ModelCheckpoint(tmp_path, filename="it", save_on_exception=True)
    with pytest.raises((RuntimeError, NonFiniteError)):
        fit(data, callbacks=[save], enable_checkpointing=True)
    (path,) = tmp_path.glob("*.ckpt")
    assert fit(data, ckpt_path=path).env_steps == 192
    assert "the environments start fresh episodes" in capsys.readouterr().out


def test_another_seed_for_a_resumed_run_has_no_effect_and_says_so(fit, tmp_path, recwarn):
    data = {"num_envs": 2, "num_steps": 16, "total_timesteps": 64}
    path = tmp_path / "middle.ckpt"
    whole = fit(data, callbacks=[SaveAfter(path, 1)])
    for seed in (1, 5):
        recwarn.clear()
        resumed = fit(data, ckpt_path=path, seed=seed)
        assert torch.equal(weights(resumed), weights(whole))
        said = [str(warned.message) for warned in recwarn]
        assert ("The resumed run keeps its seed, 1: 5 has no effect." in said) == (seed == 5)


def test_noise_continues_after_a_checkpoint_that_was_saved_after_a_fit(fit, tmp_path):
    drawn = []

    class Agent(MLPAgent):
        def noise(self, batch_shape, generator=None):
            drawn.append(generator.initial_seed())
            return super().noise(batch_shape, generator)

    data = {"num_envs": 2, "num_steps": 16, "total_timesteps": 64}
    model = {"num_minibatches": 2, "agent": Agent}
    fit(data, model).trainer.save_checkpoint(tmp_path / "end.ckpt")
    longer = data | {"total_timesteps": 128}
    fit(longer, model, ckpt_path=tmp_path / "end.ckpt")
    resumed = drawn.copy()
    drawn.clear()
    fit(longer, model)
    assert resumed == drawn
    assert len(set(drawn)) == 4


def test_a_checkpoint_of_the_form_before_starts_fresh_episodes(fit, tmp_path, capsys):
    """It had the episodes beside the collector's state."""
    data = {"num_envs": 3, "num_steps": 20, "total_timesteps": 240}
    path = tmp_path / "middle.ckpt"
    fit(data, {"num_minibatches": 2}, callbacks=[SaveAfter(path, 2)])
    checkpoint = torch.load(path, weights_only=True)
    state = checkpoint["RolloutDataModule"]
    state["running"] = state["collector"].pop("running")
    torch.save(checkpoint, path)
    resumed = fit(data, {"num_minibatches": 2}, ckpt_path=path)
    assert "the environments start fresh episodes" in capsys.readouterr().out
    assert resumed.rollouts_done == 4


def same(a, b):
    return all(torch.equal(value, b["state_dict"][key]) for key, value in a["state_dict"].items())


@pytest.mark.integration
@pytest.mark.parametrize("overlap", ["false", "true"])
@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_at_the_end_of_the_iteration_and_no_step_is_lost(runs, devices, number, overlap):
    whole, broken = runs("whole"), runs("broken")
    flags = ("--data.overlap", overlap)
    uninterrupted = whole.start(*flags, devices=devices)
    process = broken.start(*flags, devices=devices)
    assert wait_for_a_checkpoint(broken, process)
    process.send_signal(number)
    code, said = broken.wait(process)
    assert code == 128 + number, said
    assert ("Interrupted after" if number == signal.SIGINT else "Preempted after") in said
    assert "preempted.ckpt" in said
    code, said = broken.wait(broken.start("--auto_resume", *flags, devices=devices))
    assert code == 0, said
    assert "preempted.ckpt: each environment resumes its episode, to the bit" in said
    code, said = whole.wait(uninterrupted)
    assert code == 0, said
    assert same(whole.final(15_360), broken.final(15_360))


@pytest.mark.integration
def test_no_rank_outlives_a_launcher_that_is_killed_while_they_start(runs):
    broken = runs("broken")
    process = broken.start(devices=2)
    while len([command for command in left_of(process.pid).values() if "ppo_lightning" in command]) < 2:
        time.sleep(0.01)
    time.sleep(0.5)
    process.kill()
    broken.wait(process, timeout=20)


def waits(number, seconds=3):
    """Return whether a process uses no CPU time for some seconds."""
    used = [Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[11:13]]
    time.sleep(seconds)
    used.append(Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[11:13])
    return used[0] == used[1]


@pytest.mark.integration
def test_no_rank_of_a_users_script_outlives_its_launcher(tmp_path):
    """The launcher is stopped and killed while the other rank waits for it in rendezvous."""
    process, ranks = start(tmp_path / "run", 2), []
    while not ranks:
        time.sleep(0.01)
        ranks = [number for number in left_of(process.pid) if "LOCAL_RANK" in environment_of(number)]
    process.send_signal(signal.SIGSTOP)
    while not waits(ranks[0]):
        pass
    process.kill()
    process.communicate()
    time.sleep(1)
    left = left_of(process.pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    finish(process)
    assert not left


@pytest.mark.integration
def test_a_killed_run_resumes_from_its_last_checkpoint(runs):
    broken = runs("broken")
    process = broken.start("--auto_resume")
    assert wait_for_a_checkpoint(broken, process)
    process.kill()
    process.communicate()
    newest = broken.newest()
    (newest.parent / "torn.ckpt").write_bytes(newest.read_bytes()[:1000])
    code, said = broken.wait(broken.start("--auto_resume"))
    assert code == 0, said
    assert "skipped: ckpt_path" in said
    assert f"Resumed from {newest.relative_to(broken.folder)}" in said
    broken.final(15_360)


@pytest.mark.slow
def test_twenty_signals_at_random_moments_on_any_of_two_ranks(runs):
    """The resumed run ends like the uninterrupted one; benchmarks/attack.py tries one rank."""
    whole, broken = runs("whole"), runs("broken")
    total, generator = 500_000, random.Random(2)
    uninterrupted = whole.start(total=total, devices=2)
    for _ in range(20):
        process = broken.start("--auto_resume", total=total, devices=2)
        time.sleep(generator.uniform(0, 20))
        if living := [pid for pid, command in left_of(process.pid).items() if "ppo_lightning" in command]:
            os.kill(generator.choice(living), signal.SIGTERM)
        code, said = broken.wait(process)
        print(code, broken.newest(), flush=True)
        assert code != 0 or "checkpoint: /" in said, said  # the signal may arrive after the run
    code, said = broken.wait(broken.start("--auto_resume", total=total, devices=2), timeout=600)
    assert code == 0, said
    code, said = whole.wait(uninterrupted, timeout=600)
    steps = total // 512 * 512
    ends = whole.final(steps), broken.final(steps)
    assert same(*ends)
    assert ends[0]["episode_returns"] == ends[1]["episode_returns"]
    assert sum(ends[1]["episode_returns"]) / 100 > 450


def test_the_folders_of_runs_are_those_of_all_callbacks(tmp_path):
    best = ModelCheckpoint(dirpath=tmp_path / "best", monitor="eval/episodic_return", mode="max")
    for callbacks, folders in (
        ([ModelCheckpoint(), best], ["runs", "best"]),
        ([best], ["best"]),
        ([], ["runs"]),
    ):
        trainer = L.Trainer(
            accelerator="cpu",
            logger=CSVLogger(tmp_path, "runs"),
            callbacks=callbacks,
            enable_checkpointing=bool(callbacks),
        )
        assert folders_of_runs(trainer) == [tmp_path / name for name in folders]


def test_a_resumed_run_repeats_no_episodes_of_its_start(fit, tmp_path):
    data = {"env_id": "Reach-v0", "num_envs": 2, "num_steps": 16, "total_timesteps": 32 * 6}
    save = SaveAfter(tmp_path / "middle.ckpt", 3)
    runs = [fit(data, ppo=RecordedPPO, callbacks=[save]), fit(data, ppo=RecordedPPO, ckpt_path=save.path)]
    luck = torch.cat([rollout["observation"][..., 2].flatten() for run in runs for rollout in run.rollouts])
    assert len(luck) == len(luck.unique()) == 32 * 9
