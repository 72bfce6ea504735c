import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import lightning as L
import pytest
import torch

import tests.environments  # noqa: F401  (registers them)
from ppo_lightning import PPO, RolloutDataModule, make_env

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
def env():
    """Return ``make_env``; the fixture closes the environments after the test."""
    made = []

    def make(*args, **kwargs):
        made.append(make_env(*args, **kwargs))
        return made[-1]

    yield make
    for environment in made:
        environment.close(raise_if_closed=False)
