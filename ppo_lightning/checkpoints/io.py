"""Checkpoint files that are whole, or not there."""

import contextlib
import fcntl
import io
import os
import sys
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from ppo_lightning.checkpoints.file import read_checkpoint

UNFINISHED = ".unfinished.part"


class CheckedCheckpointIO(TorchCheckpointIO):
    """Read checkpoints without executing anything, and survive disks that are full.

    The command line adds this plugin. From Python, pass it to the Trainer.

    A checkpoint is written beside its place and renamed. Lightning's own way writes it into the system's
    temporary folder, from where it is copied if that is another disk: a kill during the copy leaves half a
    file of the right name.

    Args:
        on_error: What happens when a checkpoint cannot be written (a full disk, a folder that is read-only):
            ``continue`` prints that on standard error and trains on, ``stop`` ends the run.

    Example:
        >>> trainer = L.Trainer(max_epochs=-1, plugins=[CheckedCheckpointIO(on_error="stop")])
    """

    def __init__(self, on_error: Literal["continue", "stop"] = "continue") -> None:
        self.on_error, self._failed = on_error, False

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Save a checkpoint; Lightning writes to paths with a protocol (``s3://``).

        Raises:
            OSError: The file cannot be written, and ``on_error`` is ``stop``.
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
            print(
                f"\nNO CHECKPOINT was written to {path}: {error}. Training continues.",
                file=sys.stderr,
                flush=True,
            )

    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = True
    ) -> dict[str, Any]:
        """Load a checkpoint by :func:`~ppo_lightning.checkpoints.file.read_checkpoint`; ignore ``weights_only``.

        Raises:
            ConfigError: As there.
        """
        return read_checkpoint(path, map_location)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint, unless the one that replaces it could not be written."""
        if not self._failed:
            super().remove_checkpoint(path)


def remove_unfinished(folder: Path) -> None:
    """Remove the file of a killed writer; a running writer holds a lock on its file."""
    with contextlib.suppress(OSError), open(folder / UNFINISHED, "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (folder / UNFINISHED).unlink()


def _write(checkpoint: dict[str, Any], path: Path) -> None:
    """Write beside the file's place, and rename; a killed writer leaves at most one file in a folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    torch.save(checkpoint, buffer)
    unfinished = path.with_name(UNFINISHED)
    try:
        with open(unfinished, "wb") as file:
            with contextlib.suppress(OSError):  # some network file systems have no locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.write(buffer.getbuffer())
            file.flush()
            os.fsync(file.fileno())
            os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
