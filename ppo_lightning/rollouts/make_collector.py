"""Choose the collector for an environment."""

from contextlib import nullcontext
from typing import Any, NamedTuple

from torchrl.envs import EnvBase, TransformedEnv

from ppo_lightning.envs import BatchedEnv
from ppo_lightning.envs.tensor_env import TensorEnv
from ppo_lightning.errors import ConfigError
from ppo_lightning.models import ActorCritic
from ppo_lightning.models.normalizers import RewardScaler
from ppo_lightning.rollouts.collector import Precision, RolloutCollector
from ppo_lightning.rollouts.opponents import Opponents
from ppo_lightning.rollouts.scan_collector import ScanCollector
from ppo_lightning.rollouts.storage import check_memory
from ppo_lightning.rollouts.tensor_collector import TensorCollector
from ppo_lightning.utils import collectives

Collector = RolloutCollector | TensorCollector


class CollectorInputs(NamedTuple):
    """Inputs of a collector, which the LightningModule's method ``collector_inputs`` returns.

    Attributes:
        agent: The agent.
        reward_scaler: Scales the rewards. None: no scaling.
        opponents: Choose the actions of some players of some games. None: the agent acts for all players.
        compile: Compile rollouts of environments that are functions of tensors.
    """

    agent: ActorCritic
    reward_scaler: RewardScaler | None
    opponents: Opponents | None = None
    compile: bool = False


def make_collector(
    env: EnvBase,
    agent: ActorCritic,
    num_steps: int,
    num_rollouts: int | None = None,
    deterministic: bool = False,
    reward_scaler: RewardScaler | None = None,
    seed: int = 0,
    first_env: int = 0,
    total_envs: int | None = None,
    precision: Precision = nullcontext,
    step_timeout: float | None = None,
    opponents: Opponents | None = None,
    compile: bool = False,
) -> Collector:
    """Choose the collector for an environment of batch size [N].

    Args:
        env: Natively batched environments get :class:`RolloutCollector`. Environments that are functions of
            tensors get :class:`ScanCollector`, on several ranks only without ``norm_obs``. Any other TorchRL
            environment, with transforms for example, gets :class:`TensorCollector`, which is slower.
            All yield the same keys.
        agent: The agent.
        num_steps: T.
        num_rollouts: As for :class:`RolloutCollector`, as the following.
        deterministic: Choose the most probable actions, and do not update the agent's statistics.
        reward_scaler: Scales the rewards; None: no scaling.
        seed: The run's seed.
        first_env: Global index of the first environment.
        total_envs: Number of environments of all ranks.
        precision: Makes the context in which the agent acts.
        step_timeout: Seconds after which a hung step terminates the process.
        opponents: As for :class:`RolloutCollector`.
        compile: As for :class:`ScanCollector`.

    Raises:
        ConfigError: An Atari game has transforms, or a rollout would not fit into memory.
    """
    observation = env.observation_spec_unbatched["observation"]
    state_size = 0 if agent.memory is None else agent.memory.state_size
    observations = 2 * observation.shape.numel() * observation.dtype.itemsize  # before and after the step
    small = 64  # actions, rewards, values, flags
    check_memory(env.batch_size[0] * num_steps, observations + 4 * state_size + small)
    options = (deterministic, reward_scaler, first_env, total_envs, precision, step_timeout)
    if isinstance(env, BatchedEnv):
        if env.turn_based and agent.memory is not None:
            raise ConfigError(
                "model.agent has a memory, which the players of a turn-based game would share: set"
                " model.agent.memory to null."
            )
        return RolloutCollector(env, agent, num_steps, num_rollouts, seed, *options, opponents)
    base: Any = env.base_env if isinstance(env, TransformedEnv) else env
    if isinstance(base, BatchedEnv) and base.episode_done is not None:
        raise ConfigError(
            "data.transforms do not work with Atari games, whose lives and clipped rewards they would count"
            " as episodes and returns: remove them, and set the preprocessing in data.env_kwargs."
        )
    if isinstance(base, BatchedEnv) and base.num_players > 1:
        raise ConfigError("data.transforms do not work with games of several players: remove them.")
    if isinstance(base, BatchedEnv) and base.resets_late:
        raise ConfigError(
            "data.transforms do not work with a vectorized environment that resets at the step after an"
            " episode end, because the reset would count as a step: make it with AutoresetMode.DISABLED or"
            " SAME_STEP."
        )
    if isinstance(base, BatchedEnv) and base.valid is not None:
        raise ConfigError(
            "data.env_kwargs.max_restarts does not work with data.transforms: remove one of them."
        )
    # Ranks exchange their statistics of observations at each step, which a graph cannot.
    alone = agent.normalizer is None or collectives.world_size() == 1
    if isinstance(env, TensorEnv) and env.is_function and alone:
        return ScanCollector(env, agent, num_steps, num_rollouts, seed, *options, compile=compile)
    return TensorCollector(env, agent, num_steps, num_rollouts, seed, *options)
