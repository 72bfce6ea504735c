"""Checkpoint plugin with atomic writing and safe reading."""

import sys
from pathlib import Path
from typing import Any

from lightning import Trainer
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO

from ppo_lightning.checkpoints.file import (
    BESIDE,
    read_checkpoint,
    remove_beside,
    user_path,
    write_atomically,
    write_beside,
)
from ppo_lightning.checkpoints.run import RUN_KEY, complete, run_entries
from ppo_lightning.errors import NonFiniteError
from ppo_lightning.utils.finite import first_nonfinite
from ppo_lightning.utils.output import say


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
            path = user_path(path)
            write_beside(checkpoint, path)
            write_atomically(checkpoint, path)
            remove_beside(path, keep=checkpoint.get(BESIDE))
            self._failed = False
        except OSError as error:
            self._failed = True
            say(f"NO CHECKPOINT was written to {path}: {error}. Training continues.", sys.stderr)

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


class RunCheckpointIO(CheckpointIO):
    """Checkpoint plugin that completes what Lightning writes, before another plugin writes it.

    Every run has this plugin around that of its Trainer. A plugin gets a checkpoint after all hooks, so that
    no override of ``on_save_checkpoint`` loses what a checkpoint needs to be read.

    Args:
        plugin: The plugin that reads and writes.
        trainer: The Trainer of the run.
    """

    def __init__(self, plugin: CheckpointIO, trainer: Trainer) -> None:
        self.plugin = plugin
        self.trainer = trainer

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Save a checkpoint of the Trainer, or the weights that a started process returns.

        Raises:
            NonFiniteError: The weights, the statistics or the optimizer's state are not finite.
        """
        if "state_dict" not in checkpoint:
            checkpoint = {**checkpoint, RUN_KEY: run_entries(self.trainer.lightning_module)}
        elif name := first_nonfinite(checkpoint):
            raise NonFiniteError(f"No checkpoint was written: {name} is not finite.")
        else:
            checkpoint = complete(checkpoint, self.trainer.lightning_module)
        self.plugin.save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint with the other plugin."""
        return self.plugin.load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint with the other plugin."""
        self.plugin.remove_checkpoint(path)

    def teardown(self) -> None:
        """End the other plugin, which may write in a thread."""
        self.plugin.teardown()


def use_checked_files(trainer: Trainer) -> None:
    """Let a Trainer write whole files and complete checkpoints, with its own plugin if it has one."""
    plugin = trainer.strategy.checkpoint_io
    if type(plugin) is TorchCheckpointIO:  # the Trainer has no plugin
        plugin = CheckedCheckpointIO()
    if not isinstance(plugin, RunCheckpointIO):
        trainer.strategy.checkpoint_io = RunCheckpointIO(plugin, trainer)
