"""Refusal of options and callbacks of Lightning that do not work or would silently have no effect."""

import re
import warnings
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EMAWeightAveraging,
    LearningRateFinder,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.trainer.states import TrainerFn

from ppo_lightning import private
from ppo_lightning.errors import ConfigError
from ppo_lightning.rollouts.learner import Learner

REFUSED: dict[Any, str] = {
    StochasticWeightAveraging: (
        "StochasticWeightAveraging copies the module before the agent exists: use EMAWeightAveraging of"
        " lightning.pytorch.callbacks instead."
    ),
    LearningRateFinder | BatchSizeFinder: (
        "Lightning's Tuner cannot tune runs whose data change with the policy: compare learning rates and"
        " data.num_envs in whole runs instead."
    ),
}


def check_trainer(trainer: Any, module: Learner) -> None:
    """Raise a ConfigError that names an option of a Trainer that a module does not support."""
    name = type(module).__name__
    if trainer.gradient_clip_val is not None:
        remedy = "set model.max_grad_norm" if "max_grad_norm" in module.hparams else "leave it out"
        raise ConfigError(f"trainer.gradient_clip_val does not act on {name}'s minibatches: {remedy}.")
    if trainer.precision not in module.precisions:
        accepted = " or ".join(map(repr, module.precisions))
        raise ConfigError(f"trainer.precision is {trainer.precision!r}: {name} takes {accepted}.")
    if trainer.state.fn != TrainerFn.FITTING:
        return
    for name in ("max_steps", "max_epochs", "limit_train_batches", "val_check_interval", "log_every_n_steps"):
        if getattr(trainer, name, None) == 0:  # a `val_check_interval` of time is kept elsewhere
            cause = ", because trainer.barebones is true" if trainer.barebones else ""
            raise ConfigError(f"trainer.{name} is 0{cause}: it must be at least 1.")
    for name in ("min_steps", "min_epochs", "overfit_batches"):
        if value := getattr(trainer, name):
            raise ConfigError(
                f"trainer.{name} is {value}: leave it out, because every rollout is new and"
                " data.total_timesteps ends the run."
            )
    if trainer.accumulate_grad_batches != 1:  # Lightning asks for automatic optimization
        remedy = (
            "lower model.num_minibatches" if "num_minibatches" in module.hparams else "raise model.batch_size"
        )
        raise ConfigError(f"trainer.accumulate_grad_batches is not 1: {remedy} instead.")


def check_callbacks(trainer: L.Trainer, steps_per_rollout: int | None) -> None:
    """Raise a ConfigError that names a callback that cannot work, and adapt averages."""
    # Lightning's advice, to save the weights before the last optimizer step, does not apply here.
    warnings.filterwarnings("ignore", message="Using ModelCheckpoint with manual optimization")
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind, sentence in REFUSED.items():
            if isinstance(callback, kind):
                raise ConfigError(sentence)
        if isinstance(callback, WeightAveraging):
            private.copy_buffers(callback)
        saves_errors = isinstance(callback, OnExceptionCheckpoint)
        saves_errors |= isinstance(callback, ModelCheckpoint) and callback.save_on_exception
        if saves_errors and trainer.world_size > 1:
            raise ConfigError(
                f"{type(callback).__name__} saves after an exception, which may be that of one rank, and a"
                " save needs all ranks: leave it out. Each epoch ends with a checkpoint."
            )
        monitor = str(getattr(callback, "monitor", None))
        if getattr(callback, "mode", "max") == "min" and re.search(r"episodic_return$|success_rate", monitor):
            raise ConfigError(
                f"{type(callback).__name__} would take the smallest {monitor} for the best: set mode='max'."
            )
        if (
            isinstance(callback, EMAWeightAveraging)
            and steps_per_rollout != 1 != callback.update_every_n_steps
        ):
            raise ConfigError(
                "EMAWeightAveraging looks at the count of optimizer steps once a rollout, where it may never"
                " be a multiple of update_every_n_steps: set it to 1, and decay to about 1 - 10 / rollouts."
            )
        if not isinstance(callback, ModelCheckpoint):
            continue
        if private.saves_by_time(callback):
            raise ConfigError(
                "ModelCheckpoint's train_time_interval has no effect with manual optimization:"
                " set every_n_epochs (an epoch has data.rollouts_per_epoch rollouts) instead."
            )
        every = private.steps_between_saves(callback)
        if every and monitor.startswith("eval/"):
            raise ConfigError(
                f"ModelCheckpoint's every_n_train_steps ({every}) saves before an evaluation, with the"
                f" {monitor} of older weights: set every_n_epochs instead."
            )
        if every > 1 and steps_per_rollout is None:
            raise ConfigError(
                f"ModelCheckpoint's every_n_train_steps ({every}) needs the same number of optimizer steps"
                " in each rollout, which model.target_kl and a VectorEnv with AutoresetMode.NEXT_STEP change:"
                " set every_n_epochs instead."
            )
        # Lightning saves after a rollout only if the count of optimizer steps is then a multiple.
        if every and steps_per_rollout and every % steps_per_rollout and steps_per_rollout % every:
            raise ConfigError(
                f"ModelCheckpoint's every_n_train_steps ({every}) counts optimizer steps"
                f" and must be a multiple of the {steps_per_rollout} of one rollout"
                " (model.update_epochs * model.num_minibatches)."
            )
