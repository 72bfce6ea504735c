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
from ppo_lightning.utils.arguments import is_left_out
from ppo_lightning.utils.finite import first_nonfinite


def preflight(trainer: Any, module: Learner, data: Any) -> None:
    """Refuse a run that cannot work, or would silently ignore a setting, with the first of :func:`refusals`.

    A run calls it before anything is made, and again when its environments and its agent exist.
    """
    for sentence in refusals(trainer, module, data):
        raise ConfigError(sentence)


def refusals(trainer: Any, module: Learner, data: Any) -> Iterator[str]:
    """Yield a sentence for each fault of a run."""
    yield from of_trainer(trainer, module)
    if trainer.state.fn == TrainerFn.PREDICTING:
        return
    if not isinstance(data, RolloutDataModule):
        yield f"{type(module).__name__} needs trainer.fit(model, datamodule=RolloutDataModule(...))."
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
            yield f"trainer.{name} is {value}: leave it out, because data.total_timesteps ends the run."
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
        rollout = f"one rollout of num_envs * num_steps = {data.frames_per_rollout}"
        yield f"data.total_timesteps is {data.total_timesteps}, less than {rollout}: raise it."
    backend = data.hparams["worker_backend"]
    if backend != "process" and not data.hparams["num_workers"]:
        yield f"data.worker_backend is {backend!r} and data.num_workers is 0: set the number of workers."


def of_callbacks(trainer: Any, steps_per_rollout: int | None) -> Iterator[str]:
    """Yield the callbacks that cannot work with whole rollouts as batches."""
    for callback in trainer.callbacks:
        name = type(callback).__name__
        if isinstance(callback, StochasticWeightAveraging):
            yield "StochasticWeightAveraging copies a module without an agent: use EMAWeightAveraging."
        if isinstance(callback, LearningRateFinder | BatchSizeFinder):
            yield "Lightning's Tuner cannot tune runs whose data change with the policy: compare whole runs."
        saves_errors = isinstance(callback, OnExceptionCheckpoint)
        saves_errors |= isinstance(callback, ModelCheckpoint) and callback.save_on_exception
        if saves_errors and trainer.world_size > 1:
            yield f"{name} saves after an exception of one rank, and a save needs all ranks: leave it out."
        monitor = str(getattr(callback, "monitor", None))
        if getattr(callback, "mode", "max") == "min" and re.search(r"episodic_return$|success_rate", monitor):
            yield f"{name} would take the smallest {monitor} for the best: set mode='max'."
        # It looks at the count of optimizer steps only after each rollout.
        averages_each = steps_per_rollout == 1 or getattr(callback, "update_every_n_steps", 1) == 1
        if isinstance(callback, EMAWeightAveraging) and not averages_each:
            yield (
                "EMAWeightAveraging looks at update_every_n_steps once a rollout: set it to 1, and decay to"
                " about 1 - 10 / rollouts."
            )
        if isinstance(callback, ModelCheckpoint):
            yield from of_checkpoint_callback(callback, steps_per_rollout)


def of_checkpoint_callback(callback: ModelCheckpoint, steps_per_rollout: int | None) -> Iterator[str]:
    """Yield the intervals at which a callback would never save, or would save other weights."""
    if private.saves_by_time(callback):
        yield "ModelCheckpoint's train_time_interval has no effect here: set every_n_epochs instead."
    every = private.steps_between_saves(callback)
    if not every:
        return
    subject = f"ModelCheckpoint's every_n_train_steps ({every})"
    if str(callback.monitor).startswith("eval/"):
        yield f"{subject} saves before an evaluation, with a metric of older weights: set every_n_epochs."
    if every > 1 and steps_per_rollout is None:
        why = "model.target_kl or a VectorEnv with AutoresetMode.NEXT_STEP changes the steps of a rollout"
        yield f"{subject} may never be reached, because {why}: set every_n_epochs."
    # Lightning saves after a rollout only if the count of optimizer steps is then a multiple.
    if steps_per_rollout and every % steps_per_rollout and steps_per_rollout % every:
        rollout = f"the {steps_per_rollout} of one rollout (model.update_epochs * model.num_minibatches)"
        yield f"{subject} counts optimizer steps and must be a multiple of {rollout}."


def of_agent(module: Any, data: RolloutDataModule) -> Iterator[str]:
    """Yield what no algorithm can train or save."""
    agent = module.agent
    name = type(agent).__name__
    if tensor := first_nonfinite({"state_dict": agent.state_dict()}):
        finite = "and checkpoints take finite ones: register a constant with persistent=False"
        yield f"{name} has the infinite buffer or weight {tensor}, {finite}."
    if type(agent).normalize is not Actor.normalize:
        yield f"{name} overrides normalize, which rollouts do not call: change the forward of a body instead."
    if mask_columns(data.specs.observation) and agent.mask is None and not isinstance(agent, NetworkAgent):
        remedy = "pass mask=mask_columns(observation_spec), of ppo_lightning.spaces.specs, to its base class"
        yield f"model.agent is {name}, which would ignore the action_mask of observations: {remedy}."


# Of some algorithms, which yield them in their `refusals`


def of_memory(module: Any) -> Iterator[str]:
    """Yield an agent with a memory if minibatches are single steps, one without if they are sequences."""
    if module.agent is None:
        return
    has_memory = module.agent.memory is not None
    if has_memory and not module.splits_sequences:
        name = type(module).__name__
        yield f"model.agent has a memory, which {name} cannot train: use ppo_lightning.RecurrentPPO."
    if module.splits_sequences and not has_memory:
        yield "RecurrentPPO needs an agent with a memory: set model.agent.memory to lstm or min_gru."
    if has_memory and module.fitting and getattr(module.data.env, "turn_based", False):
        yield "model.agent has a memory, which the players of a turn-based game would share: leave it out."


def of_features(module: Any) -> Iterator[str]:
    """Yield an agent without features, for algorithms that have networks on them."""
    if isinstance(module.agent, NetworkAgent):
        name = type(module).__name__
        yield f"{name} builds on the features that model.actor and model.critic do not show: set model.agent."


def of_turns(module: Any) -> Iterator[str]:
    """Yield a game of turns, for algorithms whose targets ignore the ``discount`` of a step."""
    if module.fitting and module.agent is not None and getattr(module.data.env, "turn_based", False):
        targets = f"the targets of {type(module).__name__} do not change sides"
        yield f"data.env_id has a game whose players take turns, and {targets}: use ppo_lightning.SelfPlay."


def steps_to_split(module: Any) -> int:
    """Return the number of steps, or of sequences, that the number of minibatches must divide."""
    if module.splits_sequences:
        return module.data.num_envs // module.trainer.world_size
    # Each of several ranks splits the steps of each environment.
    return module.data.num_steps if module.trainer.world_size > 1 else module.data.frames_per_rollout


def of_minibatches(module: Any) -> Iterator[str]:
    """Yield numbers of minibatches that do not fit a rollout, and two schedules of the learning rate."""
    if not module.fitting:
        return
    hparams, data, ranks = module.hparams, module.data, module.trainer.world_size
    # A number that was left out becomes a divisor.
    count = 1 if is_left_out(module, "num_minibatches") else hparams.num_minibatches
    if (steps := steps_to_split(module)) % count:
        names = "data.num_steps" if ranks > 1 else "data.num_envs * data.num_steps"
        if module.splits_sequences:
            names = "The number of sequences of a rank, data.num_envs / ranks"
        yield f"{names} = {steps} is not divisible by model.num_minibatches = {count}: change one of the two."
    if hparams.desired_kl is not None and hparams.anneal_lr:
        yield "model.desired_kl and model.anneal_lr set the learning rate: set anneal_lr to false."
    if data.frames_per_rollout // ranks // count == 1 and hparams.norm_adv:
        yield f"model.num_minibatches = {count} makes minibatches of one step: lower it."


def of_phases(module: Any) -> Iterator[str]:
    """Yield sizes with which PPG has no auxiliary phase, or phases that cannot be split."""
    if not module.fitting:
        return
    hparams, data, ranks = module.hparams, module.data, module.trainer.world_size
    if hparams.n_iteration > data.num_rollouts:
        run = f"the run of {data.num_rollouts} rollouts would have no auxiliary phase"
        yield f"model.n_iteration is {hparams.n_iteration}, and {run}: lower it."
    size = hparams.num_aux_rollouts
    num_sequences = data.num_envs * hparams.n_iteration
    if num_sequences % size or size % ranks:
        product = f"data.num_envs * model.n_iteration = {num_sequences}"
        yield f"model.num_aux_rollouts ({size}) must divide {product} and be a multiple of the {ranks} ranks."


def of_replay(module: Any) -> Iterator[str]:
    """Yield what off-policy algorithms cannot train."""
    name = type(module).__name__
    if module.trainer.precision != "32-true":
        yield f"trainer.precision is {module.trainer.precision!r}: {name} takes '32-true'."
    if module.fitting:
        hparams, data = module.hparams, module.data
        frames, total = data.frames_per_rollout, data.plan.num_frames
        if data.overlap:
            yield "data.overlap acts with weights that are two batches old: set it to false."
        if hparams.buffer_size < frames:
            batch = f"one batch of data.num_envs * data.num_steps = {frames}"
            yield f"model.buffer_size is {hparams.buffer_size}, less than {batch} transitions: raise it."
        if not module.due(0, total):
            run = f"the run ends after {total} steps without an update"
            starts = f"model.learning_starts is {module.learning_starts}"
            yield f"{starts}, train_frequency {hparams.train_frequency}, and {run}: lower them."
    if module.agent is not None and type(module.agent.head) is not module.head:
        if callable(module.agent.default_head):  # the actions do not fit any agent of this kind
            module.agent.default_head(1, module.data.specs.action)
        remedy = f"leave it out, or give an agent whose head is a {module.head.__name__}"
        yield f"model.agent is {type(module.agent).__name__}, which {name} cannot train: {remedy}."
