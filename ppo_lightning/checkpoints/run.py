"""What a checkpoint says of its run, and what a process of several returns to the one that started it."""

import os
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_warn

from ppo_lightning import __version__
from ppo_lightning.checkpoints.agent import (
    LOCAL,
    VERSION,
    changed_settings,
    check_same_agent,
    check_same_state,
    known_class,
    trained_agent,
)
from ppo_lightning.checkpoints.settings import MAKERS, facts_of, require_known
from ppo_lightning.envs.specs import Specs
from ppo_lightning.errors import ConfigError
from ppo_lightning.spaces.specs import spec_from_plain
from ppo_lightning.utils.arguments import is_left_out
from ppo_lightning.utils.output import say
from ppo_lightning.utils.seeding import initial_weights

RUN_KEY = "returned"  # in the weights that a started process returns: the entries of `run_entries`


def run_entries(module: Any) -> dict[str, Any]:
    """Return the entries with which a checkpoint of a run can be read and resumed, as plain types."""
    progress = module.progress
    # Results of the last evaluation, if it evaluated the current weights
    results = progress.evaluation if progress.evaluated_at == progress.env_steps else {}
    return {
        VERSION: __version__,
        "agent": module.recipe,
        "evaluation": results or None,
        **(progress.run or facts_of(module.data)),
        **progress.state_dict(),
    }


def complete(checkpoint: dict[str, Any], module: Any) -> dict[str, Any]:
    """Return a checkpoint of Lightning with the entries of its run and the class of its module."""
    entries = run_entries(module)
    # The data module may count for another module since.
    states = {key: x for key, x in checkpoint.items() if isinstance(x, dict) and "collector" in x}
    entries |= {key: state | {"progress": module.progress.state_dict()} for key, state in states.items()}
    hyperparameters = dict(checkpoint.get("hyper_parameters", {}))
    # A subclass may have saved what makes the agent, such as a class or a network, which no reader loads.
    for name in MAKERS:
        hyperparameters.pop(name, None)
    module_path = class_path(module)
    if not module_path.startswith("__main__.") and LOCAL not in module_path:
        hyperparameters.setdefault("_class_path", module_path)  # as the command line does
    left_out = getattr(module, "left_out", ())
    hyperparameters["_left_out"] = [name for name in left_out if is_left_out(module, name)]
    return {**checkpoint, **entries, "hyper_parameters": hyperparameters}


def class_path(module: Any) -> str:
    """Return the import path of an object's class."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def restore(module: Any, checkpoint: dict[str, Any]) -> None:
    """Give a module the agent and the counters of a checkpoint that fits. Lightning loads the weights."""
    if module.agent is None:
        rebuild(module, checkpoint)
    check_same_agent(saved=checkpoint["agent"], current=module.recipe)
    settings = checkpoint.get("hyper_parameters", {})
    changes = changed_settings("model", settings, module.hparams)
    path, name = settings.get("_class_path"), type(module).__name__
    if path and known_class(path, object) is None:
        rank_zero_warn(f"{path} wrote the checkpoint, and nothing has imported it: this is {name}.")
    writer = known_class(path, L.LightningModule) or type(module)
    if not isinstance(module, writer):
        changes = f"The checkpoint is of {writer.__name__} and the module of {name}"
    check_same_state(saved=checkpoint["state_dict"], current=module.state_dict(), changes=changes)
    if module.fitting:
        require_same_run(module.data, checkpoint)
        if changes and module.trainer.is_global_zero:
            say(f"The resumed run has other settings: {changes}.")
        module.data.seed = seed = checkpoint["seed"]  # the random numbers continue
        if (given := os.environ.get("PL_GLOBAL_SEED")) not in (None, str(seed)):
            rank_zero_warn(f"The resumed run keeps its seed, {seed}: {given} has no effect.")
    module.loaded = {}, Path()
    module.progress.load_state_dict(checkpoint)


def rebuild(module: Any, checkpoint: dict[str, Any]) -> None:
    """Build the agent that a checkpoint describes, and the networks of the variant."""
    given = getattr(module.make_agent, "keywords", {})
    settings = {key: [*x] if isinstance(x, tuple) else x for key, x in given.items()}
    plain = {key: x for key, x in settings.items() if isinstance(x, str | int | float | list)}
    if changes := changed_settings("model.agent", checkpoint["agent"]["init_args"], plain):
        raise ConfigError(f"{changes}: a checkpoint has the agent of its run, leave the setting out.")
    module.agent = trained_agent(checkpoint, given).train()
    module.recipe = checkpoint["agent"]
    specs = Specs(*(spec_from_plain(module.recipe[name]) for name in ("observation_spec", "action_spec")))
    module.observation_spec = specs.observation
    with initial_weights():
        module.add_networks(specs)


def require_same_run(data: Any, checkpoint: dict[str, Any]) -> None:
    """Check that the run of a checkpoint can be resumed: schedules count rollouts of one size."""
    if "optimizer_states" not in checkpoint:
        raise ConfigError("ckpt_path has weights only (no optimizer_states) and cannot resume a run.")
    source = checkpoint["datamodule_hyper_parameters"]
    require_known(checkpoint, type(data))
    if source["backend"] == data.hparams["backend"] and source["env_id"] != data.hparams["env_id"]:
        env_ids = f"{source['env_id']} and data.env_id is {data.hparams['env_id']}"
        raise ConfigError(f"ckpt_path is of a run on {env_ids}: keep it, or start a new run.")
    saved = checkpoint["frames_per_rollout"]
    if saved != data.frames_per_rollout:
        sizes = f"data.num_envs * data.num_steps = {saved}, and now it is {data.frames_per_rollout}"
        raise ConfigError(f"ckpt_path is of a run with {sizes}: keep it, or start a new run.")


def receive(module: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the weights of a state dictionary, after a module received the run that comes with them.

    Of processes that it starts, Lightning returns the weights, to which ``RunCheckpointIO`` adds the run.
    """
    weights = dict(state_dict)
    if entries := weights.pop(RUN_KEY, None):
        rebuild(module, entries | {"state_dict": weights})
        module.progress.load_state_dict(entries)
        module.progress.evaluated_at = module.progress.env_steps
        module.progress.evaluation = entries["evaluation"] or {}
        module.loaded = {}, Path()
    return weights
