"""Refusal of Lightning callbacks that do not work with PPO or would silently have no effect."""

import warnings

import lightning as L
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.utilities import rank_zero_warn

from ppo_lightning.errors import ConfigError
from ppo_lightning.utils import lightning_private

FIRST_WEIGHTS = 0.05  # largest share of the first weights in an average at the end of a run


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
        if lightning_private.saves_by_time(callback):
            raise ConfigError(
                "ModelCheckpoint's train_time_interval has no effect with manual optimization:"
                " set every_n_epochs (an epoch has data.rollouts_per_epoch rollouts) instead."
            )
        every = lightning_private.steps_between_saves(callback)
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
        decay = lightning_private.average_decay(callback)
        if decay**num_rollouts > FIRST_WEIGHTS:
            rank_zero_warn(
                f"EMAWeightAveraging averages once a rollout: with decay {decay:g}, {decay**num_rollouts:.0%}"
                f" of the average after the {num_rollouts} rollouts of the run are the first weights. Set"
                f" decay to {max(0.5, 1 - 10 / num_rollouts):.2g}."
            )
