"""The memory that rollouts are collected into."""

import torch
from tensordict import TensorDict

from ppo_lightning.envs import BatchedEnv
from ppo_lightning.models import ActorCritic


def allocate(env: BatchedEnv, agent: ActorCritic, num_steps: int) -> TensorDict:
    """Returns a rollout [N, T] of zeros, with the keys that :class:`~ppo_lightning.RolloutCollector` describes, on the CPU."""
    shape = (env.num_envs, num_steps)
    observation, action = env.observation_spec_unbatched["observation"], env.action_spec_unbatched
    seen = observation.dtype if agent.normalizer is None else torch.float32
    pinned = agent.critic.weight.device.type == "cuda"  # which copies such memory without a detour

    def empty(dtype: torch.dtype, *features: int) -> torch.Tensor:
        # One step of all environments lies together: with thousands of them, a column of [N, T] is N cache misses.
        return torch.zeros(*shape[::-1], *features, dtype=dtype, pin_memory=pinned).transpose(0, 1)

    following = {
        "observation": empty(seen, *observation.shape),
        "reward": empty(torch.float32, 1),
        "terminated": empty(torch.bool, 1),
        "truncated": empty(torch.bool, 1),
        "done": empty(torch.bool, 1),
        "episode_done": empty(torch.bool, 1),
        "episode_reward": empty(torch.float32, 1),
        "step_count": empty(torch.int64, 1),
    }
    keys = {
        "observation": empty(seen, *observation.shape),
        "action": empty(action.dtype, *action.shape),
        "action_log_prob": empty(torch.float32),
        "state_value": empty(torch.float32, 1),
    }
    if agent.memory is not None:
        size = agent.memory.state_size
        keys["memory"] = torch.zeros(shape[0], 1, size).expand(*shape, size)  # one state, not T
        following["memory"] = empty(torch.float32, size)
    # On the CPU, so that moving it there costs nothing.
    return TensorDict({**keys, "next": TensorDict(following, batch_size=shape)}, batch_size=shape, device="cpu")
