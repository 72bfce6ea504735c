"""Checkpoint files that are whole, or not there."""

import contextlib
import fcntl
import io
import os
import sys
import time
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from ppo_lightning.checkpoints.file import read_checkpoint


class CheckedCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its place, reads it back, and only then gives it its name; reads without executing anything.

    PPO puts it in the place of Lightning's default one. A file of that name, and the checkpoint before, stay as they are
    until the new one is whole, and if it cannot be written.

    Args:
        on_error: What happens when a checkpoint cannot be written (a full disk, a folder that is read-only): ``continue``
            says so on standard error and trains on, ``stop`` ends the run.
    """

    def __init__(self, on_error: Literal["continue", "stop"] = "continue") -> None:
        self.on_error, self._failed = on_error, False

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Saves a checkpoint; a path with a protocol (``s3://``) is left to Lightning.

        Raises:
            OSError: It cannot be written, and ``on_error`` is ``stop``.
        """
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        try:
            _write(checkpoint, Path(path))
            self._failed = False
        except OSError as error:
            if self.on_error == "stop":
                raise
            self._failed = True
            print(f"\nNO CHECKPOINT was written to {path}: {error}. Training goes on.", file=sys.stderr, flush=True)

    def load_checkpoint(self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = True) -> dict[str, Any]:
        """Load a checkpoint by :func:`~ppo_lightning.checkpoints.file.read_checkpoint`; ignore ``weights_only``.

        Raises:
            ConfigError: As there.
        """
        return read_checkpoint(path, map_location)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Removes a checkpoint, unless the one that shall take its place could not be written."""
        if not self._failed:
            super().remove_checkpoint(path)


def remove_unfinished(folder: Path) -> None:
    """Remove what writers that were killed have left in a folder; the file of a writer that still runs stays.

    A writer holds a lock on its file, which ends with the process. The minute is for the moment before it has the lock.
    """
    for path in folder.glob(".*.part"):
        with contextlib.suppress(OSError), open(path, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - path.stat().st_mtime > 60:
                path.unlink()


def _write(checkpoint: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_unfinished(path.parent)
    buffer, beside = io.BytesIO(), path.with_name(f".{path.name}.{os.getpid()}.part")
    torch.save(checkpoint, buffer)
    try:
        with open(beside, "wb") as file:
            with contextlib.suppress(OSError):  # not every network's file system has locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.write(buffer.getbuffer())
            file.flush()
            os.fsync(file.fileno())
            if beside.read_bytes() != buffer.getbuffer():
                raise OSError("it reads back differently")
            os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the name, too, survives a power failure
    finally:
        os.close(folder)
