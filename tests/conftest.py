import contextlib
import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")

import lightning as L
import pytest
import torch

import tests.environments  # noqa: F401  (registers them)
from ppo_lightning import PPO, RolloutDataModule, make_env
from tests.helpers import Runs, SaveAfter, require_same

torch.set_num_threads(1)


@pytest.fixture
def make_trainer(tmp_path):
    """Return a function that makes quiet Trainers in a folder of the test."""

    def make(**options):
        defaults = {
            "accelerator": "cpu",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "limit_val_batches": 0,
            "default_root_dir": tmp_path,
        }
        return L.Trainer(**defaults | options)

    return make


@pytest.fixture
def fit(make_trainer):
    """Return a function that trains a module and returns it.

    ``fit({data options}, {model options}, seed=1, **trainer options)``.
    """

    def run(data=None, model=None, seed=1, ppo=PPO, ckpt_path=None, **options):
        L.seed_everything(seed, verbose=False)
        module, datamodule = ppo(**model or {}), RolloutDataModule(**data or {})
        make_trainer(**options).fit(module, datamodule, ckpt_path=ckpt_path)
        return module

    return run


@pytest.fixture
def fit_and_resume(fit, tmp_path):
    """Return a function that trains a run and resumes it, and requires the same end of both, to the bit.

    ``fit_and_resume(rollouts, {data options}, {model options}, **options of fit)``. The checkpoint after
    ``rollouts`` rollouts is ``middle.ckpt``.
    """

    def run(rollouts, data=None, model=None, **options):
        path = tmp_path / "middle.ckpt"
        whole = fit(data, model, callbacks=[SaveAfter(path, rollouts)], **options)
        resumed = fit(data, model, ckpt_path=path, **options)
        require_same(whole, resumed)
        return whole, resumed

    return run


@pytest.fixture
def runs(tmp_path):
    """Return a function that makes a folder for runs in processes, which end with the test."""
    made = []

    def make(name):
        made.append(Runs(tmp_path / name))
        return made[-1]

    yield make
    for folder_runs in made:
        for process in folder_runs.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def env():
    """Return ``make_env``; the fixture closes the environments after the test."""
    made = []

    def make(*args, **kwargs):
        made.append(make_env(*args, **kwargs))
        return made[-1]

    yield make
    for environment in made:
        environment.close(raise_if_closed=False)
