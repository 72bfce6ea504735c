"""Checkpoint files that are whole, or not there."""

import io
import os
import sys
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from ppo_lightning.errors import ConfigError, first_line


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
        """Loads a checkpoint of tensors and plain types; ``weights_only=False`` is not honoured.

        Raises:
            ConfigError: The file is truncated, of another kind, or would execute code.
        """
        try:
            return super().load_checkpoint(path, map_location, weights_only=True)
        except FileNotFoundError:
            raise
        except Exception as error:  # whatever torch.load raises for what is no checkpoint
            raise ConfigError(f"ckpt_path {str(path)!r} cannot be read as a checkpoint: {first_line(error)}.") from error

    def remove_checkpoint(self, path: str | Path) -> None:
        """Removes a checkpoint, unless the one that shall take its place could not be written."""
        if not self._failed:
            super().remove_checkpoint(path)


def _write(checkpoint: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer, beside = io.BytesIO(), path.with_name(f".{path.name}.part")
    torch.save(checkpoint, buffer)
    try:
        with open(beside, "wb") as file:
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
