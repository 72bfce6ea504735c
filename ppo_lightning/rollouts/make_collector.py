"""Choose the collector for an environment."""

from typing import Any

from torchrl.envs import TransformedEnv

from ppo_lightning.envs import BatchedEnv
from ppo_lightning.envs.tensor_env import FunctionalEnv
from ppo_lightning.envs.torchrl import AnyEnv, untransformed
from ppo_lightning.errors import ConfigError
from ppo_lightning.models import Actor
from ppo_lightning.rollouts.base import Collector
from ppo_lightning.rollouts.collector import RolloutCollector
from ppo_lightning.rollouts.scan_collector import ScanCollector
from ppo_lightning.rollouts.storage import check_memory
from ppo_lightning.rollouts.tensor_collector import TensorCollector
from ppo_lightning.rollouts.weighted_collector import WeightedCollector


def make_collector(
    env: AnyEnv,
    agent: Actor,
    num_steps: int,
    num_rollouts: int | None = None,
    compile: bool = False,
    **options: Any,
) -> Collector:
    """Make the collector that an environment of batch size [N] asks for. All yield the same keys.

    A :class:`BatchedEnv` gets the class that its own class names (``collector_class``), by default
    :class:`RolloutCollector`, or :class:`WeightedCollector` if not all of its steps count. A
    :class:`FunctionalEnv` gets :class:`ScanCollector`, which may ``compile``. Any other environment, with
    transforms for example, gets :class:`TensorCollector`, which is slower.
    """
    observation = env.observation_spec_unbatched["observation"]
    state_size = 0 if agent.memory is None else agent.memory.state_size
    observations = 2 * observation.shape.numel() * observation.dtype.itemsize  # before and after the step
    small = 64  # actions, rewards, values, flags
    check_memory(env.batch_size[0] * num_steps, observations + 4 * state_size + small)
    base = untransformed(env)
    if isinstance(base, BatchedEnv):
        if not isinstance(env, TransformedEnv):
            kind = RolloutCollector if base.valid is None else WeightedCollector
            kind = getattr(type(base), "collector_class", kind)
            return kind(base, agent, num_steps, num_rollouts, **options)
        if base.untransformable:
            raise ConfigError(f"data.transforms do not work with {base.untransformable}")
    if not isinstance(env, FunctionalEnv):
        return TensorCollector(env, agent, num_steps, num_rollouts, **options)
    if env.device is not None and env.device.type != agent.device.type:
        remedy = f"for the backend 'torch', set data.env_kwargs.device {agent.device.type!r}"
        raise ConfigError(f"The environments are on {env.device}, the agent is on {agent.device}: {remedy}.")
    return ScanCollector(env, agent, num_steps, num_rollouts, compile=compile, **options)
