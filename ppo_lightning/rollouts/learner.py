# ruff: noqa: D102
"""What updates, the run log and callbacks ask of a LightningModule that learns from rollouts."""

from collections import deque
from typing import Any, ClassVar, Protocol

import lightning as L
import torch
from torch import Tensor

from ppo_lightning.rollouts.datamodule import RolloutDataModule


class Learner(Protocol):
    """A module of any algorithm, on-policy or off-policy, see :class:`ppo_lightning.AgentModule`."""

    precisions: ClassVar[tuple[str, ...]]
    env_steps: int
    episode_returns: deque[float]
    run_log: Any
    episode_lengths: deque[float]
    evaluated_at: int | None  # environment steps of the last evaluation in a fit

    @property
    def agent(self) -> Any: ...
    @property
    def data(self) -> RolloutDataModule: ...
    @property
    def hparams(self) -> Any: ...
    @property
    def trainer(self) -> L.Trainer: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def rollouts_done(self) -> int: ...
    @property
    def mean_return(self) -> float | None: ...
    @property
    def minibatch_size(self) -> int: ...
    @property
    def microbatch_size(self) -> int: ...
    @property
    def tolerance(self) -> float: ...
    def state_dict(self) -> dict[str, Any]: ...
    def optimizers(self) -> Any: ...
    def manual_backward(self, loss: Tensor, /) -> None: ...
    def clip_gradients(self, optimizer: Any, value: float, algorithm: str, /) -> None: ...
