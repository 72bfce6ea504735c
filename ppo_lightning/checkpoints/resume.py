"""Search for the checkpoint to resume from."""

import sys
from pathlib import Path
from typing import Any

from lightning import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from ppo_lightning.checkpoints.file import read_checkpoint
from ppo_lightning.checkpoints.io import remove_unfinished
from ppo_lightning.errors import ConfigError


def newest_checkpoint(trainer: Trainer, env_id: Any, seed: Any) -> str | None:
    """Return the newest intact checkpoint with the same environment and seed, None if there is none.

    The search covers the folders of ``ModelCheckpoint`` if they are set, otherwise the folders of all
    versions of the first logger.

    Args:
        trainer: Trainer that has not started yet.
        env_id: ``data.env_id`` of the configuration.
        seed: ``seed_everything`` of the configuration. True, a random seed, matches every run.
    """
    folders = _folders(trainer)
    for folder in folders:
        remove_unfinished(folder)
    paths = [path for folder in folders for path in folder.glob("*.ckpt")]
    for path in sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            checkpoint = read_checkpoint(str(path))
        except ConfigError as error:
            print(f"skipped: {error}", file=sys.stderr)
            continue
        same_env = checkpoint["datamodule_hyper_parameters"]["env_id"] == env_id
        if same_env and seed in (True, checkpoint["seed"]):
            return str(path)
    return None


def _folders(trainer: Trainer) -> list[Path]:
    folders = [
        callback.dirpath
        for callback in trainer.checkpoint_callbacks
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None
    ]
    if folders:
        return [Path(folder) for folder in folders]
    if trainer.loggers:
        logger = trainer.loggers[0]
        return list(Path(logger.save_dir or trainer.default_root_dir, str(logger.name)).glob("*/checkpoints"))
    return [Path(trainer.default_root_dir, "checkpoints")]
