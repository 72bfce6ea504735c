"""Faults: full disks, damaged files, environments that raise errors or hang, and non-finite updates."""

import functools
import os
import resource
import signal
import time
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torchrl.envs import StepCounter

from ppo_lightning import (
    DQN,
    PPO,
    ConfigError,
    MLPAgent,
    RolloutDataModule,
    last_checkpoint,
    make_env,
)
from ppo_lightning.algorithms import losses
from ppo_lightning.callbacks.guards import RolloutGuard
from ppo_lightning.envs.restarts import RestartOnFailure
from ppo_lightning.errors import NonFiniteError
from ppo_lightning.models.normalizers import RewardScaler
from ppo_lightning.rollouts.make_collector import make_collector
from tests.environments import NextStepVector, Trouble
from tests.helpers import Forked, RecordedPPO, finish, start

SMALL = {"num_envs": 2, "num_steps": 16, "total_timesteps": 2 * 16 * 4}


@pytest.fixture
def full_disk():
    """Return a function that limits files to 2000 bytes; writing more fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


class FillDisk(ModelCheckpoint):
    """Callback that saves after every iteration; the disk is full from the third iteration on."""

    def __init__(self, folder, fill):
        super().__init__(folder, every_n_train_steps=1, filename="{step}")
        self.fill = fill

    def on_train_batch_end(self, trainer, pl_module, *args):
        if pl_module.rollouts_done == 3:
            self.fill()
        super().on_train_batch_end(trainer, pl_module, *args)


BUFFERED = {"learning_starts": 64, "train_frequency": 32, "save_buffer": True}


@pytest.mark.parametrize(("algorithm", "model"), [(PPO, {}), (DQN, BUFFERED)])
def test_a_full_disk_is_reported_and_the_previous_checkpoint_stays(
    algorithm, model, fit, tmp_path, full_disk, capsys
):
    callback = FillDisk(tmp_path, full_disk)
    module = fit(SMALL, model, ppo=algorithm, callbacks=[callback], enable_checkpointing=True)
    assert module.rollouts_done == 4
    errors = capsys.readouterr().err
    assert errors.count("NO CHECKPOINT was written") == 2 and "File too large" in errors
    files = {path.name for path in tmp_path.iterdir() if path.is_file()}
    replay = {"step=64.64.replay"} if model else set()
    assert files == {"step=64.ckpt"} | replay, "no torn file, and the old one"
    assert last_checkpoint(tmp_path) == str(tmp_path / "step=64.ckpt")


def test_a_preempted_run_names_no_checkpoint_that_a_full_disk_lacks(fit, tmp_path, full_disk, capsys):
    def stop():
        full_disk()
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        longer = SMALL | {"total_timesteps": 160}  # the signal comes before the last rollout
        fit(longer, callbacks=[FillDisk(tmp_path, stop)], enable_checkpointing=True)
    said = capsys.readouterr().out
    assert "no checkpoint, without" in said and "To resume" not in said


class Malicious:
    def __reduce__(self):
        return os.system, ("touch executed",)


def test_a_file_that_executes_code_is_refused_by_every_method_of_the_trainer(
    make_trainer, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": Malicious()}, "malicious.ckpt")
    data = RolloutDataModule(**SMALL)
    for run in (
        functools.partial(make_trainer().fit, datamodule=data),
        functools.partial(make_trainer(limit_val_batches=1).validate, datamodule=data),
        functools.partial(make_trainer().predict, dataloaders=torch.utils.data.DataLoader(torch.zeros(2, 4))),
    ):
        for options in ({}, {"weights_only": False}):
            with pytest.raises(ConfigError, match="cannot be read as a checkpoint"):
                run(PPO(), ckpt_path="malicious.ckpt", **options)
    with pytest.raises(ConfigError, match="cannot be read as a checkpoint"):
        PPO.load_from_checkpoint("malicious.ckpt", weights_only=False)
    assert not Path("executed").exists()
    torch.load("malicious.ckpt", weights_only=False)
    assert Path("executed").exists(), "or the file was harmless"


def trouble(kind, at, **kwargs):
    """Return the settings of environments, of which one fails at a step."""
    return {"env_id": "tests.environments:Trouble-v0", "env_kwargs": {"kind": kind, "at": at} | kwargs}


@pytest.mark.integration
@pytest.mark.parametrize("overlap", [False, True])
def test_an_environment_that_hangs_ends_the_run_with_its_traceback(tmp_path, overlap):
    began = time.monotonic()
    data = trouble("hangs", 40, env=1) | {"num_envs": 4, "step_timeout": 3.0, "overlap": overlap}
    code, errors = finish(start(tmp_path / "run", 1, data=data, rollouts=4))
    assert code == 1
    assert "Timeout (0:00:03)!" in errors
    stacks = errors.split("Thread 0x")[1:]
    assert any("environments.py" in stack.splitlines()[1] for stack in stacks), "says where it hangs"
    assert time.monotonic() - began < 60


def test_an_error_cancels_the_step_timeout():
    """Otherwise the process, for example a notebook, would end at the timeout."""
    env = make_env(**trouble("raises", 3, env=Trouble.made))
    collector = make_collector(env, MLPAgent(*env.agent_specs), 8, step_timeout=2.0)
    with pytest.raises(RuntimeError, match="the simulator is broken"):
        collector.rollout()
    time.sleep(2.5)
    collector.shutdown()


@pytest.mark.integration
def test_an_environment_that_hangs_in_an_evaluation_ends_the_run_with_its_traceback(tmp_path):
    script = f"""
import lightning as L, tests.environments
from ppo_lightning import PPO, RolloutDataModule
kwargs = {{"kind": "hangs", "at": 3, "env": 1}}  # 0 gives the specs
data = RolloutDataModule("Trouble-v0", num_envs=4, eval_episodes=2, env_kwargs=kwargs, step_timeout=2.0)
L.Trainer(logger=False, accelerator="cpu", default_root_dir={str(tmp_path)!r}).validate(PPO(), data)
"""
    code, errors = finish(Forked(tmp_path, exec, script, {}))
    assert code == 1
    assert "Timeout (0:00:02)!" in errors
    assert "environments.py" in errors.split("most recent call first", 1)[1], "says where it hangs"


@pytest.mark.integration
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", ["raises", pytest.param("exits", marks=pytest.mark.slow), "hangs"])
def test_trouble_on_one_rank_ends_all_ranks(tmp_path, kind, overlap):
    data = trouble(kind, 20) | {"step_timeout": 3.0, "overlap": overlap}
    agent = {"norm_obs": overlap}  # whose exchange another rank's thread waits for
    process = start(tmp_path / "run", 2, data=data, agent=agent, rollouts=4, trouble_on=1)
    code, errors = finish(process, timeout=90)
    assert code != 0, errors


# Updates


class Spoilt(PPO):
    def advantages(self, rollout):
        rollout = super().advantages(rollout)
        rollout["advantage"] *= torch.nan if self.rollouts_done == 2 else 1
        return rollout


def test_an_update_that_gives_nan_ends_the_run_by_default(fit):
    with pytest.raises(NonFiniteError, match="losses/policy_loss is nan after 64 steps"):
        fit(SMALL, ppo=Spoilt)


# Restarts


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("raises", "RuntimeError .the simulator is broken"),
        ("exits", r"SystemExit \(0\)"),
        ("nan", "non-finite"),
        ("nan observation", "non-finite"),
    ],
)
def test_an_environment_that_fails_is_made_anew_and_its_episode_is_truncated(kind, said):
    """The second environment fails at step 20; other episodes have 24 steps."""
    failing = trouble(kind, 20, env=Trouble.made + 1, max_episode_steps=24, max_restarts=1)
    env = make_env(num_envs=3, **failing)
    agent, scaler = MLPAgent(*env.agent_specs, norm_obs=kind == "nan"), RewardScaler(0.99)
    collector = make_collector(env, agent, 8, reward_scaler=scaler)
    with pytest.warns(UserWarning, match=f"Environment 1 .*{said}.*restart 1 of 1"):
        rollouts = [collector.rollout().clone() for _ in range(4)]
    following = rollouts[2]["next"]
    assert following["truncated"].nonzero().tolist() == [[0, 7, 0], [1, 3, 0], [2, 7, 0]], "step 20"
    assert not following["terminated"].any()
    if agent.normalizer is None:
        assert torch.equal(following["observation"][1, 3], following["observation"][1, 2])
    assert following["episode_reward"][1, 3] == following["episode_reward"][1, 2], "the reward is 0"
    counts = following["step_count"][..., 0]
    assert counts[1].tolist() == [17, 18, 19, 20, 1, 2, 3, 4], "and a new one begins"
    assert counts[0].tolist() == [17, 18, 19, 20, 21, 22, 23, 24]
    assert all(value.isfinite().all() for rollout in rollouts for value in rollout.values(True, True))
    collector.shutdown()


class FailsTogether(gymnasium.Env):
    """Environment that fails once, and the one that takes the place of the second one at the same step."""

    observation_space, action_space = gymnasium.spaces.Box(-1, 1, (2,)), gymnasium.spaces.Discrete(2)
    at = iter([5, 3, 2, 9])  # of each environment that is made

    def __init__(self):
        self.left = next(self.at)

    def reset(self, *, seed=None, options=None):
        return self.observation_space.low, {}

    def step(self, action):
        self.left -= 1
        if not self.left:
            raise RuntimeError("my own error")
        return self.observation_space.low, 1.0, False, False, {}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_run_whose_environments_may_restart_resumes_to_the_bit(fit_and_resume, num_workers):
    data = {"num_envs": 2, "num_steps": 16, "total_timesteps": 160, "num_workers": num_workers}
    fit_and_resume(3, data | {"env_kwargs": {"max_restarts": 2}}, {"num_minibatches": 2})


def test_a_run_ends_with_the_error_of_an_environment_that_fails_more_than_max_restarts():
    env = make_env(FailsTogether, 2, env_kwargs={"max_restarts": 1})
    collector = make_collector(env, MLPAgent(*env.agent_specs), 24)
    with pytest.warns(UserWarning, match="restart 1 of 1"), pytest.raises(RuntimeError, match="my own error"):
        collector.rollout()
    collector.shutdown()


@pytest.mark.parametrize(
    "options", [{}, {"norm_adv": False}, pytest.param({"compile": True}, marks=pytest.mark.slow)]
)
def test_the_update_uses_the_counted_steps_alone(fit, options):
    data = {"env_id": lambda num_envs: NextStepVector("tests.environments:Script-v0", num_envs)}
    data |= {"num_envs": 3, "num_steps": 8, "total_timesteps": 24 * 3}
    module = fit(data, {"update_epochs": 2, "num_minibatches": 2} | options, ppo=RecordedPPO)
    rollout = module.rollouts[-1]
    kept = rollout["observation"][rollout["weight"] > 0].flatten().sort().values
    assert 0 < (rollout["weight"] == 0).sum() < 12
    for epoch in module.epochs[-2:]:
        valid = [{key: value[batch["weight"] > 0] for key, value in batch.items()} for batch in epoch]
        assert torch.equal(torch.cat([batch["observation"] for batch in valid]).flatten().sort().values, kept)
        assert all(batch["weight"].mean() == pytest.approx(1) for batch in epoch)
        for advantage in (batch["advantage"] for batch in valid if options.get("norm_adv", True)):
            assert abs(advantage.mean()) < 1e-5
            assert abs(advantage.std() - 1) < 1e-3
        for batch, alone in zip(epoch, valid, strict=True):  # the loss and its parts
            del alone["weight"]
            torch.testing.assert_close(module.total_loss(batch), module.total_loss(alone))


def test_the_guard_compares_nothing_in_a_rollout_without_valid_steps(fit):
    module = fit(SMALL, ppo=RecordedPPO)
    rollout, guard = module.rollouts[-1], RolloutGuard()
    guard.every = 1
    rollout["weight"] = torch.zeros(rollout.batch_size)
    guard.on_train_batch_start(module.trainer, module, rollout, 0)


@pytest.mark.parametrize("number", [-1, 0.5, "often"])
def test_a_number_of_restarts_that_makes_no_sense_is_refused(number):
    with pytest.raises(ConfigError, match=r"max_restarts is .*: it must be (at least 0|an integer)"):
        make_env("CartPole-v1", env_kwargs={"max_restarts": number})


def test_explained_variance_leaves_out_invalid_steps(fit):
    class Masked(PPO):
        def training_step(self, rollout, batch_idx):
            self.rollout, self.valid = rollout, torch.ones(rollout.batch_size, dtype=torch.bool)
            self.valid[0, :10] = False
            rollout["weight"] = self.valid.float()
            super().training_step(rollout, batch_idx)

    module = fit(SMALL | {"total_timesteps": 32}, ppo=Masked)
    value, target = (module.rollout[key][module.valid] for key in ("state_value", "value_target"))
    expected = losses.explained_variance(value, target)
    torch.testing.assert_close(module.trainer.callback_metrics["losses/explained_variance"], expected)


@pytest.mark.parametrize(
    "data",
    [
        {"backend": "envpool"},
        {"env_id": lambda: gymnasium.make_vec("CartPole-v1", num_envs=4)},
    ],
)
def test_restarts_are_for_environments_that_are_stepped_one_by_one(fit, data):
    with pytest.raises(ConfigError, match=r"data.env_kwargs.*max_restarts"):
        fit(data | {"env_kwargs": {"max_restarts": 1}})


def test_transforms_see_a_restart_as_a_truncation(fit):
    data = SMALL | trouble("raises", 3, max_restarts=9, env=Trouble.made + 1)
    with pytest.warns(UserWarning, match="restart 1 of 9"):
        module = fit(data | {"transforms": [StepCounter(10)]}, ppo=RecordedPPO)
    assert any(rollout["next", "truncated"].any() for rollout in module.rollouts)


def test_a_new_environment_has_the_attributes_of_the_failed_one_and_a_seed_of_its_own():
    class Fails(gymnasium.Env):
        observation_space, action_space = gymnasium.spaces.Box(0, 1, (1,)), gymnasium.spaces.Discrete(2)
        worth = 1.0

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return self.np_random.random(1, np.float32), {}

        def step(self, action):
            if action:
                raise RuntimeError("broken")
            return self.np_random.random(1, np.float32), self.worth, False, False, {}

    def play(seed):
        env = RestartOnFailure(Fails, max_restarts=2)
        env.reset(seed=seed)
        assert env.set_wrapper_attr("worth", 3.0, force=False)
        last, *_ = env.step(0)
        with pytest.warns(UserWarning, match="restart 1 of 2"):
            observation, *results = env.step(1)
        assert np.array_equal(observation, last) and results == [0.0, False, True, {}]
        first, _ = env.reset()
        assert env.step(0)[1] == 3.0
        return float(first[0])

    assert play(1) == play(1) != play(2)


@pytest.mark.integration
def test_all_ranks_continue_after_a_restart_on_one_rank(tmp_path):
    data = trouble("raises", 20, max_restarts=1)
    code, errors = finish(start(tmp_path / "run", 2, data=data, rollouts=4, trouble_on=1, check_every=1))
    assert code == 0, errors
    assert "restart 1 of 1" in errors
    ranks = [torch.load(tmp_path / "run" / f"rank{rank}.pt") for rank in range(2)]
    assert torch.equal(ranks[0]["weights"], ranks[1]["weights"])
