"""Checks of settings that PPO does not support, before a run starts."""

import functools
from collections.abc import Callable
from typing import Any

from lightning.pytorch.trainer.states import TrainerFn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ppo_lightning.errors import ConfigError


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


def check_minibatches(hparams: Any, num_envs: int, num_steps: int, world_size: int) -> None:
    """Check that a rollout can be split into equal minibatches of at least two steps.

    Raises:
        ConfigError: The rollout cannot be split. The message names the fields to change.
    """
    size, rest = divmod(num_envs * num_steps // world_size, hparams.num_minibatches)
    if world_size > 1 and num_steps % hparams.num_minibatches:
        raise ConfigError(
            f"data.num_steps = {num_steps} is not divisible by model.num_minibatches ="
            f" {hparams.num_minibatches}, which {world_size} ranks need: change one of the two."
        )
    if rest:
        raise ConfigError(
            f"data.num_envs * data.num_steps = {num_envs * num_steps} is not divisible by"
            f" model.num_minibatches = {hparams.num_minibatches}: change one of the three."
        )
    check_minibatch_size(hparams, size)


def check_minibatch_size(hparams: Any, size: int) -> None:
    """Check that minibatches with normalized advantages have at least two steps.

    Raises:
        ConfigError: The minibatches have one step.
    """
    if size == 1 and hparams.norm_adv:
        raise ConfigError(
            f"model.num_minibatches = {hparams.num_minibatches} makes minibatches of one step, whose"
            " advantage cannot be normalized: lower it, or collect more steps."
        )


def check_phases(hparams: Any, data: Any, world_size: int) -> None:
    """Check that a run has an auxiliary phase, and that its sequences can be split into equal minibatches.

    Raises:
        ConfigError: The message names the fields to change.
    """
    if hparams.n_iteration > data.num_rollouts:
        raise ConfigError(
            f"model.n_iteration ({hparams.n_iteration}) is more than the {data.num_rollouts} rollouts of the"
            " run, which would have no auxiliary phase: lower it."
        )
    size = hparams.num_aux_rollouts
    num_sequences = data.num_envs * hparams.n_iteration
    if num_sequences % size or size % world_size:
        raise ConfigError(
            f"model.num_aux_rollouts ({size}) must divide data.num_envs * model.n_iteration ="
            f" {num_sequences} and be a multiple of the number of ranks ({world_size})."
        )


def check_optimizers(optimizers: Any, schedules: Any) -> None:
    """Check that ``configure_optimizers`` returned what PPO's update uses.

    Args:
        optimizers: ``LightningModule.optimizers()``: an optimizer, or a list of several or none.
        schedules: ``LightningModule.lr_schedulers()``: a schedule, a list of several, or None.

    Raises:
        ConfigError: There is not one optimizer, or the schedule cannot be stepped once a rollout.
    """
    if isinstance(optimizers, list) or not optimizers.param_groups:
        count = len(optimizers) if isinstance(optimizers, list) else 0
        returned = f"{count} optimizers"
    elif isinstance(schedules, list):
        returned = f"{len(schedules)} schedules"
    elif isinstance(schedules, ReduceLROnPlateau) or not isinstance(schedules, LRScheduler | None):
        returned = f"the schedule {type(schedules).__name__}, whose step() needs more than a count"
    else:
        return
    raise ConfigError(
        f"configure_optimizers returned {returned}: return one optimizer, with at most one LRScheduler, which"
        " PPO steps once a rollout (self.data.num_rollouts times)."
    )


def with_number_of_rollouts(configure: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a subclass's ``configure_optimizers`` whose errors say where the number of rollouts is."""

    @functools.wraps(configure)
    def configure_or_explain(module: Any) -> Any:
        try:
            return configure(module)
        except Exception as error:
            error.add_note(
                "configure_optimizers raised this. PPO steps a schedule once a rollout,"
                " self.data.num_rollouts times; trainer.estimated_stepping_batches is another number."
            )
            raise

    return configure_or_explain
