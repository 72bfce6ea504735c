"""Finding the checkpoint to go on from."""

import sys
from pathlib import Path
from typing import Any

from lightning import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from ppo_lightning.checkpoints.file import read_checkpoint
from ppo_lightning.checkpoints.io import remove_unfinished
from ppo_lightning.errors import ConfigError


def newest_checkpoint(trainer: Trainer, env_id: Any, seed: Any) -> str | None:
    """Returns the newest whole checkpoint of a run with the same environment and seed, where this Trainer keeps them.

    That is the folder of its ``ModelCheckpoint`` if it has one, otherwise those of all versions of its first logger.

    Args:
        trainer: It has not started yet.
        env_id: As the configuration has it.
        seed: As the configuration has it; True (a random one) fits every run.
    """
    folders = _folders(trainer)
    for folder in folders:
        remove_unfinished(folder)
    found = [path for folder in folders for path in folder.glob("*.ckpt")]
    for path in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            checkpoint = read_checkpoint(str(path))
        except ConfigError as error:
            print(f"passed over: {error}", file=sys.stderr)
            continue
        if checkpoint["datamodule_hyper_parameters"]["env_id"] == env_id and seed in (
            True,
            checkpoint["seed"],
        ):
            return str(path)
    return None


def _folders(trainer: Trainer) -> list[Path]:
    given = [
        c.dirpath
        for c in trainer.checkpoint_callbacks
        if isinstance(c, ModelCheckpoint) and c.dirpath is not None
    ]
    if given:
        return [Path(folder) for folder in given]
    if trainer.loggers:
        logger = trainer.loggers[0]
        return list(Path(logger.save_dir or trainer.default_root_dir, str(logger.name)).glob("*/checkpoints"))
    return [Path(trainer.default_root_dir, "checkpoints")]
