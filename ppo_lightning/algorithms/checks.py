"""Preflight: everything that is refused before a fit, each fault with one sentence."""

import re
from collections.abc import Iterator
from typing import Any

from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.trainer.states import TrainerFn

from ppo_lightning import private
from ppo_lightning.errors import ConfigError
from ppo_lightning.models.actor import Actor
from ppo_lightning.models.networks import NetworkAgent
from ppo_lightning.rollouts.datamodule import RolloutDataModule
from ppo_lightning.rollouts.learner import Learner
from ppo_lightning.spaces.specs import mask_columns
from ppo_lightning.utils.finite import first_nonfinite


def preflight(trainer: Any, module: Learner, data: Any) -> None:
    """Refuse a run that cannot work, or would silently ignore a setting.

    A run calls it before anything is made, and again when its environments and its agent exist.

    Args:
        trainer: The Trainer.
        module: The module, whose ``refusals`` are those of its algorithm.
        data: The data module; ``predict`` needs none.

    Raises:
        ConfigError: The first sentence of :func:`refusals`.
    """
    for sentence in refusals(trainer, module, data):
        raise ConfigError(sentence)


def refusals(trainer: Any, module: Learner, data: Any) -> Iterator[str]:
    """Yield a sentence for each fault of a run."""
    yield from of_trainer(trainer, module)
    if trainer.state.fn == TrainerFn.PREDICTING:
        return
    if not isinstance(data, RolloutDataModule):
        yield (
            f"{type(module).__name__} needs rollouts: call"
            " trainer.fit(model, datamodule=RolloutDataModule(...))."
        )
        return
    if trainer.state.fn == TrainerFn.FITTING:
        yield from of_limits(trainer, module)
        yield from of_data(trainer, data)
        yield from of_callbacks(trainer, module.steps_per_rollout)
    if module.agent is not None:
        yield from of_agent(module, data)
    yield from module.refusals()


def of_trainer(trainer: Any, module: Any) -> Iterator[str]:
    """Yield the options of a Trainer that have no effect in any stage."""
    name = type(module).__name__
    if private.is_compiled(module):
        yield "torch.compile(model) would compile Lightning's hooks, too: pass compile=True instead."
    if trainer.gradient_clip_val is not None:
        remedy = "set model.max_grad_norm" if "max_grad_norm" in module.hparams else "leave it out"
        yield f"trainer.gradient_clip_val does not act on {name}'s minibatches: {remedy}."
    if trainer.precision not in ("32-true", "bf16-mixed"):
        yield f"trainer.precision is {trainer.precision!r}: {name} takes '32-true' or 'bf16-mixed'."


def of_limits(trainer: Any, module: Any) -> Iterator[str]:
    """Yield the limits of a Trainer that keep a run from training, or from ending."""
    for name in ("max_steps", "max_epochs", "limit_train_batches", "val_check_interval", "log_every_n_steps"):
        if getattr(trainer, name, None) == 0 and not trainer.barebones:  # which logs nothing
            yield f"trainer.{name} is 0: it must be at least 1."
    for name in ("min_steps", "min_epochs", "overfit_batches"):
        if value := getattr(trainer, name):
            yield (
                f"trainer.{name} is {value}: leave it out, because every rollout is new and"
                " data.total_timesteps ends the run."
            )
    accumulates = any(isinstance(x, GradientAccumulationScheduler) for x in trainer.callbacks)
    if trainer.accumulate_grad_batches != 1 or accumulates:  # Lightning asks for automatic optimization
        by_minibatches = "num_minibatches" in module.hparams
        remedy = "lower model.num_minibatches" if by_minibatches else "raise model.batch_size"
        yield f"trainer.accumulate_grad_batches and its scheduler have no effect: {remedy} instead."


def of_data(trainer: Any, data: RolloutDataModule) -> Iterator[str]:
    """Yield the sizes of the data module that do not fit each other or the ranks."""
    if data.num_envs % trainer.world_size:
        yield f"data.num_envs is {data.num_envs} and must be a multiple of the {trainer.world_size} ranks."
    if not data.plan.num_rollouts:
        yield (
            f"data.total_timesteps is {data.total_timesteps}, less than one rollout of num_envs * num_steps ="
            f" {data.frames_per_rollout}: raise it, or shorten the rollout."
        )
    backend = data.hparams["worker_backend"]
    if backend != "process" and not data.hparams["num_workers"]:
        yield f"data.worker_backend is {backend!r} and data.num_workers is 0: set the number of workers."


def of_callbacks(trainer: Any, steps_per_rollout: int | None) -> Iterator[str]:
    """Yield the callbacks that cannot work with whole rollouts as batches."""
    for callback in trainer.callbacks:
        name = type(callback).__name__
        if isinstance(callback, StochasticWeightAveraging):
            yield (
                "StochasticWeightAveraging copies the module before the agent exists: use EMAWeightAveraging"
                " of lightning.pytorch.callbacks instead."
            )
        if isinstance(callback, LearningRateFinder | BatchSizeFinder):
            yield (
                "Lightning's Tuner cannot tune runs whose data change with the policy: compare learning rates"
                " and data.num_envs in whole runs instead."
            )
        saves_errors = isinstance(callback, OnExceptionCheckpoint)
        saves_errors |= isinstance(callback, ModelCheckpoint) and callback.save_on_exception
        if saves_errors and trainer.world_size > 1:
            yield (
                f"{name} saves after an exception, which may be that of one rank, and a save needs all ranks:"
                " leave it out. Each epoch ends with a checkpoint."
            )
        monitor = str(getattr(callback, "monitor", None))
        if getattr(callback, "mode", "max") == "min" and re.search(r"episodic_return$|success_rate", monitor):
            yield f"{name} would take the smallest {monitor} for the best: set mode='max'."
        # It looks at the count of optimizer steps only after each rollout.
        averages_each = steps_per_rollout == 1 or getattr(callback, "update_every_n_steps", 1) == 1
        if isinstance(callback, EMAWeightAveraging) and not averages_each:
            yield (
                "EMAWeightAveraging looks at the count of optimizer steps once a rollout, where it may never"
                " be a multiple of update_every_n_steps: set it to 1, and decay to about 1 - 10 / rollouts."
            )
        if isinstance(callback, ModelCheckpoint):
            yield from of_checkpoint_callback(callback, steps_per_rollout)


def of_checkpoint_callback(callback: ModelCheckpoint, steps_per_rollout: int | None) -> Iterator[str]:
    """Yield the intervals at which a callback would never save, or would save other weights."""
    if private.saves_by_time(callback):
        yield (
            "ModelCheckpoint's train_time_interval has no effect with manual optimization: set"
            " every_n_epochs (an epoch has data.rollouts_per_epoch rollouts) instead."
        )
    every = private.steps_between_saves(callback)
    if not every:
        return
    subject = f"ModelCheckpoint's every_n_train_steps ({every})"
    if str(callback.monitor).startswith("eval/"):
        yield (
            f"{subject} saves before an evaluation, with the {callback.monitor} of older weights: set"
            " every_n_epochs instead."
        )
    if every > 1 and steps_per_rollout is None:
        yield (
            f"{subject} needs the same number of optimizer steps in each rollout, which model.target_kl and a"
            " VectorEnv with AutoresetMode.NEXT_STEP change: set every_n_epochs instead."
        )
    # Lightning saves after a rollout only if the count of optimizer steps is then a multiple.
    if steps_per_rollout and every % steps_per_rollout and steps_per_rollout % every:
        yield (
            f"{subject} counts optimizer steps and must be a multiple of the {steps_per_rollout} of one"
            " rollout (model.update_epochs * model.num_minibatches)."
        )


def of_agent(module: Any, data: RolloutDataModule) -> Iterator[str]:
    """Yield what no algorithm can train or save."""
    agent = module.agent
    name = type(agent).__name__
    if tensor := first_nonfinite({"state_dict": agent.state_dict()}):
        yield (
            f"{name} has the infinite buffer or weight {tensor}, and checkpoints take finite ones: register a"
            " constant with persistent=False."
        )
    if type(agent).normalize is not Actor.normalize:
        yield (
            f"{name} overrides normalize, which rollouts do not call: change the observations in the forward"
            " of a body, or in data.transforms."
        )
    if mask_columns(data.specs.observation) and agent.mask is None and not isinstance(agent, NetworkAgent):
        yield (
            f"model.agent is {name}, which would ignore the action_mask of the observations: pass"
            " mask=mask_columns(observation_spec), of ppo_lightning.spaces.specs, to its base class."
        )


# Of some algorithms, which yield them in their `refusals`


def of_memory(module: Any) -> Iterator[str]:
    """Yield an agent with a memory, for algorithms whose minibatches are single steps."""
    if module.agent is not None and module.agent.memory is not None:
        yield (
            f"model.agent has a memory, which {type(module).__name__} cannot train: use"
            " ppo_lightning.RecurrentPPO, or set model.agent.memory to null."
        )


def of_features(module: Any) -> Iterator[str]:
    """Yield an agent without features, for algorithms that have networks on them."""
    if isinstance(module.agent, NetworkAgent):
        yield (
            f"{type(module).__name__} builds on the features of an agent, and model.actor and model.critic"
            " show none: use ppo_lightning.PPO, or write an ActorCritic for model.agent."
        )


def of_turns(module: Any) -> Iterator[str]:
    """Yield a game of turns, for algorithms whose targets ignore the ``discount`` of a step."""
    if module.fitting and module.agent is not None and getattr(module.data.env, "turn_based", False):
        yield (
            f"data.env_id is {module.data.env_id!r}, whose players take turns, and the targets of"
            f" {type(module).__name__} do not change sides: use ppo_lightning.SelfPlay."
        )


def of_updates(module: Any) -> Iterator[str]:
    """Yield two schedules of the learning rate, and minibatches of one step."""
    if module.hparams.desired_kl is not None and module.hparams.anneal_lr:
        yield "model.desired_kl and model.anneal_lr set the learning rate: set anneal_lr to false."
    if module.minibatch_size == 1 and module.hparams.norm_adv:
        yield (
            f"model.num_minibatches = {module.hparams.num_minibatches} makes minibatches of one step, whose"
            " advantage cannot be normalized: lower it, or collect more steps."
        )


def of_steps(module: Any) -> Iterator[str]:
    """Yield numbers of minibatches that do not divide the steps of a rollout."""
    if not module.fitting:
        return
    count = module.hparams.num_minibatches
    names, steps = "data.num_envs * data.num_steps", module.data.frames_per_rollout
    if module.trainer.world_size > 1:  # each rank splits the steps of each environment
        names, steps = "data.num_steps", module.data.num_steps
    if steps % count:
        yield (
            f"{names} = {steps} is not divisible by model.num_minibatches = {count}: change one of these"
            " numbers."
        )
    yield from of_updates(module)


def of_sequences(module: Any) -> Iterator[str]:
    """Yield an agent without a memory, and numbers of minibatches that do not divide the sequences."""
    if module.agent is not None and module.agent.memory is None:
        yield "RecurrentPPO needs an agent with a memory: set model.agent.memory to lstm or min_gru."
    if not module.fitting:
        return
    if module.agent is not None and getattr(module.data.env, "turn_based", False):
        yield (
            "model.agent has a memory, which the players of a turn-based game would share: set"
            " model.agent.memory to null."
        )
    num_envs = module.data.num_envs // module.trainer.world_size
    count = module.hparams.num_minibatches
    if num_envs % count:
        yield (
            f"data.num_envs gives each rank {num_envs} environments, whose whole sequences cannot be split"
            f" into model.num_minibatches = {count} minibatches: change one of the two."
        )
    yield from of_updates(module)


def of_phases(module: Any) -> Iterator[str]:
    """Yield sizes with which PPG has no auxiliary phase, or phases that cannot be split."""
    if not module.fitting:
        return
    hparams, data, ranks = module.hparams, module.data, module.trainer.world_size
    if hparams.n_iteration > data.num_rollouts:
        yield (
            f"model.n_iteration ({hparams.n_iteration}) is more than the {data.num_rollouts} rollouts of the"
            " run, which would have no auxiliary phase: lower it."
        )
    size = hparams.num_aux_rollouts
    num_sequences = data.num_envs * hparams.n_iteration
    if num_sequences % size or size % ranks:
        yield (
            f"model.num_aux_rollouts ({size}) must divide data.num_envs * model.n_iteration ="
            f" {num_sequences} and be a multiple of the number of ranks ({ranks})."
        )


def of_replay(module: Any) -> Iterator[str]:
    """Yield what off-policy algorithms cannot train."""
    name = type(module).__name__
    if module.trainer.precision != "32-true":
        yield f"trainer.precision is {module.trainer.precision!r}: {name} takes '32-true'."
    if module.fitting:
        hparams, data = module.hparams, module.data
        frames, total = data.frames_per_rollout, data.plan.num_frames
        if data.overlap:
            yield (
                "data.overlap acts with weights that are two batches old, and off-policy algorithms allow for"
                " one: set it to false."
            )
        if hparams.buffer_size < frames:
            yield (
                f"model.buffer_size is {hparams.buffer_size}, less than one batch of data.num_envs *"
                f" data.num_steps = {frames} transitions: raise it."
            )
        if not module.due(0, total):
            yield (
                f"model.learning_starts is {module.learning_starts}, and the run ends after {total} steps"
                " without an update: lower it, or raise data.total_timesteps."
            )
    if module.agent is not None and type(module.agent.head) is not module.head:
        if callable(module.agent.default_head):  # the actions do not fit any agent of this kind
            module.agent.default_head(1, module.data.specs.action)
        yield (
            f"model.agent is {type(module.agent).__name__}, which {name} cannot train: leave it out, or give"
            f" an agent whose head is a {module.head.__name__}."
        )
