"""Output file for the actions of ``predict``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import BasePredictionWriter


class ActionWriter(BasePredictionWriter):
    """Callback that writes the predicted actions to ``actions.npy`` in the folder of the run.

    Example:
        >>> trainer = L.Trainer(callbacks=[ActionWriter()])
    """

    def __init__(self) -> None:
        super().__init__(write_interval="epoch")

    def write_on_epoch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        predictions: Sequence[Any],
        batch_indices: Sequence[Any],
    ) -> None:
        """Write all actions [B, ...] in the order of the observations."""
        path = Path(trainer.log_dir or trainer.default_root_dir) / "actions.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, torch.cat(list(predictions)).cpu().numpy())
        print(f"actions: {path.resolve()}")
