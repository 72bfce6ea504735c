"""Preallocated storage of rollouts."""

import contextlib
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import TensorSpec

from ppo_lightning.errors import ConfigError
from ppo_lightning.models import Actor, ActorCritic


def allocate(specs: Mapping[str, TensorSpec], agent: Actor, num_envs: int, num_steps: int) -> TensorDict:
    """Return a rollout [N, T] of zeros on the CPU, with :class:`RolloutCollector`'s keys.

    ``specs`` are those of a step by key, without what is under ``next`` and the memory.
    """
    shape = (num_envs, num_steps)
    observation = specs["observation"]
    pinned = agent.device.type == "cuda"  # CUDA copies pinned memory directly

    def empty(dtype: torch.dtype, *features: int) -> torch.Tensor:
        # One step of all environments is contiguous: with thousands of environments, a column of [N, T] costs
        # N cache misses.
        return torch.zeros(*shape[::-1], *features, dtype=dtype, pin_memory=pinned).transpose(0, 1)

    following = {
        "observation": empty(observation.dtype, *observation.shape),
        "reward": empty(torch.float32, 1),
        **{key: empty(torch.bool, 1) for key in ("terminated", "truncated", "done", "episode_done")},
        "episode_reward": empty(torch.float32, 1),
        "step_count": empty(torch.int64, 1),
    }
    keys = {key: empty(spec.dtype, *spec.shape) for key, spec in specs.items()}
    if agent.memory is not None:
        size = agent.memory.state_size
        state = torch.zeros(shape[0], 1, size, dtype=torch.float32)  # one, not T
        keys["memory"] = state.expand(*shape, size)
        following["memory"] = empty(torch.float32, size)
    # With a device, so that a move to the CPU costs nothing.
    return TensorDict({**keys, "next": following}, batch_size=shape, device="cpu")


def episode_starts(rollout: TensorDictBase) -> Tensor:
    """Return True at the first step of an episode, [N, T] bool.

    The first step of a rollout [N, T] continues from the stored state. A step of weight 0 ends an episode.
    """
    ends = rollout["next", "done"].squeeze(-1)
    if (weight := rollout.get("weight", None)) is not None:
        ends = ends | (weight == 0)
    starts = ends.roll(1, dims=1)
    starts[:, 0] = False
    return starts


@torch.inference_mode()
def add_evaluation(agent: ActorCritic, rollout: TensorDictBase) -> None:
    """Add log-probabilities and values to a whole rollout at once, in the arithmetic of the update."""
    device = agent.device
    size = agent.microbatch_size
    if agent.memory is not None:
        starts = episode_starts(rollout)
        count = max(1, size // rollout.shape[1])
        for first in range(0, len(rollout), count):
            rows = slice(first, first + count)
            observation, action = rollout["observation"][rows], rollout["action"][rows]
            inputs = observation, action, rollout["memory"][rows, 0], starts[rows]
            evaluation = agent.evaluate(*(tensor.to(device) for tensor in inputs))
            rollout["action_log_prob"][rows] = evaluation.log_prob
            rollout["state_value"][rows, :, 0] = evaluation.value
        return

    def numbers(observation: Tensor, action: Tensor) -> Tensor:
        evaluation = agent.evaluate(observation.to(device), action.to(device))
        return torch.stack([evaluation.log_prob, evaluation.value], dim=-1)

    evaluated = in_parts(numbers, size, rollout["observation"], rollout["action"])
    rollout["action_log_prob"].copy_(evaluated[..., 0])
    rollout["state_value"].copy_(evaluated[..., 1:])


def without_autocast(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context for environments on such a device, whose numbers keep their precision."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


def in_parts(function: Callable[..., Tensor], microbatch_size: int, *tensors: Tensor) -> Tensor:
    """Return the numbers [N, T, ...] of a function of rows [B, ...] to numbers [B, ...], part by part."""
    parts = (tensor.transpose(0, 1).flatten(0, 1).split(microbatch_size) for tensor in tensors)
    numbers = torch.cat([function(*rows) for rows in zip(*parts, strict=True)])
    return numbers.unflatten(0, tensors[0].shape[1::-1]).transpose(0, 1)


def check_memory(
    steps: int,
    bytes_per_step: int,
    settings: str = "data.num_envs * data.num_steps",
    device: torch.device | None = None,
) -> None:
    """Refuse steps that take more than the memory of a GPU or, if the system reports it, of this machine.

    ``settings`` are those whose product is the number of steps, for the message.
    """
    needed, memory, owner = steps * bytes_per_step, math.inf, "this machine"
    if device is not None and device.type == "cuda":
        memory, owner = torch.cuda.get_device_properties(device).total_memory, "the GPU"
    elif hasattr(os, "sysconf"):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        sizes = f"{needed / 1e9:.0f} GB and {owner} has {memory / 1e9:.0f} GB of memory"
        raise ConfigError(f"{settings} = {steps} steps take {sizes}: lower one of these settings.")
