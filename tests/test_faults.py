"""What goes wrong around a run: files that cannot be written or are not what they seem, environments that raise or hang."""

import os
import resource
import signal
import time
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from ppo_lightning import PPO, ConfigError, MLPAgent, RolloutDataModule, make_env
from ppo_lightning.checkpoint_io import CheckedCheckpointIO
from ppo_lightning.make_collector import make_collector
from tests.environments import Trouble
from tests.test_distributed import finish, start

SMALL = {"num_envs": 2, "num_steps": 16, "total_timesteps": 2 * 16 * 4}


@pytest.fixture
def full_disk():
    """No file may grow beyond 2000 bytes, which is an error of the system's as a full disk is."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


class FillDisk(ModelCheckpoint):
    """Saves after every iteration; the disk is full after the second."""

    def __init__(self, folder, fill):
        super().__init__(folder, every_n_train_steps=1, filename="{step}")
        self.fill = fill

    def on_train_batch_end(self, trainer, pl_module, *args):
        if pl_module.rollouts_done == 3:
            self.fill()
        super().on_train_batch_end(trainer, pl_module, *args)


def test_a_full_disk_is_said_and_the_checkpoint_before_stays(fit, tmp_path, full_disk, capsys):
    module = fit(SMALL, callbacks=[FillDisk(tmp_path, full_disk)], enable_checkpointing=True)
    assert module.rollouts_done == 4, "training goes on"
    errors = capsys.readouterr().err
    assert errors.count("NO CHECKPOINT was written") == 2
    assert "File too large" in errors
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["step=32.ckpt"], "no torn file, and the old one"
    assert PPO.load_from_checkpoint(tmp_path / "step=32.ckpt").env_steps == 64


def test_a_full_disk_ends_the_run_where_that_is_asked_for(fit, tmp_path, full_disk):
    with pytest.raises(OSError, match="File too large"):
        fit(SMALL, callbacks=[FillDisk(tmp_path, full_disk)], enable_checkpointing=True, plugins=[CheckedCheckpointIO("stop")])
    assert PPO.load_from_checkpoint(tmp_path / "step=32.ckpt").env_steps == 64
    assert len([*tmp_path.glob("*.ckpt")]) == 1


def test_a_folder_that_cannot_be_written_is_said(fit, tmp_path, capsys):
    (tmp_path / "file").write_text("no folder")
    callback = ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=1)
    callback.dirpath = str(tmp_path / "file" / "checkpoints")
    fit(SMALL, callbacks=[callback], enable_checkpointing=True)
    assert "NO CHECKPOINT was written" in capsys.readouterr().err


class Malicious:
    def __reduce__(self):
        return os.system, ("touch executed",)


@pytest.fixture
def bad_files(fit, tmp_path, monkeypatch):
    """A truncated checkpoint, one that executes something when it is unpickled, and a text."""
    monkeypatch.chdir(tmp_path)
    fit(SMALL, callbacks=[ModelCheckpoint(tmp_path, every_n_train_steps=1, filename="good")], enable_checkpointing=True)
    good = Path("good.ckpt").read_bytes()
    Path("truncated.ckpt").write_bytes(good[: len(good) // 2])
    torch.save(torch.load("good.ckpt", weights_only=True) | {"state_dict": Malicious()}, "malicious.ckpt")
    Path("text.ckpt").write_text("weights")
    return [Path(f"{name}.ckpt") for name in ("truncated", "malicious", "text")]


def test_files_that_are_no_checkpoints_are_refused_and_execute_nothing(bad_files, make_trainer):
    for path in bad_files:
        for run in (make_trainer().fit, make_trainer(limit_val_batches=1).validate, make_trainer().predict):
            for options in ({}, {"weights_only": False}):
                with pytest.raises(ConfigError, match="cannot be read as a checkpoint"):
                    run(PPO(), datamodule=RolloutDataModule(**SMALL), ckpt_path=path, **options)
        with pytest.raises(Exception, match=r".+"):
            PPO.load_from_checkpoint(path, weights_only=False)
    assert not Path("executed").exists()
    torch.load("malicious.ckpt", weights_only=False)
    assert Path("executed").exists(), "or the file was harmless"


def run_with(trouble, folder, **options):
    """Trains, in a process of its own, with trouble at step 40 of environment 1."""
    data = {"env_id": "tests.environments:Trouble-v0", "env_kwargs": {"kind": trouble, "at": 40, "env": 1}, "num_envs": 4}
    return start(folder, 1, data=data | options, rollouts=4)


def test_an_environment_that_hangs_ends_the_run_with_its_traceback(tmp_path):
    began = time.monotonic()
    code, errors = finish(run_with("hangs", tmp_path / "run", step_timeout=3.0))
    assert code == 1
    assert "Timeout (0:00:03)!" in errors
    assert "environments.py" in errors.split("most recent call first")[1].splitlines()[1], "says where it hangs"
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("trouble", "message"), [("raises", "the simulator is broken"), ("nan", "reward of environment 1 is nan")]
)
def test_an_environment_that_raises_or_gives_nan_ends_the_run_with_its_traceback(tmp_path, trouble, message):
    code, errors = finish(run_with(trouble, tmp_path / "run"))
    assert code == 1
    assert message in errors


def test_after_an_error_nobody_waits_for_the_step_any_more():
    """Or the process (a notebook, say) would end some minutes later."""
    env = make_env("tests.environments:Trouble-v0", 1, kind="raises", at=3, env=Trouble.made)
    agent = MLPAgent(env.observation_spec_unbatched["observation"], env.action_spec_unbatched)
    collector = make_collector(env, agent, 8, step_timeout=0.5)
    with pytest.raises(RuntimeError, match="the simulator is broken"):
        collector.rollout()
    time.sleep(1)
    collector.shutdown()


@pytest.mark.parametrize("trouble", ["raises", "exits", "hangs"])
def test_trouble_on_one_rank_ends_all_ranks(tmp_path, trouble):
    data = {"env_id": "tests.environments:Trouble-v0", "env_kwargs": {"kind": trouble, "at": 20}, "step_timeout": 3.0}
    process = start(tmp_path / "run", 2, data=data, rollouts=4, trouble_on=1)
    code, errors = finish(process, timeout=90)
    assert code != 0, errors
