"""Values of PPO's settings that a user leaves out."""

import functools
from typing import Any, NamedTuple

from ppo_lightning.envs.specs import Specs
from ppo_lightning.models.default import DefaultAgent
from ppo_lightning.models.networks import class_of
from ppo_lightning.models.normalizers import RewardScaler
from ppo_lightning.spaces.pictures import has_picture


class Defaults(NamedTuple):
    """Values of settings that are None, see :class:`~ppo_lightning.algorithms.ppo.PPO`.

    ``norm_obs`` is that of the agent, if ``agent`` is left out or a DefaultAgent.
    """

    learning_rate: float
    num_minibatches: int
    update_epochs: int
    clip_vloss: bool
    ent_coef: float
    norm_reward: bool
    norm_obs: bool


# Chosen by benchmarks/defaults.py: runs of 25 000 to 100 000 steps on vectors
SHORT_RUNS = Defaults(
    learning_rate=1e-3,
    num_minibatches=8,
    update_epochs=10,
    clip_vloss=False,
    ent_coef=0.0,
    norm_reward=True,
    norm_obs=True,
)
# Those of CleanRL's ppo.py, for pictures and for variants that other settings suit
CLEANRL = Defaults(
    learning_rate=2.5e-4,
    num_minibatches=4,
    update_epochs=4,
    clip_vloss=True,
    ent_coef=0.01,
    norm_reward=False,
    norm_obs=False,
)


def settle(module: Any, defaults: Defaults) -> None:
    """Give the hyperparameters of a module that were left out their values."""
    # A user may have set a value since, and `save_hyperparameters` of a subclass may have brought None back.
    chosen = {
        name: getattr(defaults, name)
        for name in module.left_out
        if module.hparams[name] in (None, getattr(module.defaults, name))
    }
    module.save_hyperparameters(chosen)
    # detail P2
    module.reward_scaler = RewardScaler(module.hparams.gamma) if module.hparams.norm_reward else None


def settle_for(module: Any, specs: Specs) -> None:
    """Give hyperparameters and agent the values for the observations of a run."""
    defaults = CLEANRL if has_picture(specs.observation) else module.defaults
    settle(module, defaults)
    given = getattr(module.make_agent, "keywords", {}).get("norm_obs")
    if class_of(module.make_agent) is DefaultAgent and given is None:
        module.make_agent = functools.partial(module.make_agent, norm_obs=defaults.norm_obs)
