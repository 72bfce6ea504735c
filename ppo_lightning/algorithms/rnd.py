"""Random Network Distillation: PPO with an intrinsic reward for novel observations.

Source: Burda et al., "Exploration by Random Network Distillation" (2018), arXiv:1810.12894.
"""

import contextlib
import copy
import dataclasses
import math
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.data import TensorSpec

from ppo_lightning.algorithms import checks, losses
from ppo_lightning.algorithms.defaults import CLEANRL
from ppo_lightning.algorithms.minibatches import Minibatch
from ppo_lightning.algorithms.ppo import PPO
from ppo_lightning.envs.specs import Specs
from ppo_lightning.models import ActorCritic, Evaluation
from ppo_lightning.models.cnn import nature_convolutions
from ppo_lightning.models.heads import Float32Linear
from ppo_lightning.models.init import orthogonal
from ppo_lightning.models.normalizers import Moments, ObservationNormalizer, merge_rows
from ppo_lightning.rollouts.datamodule import DEFAULT_NUM_ENVS, RolloutDataModule
from ppo_lightning.rollouts.make_collector import make_collector
from ppo_lightning.rollouts.storage import in_parts
from ppo_lightning.spaces.pictures import is_picture, read_picture
from ppo_lightning.spaces.specs import stored
from ppo_lightning.utils import collectives
from ppo_lightning.utils.arguments import Range, check_arguments
from ppo_lightning.utils.scans import discounted_sum
from ppo_lightning.utils.seeding import derive_seed

CLIP = 5.0  # maximum absolute value of a normalized observation
HIDDEN = 128  # width of the layers for rows of numbers
EMBEDDING = 512  # width of the linear layers for pictures


class RND(PPO):
    """PPO with an intrinsic reward for novel observations.

    The intrinsic reward of a step is the error of a predictor of a fixed random network, on the observation
    after the step, divided by the running standard deviation of its discounted sum. Intrinsic rewards have a
    value function of their own, and their returns do not end with the episode.

    Args:
        update_proportion: Share of the steps that train the predictor, drawn anew in each epoch.
        int_coef: Weight of the advantage of the intrinsic rewards.
        ext_coef: Weight of the advantage of the environment's rewards.
        int_gamma: Discount of the intrinsic rewards. ``gamma`` is that of the environment's rewards.
        num_iterations_obs_norm_init: Rollouts of random actions with which the statistics begin. The x axis
            of metrics counts their steps, ``data.total_timesteps`` does not.
        **hyperparameters: Those of :class:`~ppo_lightning.PPO`.

    Raises:
        ConfigError: A number is out of its range, or the agent has a memory.

    Example:
        >>> data = RolloutDataModule("MountainCar-v0", num_envs=16, total_timesteps=500_000)
        >>> L.Trainer(accelerator="cpu").fit(RND(gamma=0.999), data)
    """

    minibatch_keys: ClassVar = (*PPO.minibatch_keys, "int_value_target", "novelty_input", "novelty_weight")
    defaults = CLEANRL
    default_num_envs = DEFAULT_NUM_ENVS

    def __init__(
        self,
        update_proportion: Annotated[float, Range(1e-6, 1)] = 0.25,
        int_coef: Annotated[float, Range(0)] = 1.0,
        ext_coef: Annotated[float, Range(0)] = 2.0,
        int_gamma: Annotated[float, Range(0, 1)] = 0.99,
        num_iterations_obs_norm_init: Annotated[int, Range(0)] = 50,
        **hyperparameters: Any,
    ) -> None:
        check_arguments(RND.__init__, locals(), "model")
        super().__init__(**hyperparameters)
        # Sums of the intrinsic rewards of each environment, which continue from one rollout to the next
        self.sums = dict.fromkeys(("discounted", "episode"), torch.zeros(0))

    def refusals(self) -> Iterator[str]:
        """Yield agents without features, and what PPO cannot train."""
        yield from super().refusals()
        yield from checks.of_features(self)
        yield from checks.of_turns(self)

    def add_networks(self, specs: Specs) -> None:
        """Build the networks of the intrinsic reward."""
        self.curiosity = Curiosity(specs.observation, self.agent.critic.in_features)

    def trainable_parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters of the agent, of the predictor and of the intrinsic value."""
        yield from super().trainable_parameters()
        yield from self.curiosity.predictor.parameters()
        yield from self.curiosity.critic.parameters()

    def setup(self, stage: str) -> None:
        """Begin the sums of rewards at 0."""
        if stage == "fit":
            zeros = torch.zeros(self.data.shard.count, dtype=torch.float64)
            self.sums = {"discounted": zeros, "episode": zeros.clone()}

    def on_train_start(self) -> None:
        """Begin new statistics with random steps."""
        super().on_train_start()
        if not self.curiosity.normalizer.count:
            for rollout in random_rollouts(self.data, self.agent, self.hparams.num_iterations_obs_norm_init):
                observation = self.curiosity.view(rollout["next", "observation"])
                self.curiosity.observe(observation, rollout.get("weight"))
                self.progress.count_extra(self.data.frames_per_rollout)
            self.progress.learn_from_here()

    @torch.no_grad()
    def advantages(self, rollout: TensorDictBase) -> TensorDictBase:
        """Add the combined ``advantage`` and ``value_target`` [N, T, 1], and ``int_value_target`` [N, T]."""
        rollout = super().advantages(rollout)
        rows = min(self.minibatch_size, self.microbatch_size)
        reward = self.int_rewards(rollout, rows)
        value = in_parts(self.int_value, rows, rollout["observation"], rollout["action"])
        # At an episode end, the stream continues with the first observation of the next episode.
        collector: Any = self.data.collector
        last = torch.as_tensor(collector.observation).to(rollout["observation"])
        last_value = self.int_value(last, rollout["action"][:, -1])
        gamma, gae_lambda = self.hparams.int_gamma, self.hparams.gae_lambda
        advantage, rollout["int_value_target"] = endless_gae(
            reward, value, last_value, gamma, gae_lambda, rollout.get("weight")
        )
        extrinsic = self.hparams.ext_coef * rollout["advantage"]
        rollout["advantage"] = extrinsic + self.hparams.int_coef * advantage.unsqueeze(-1)
        sums = self.episode_sums(rollout)
        if len(sums):
            self.run_log.add({"charts/episode_curiosity_reward": sums.mean()})
        return rollout

    @torch.no_grad()
    def int_rewards(self, rollout: TensorDictBase, microbatch_size: int) -> Tensor:
        """Return rewards divided by the running standard deviation of their discounted sum, [N, T].

        The rewards use the statistics of the observations before the rollout. Steps of weight 0 have the
        reward 0 and enter no statistics. The rollout receives ``novelty_input``, [N, T, ...], and
        ``int_reward``, the rewards before scaling. With several ranks this is a collective.
        """
        weight = rollout.get("weight")
        rollout["novelty_input"] = self.curiosity.view(rollout["next", "observation"])
        reward = in_parts(self.curiosity.error, microbatch_size, rollout["novelty_input"])
        rollout["int_reward"] = reward if weight is None else reward * weight
        self.curiosity.observe(rollout["novelty_input"], weight)
        never, gamma = torch.zeros_like(reward, dtype=torch.bool), self.hparams.int_gamma
        sums = discounted_sum(rollout["int_reward"].T, never.T, self.sums["discounted"], gamma).T
        return rollout["int_reward"] / self.curiosity.reward_std(sums, weight)

    def episode_sums(self, rollout: TensorDictBase) -> Tensor:
        """Return the sums of ``int_reward`` over the episodes that ended in a rollout, of all ranks, [E].

        A sum starts afresh where ``("next", "step_count")`` is 1, also in a resumed run with fresh episodes.
        """
        first = rollout["next", "step_count"].squeeze(-1).cpu() == 1
        self.sums["episode"].masked_fill_(first[:, 0], 0)
        last = first.roll(-1, dims=1)
        last[:, -1] = False
        sums = discounted_sum(rollout["int_reward"].T, last.T, self.sums["episode"]).T
        return collectives.concatenate(sums[rollout["next", "episode_done"][..., 0].cpu()])

    def int_value(self, observation: Tensor, action: Tensor) -> Tensor:
        """Return the intrinsic values [B] of observations [B, ...]. The actions have no effect."""
        return self.curiosity.value(self.agent.evaluate(observation, action).critic_features)

    def minibatches(self, rollout: TensorDictBase) -> Iterator[Minibatch]:
        """Yield minibatches, with the weights of the steps that train the predictor in this epoch."""
        share = self.hparams.update_proportion
        chosen = self.uniform("predictor", *rollout.batch_size) < share
        weighted = rollout.copy().set("novelty_weight", chosen.to(rollout["action"].device) / share)
        yield from super().minibatches(weighted)

    def loss(self, minibatch: Minibatch, evaluation: Evaluation) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the losses of PPO, of the intrinsic value and of the predictor, see :meth:`PPO.loss`."""
        loss, parts = super().loss(minibatch, evaluation)
        weight = minibatch.get("weight")
        target = minibatch["int_value_target"]
        value = self.curiosity.value(evaluation.critic_features)
        value_loss = losses.value_loss(value, target, target, None, weight)  # not clipped
        error = self.curiosity.error(minibatch["novelty_input"]) * minibatch["novelty_weight"]
        fwd_loss = losses.weighted_mean(error, weight)
        own = {"int_value_loss": value_loss.detach(), "fwd_loss": fwd_loss.detach()}
        return loss + self.hparams.vf_coef * value_loss + fwd_loss, parts | own

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the sums of all environments."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["intrinsic"] = {name: collectives.concatenate(x) for name, x in self.sums.items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the sums, to resume a run."""
        super().on_load_checkpoint(checkpoint)
        if self.fitting and len(checkpoint["intrinsic"]["discounted"]) == self.data.num_envs:
            rows = self.data.shard.rows
            self.sums = {name: sums[rows].clone() for name, sums in checkpoint["intrinsic"].items()}


def endless_gae(
    reward: Tensor, value: Tensor, last_value: Tensor, gamma: float, gae_lambda: float, weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute advantages and value targets of a stream of rewards that does not end with the episode.

    It stops before steps of weight 0 only. The arguments are those of
    :func:`~ppo_lightning.algorithms.losses.gae`, and the values of the last observations, [N].
    """
    next_value = torch.cat([value[:, 1:], last_value[:, None]], dim=1)
    never = torch.zeros_like(value, dtype=torch.bool)
    stops = never if weight is None else losses.before_uncounted(weight)
    return losses.gae(reward, value, next_value, never, stops, gamma, gae_lambda)


class Curiosity(nn.Module):
    """Novelty of observations, and the value of novelty.

    A predictor learns the output of a fixed random network. The error of the predictor is small for
    observations like those that it was trained on, and large for new ones. The observations are normalized
    and clipped to [-5, 5]. Of a picture, the networks see the last frame: the last three channels if their
    number is a multiple of three (colours), otherwise the last one.

    The networks for pictures are those of the authors, and of CleanRL's ppo_rnd_envpool.py. The value of
    novelty reads the features of the agent's value function, of width ``critic_features``.

    Example:
        >>> curiosity = Curiosity(Unbounded((4,)), critic_features=64)
        >>> curiosity.error(torch.zeros(3, 4)).shape
        torch.Size([3])
    """

    def __init__(self, observation_spec: TensorSpec, critic_features: int) -> None:
        super().__init__()
        shape: tuple[int, ...] = (stored(observation_spec).shape.numel(),)
        self.picture = read_picture(observation_spec) if is_picture(observation_spec) else None
        if self.picture is not None:
            channels, height, width = self.picture.size
            shape = (3 if channels % 3 == 0 else 1, height, width)
        self.shape = shape
        self.normalizer = ObservationNormalizer(shape, clip=CLIP)
        self.reward_moments = Moments(())  # of the discounted sums of intrinsic rewards
        self.target = random_features(shape).requires_grad_(False)
        width = HIDDEN if len(shape) == 1 else EMBEDDING
        layers = hidden(width, width), nn.ReLU(), hidden(width, width)
        self.predictor = nn.Sequential(random_features(shape), nn.ReLU(), *layers)
        self.critic = orthogonal(Float32Linear(critic_features, 1), gain=0.01)

    def view(self, observation: Tensor) -> Tensor:
        """Return what the networks see of stored observations [N, T, ...], [N, T, *shape]."""
        if self.picture is None:
            return observation.flatten(2)
        return self.picture(observation, num_batch_axes=2)[:, :, -self.shape[0] :]

    def error(self, observation: Tensor) -> Tensor:
        """Return the mean squared error of the predictor for raw observations of :meth:`view`, [B]."""
        normalized = self.normalizer(observation)
        # bfloat16 would round the difference away.
        return (self.predictor(normalized).float() - self.target(normalized).float()).square().mean(-1)

    def value(self, critic_features: Tensor) -> Tensor:
        """Return the values of novelty [B] from the features of the agent's value function [B, F]."""
        return self.critic(critic_features).squeeze(-1)

    @torch.no_grad()
    def observe(self, observation: Tensor, weight: Tensor | None = None) -> None:
        """Merge the steps [N, T, *shape] of :meth:`view` that count, of all ranks. This is a collective."""
        rows = observation.flatten(0, 1) if weight is None else observation[weight > 0]
        merge_rows(self.normalizer, rows)

    @torch.no_grad()
    def reward_std(self, discounted: Tensor, weight: Tensor | None = None) -> Tensor:
        """Merge the discounted sums [N, T] of steps that count, and return the deviation of all sums."""
        rows = discounted.flatten() if weight is None else discounted[weight.to(discounted.device) > 0]
        merge_rows(self.reward_moments, rows)
        return self.reward_moments.std.float()


def hidden(in_features: int, out_features: int) -> nn.Linear:
    """Make a linear layer with orthogonal weights of gain sqrt(2)."""
    return orthogonal(nn.Linear(in_features, out_features), gain=math.sqrt(2))


def random_features(shape: tuple[int, ...]) -> nn.Sequential:
    """Make the network whose output is predicted, for pictures [C, H, W] or numbers [D]."""
    if len(shape) == 1:
        layers = hidden(shape[0], HIDDEN), hidden(HIDDEN, HIDDEN)
        for layer in layers:
            nn.init.uniform_(layer.bias, -1, 1)
        return nn.Sequential(layers[0], nn.LeakyReLU(), layers[1])
    pictures = nature_convolutions(shape[0], nn.LeakyReLU)
    return nn.Sequential(pictures, hidden(pictures(torch.zeros(1, *shape)).shape[1], EMBEDDING))


def random_rollouts(data: RolloutDataModule, agent: ActorCritic, count: int) -> Iterator[TensorDictBase]:
    """Yield ``count`` rollouts [N, T] of random actions in temporary environments of this rank.

    Environments and noise have seeds of their own. The agent acts with weights of 0 in a copy of its head:
    discrete actions are uniform over the allowed ones, and continuous ones are standard normal before they
    are squashed or clipped to their bounds.
    """
    agent = copy.deepcopy(agent)
    for parameter in agent.head.parameters():
        parameter.data.zero_()
    shard = dataclasses.replace(data.shard, seed=derive_seed(data.seed, "curiosity"))
    precision, timeout = data.trainer.precision_plugin.forward_context, data.factory.step_timeout
    options: Any = {"shard": shard, "precision": precision, "step_timeout": timeout}
    with contextlib.closing(data.factory.make(shard.count, shard.seed, shard.first)) as env:
        yield from make_collector(env, agent, data.num_steps, count, **options).iterator()
