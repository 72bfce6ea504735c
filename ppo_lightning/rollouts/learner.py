# ruff: noqa: D102
"""What the run log, callbacks and updates ask of a LightningModule that learns from rollouts."""

from collections.abc import Iterator
from typing import Any, Protocol

import lightning as L
import torch
from lightning.fabric.utilities.data import AttributeDict
from torch import Tensor

from ppo_lightning.rollouts.datamodule import RolloutDataModule
from ppo_lightning.rollouts.progress import Progress


class Learner(Protocol):
    """A module of any algorithm, on-policy or off-policy, see :class:`ppo_lightning.AgentModule`."""

    agent: Any
    hparams: AttributeDict
    progress: Progress

    @property
    def data(self) -> RolloutDataModule: ...
    @property
    def trainer(self) -> L.Trainer: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def env_steps(self) -> int: ...
    @property
    def rollouts_done(self) -> int: ...
    @property
    def steps_per_rollout(self) -> int | None: ...
    def refusals(self) -> Iterator[str]: ...
    def state_dict(self) -> dict[str, Any]: ...


class MinibatchLearner(Learner, Protocol):
    """A module that takes optimizer steps on minibatches."""

    @property
    def minibatch_size(self) -> int: ...
    @property
    def microbatch_size(self) -> int: ...
    def optimizers(self) -> Any: ...
    def manual_backward(self, loss: Tensor, /) -> None: ...
    def clip_gradients(self, optimizer: Any, value: float, algorithm: str, /) -> None: ...
