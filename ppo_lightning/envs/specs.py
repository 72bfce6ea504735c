"""Specs of batches of environments, from which agents are built."""

from typing import NamedTuple

from torchrl.data import Categorical, Composite, TensorSpec
from torchrl.envs import EnvBase

from ppo_lightning.envs.batched import BatchedEnv
from ppo_lightning.envs.tensor_env import TensorEnv
from ppo_lightning.errors import ConfigError
from ppo_lightning.spaces.entries import PRIVILEGED
from ppo_lightning.spaces.specs import MASK, stored


class Specs(NamedTuple):
    """Specs of one environment, part by part.

    Attributes:
        observation: Spec of the observations.
        action: Spec of the actions.
    """

    observation: TensorSpec
    action: TensorSpec


def specs_of(env: EnvBase) -> Specs:
    """Return the specs of one environment of a batch.

    Args:
        env: A batch of environments.

    Raises:
        ConfigError: The environment has no ``observation``, or transforms would hide a part of its spaces.
    """
    if isinstance(env, BatchedEnv | TensorEnv):
        return Specs(*env.agent_specs)
    spec = env.observation_spec_unbatched
    base = getattr(env, "base_env", None)
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
    if has_parts or MASK in spec or isinstance(spec.get("observation", None), Categorical | Composite):
        raise ConfigError(
            "Discrete observations, observations and actions of several parts and an action_mask need a"
            " Gymnasium environment without data.transforms: elsewhere they would be ignored."
        )
    if "observation" not in spec:
        raise ConfigError(
            f"env_id makes an environment with the keys {list(spec.keys())}: it needs the key 'observation'"
            f"{suggest_transforms(spec)}"
        )
    return Specs(spec["observation"], env.action_spec_unbatched)


def suggest_transforms(spec: Composite) -> str:
    """Return the end of an error message: transforms that join the floats of a spec as ``observation``."""
    leaves = {key: part for key, part in spec.items() if not isinstance(part, Composite)}
    floats = {key: part for key, part in leaves.items() if part.dtype.is_floating_point and part.ndim < 2}
    if not floats:
        return "."
    scalars = [key for key, part in floats.items() if part.ndim == 0]
    vectors = [f"{key}_1" if key in scalars else key for key in floats]
    lines = [
        f"UnsqueezeTransform(-1, in_keys={scalars}, out_keys={[f'{key}_1' for key in scalars]})"
        if scalars
        else "",
        f"CatTensors({vectors}, 'observation', del_keys=False)",
        "StepCounter(200)  # an episode's time limit",
    ]
    return ". These data.transforms make it:" + "".join(f"\n    {line}" for line in lines if line)
