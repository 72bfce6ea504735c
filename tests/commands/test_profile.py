"""``ppo-lightning profile``: the share of each stage, and the recommended settings."""

import re
import time

import pytest
from lightning.pytorch.profilers import SimpleProfiler

from ppo_lightning import DQN, PPO, CNNAgent
from ppo_lightning.algorithms.defaults import SHORT_RUNS
from ppo_lightning.commands import profile
from ppo_lightning.commands.profile import StageClock

SMALL = {"num_envs": 2, "num_steps": 32, "total_timesteps": 10**9}
REACH = SMALL | {"env_id": "Reach-v0"}
STAGES = ("collect", "advantages", "update", "log")  # of PPO


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_stages_add_up_and_the_run_ends(fit, compile):
    clock = StageClock(0.5)
    module = fit(REACH, {"norm_reward": True, "compile": compile}, max_epochs=-1, callbacks=[clock])
    assert 0 < module.env_steps < 10**7 and clock.warm_up > 0
    assert sum(clock.shares.values()) == pytest.approx(1, abs=1e-6)
    assert all(0 <= share < 1 for share in clock.shares.values())
    assert clock.shares["update"] > clock.shares["advantages"] > 0
    assert 0 < clock.environments < clock.shares["collect"]
    assert clock.changes[0] == (("--num_threads", "2") if compile else ("--model.compile", "true"))


@pytest.mark.usefixtures("own_defaults")
def test_a_run_is_measured_with_the_defaults_for_its_length(fit):
    clock = StageClock(0.2)
    module = fit(SMALL | {"total_timesteps": 128}, max_epochs=-1, callbacks=[clock])
    assert clock.sps > 0 and module.env_steps > 128
    assert module.hparams.learning_rate == SHORT_RUNS["learning_rate"]


def test_with_overlap_the_wait_for_a_rollout_is_collect(fit):
    clock = StageClock(0.5)
    fit(REACH | {"overlap": True}, {}, max_epochs=-1, callbacks=[clock])
    assert set(clock.shares) == {*STAGES, "other"}
    assert 0 < clock.shares["collect"] < 1
    assert clock.environments == 0, "the thread steps them beside the update"


def test_a_run_with_replay_is_measured_with_its_updates(fit):
    clock = StageClock(0.2)
    fit(SMALL | {"num_steps": 8}, {"train_frequency": 8}, ppo=DQN, max_epochs=-1, callbacks=[clock])
    assert set(clock.shares) == {"collect", "store", "update", "log", "other"}
    assert clock.shares["update"] > clock.shares["store"] > 0


def test_lightnings_simple_profiler_shows_the_same_stages_once_a_rollout(fit, tmp_path):
    profiler = SimpleProfiler(tmp_path, "stages")
    data = SMALL | {"total_timesteps": 3 * 64, "eval_episodes": 1, "rollouts_per_epoch": 3}
    fit(data, {}, profiler=profiler, limit_val_batches=1)
    calls = {stage: len(profiler.recorded_durations[stage]) for stage in (*STAGES, "evaluate")}
    assert calls == {"collect": 3, "advantages": 3, "update": 3, "log": 3, "evaluate": 1}


class Slow(PPO):
    def advantages(self, rollout):
        time.sleep(0.3)
        return super().advantages(rollout)


def test_a_slow_stage_is_found(fit):
    clock = StageClock(1.5)  # a machine may stop for a second
    model = {"num_minibatches": 2, "update_epochs": 1}  # an update that a busy machine does not slow down
    fit(SMALL, model, ppo=Slow, max_epochs=-1, callbacks=[clock])
    assert clock.shares["advantages"] > 0.5


def test_pictures_may_be_computed_in_bf16(fit):
    data = SMALL | {"env_id": "ALE/Breakout-v5", "backend": "envpool", "num_steps": 8}
    clock = StageClock(0.1)
    fit(data, {"agent": CNNAgent, "num_minibatches": 2, "update_epochs": 1}, max_epochs=-1, callbacks=[clock])
    assert ("--trainer.precision", "bf16-mixed") in clock.changes


@pytest.mark.integration
def test_the_command_prints_tables_and_leaves_no_file(tmp_path, monkeypatch, output_of):
    tried = [("--model.num_minibatches", "2"), ("--data.backend", "envpool"), ("--model.compile", "false")]
    monkeypatch.setattr(profile, "changes", lambda module, share: tried)
    flags = ["--data.num_envs", "2", "--data.env_id", "Reach-v0", "--model.num_minibatches", "2"]
    limits = ["--trainer.max_steps", "8", "--trainer.fast_dev_run", "true"]  # which would end a measurement
    out = output_of("profile", "--seconds", "0.2", *flags, *limits)
    assert "environment steps per second." in out and "| update |" in out
    for change in ("--model.num_minibatches 2", "--model.compile false"):
        sps, ratio = next(line for line in out.splitlines() if change in line).split("|")[2:4]
        assert int(sps) > 0 and float(ratio) > 0
    assert "--data.backend envpool | does not work: env_id 'Reach-v0' is not an environment of EnvPool" in out
    assert "checkpoint: none" not in out
    assert re.search(r"\n(Set|None of) .*\. Compilation takes \d+ s: it pays in ", out)
    assert list(tmp_path.iterdir()) == []


ONE_THREAD, COMPILED = ("--num_threads", "1"), ("--model.compile", "true")


@pytest.mark.parametrize(
    ("tried", "sentence"),
    [
        ({ONE_THREAD: 250.0, COMPILED: 180.0}, "Set --num_threads 1: 2.5 times as fast."),
        ({ONE_THREAD: 105.0}, "None of these settings is more than 10 % faster."),
        ({COMPILED: 120.0}, "Set --model.compile true: 1.2 times as fast."),
        ({}, "None of these settings is more than 10 % faster."),
    ],
)
def test_the_fastest_setting_is_recommended(tried, sentence):
    assert profile.recommendation(100.0, tried) == sentence


@pytest.mark.parametrize(
    ("sps", "warm_up", "sentence"),
    [
        (200.0, 12.0, "Compilation takes 10 s: it pays in runs of more than 2000 steps."),
        (200.0, 1.0, "Compilation takes 0 s: it pays in runs of more than 0 steps."),
        (90.0, 12.0, "Compilation takes 10 s: it pays in no run."),
    ],
)
def test_the_shortest_run_for_which_compilation_pays_is_named(sps, warm_up, sentence):
    eager, compiled = StageClock(), StageClock()
    eager.sps, eager.warm_up = 100.0, 2.0
    compiled.sps, compiled.warm_up = sps, warm_up
    assert profile.break_even(eager, compiled) == sentence
