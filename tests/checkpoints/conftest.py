"""A checkpoint of the command line, and edited copies of it."""

import pytest
import torch

from ppo_lightning.commands import cli
from tests.helpers import RECIPE

SMALL = ["--data.num_steps", "16", "--data.total_timesteps", "128", "--data.eval_episodes", "1"]
DATA = "datamodule_hyper_parameters"
MISSING = object()  # value of an entry that is removed


@pytest.fixture(scope="package")
def run(tmp_path_factory):
    """Return the checkpoint of a command-line run, in the folder of the run."""
    folder = tmp_path_factory.mktemp("run")
    logger = ["--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", str(folder)]
    cli.main(["fit", "--config", RECIPE, *SMALL, *logger, "--data.rollouts_per_epoch", "2"])
    return next(folder.rglob("*.ckpt"))


@pytest.fixture
def edited(run, tmp_path, monkeypatch):
    """Return a function ``edited(*keys, value)`` that saves the checkpoint with a changed entry: its path."""
    monkeypatch.chdir(tmp_path)

    def save(*entry, name="edited.ckpt", source=run):
        *keys, last, value = entry
        part = checkpoint = torch.load(source, weights_only=True)
        for key in keys:
            part = part[key]
        if value is MISSING:
            del part[last]
        else:
            part[last] = value
        torch.save(checkpoint, name)
        return name

    return save
