"""Refusal of options and callbacks of Lightning that do not work or would silently have no effect."""

import warnings
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn

from ppo_lightning import private
from ppo_lightning.callbacks.guards import Guard
from ppo_lightning.errors import ConfigError
from ppo_lightning.rollouts.learner import Learner

FIRST_WEIGHTS = 0.05  # largest share of the first weights in an average at the end of a run


class TrainerGuard(Guard):
    """Callback that checks the other callbacks of a run again, once the environments exist."""

    def on_train_start(self, trainer: L.Trainer, pl_module: Learner) -> None:
        """Refuse callbacks that cannot work with invalid steps, and warn of a slow average."""
        check_callbacks(trainer, pl_module.steps_per_rollout)
        warn_of_slow_average(trainer, pl_module.data.num_rollouts)


def check_trainer(trainer: Any) -> None:
    """Refuse options of a Trainer that PPO does not support.

    Raises:
        ConfigError: An option is not supported. The message names the option and the alternative.
    """
    if trainer.gradient_clip_val is not None:
        raise ConfigError(
            "trainer.gradient_clip_val does not act on PPO's minibatches: set model.max_grad_norm instead."
        )
    if trainer.precision not in ("32-true", "bf16-mixed"):
        raise ConfigError(f"trainer.precision is {trainer.precision!r}: PPO takes '32-true' or 'bf16-mixed'.")
    if trainer.state.fn != TrainerFn.FITTING:
        return
    nothing = "it must not be 0, which trains nothing; data.total_timesteps ends a run"
    for name, refused, must in (
        ("min_steps", trainer.min_steps, "leave it out and set data.total_timesteps, which ends the run"),
        ("min_epochs", trainer.min_epochs, "leave it out and set data.total_timesteps, which ends the run"),
        ("max_steps", trainer.max_steps == 0, nothing),
        ("max_epochs", trainer.max_epochs == 0, nothing),
        ("limit_train_batches", trainer.limit_train_batches == 0, nothing),
        (
            "accumulate_grad_batches",
            trainer.accumulate_grad_batches != 1,
            "set model.num_minibatches lower instead",
        ),
        ("overfit_batches", trainer.overfit_batches, "leave it out, because every rollout is new"),
        ("val_check_interval", trainer.val_check_interval == 0, "it must be at least 1 rollout"),
        (
            "log_every_n_steps",
            trainer.log_every_n_steps == 0,
            "it must be at least 1; trainer.logger false logs nothing",
        ),
    ):
        if refused:
            raise ConfigError(f"trainer.{name} is {getattr(trainer, name)}: {must}.")


def check_callbacks(trainer: L.Trainer, steps_per_rollout: int | None) -> None:
    """Refuse callbacks that cannot work, or would have no effect.

    Args:
        trainer: Trainer whose callbacks are checked.
        steps_per_rollout: Optimizer steps per rollout, None if the number varies.

    Raises:
        ConfigError: Names the callback and what to use instead.
    """
    # Lightning's advice, to save the weights before the last optimizer step, does not apply to PPO.
    warnings.filterwarnings("ignore", message="Using ModelCheckpoint with manual optimization")
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, StochasticWeightAveraging):
            raise ConfigError(
                "StochasticWeightAveraging copies the module before the agent exists:"
                " use EMAWeightAveraging of lightning.pytorch.callbacks instead."
            )
        if isinstance(callback, LearningRateFinder | BatchSizeFinder):
            raise ConfigError(
                "Lightning's Tuner cannot tune PPO, because the data change with the policy:"
                " compare values of model.learning_rate and data.num_envs in whole runs instead."
            )
        if isinstance(callback, GradientAccumulationScheduler):
            raise ConfigError(
                "trainer.accumulate_grad_batches must stay 1, but a GradientAccumulationScheduler changes it:"
                " remove the callback and set model.num_minibatches lower instead."
            )
        if not isinstance(callback, ModelCheckpoint):
            continue
        if private.saves_by_time(callback):
            raise ConfigError(
                "ModelCheckpoint's train_time_interval has no effect with manual optimization:"
                " set every_n_epochs (an epoch has data.rollouts_per_epoch rollouts) instead."
            )
        every = private.steps_between_saves(callback)
        if every > 1 and steps_per_rollout is None:
            raise ConfigError(
                f"ModelCheckpoint's every_n_train_steps ({every}) needs the same number of optimizer steps"
                " in each rollout, which model.target_kl, data.env_kwargs.max_restarts and a VectorEnv with"
                " AutoresetMode.NEXT_STEP change: set every_n_epochs instead."
            )
        # Lightning saves after a rollout only if the count of optimizer steps is then a multiple.
        if every and steps_per_rollout and every % steps_per_rollout and steps_per_rollout % every:
            raise ConfigError(
                f"ModelCheckpoint's every_n_train_steps ({every}) counts optimizer steps"
                f" and must be a multiple of the {steps_per_rollout} of one rollout"
                " (model.update_epochs * model.num_minibatches)."
            )


def warn_of_slow_average(trainer: L.Trainer, num_rollouts: int) -> None:
    """Warn if an average of the weights would still hold those of the first rollout at the end of the run.

    Args:
        trainer: Trainer whose callbacks are checked.
        num_rollouts: Number of rollouts of the run, after each of which Lightning averages once.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if not isinstance(callback, EMAWeightAveraging):
            continue
        decay = private.average_decay(callback)
        if decay**num_rollouts > FIRST_WEIGHTS:
            rank_zero_warn(
                f"EMAWeightAveraging averages once a rollout: with decay {decay:g}, {decay**num_rollouts:.0%}"
                f" of the average after the {num_rollouts} rollouts of the run are the first weights. Set"
                f" decay to {max(0.5, 1 - 10 / num_rollouts):.2g}."
            )
