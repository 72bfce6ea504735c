"""Find normalization with running statistics that is part of an environment."""

import contextlib
from typing import Any

import gymnasium
from torch import nn
from torchrl.envs import EnvBase, Transform

from ppo_lightning.private import INNER_ENVS

SETTINGS = {
    "NormalizeObservation": "model.agent.norm_obs",
    "NormalizeReward": "model.norm_reward",
    "VecNorm": "model.agent.norm_obs",
    "VecNormV2": "model.agent.norm_obs",
}
LAYERS = gymnasium.Env | gymnasium.vector.VectorEnv | EnvBase | Transform
INNER = ("env", "envs", "samples", "base_env", "transform", "transforms", *INNER_ENVS)


def normalizers(env: Any) -> dict[str, str]:
    """Return the normalizing wrappers and transforms of environments, and the settings that replace them.

    Args:
        env: Environments of any kind.

    Example:
        >>> normalizers(gymnasium.wrappers.NormalizeReward(gymnasium.make("CartPole-v1")))
        {'NormalizeReward': 'model.norm_reward'}
    """
    found: dict[str, str] = {}
    layers = [env]
    seen = set()
    while layers:
        layer = layers.pop()
        if id(layer) in seen or not isinstance(layer, LAYERS):
            continue
        seen.add(id(layer))
        names = [kind.__name__ for kind in type(layer).__mro__]
        with contextlib.suppress(Exception):  # an AsyncVectorEnv has its environments in other processes
            names += [wrapper.name for wrapper in layer.get_attr("spec")[0].additional_wrappers]
        found |= {name: SETTINGS[name] for name in names if name in SETTINGS}
        for name in INNER:
            with contextlib.suppress(Exception):  # a user's class may have these names for anything
                inner = getattr(layer, name)
                layers += inner if isinstance(inner, list | nn.ModuleList) else [inner]
    return found
