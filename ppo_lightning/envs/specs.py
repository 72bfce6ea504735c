"""Specs of batches of environments, from which agents are built."""

from typing import NamedTuple

import torch
from torchrl.data import Categorical, Composite, MultiCategorical, TensorSpec

from ppo_lightning.envs.batched import BatchedEnv
from ppo_lightning.envs.tensor_env import TensorEnv
from ppo_lightning.envs.torchrl import AnyEnv, TorchRLEnv, untransformed
from ppo_lightning.errors import ConfigError
from ppo_lightning.spaces.entries import PRIVILEGED
from ppo_lightning.spaces.specs import MASK, stored


class Specs(NamedTuple):
    """Specs of one environment, part by part."""

    observation: TensorSpec
    action: TensorSpec


def specs_of(env: AnyEnv) -> Specs:
    """Return the specs of one environment of a batch."""
    if isinstance(env, BatchedEnv | TorchRLEnv | TensorEnv):
        return Specs(*env.agent_specs)
    spec = env.observation_spec_unbatched
    base = untransformed(env)
    has_parts = False
    if isinstance(base, BatchedEnv | TensorEnv):
        observations, actions = base.agent_specs
        sizes = getattr(observations, "entry_sizes", {})
        transformed = spec.get("observation", None)
        if sizes and transformed is not None and transformed.shape == observations.shape:
            transformed.entry_sizes = sizes
            sizes = {}
        has_parts = (
            stored(observations) is not observations
            or isinstance(actions, Composite)
            or any(name.startswith(PRIVILEGED) for name in sizes)
        )
    has_parts |= isinstance(env.action_spec_unbatched, Composite)
    if has_parts or MASK in spec or isinstance(spec.get("observation", None), Categorical | Composite):
        needed = "need a Gymnasium environment without data.transforms, which would ignore them"
        raise ConfigError(f"Discrete observations, spaces of several parts and an action_mask {needed}.")
    if "observation" not in spec:
        raise ConfigError(
            f"env_id makes the keys {list(spec.keys())}: it needs 'observation', which a transform can"
            " make, as CatTensors(keys, 'observation', del_keys=False) does."
        )
    action = env.action_spec_unbatched
    if type(action) is Categorical and action.ndim:  # several choices among as many actions
        action = MultiCategorical(torch.full(action.shape, action.n))
    return Specs(spec["observation"], action)
