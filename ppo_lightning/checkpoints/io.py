"""Checkpoint plugin with atomic writing and safe reading."""

import sys
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO

from ppo_lightning.checkpoints.file import (
    BESIDE,
    read_checkpoint,
    remove_beside,
    write_atomically,
    write_beside,
)


class CheckedCheckpointIO(TorchCheckpointIO):
    """Checkpoint plugin that writes files atomically and executes nothing while reading.

    Every run has this plugin, unless the Trainer has another one.

    A checkpoint is written to a temporary name in the same folder and then renamed.
    Lightning writes to the system's temporary folder instead, and copies the file if that is another
    disk. A kill during the copy then leaves half a file under the final name.

    Example:
        >>> import lightning as L
        >>> trainer = L.Trainer(plugins=[CheckedCheckpointIO()])
    """

    def __init__(self) -> None:
        self._failed = False

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Save a checkpoint atomically. Paths with a protocol (``s3://``) are left to Lightning.

        If the file cannot be written (full disk, read-only folder), standard error says so, and training
        continues.
        """
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        try:
            write_beside(checkpoint, Path(path))
            write_atomically(checkpoint, Path(path))
            remove_beside(Path(path), keep=checkpoint.get(BESIDE))
            self._failed = False
        except OSError as error:
            self._failed = True
            message = f"\nNO CHECKPOINT was written to {path}: {error}. Training continues."
            print(message, file=sys.stderr, flush=True)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = True
    ) -> dict[str, Any]:
        """Load only tensors and plain types, with :func:`~ppo_lightning.checkpoints.file.read_checkpoint`."""
        return read_checkpoint(path, map_location)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint, unless its replacement could not be written."""
        if not self._failed:
            super().remove_checkpoint(path)
            remove_beside(Path(path))
