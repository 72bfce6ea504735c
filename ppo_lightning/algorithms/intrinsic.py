"""Intrinsic rewards of rollouts, and their advantages."""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from ppo_lightning.algorithms import losses
from ppo_lightning.algorithms.minibatches import Minibatch
from ppo_lightning.errors import ConfigError
from ppo_lightning.models.curiosity import Curiosity
from ppo_lightning.rollouts.datamodule import RolloutDataModule
from ppo_lightning.utils import collectives
from ppo_lightning.utils.scans import discounted_sum

State = dict[str, Any]  # of one environment: the two sums, and rows of hash and number of visits
START: State = {"discounted": 0.0, "episode": 0.0, "visits": torch.zeros(0, 2)}


class IntrinsicRewards:
    """Intrinsic rewards of N environments: sums over time and over episodes, and counts of visits.

    The sums and counts continue from one rollout to the next. Those of an episode start afresh where
    ``("next", "step_count")`` is 1, which also holds for the fresh episodes of a resumed run.

    Args:
        states: State of each of the N environments, from :meth:`states` or :data:`START`.
        gamma: Discount of the intrinsic rewards.
        episodic_bonus: Divide each reward by the square root of the number of visits in the episode.

    Example:
        >>> rewards = IntrinsicRewards([START], gamma=0.5)
        >>> rewards.discount(torch.ones(1, 3)).tolist()
        [[1.0, 1.5, 1.75]]
        >>> rewards.discount(torch.zeros(1, 1)).tolist()
        [[0.875]]
    """

    def __init__(self, states: Sequence[State], gamma: float, episodic_bonus: bool = False) -> None:
        self.gamma = gamma
        self.episodic_bonus = episodic_bonus
        self.discounted, self.episode = (
            torch.tensor([state[key] for state in states], dtype=torch.float64)
            for key in ("discounted", "episode")
        )
        self.visits: list[Counter[int]] = [Counter(dict(state["visits"].tolist())) for state in states]

    @torch.no_grad()
    def compute(self, rollout: TensorDictBase, curiosity: Curiosity, rows_at_once: int) -> Tensor:
        """Compute the scaled rewards of a rollout, and continue the statistics.

        The rewards use the statistics of the observations before the rollout. Invalid steps have the reward
        0 and enter no statistics. With several ranks this is a collective.

        Args:
            rollout: Batch size [N, T]. Receives ``novelty_input``, [N, T, ...], and ``int_reward``, the
                rewards before scaling, [N, T].
            curiosity: Networks and statistics.
            rows_at_once: Number of rows that go through the networks at once.

        Returns:
            Rewards divided by the running standard deviation of their discounted sum, [N, T] float32.
        """
        following = rollout["next"]
        valid = rollout.get("valid")
        rollout["novelty_input"] = curiosity.view(following["observation"])
        reward = in_parts(curiosity.error, rows_at_once, rollout["novelty_input"])
        if valid is not None:
            reward = reward * valid
        if self.episodic_bonus:
            visits = self.count_visits(rollout["observation"], following["observation"], begins(rollout))
            reward = reward / visits.to(reward.device).sqrt()
        rollout["int_reward"] = reward
        curiosity.observe(rollout["novelty_input"], valid)
        return reward / curiosity.reward_std(self.discount(reward), valid)

    def discount(self, reward: Tensor) -> Tensor:
        """Return the discounted sum of past rewards over time, across episode ends.

        Args:
            reward: [N, T].

        Returns:
            Sum up to and including each step, [N, T] float64 on the CPU.
        """
        never = torch.zeros_like(reward, dtype=torch.bool)
        return discounted_sum(reward.T, never.T, self.discounted, self.gamma).T

    def sum_episodes(self, rollout: TensorDictBase) -> Tensor:
        """Return the sums of ``int_reward`` over the episodes that ended in a rollout, of all ranks, [E]."""
        first = begins(rollout).cpu()
        self.episode.masked_fill_(first[:, 0], 0)
        last = first.roll(-1, dims=1)
        last[:, -1] = False
        sums = discounted_sum(rollout["int_reward"].T, last.T, self.episode).T
        return collectives.concatenate(sums[rollout["next", "episode_done"][..., 0].cpu()])

    def count_visits(self, observation: Tensor, following: Tensor, first: Tensor) -> Tensor:
        """Return how often the episode has visited the observation after each step, this visit included.

        Args:
            observation: Observations before the steps, [N, T, ...].
            following: Observations after the steps, [N, T, ...].
            first: True at the first step of an episode, [N, T] bool.

        Returns:
            Numbers of visits, at least 1, [N, T].
        """
        count = torch.zeros(first.shape)
        arrays = (tensor.numpy(force=True) for tensor in (observation, following, first, count))
        for befores, afters, firsts, counts, visits in zip(*arrays, self.visits, strict=True):
            for t in range(len(counts)):
                if firsts[t]:
                    visits.clear()
                    visits[digest(befores[t].tobytes())] = 1
                key = digest(afters[t].tobytes())
                visits[key] += 1
                counts[t] = visits[key]
        return count

    def states(self) -> list[State]:
        """Return the state of each environment of all ranks, as plain data. This is a collective."""
        columns = self.discounted.tolist(), self.episode.tolist(), self.visits
        return collectives.chain(
            [
                {"discounted": discounted, "episode": episode, "visits": torch.tensor([*visits.items()])}
                for discounted, episode, visits in zip(*columns, strict=True)
            ]
        )


def begins(rollout: TensorDictBase) -> Tensor:
    """Return True at the first step of an episode, also if it is the first of the rollout, [N, T] bool."""
    return rollout["next", "step_count"].squeeze(-1) == 1


def digest(row: bytes) -> int:
    """Return a hash of 64 bits, the same in every process."""
    return int.from_bytes(hashlib.blake2b(row, digest_size=8).digest(), "big", signed=True)


def in_parts(function: Callable[..., Tensor], rows_at_once: int, *tensors: Tensor) -> Tensor:
    """Apply a function from rows [B, ...] to numbers [B] to tensors [N, T, ...], part by part.

    Returns:
        Numbers, [N, T].
    """
    parts = (tensor.transpose(0, 1).flatten(0, 1).split(rows_at_once) for tensor in tensors)
    numbers = torch.cat([function(*rows) for rows in zip(*parts, strict=True)])
    return numbers.unflatten(0, tensors[0].shape[1::-1]).T


def endless_gae(
    reward: Tensor,
    value: Tensor,
    last_value: Tensor,
    gamma: float,
    gae_lambda: float,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute advantages of a stream of rewards that does not end with the episode.

    At an episode end, the return continues with the first observation of the next episode. It stops before
    invalid steps only.

    Args:
        reward: [N, T].
        value: Values of the observations before the steps, [N, T].
        last_value: Values of the observations after the last step, [N].
        gamma: Discount factor.
        gae_lambda: Weight of longer returns.
        valid: False at steps that do not count, [N, T] bool. None: all count.

    Returns:
        Advantages [N, T], and value targets [N, T].
    """
    next_value = torch.cat([value[:, 1:], last_value[:, None]], dim=1)
    never = torch.zeros_like(value, dtype=torch.bool)
    stops = never if valid is None else torch.cat([~valid[:, 1:], never[:, :1]], dim=1)
    return losses.gae(reward, value, next_value, never, stops, gamma, gae_lambda)


def novelty_losses(
    curiosity: Curiosity, minibatch: Minibatch, critic_features: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the losses of the value of novelty, which is not clipped, and of the predictor, scalars.

    Args:
        curiosity: Networks and statistics.
        minibatch: Tensors [B, ...].
        critic_features: Features of the agent's value function, [B, F].
    """
    valid = minibatch.get("valid")
    target = minibatch["int_value_target"]
    value_loss = losses.value_loss(curiosity.value(critic_features), target, target, None, valid)
    error = curiosity.error(minibatch["novelty_input"]) * minibatch["novelty_weight"]
    return value_loss, losses.weighted_mean(error, valid)


def own_states(states: Sequence[State], data: RolloutDataModule) -> Sequence[State]:
    """Return the states of the environments of this rank.

    Args:
        states: From :meth:`IntrinsicRewards.states`. If they are those of another number of environments, all
            environments start with :data:`START`.
        data: Data module of the run.
    """
    if len(states) != data.num_envs:
        states = [START] * data.num_envs
    return states[data.shard.rows]


def check_rnd(module: Any) -> None:
    """Check that an RND module fits its environment and its agent.

    Raises:
        ConfigError: The players take turns, or ``episodic_bonus`` would count changing observations.
    """
    if getattr(module.data.env, "turn_based", False):
        raise ConfigError(
            f"data.env_id is {module.data.env_id!r}, whose players take turns, and the intrinsic rewards of"
            " RND do not change sides: use ppo_lightning.SelfPlay."
        )
    if module.hparams.episodic_bonus and module.agent.normalizer is not None:
        raise ConfigError(
            "model.episodic_bonus counts equal observations, and model.agent.norm_obs changes them over"
            " time: set one of the two to false."
        )
