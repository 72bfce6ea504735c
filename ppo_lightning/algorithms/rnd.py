"""Random Network Distillation: PPO with an intrinsic reward for novel observations.

Source: Burda et al., "Exploration by Random Network Distillation" (2018), arXiv:1810.12894.
"""

import inspect
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from ppo_lightning.algorithms import intrinsic
from ppo_lightning.algorithms.intrinsic import IntrinsicRewards, State
from ppo_lightning.algorithms.minibatches import Minibatch
from ppo_lightning.algorithms.ppo import PPO
from ppo_lightning.models.curiosity import Curiosity
from ppo_lightning.rollouts.random_steps import random_rollouts
from ppo_lightning.utils.arguments import Range, check_arguments
from ppo_lightning.utils.seeding import one_thread


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
        episodic_bonus: Divide the intrinsic reward by the square root of the number of visits of the
            observation in the episode, for levels that differ between episodes. Source: Henaff et al., "A
            Study of Global and Episodic Bonuses for Exploration in Contextual MDPs" (2023).
        **hyperparameters: Those of :class:`~ppo_lightning.PPO`.

    Raises:
        ConfigError: A number is out of its range, the agent has a memory, the players take turns, or
            ``episodic_bonus`` would count observations that the agent normalizes.

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
        episodic_bonus: bool = False,
        **hyperparameters: Any,
    ) -> None:
        check_arguments(RND.__init__, locals(), "model")
        super().__init__(**hyperparameters)
        names = inspect.signature(RND.__init__).parameters
        self.save_hyperparameters(*(name for name in names if name not in ("self", "hyperparameters")))
        self.curiosity: Curiosity = None  # type: ignore[assignment]
        self.rewards = IntrinsicRewards([], int_gamma)
        self._saved: list[State] = []  # states of all environments of a resumed run

    def configure_model(self) -> None:
        """Build the agent and, in a fit, the networks of the intrinsic reward."""
        super().configure_model()
        if self.fitting:
            intrinsic.check_rnd(self)
            if self.curiosity is None:
                with torch.device("cpu"), one_thread():
                    self.curiosity = Curiosity.of(self.data.env, self.data.specs.observation, self.agent)

    def trainable_parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters of the agent, of the predictor and of the intrinsic value."""
        yield from super().trainable_parameters()
        yield from self.curiosity.trainable_parameters()

    def on_train_start(self) -> None:
        """Resume the running sums, and begin new statistics with random steps."""
        super().on_train_start()
        states = intrinsic.own_states(self._saved, self.data)
        self.rewards = IntrinsicRewards(states, self.hparams.int_gamma, self.hparams.episodic_bonus)
        self._saved = []
        if not self.curiosity.normalizer.count:
            for rollout in random_rollouts(self.data, self.agent, self.hparams.num_iterations_obs_norm_init):
                self.curiosity.observe(self.curiosity.view(rollout["next", "observation"]))

    @torch.no_grad()
    def advantages(self, rollout: TensorDictBase) -> TensorDictBase:
        """Add the combined ``advantage`` and ``value_target`` [N, T, 1], and ``int_value_target`` [N, T]."""
        rollout = super().advantages(rollout)
        rows = self.rows_differentiated_at_once()
        reward = self.rewards.compute(rollout, self.curiosity, rows)
        value = intrinsic.in_parts(self.int_value, rows, rollout["observation"], rollout["action"])
        last_value = self.int_value(rollout["next", "observation"][:, -1], rollout["action"][:, -1])
        gamma, gae_lambda = self.hparams.int_gamma, self.hparams.gae_lambda
        advantage, rollout["int_value_target"] = intrinsic.endless_gae(
            reward, value, last_value, gamma, gae_lambda, rollout.get("valid")
        )
        extrinsic = self.hparams.ext_coef * rollout["advantage"]
        rollout["advantage"] = extrinsic + self.hparams.int_coef * advantage.unsqueeze(-1)
        return rollout

    def int_value(self, observation: Tensor, action: Tensor) -> Tensor:
        """Return the intrinsic values [B] of observations [B, ...]. The actions have no effect."""
        return self.curiosity.value(self.agent.evaluate(observation, action).critic_features)

    def minibatches(self, rollout: TensorDictBase) -> Iterator[Minibatch]:
        """Yield minibatches, with the weights of the steps that train the predictor in this epoch."""
        share = self.hparams.update_proportion
        chosen = self.uniform("predictor", *rollout.batch_size) < share
        weighted = rollout.copy().set("novelty_weight", chosen.to(rollout["action"].device) / share)
        yield from super().minibatches(weighted)

    def loss(self, minibatch: Minibatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of PPO plus those of intrinsic value and predictor, see :meth:`PPO.loss`."""
        evaluation = self.agent.evaluate(minibatch["observation"], minibatch["action"])
        loss, parts = self.loss_of(minibatch, evaluation)
        value_loss, fwd_loss = intrinsic.novelty_losses(self.curiosity, minibatch, evaluation.critic_features)
        own = {"int_value_loss": value_loss.detach(), "fwd_loss": fwd_loss.detach()}
        return loss + self.hparams.vf_coef * value_loss + fwd_loss, parts | own

    def count_episodes(self, rollout: TensorDictBase) -> dict[str, Tensor]:
        """Count episodes, and add the mean of their sums of intrinsic rewards before scaling."""
        metrics = super().count_episodes(rollout)
        sums = self.rewards.sum_episodes(rollout)
        return metrics | ({"charts/episode_curiosity_reward": sums.mean()} if len(sums) else {})

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the sums and counts of all environments."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["intrinsic"] = self.rewards.states()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the entries of a checkpoint of an RND run."""
        self.curiosity = Curiosity.like(checkpoint["state_dict"], self.curiosity)
        super().on_load_checkpoint(checkpoint)
        self._saved = checkpoint["intrinsic"] if self.fitting else []

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load weights and statistics, also those that a started process returns to its parent."""
        self.curiosity = self.curiosity or Curiosity.like(state_dict)
        return super().load_state_dict(state_dict, *args, **kwargs)
