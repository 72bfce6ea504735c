"""Random Network Distillation: PPO with an intrinsic reward for novel observations.

Source: Burda et al., "Exploration by Random Network Distillation" (2018), arXiv:1810.12894.
"""

import inspect
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from ppo_lightning.algorithms import intrinsic
from ppo_lightning.algorithms.intrinsic import IntrinsicRewards, State
from ppo_lightning.algorithms.minibatches import Minibatch
from ppo_lightning.algorithms.ppo import PPO
from ppo_lightning.envs.specs import Specs
from ppo_lightning.errors import ConfigError
from ppo_lightning.models import Evaluation
from ppo_lightning.models.curiosity import Curiosity
from ppo_lightning.rollouts.random_steps import random_rollouts
from ppo_lightning.utils.arguments import Range, check_arguments


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
        num_iterations_obs_norm_init: Rollouts of random actions with which the statistics begin.
        **hyperparameters: Those of :class:`~ppo_lightning.PPO`.

    Raises:
        ConfigError: A number is out of its range, the agent has a memory, or the players take turns.

    Example:
        >>> data = RolloutDataModule("MountainCar-v0", num_envs=16, total_timesteps=500_000)
        >>> L.Trainer(accelerator="cpu").fit(RND(gamma=0.999), data)
    """

    minibatch_keys: ClassVar = (*PPO.minibatch_keys, "int_value_target", "novelty_input", "novelty_weight")

    def __init__(
        self,
        update_proportion: Annotated[float, Range(1e-6, 1)] = 0.25,
        int_coef: Annotated[float, Range(0, 1000)] = 1.0,
        ext_coef: Annotated[float, Range(0, 1000)] = 2.0,
        int_gamma: Annotated[float, Range(0, 1)] = 0.99,
        num_iterations_obs_norm_init: Annotated[int, Range(0, 1_000_000)] = 50,
        **hyperparameters: Any,
    ) -> None:
        check_arguments(RND.__init__, locals(), "model")
        super().__init__(**hyperparameters)
        names = inspect.signature(RND.__init__).parameters
        self.save_hyperparameters(*(name for name in names if name not in ("self", "hyperparameters")))
        self.rewards = IntrinsicRewards([], int_gamma)
        self._saved: list[State] = []  # states of all environments of a resumed run

    def check_agent(self) -> None:
        """Refuse an agent with a memory, and players who take turns."""
        super().check_agent()
        if self.fitting and self.data.turn_based:
            raise ConfigError(
                f"data.env_id is {self.data.env_id!r}, whose players take turns, and the intrinsic rewards of"
                " RND do not change sides: use ppo_lightning.SelfPlay."
            )

    def add_networks(self, specs: Specs) -> None:
        """Build the networks of the intrinsic reward."""
        self.curiosity = Curiosity(specs.observation, self.agent.critic.in_features)

    def trainable_parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters of the agent, of the predictor and of the intrinsic value."""
        yield from super().trainable_parameters()
        yield from self.curiosity.trainable_parameters()

    def on_train_start(self) -> None:
        """Resume the running sums, and begin new statistics with random steps."""
        super().on_train_start()
        states = intrinsic.own_states(self._saved, self.data)
        self.rewards = IntrinsicRewards(states, self.hparams.int_gamma)
        self._saved = []
        if not self.curiosity.normalizer.count:
            for rollout in random_rollouts(self.data, self.agent, self.hparams.num_iterations_obs_norm_init):
                self.curiosity.observe(self.curiosity.view(rollout["next", "observation"]))

    @torch.no_grad()
    def advantages(self, rollout: TensorDictBase) -> TensorDictBase:
        """Add the combined ``advantage`` and ``value_target`` [N, T, 1], and ``int_value_target`` [N, T]."""
        rollout = super().advantages(rollout)
        rows = min(self.minibatch_size, self.microbatch_size)
        reward = self.rewards.compute(rollout, self.curiosity, rows)
        value = intrinsic.in_parts(self.int_value, rows, rollout["observation"], rollout["action"])
        last_value = self.int_value(rollout["next", "observation"][:, -1], rollout["action"][:, -1])
        gamma, gae_lambda = self.hparams.int_gamma, self.hparams.gae_lambda
        advantage, rollout["int_value_target"] = intrinsic.endless_gae(
            reward, value, last_value, gamma, gae_lambda, rollout.get("valid")
        )
        extrinsic = self.hparams.ext_coef * rollout["advantage"]
        rollout["advantage"] = extrinsic + self.hparams.int_coef * advantage.unsqueeze(-1)
        sums = self.rewards.sum_episodes(rollout)  # of the rewards before scaling
        if len(sums):
            self.run_log.add({"charts/episode_curiosity_reward": sums.mean()})
        return rollout

    def int_value(self, observation: Tensor, action: Tensor) -> Tensor:
        """Return the intrinsic values [B] of observations [B, ...]. The actions have no effect."""
        return self.curiosity.value(self.agent.evaluate(observation, action).critic_features)

    def minibatches(self, rollout: TensorDictBase) -> Iterator[Minibatch]:
        """Yield minibatches, with the weights of the steps that train the predictor in this epoch."""
        share = self.hparams.update_proportion
        chosen = self.uniform(*rollout.batch_size) < share
        weighted = rollout.copy().set("novelty_weight", chosen.to(rollout["action"].device) / share)
        yield from super().minibatches(weighted)

    def loss(self, minibatch: Minibatch, evaluation: Evaluation) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of PPO plus those of intrinsic value and predictor, see :meth:`PPO.loss`."""
        loss, parts = super().loss(minibatch, evaluation)
        value_loss, fwd_loss = intrinsic.novelty_losses(self.curiosity, minibatch, evaluation.critic_features)
        own = {"int_value_loss": value_loss.detach(), "fwd_loss": fwd_loss.detach()}
        return loss + self.hparams.vf_coef * value_loss + fwd_loss, parts | own

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the sums of all environments."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["intrinsic"] = self.rewards.states()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the entries of a checkpoint of an RND run."""
        super().on_load_checkpoint(checkpoint)
        self._saved = checkpoint["intrinsic"] if self.fitting else []
