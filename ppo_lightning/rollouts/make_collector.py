"""Choose the collector: the fast one for natively batched environments, otherwise TorchRL's own."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.collectors import BaseCollector, Collector
from torchrl.data import Bounded
from torchrl.envs import (
    Compose,
    DoubleToFloat,
    EnvBase,
    InitTracker,
    RewardSum,
    StepCounter,
    Transform,
    TransformedEnv,
)
from torchrl.envs.utils import ExplorationType

from ppo_lightning.envs import BatchedEnv
from ppo_lightning.errors import ConfigError
from ppo_lightning.models import ActorCritic
from ppo_lightning.models.normalizers import RewardScaler
from ppo_lightning.rollouts.collector import Precision, RolloutCollector
from ppo_lightning.rollouts.storage import check_memory
from ppo_lightning.rollouts.transforms import (
    ClipAction,
    EpisodeDone,
    NormalizeObservation,
    RequireFinite,
    ScaleReward,
)
from ppo_lightning.utils.seeding import derive_seed


class TorchRLCollector(Collector):
    """TorchRL's collector, with an error where an environment raises ``SystemExit``: the run is not over."""

    def iterator(self) -> Iterator[TensorDictBase]:
        """Yield rollouts.

        Raises:
            RuntimeError: An environment raised ``SystemExit``.
        """
        try:
            yield from super().iterator()
        except SystemExit as error:
            raise RuntimeError(f"An environment of data.env_id raised {error!r}.") from error


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
) -> BaseCollector:
    """Choose the collector for an environment of batch size [N].

    Args:
        env: Natively batched environments get :class:`RolloutCollector`, any other TorchRL environment (one
            with transforms, say) TorchRL's own ``Collector``: slower, with the same keys out.
        agent: Acts.
        num_steps: T.
        num_rollouts: How many rollouts make the run; None: no end.
        deterministic: Always take the most probable action, and leave the agent's statistics as they are.
        reward_scaler: Scales the rewards; None: they are stored as they are.
        seed: The run's seed; the action noise derives its own.
        first_env: As for :class:`RolloutCollector`.
        total_envs: As for :class:`RolloutCollector`.
        precision: As for :class:`RolloutCollector`.
        step_timeout: As for :class:`RolloutCollector`; TorchRL's collector does not watch.

    Raises:
        ConfigError: An Atari game has transforms; or an agent with running statistics would share them with
            other ranks through TorchRL's collector; or a rollout would not fit into memory.
    """
    observation = env.observation_spec_unbatched["observation"]
    state_size = 0 if agent.memory is None else agent.memory.state_size
    observations = 2 * observation.shape.numel() * observation.dtype.itemsize  # before and after the step
    small = 64  # actions, rewards, values, flags
    check_memory(env.batch_size[0], num_steps, observations + 4 * state_size + small)
    if isinstance(env, BatchedEnv):
        options = (deterministic, reward_scaler, first_env, total_envs, precision, step_timeout)
        return RolloutCollector(env, agent, num_steps, num_rollouts, seed, *options)
    base: Any = env.base_env if isinstance(env, TransformedEnv) else env
    if isinstance(base, BatchedEnv) and base.episode_done is not None:
        raise ConfigError(
            "data.transforms do not work with Atari games, whose lives and rewards TorchRL's collector would"
            " take wrongly: leave them out; the preprocessing stands in data.env_kwargs."
        )
    if isinstance(base, BatchedEnv) and base.resets_late:
        raise ConfigError(
            "data.transforms do not work with a vectorized environment that resets at the step after an"
            " episode end, which TorchRL's collector would count: make it with AutoresetMode.DISABLED or"
            " SAME_STEP."
        )
    num_envs = env.batch_size[0]
    if agent.normalizer is not None and num_envs < (total_envs or 0):
        raise ConfigError(
            "model.agent.norm_obs works on several ranks with environments that are named by their id,"
            " without data.transforms: elsewhere a rank cannot know when the others reset theirs."
        )
    transforms: list[Transform] = [
        DoubleToFloat(),
        RequireFinite(first_env),
        EpisodeDone(),
        RewardSum(),
        StepCounter(),
    ]
    if agent.memory is not None:
        transforms.append(InitTracker())
    if agent.normalizer is not None:
        transforms.append(NormalizeObservation(agent.normalizer, update=not deterministic))
    if reward_scaler is not None:
        transforms.append(ScaleReward(reward_scaler))
    if isinstance(spec := env.action_spec_unbatched, Bounded) and spec.dtype.is_floating_point:
        transforms.append(ClipAction(spec.space.low, spec.space.high))
    frames = num_envs * num_steps
    device = agent.device
    generator = torch.Generator().manual_seed(derive_seed(seed, "noise"))

    def draw() -> torch.Tensor:
        return agent.noise((total_envs or num_envs,), generator)[first_env : first_env + num_envs]

    memory = agent.initial_memory(num_envs)

    def policy(tensordict: TensorDictBase) -> TensorDictBase:
        nonlocal memory
        if memory is not None:
            tensordict["memory"] = memory.masked_fill(tensordict["is_init"], 0)
        with precision():
            acted = agent.act_on(tensordict, tensordict["observation"], draw)
        memory = acted.get(("next", "memory"), None)
        return acted

    return TorchRLCollector(
        TransformedEnv(env, Compose(*transforms)),
        policy,
        frames_per_batch=frames,
        total_frames=-1 if num_rollouts is None else num_rollouts * frames,
        policy_device=None if device.type == "cpu" else device,
        exploration_type=ExplorationType.DETERMINISTIC if deterministic else ExplorationType.RANDOM,
        track_traj_ids=False,
        auto_register_policy_transforms=False,
    )
