"""Save and find the checkpoint to resume from."""

import math
import sys
from pathlib import Path
from typing import Any

import torch
from lightning import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from ppo_lightning.checkpoints.file import read_beside, read_checkpoint, user_path
from ppo_lightning.errors import ConfigError


def last_checkpoint(*folders: str | Path, env_id: Any = None, seed: Any = True) -> str | None:
    """Return the last intact checkpoint of the newest run in some folders, None if there is none.

    Lightning's ``ckpt_path="last"`` looks in the folder of the new run only. A damaged file is skipped with a
    message on standard error, and one of weights only without.

    Args:
        *folders: Folders of the runs, with all subfolders; by default ``lightning_logs``.
        env_id: Accept runs with this ``data.env_id`` only; None accepts all.
        seed: Accept runs with this seed only; True accepts all.

    Example:
        >>> trainer.fit(PPO(), data, ckpt_path=ppo_lightning.last_checkpoint("lightning_logs"))
    """
    if hasattr(env_id, "__qualname__"):  # a function or a class
        env_id = f"{env_id.__module__}.{env_id.__qualname__}"
    paths = [path for folder in folders or ("lightning_logs",) for path in user_path(folder).rglob("*.ckpt")]
    for path in sorted(filter(Path.is_file, paths), key=_age, reverse=True):
        try:
            checkpoint = read_checkpoint(str(path))
            read_beside(checkpoint, path)
        except ConfigError as error:
            print(f"skipped: {error}", file=sys.stderr)
            continue
        if "optimizer_states" not in checkpoint:  # weights only
            continue
        same_env = env_id in (None, checkpoint["datamodule_hyper_parameters"]["env_id"])
        if same_env and (seed is True or seed == checkpoint["seed"]):  # 1 == True
            return str(path)
    return None


def _age(path: Path) -> tuple[float, float, float]:
    """Return when the run of a checkpoint began, its step and, for equal ones, the time of the file."""
    time = path.stat().st_mtime
    try:
        content = torch.load(path, "cpu", weights_only=True, mmap=True)
        return content.get("begun", path.parent.stat().st_mtime), content["env_steps"], time
    except Exception:  # a damaged file may raise anything; who reads it says so
        return time, math.inf, time


def folders_of_runs(trainer: Trainer) -> list[Path]:
    """Return the folders of ``ModelCheckpoint``: of all versions of the first logger, where none is set."""
    runs = folder_of_logger(trainer) if trainer.loggers else Path(trainer.default_root_dir, "checkpoints")
    callbacks = [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
    folders = [Path(callback.dirpath or runs) for callback in callbacks] or [runs]
    # A fit sets a folder that was not set, to one of a version.
    return [*dict.fromkeys(runs if runs.resolve() in each.resolve().parents else each for each in folders)]


def folder_of_logger(trainer: Trainer) -> Path:
    """Return the folder in which ``ModelCheckpoint`` has one for each version of the first logger."""
    logger = trainer.loggers[0]
    return Path(logger.save_dir or trainer.default_root_dir, str(logger.name))


def save_beside_checkpoints(trainer: Trainer, name: str) -> str | None:
    """Save ``NAME.ckpt`` in the folder of ``ModelCheckpoint``; return its path, if written. A collective."""
    folder = getattr(trainer.checkpoint_callback, "dirpath", None)
    if folder is None:
        return None
    path = Path(folder) / f"{name}.ckpt"
    trainer.save_checkpoint(path, weights_only=False)
    return str(path) if path.exists() else None
