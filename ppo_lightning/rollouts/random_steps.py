"""Rollouts of random actions."""

import copy
import dataclasses
from collections.abc import Iterator

import torch
from tensordict import TensorDictBase

from ppo_lightning.models import ActorCritic
from ppo_lightning.rollouts.datamodule import RolloutDataModule
from ppo_lightning.rollouts.make_collector import make_collector
from ppo_lightning.utils.seeding import derive_seed


def random_rollouts(data: RolloutDataModule, agent: ActorCritic, count: int) -> Iterator[TensorDictBase]:
    """Yield rollouts [N, T] of random actions in temporary environments of this rank.

    The rollouts of all ranks together are those of one rank with all environments. Environments and noise
    have seeds of their own.

    Args:
        data: Data module of the run.
        agent: Agent whose observations the rollouts have. The agent does not change.
        count: Number of rollouts.
    """
    assert data.trainer is not None
    shard = dataclasses.replace(data.shard, seed=derive_seed(data.seed, "curiosity"))
    env = data.make_env(shard)
    try:
        collector = make_collector(
            env,
            random_copy(agent),
            data.num_steps,
            count,
            shard=shard,
            precision=data.trainer.precision_plugin.forward_context,
            step_timeout=data.step_timeout,
        )
        yield from collector.iterator()
    finally:
        env.close()


def random_copy(agent: ActorCritic) -> ActorCritic:
    """Return a copy of an agent whose actions do not depend on the observations.

    All parameters of the head are 0. Discrete actions are uniform over the allowed ones, and continuous
    actions are standard normal, before they are squashed or clipped to their bounds.
    """
    agent = copy.deepcopy(agent)
    with torch.no_grad():
        for parameter in agent.head.parameters():
            parameter.zero_()
    return agent
