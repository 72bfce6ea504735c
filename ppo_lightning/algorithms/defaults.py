"""Values of PPO's settings that a user leaves out."""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from torchrl.data import Bounded, TensorSpec

from ppo_lightning import private
from ppo_lightning.algorithms.checks import steps_to_split
from ppo_lightning.models.default import DefaultAgent
from ppo_lightning.models.networks import class_of
from ppo_lightning.models.normalizers import RewardScaler
from ppo_lightning.spaces.pictures import has_picture
from ppo_lightning.utils.output import say

# Chosen by benchmarks/defaults.py, mostly with runs of 50 000 steps on vectors
SHORT_RUNS: Mapping[str, Any] = {
    "learning_rate": 1e-3,
    "num_minibatches": 8,
    "update_epochs": 10,
    "adv_eps": 0.03,  # where returns no longer vary, advantages are noise; with norm_reward only
    "clip_vloss": False,
    "ent_coef": 0.0,
    "norm_reward": True,
    "norm_obs": True,  # of the agent, if `agent` is left out or a DefaultAgent
}
# Where their learning rate moves the policy too far: chosen with runs of 1 000 000 steps of MuJoCo
LONG_RUNS: Mapping[str, Any] = {**SHORT_RUNS, "learning_rate": 3e-4, "num_minibatches": 16}
LONGEST_SHORT_RUN = 500_000  # steps
MANY = 200  # numbers of an observation: 204 to 2000 were measured
# Those of CleanRL's ppo.py, for pictures and for variants that other settings suit
CLEANRL: Mapping[str, Any] = {
    "learning_rate": 2.5e-4,
    "num_minibatches": 4,
    "update_epochs": 4,
    "adv_eps": 1e-8,
    "clip_vloss": True,
    "ent_coef": 0.01,
    "norm_reward": False,
    "norm_obs": False,
}


def settle(module: Any, defaults: Mapping[str, Any]) -> None:
    """Give the hyperparameters of a module that were left out their values."""
    # A user may have set a value since, and `save_hyperparameters` of a subclass may have brought None back.
    chosen = {
        name: defaults[name]
        for name, before in module.left_out.items()
        if module.hparams[name] in (None, before)
    }
    if "adv_eps" in chosen and not (module.hparams | chosen)["norm_reward"]:
        chosen["adv_eps"] = CLEANRL["adv_eps"]
    module.left_out |= chosen
    private.set_hyperparameters(module, chosen)
    # detail P2
    if module.hparams.norm_reward != (module.reward_scaler is not None):  # a second fit keeps its statistics
        module.reward_scaler = RewardScaler(module.hparams.gamma) if module.hparams.norm_reward else None
    if module.reward_scaler is not None:
        module.reward_scaler.gamma = module.hparams.gamma  # which a user may have set since


def settle_by_run(module: Any) -> None:
    """Give hyperparameters the values for a run, and the agent its own before it exists."""
    is_new = module.agent is None
    if module.trainer.state.fn == TrainerFn.PREDICTING or not (is_new or module.fitting):
        return
    with torch.device("cpu"):
        observation_spec = module.data.specs.observation
    defaults = dict(CLEANRL if has_picture(observation_spec) else module.defaults)
    if module.fitting:
        if defaults == SHORT_RUNS and module.data.plan.num_frames > LONGEST_SHORT_RUN:
            defaults = dict(LONG_RUNS)
        steps, rows = steps_to_split(module), module.data.frames_per_rollout // module.trainer.world_size
        counts = range(1, min(defaults["num_minibatches"], rows // 2) + 1)  # one row has no deviation
        defaults["num_minibatches"] = max((count for count in counts if steps % count == 0), default=1)
    settle(module, defaults)
    if not is_new:
        return
    given = getattr(module.make_agent, "keywords", {}).get("norm_obs")
    if class_of(module.make_agent) is DefaultAgent and given is None:
        norm_obs = defaults["norm_obs"] and not are_many_fractions(observation_spec)
        module.make_agent = functools.partial(module.make_agent, norm_obs=norm_obs)
        if norm_obs != defaults["norm_obs"] and module.trainer.is_global_zero:
            say("norm_obs false: observations are many numbers between 0 and 1")


def are_many_fractions(observation_spec: TensorSpec) -> bool:
    """Return whether observations are many numbers in [0, 1], from which PPO learns more as they are."""
    if not isinstance(observation_spec, Bounded) or observation_spec.shape.numel() < MANY:
        return False
    space: Any = observation_spec.space
    return bool((space.low >= 0).all() and (space.high <= 1).all())


def keep_from(module: Any, checkpoint: dict[str, Any]) -> None:
    """Keep what was left out as a checkpoint has it, in a resumed run what its length chose."""
    # Checkpoints without `adv_eps` are older than it.
    saved = {"adv_eps": CLEANRL["adv_eps"], **checkpoint.get("hyper_parameters", {})}
    names = module.left_out.keys() & saved.keys()
    if module.fitting:
        names &= {"learning_rate", "num_minibatches", "adv_eps", *saved.get("_left_out", ())}
        if steps_to_split(module) % saved.get("num_minibatches", 1):  # other ranks
            names -= {"num_minibatches"}
    settle(module, module.left_out | {name: saved[name] for name in names})
