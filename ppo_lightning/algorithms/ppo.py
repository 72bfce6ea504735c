"""Proximal Policy Optimization: one ``training_step`` is one PPO iteration."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import TensorSpec

from ppo_lightning.algorithms import losses
from ppo_lightning.algorithms.agent_module import AgentModule
from ppo_lightning.algorithms.checks import check_minibatches, check_optimizers, with_number_of_rollouts
from ppo_lightning.algorithms.minibatches import Minibatch, joined, mean_of, split_epoch, take, with_valid
from ppo_lightning.algorithms.schedule import (
    IterationLR,
    KLAdaptiveLR,
    LinearAnnealing,
    override_restored_settings,
    remaining,
)
from ppo_lightning.algorithms.update import CompiledUpdate, EagerUpdate, make_update
from ppo_lightning.callbacks.guards import EqualRanksGuard, NonFiniteGuard, RolloutGuard
from ppo_lightning.errors import ConfigError
from ppo_lightning.models import ActorCritic, Evaluation, MLPAgent
from ppo_lightning.models.normalizers import RewardScaler
from ppo_lightning.utils import collectives
from ppo_lightning.utils.arguments import Range, check_arguments
from ppo_lightning.utils.seeding import Stream


class PPO(AgentModule):
    """Proximal Policy Optimization with the implementation details of Huang et al. (2022).

    Variants override ``advantages``, ``minibatches`` or ``loss``. The base class
    :class:`~ppo_lightning.algorithms.agent_module.AgentModule` builds, evaluates and saves the agent.

    Args:
        learning_rate: Initial learning rate of Adam.
        anneal_lr: Decrease the learning rate linearly to 0 over the run.
        desired_kl: Desired mean approximate KL divergence of an iteration, to which the learning rate adapts
            (:class:`~ppo_lightning.algorithms.schedule.KLAdaptiveLR`). Needs ``anneal_lr=False``. None: off.
        gamma: Discount of future rewards.
        gae_lambda: Weight of longer returns in the advantage estimate.
        num_minibatches: Number of minibatches per rollout.
        update_epochs: Passes over each rollout.
        norm_adv: Normalize the advantages of each minibatch.
        clip_coef: Clipping range of the probability ratio, and of the value if ``clip_vloss``.
        anneal_clip_coef: Decrease the clipping range linearly to 0 over the run.
        clip_vloss: Clip the value loss.
        ent_coef: Weight of the entropy bonus.
        vf_coef: Weight of the value loss.
        max_grad_norm: Maximum norm of the gradient of all parameters together.
        target_kl: Stop the epochs of an iteration when the approximate KL divergence exceeds this value.
            None: never.
        adam_eps: Adam's epsilon.
        norm_reward: Divide the rewards by the running standard deviation of their discounted sum.
        bootstrap_truncated: Bootstrap from the value of the final observation at a time limit. If False, a
            time limit counts as a terminal state, as in CleanRL.
        microbatch_size: Maximum number of rows of a minibatch that are differentiated at once. Gradients of
            the parts are added, which gives the same result with less memory. None: on the CPU the rows that
            fit into the cache (MLP 4096, Nature 128, IMPALA 64), otherwise all rows.
        compile: Compile the update. Compilation takes about ten seconds and needs a C++ compiler. On a single
            device, loss, gradients, clipping and Adam are one graph, and Lightning's hooks around the
            optimizer do not run. On several ranks, the loss is compiled. Weights equal those of the eager
            update to float tolerance.
        agent: Makes the agent from the specs of observations and actions.

    Raises:
        ConfigError: A number is out of its range, or the rollout cannot be split into these minibatches.

    Example:
        >>> L.seed_everything(1)
        >>> data = RolloutDataModule("CartPole-v1", total_timesteps=500_000)
        >>> trainer = L.Trainer(accelerator="cpu")
        >>> trainer.fit(PPO(), data)
    """

    minibatch_keys: ClassVar[tuple[str, ...]] = (
        "observation",
        "action",
        "action_log_prob",
        "state_value",
        "advantage",
        "value_target",
    )
    fit_callbacks = (*AgentModule.fit_callbacks, RolloutGuard, NonFiniteGuard, EqualRanksGuard)
    takes_memory: ClassVar = False  # whether the agent must have a memory
    norm_adv_of: ClassVar = "minibatch"  # or "rollout": a variant normalizes the advantages itself

    def __init__(
        self,
        learning_rate: Annotated[float, Range(1e-15, 10)] = 2.5e-4,
        anneal_lr: bool = True,
        desired_kl: Annotated[float | None, Range(1e-12, 1000)] = None,
        gamma: Annotated[float, Range(0, 1)] = 0.99,
        gae_lambda: Annotated[float, Range(0, 1)] = 0.95,
        num_minibatches: Annotated[int, Range(1, 1_000_000)] = 4,
        update_epochs: Annotated[int, Range(1, 10_000)] = 4,
        norm_adv: bool = True,
        clip_coef: Annotated[float, Range(1e-6)] = 0.2,
        anneal_clip_coef: bool = False,
        clip_vloss: bool = True,
        ent_coef: Annotated[float, Range(-1000, 1000)] = 0.01,
        vf_coef: Annotated[float, Range(0, 1000)] = 0.5,
        max_grad_norm: Annotated[float, Range(1e-6)] = 0.5,
        target_kl: Annotated[float | None, Range(1e-12, 1000)] = None,
        adam_eps: Annotated[float, Range(1e-30, 1)] = 1e-5,
        norm_reward: bool = False,
        bootstrap_truncated: bool = True,
        microbatch_size: Annotated[int | None, Range(1)] = None,
        compile: bool = False,
        agent: Callable[[TensorSpec, TensorSpec], ActorCritic] = MLPAgent,
    ) -> None:
        check_arguments(PPO.__init__, locals(), "model")
        if desired_kl is not None and anneal_lr:
            raise ConfigError(
                "model.desired_kl and model.anneal_lr set the learning rate: set anneal_lr to false."
            )
        super().__init__(agent)
        self.save_hyperparameters(ignore=["agent"])
        self.automatic_optimization = False
        # detail P2
        self.reward_scaler = RewardScaler(gamma) if norm_reward else None
        # A tensor, because a compiled graph treats numbers as constants.
        self.clip_coef = torch.tensor(clip_coef)
        self.optimize: EagerUpdate | CompiledUpdate = EagerUpdate(self)
        self._draws: Counter[Stream] = Counter()  # of the iteration

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let an error in ``configure_optimizers`` of a subclass say where the number of rollouts is."""
        super().__init_subclass__(**kwargs)
        if "configure_optimizers" in vars(cls):
            configure: Any = with_number_of_rollouts(cls.configure_optimizers)
            cls.configure_optimizers = configure  # type: ignore[method-assign]

    def training_step(self, rollout: TensorDictBase, batch_idx: int) -> None:
        """Run one PPO iteration.

        Args:
            rollout: From a collector, batch size [N, T].
            batch_idx: Lightning's count of rollouts in this epoch.
        """
        rollout = self.advantages(rollout)
        metrics = []
        epochs = (self.minibatches(rollout) for _ in range(self.hparams.update_epochs))
        for minibatches in joined(epochs) if self.hparams.target_kl is None else epochs:
            metrics += self.update(minibatches)
            if metrics and self.kl_exceeded(metrics[-1]["approx_kl"]):
                break
        self.log_rollout(rollout, metrics)
        self.step_schedule(metrics)

    def advantages(self, rollout: TensorDictBase) -> TensorDictBase:
        """Add ``advantage`` and ``value_target``, both [N, T, 1].

        The rollout holds V(s_t). The critic evaluates only observations that are not the first of a stored
        step: final observations at time limits, and those at the end of the rollout.
        """
        following = rollout["next"]
        value = rollout["state_value"].squeeze(-1)
        done = following["done"].squeeze(-1)
        terminated = following["terminated"].squeeze(-1)
        if not self.hparams.bootstrap_truncated:
            terminated = done
        boundary = done & ~terminated
        boundary[:, -1] = ~terminated[:, -1]
        next_value = value.roll(-1, dims=1)
        memory = following["memory"][boundary] if self.agent.memory is not None else None
        with torch.no_grad():
            next_value[boundary] = self.agent.value(following["observation"][boundary], memory)
        # detail 5
        advantage, value_target = losses.gae(
            following["reward"].squeeze(-1),
            value,
            next_value,
            terminated,
            done,
            self.hparams.gamma,
            self.hparams.gae_lambda,
            rollout.get("sign", None),
        )
        rollout["advantage"] = advantage.unsqueeze(-1)
        rollout["value_target"] = value_target.unsqueeze(-1)
        return rollout

    def minibatches(self, rollout: TensorDictBase) -> Iterator[Minibatch]:
        """Yield the rollout in random minibatches of tensors [B, ...], with normalized advantages.

        The steps of each environment are shuffled separately and dealt out to the minibatches. If
        ``num_minibatches`` divides T, a minibatch has the same number of steps of each environment, so that
        the minibatches of N ranks together are the minibatch of one rank.
        """
        num_envs, num_steps = rollout.batch_size
        # detail 6
        steps = (
            self.uniform("shuffle", num_envs, num_steps).numpy().argsort(axis=1)
        )  # in a seventh of PyTorch's time
        order = (steps * num_envs + np.arange(num_envs)[:, None]).T.ravel()
        # Gather a whole epoch at once, from rows in the order in which the collector stores them.
        keys = with_valid(rollout, self.minibatch_keys)
        epoch = {key: take(rollout[key].transpose(0, 1).flatten(0, 1), order) for key in keys}
        norm_adv = self.hparams.norm_adv and self.norm_adv_of == "minibatch"
        yield from split_epoch(epoch, self.hparams.num_minibatches, norm_adv)

    def loss(self, minibatch: Minibatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the total loss of a minibatch and its detached parts.

        Only tensor operations are allowed, because the method may be compiled.
        """
        return self.loss_of(minibatch, self.agent.evaluate(minibatch["observation"], minibatch["action"]))

    def loss_of(self, minibatch: Minibatch, evaluation: Evaluation) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the same as :meth:`loss`, from an evaluation whose tensors have the minibatch's shape."""
        keys = ("state_value", "advantage", "value_target")
        old_value, advantage, value_target = (minibatch[key].squeeze(-1) for key in keys)
        valid = minibatch.get("valid")
        clip_coef = self.clip_coef
        log_ratio = evaluation.log_prob - minibatch["action_log_prob"]
        policy_loss = losses.policy_loss(log_ratio, advantage, clip_coef, valid)
        value_clip = clip_coef if self.hparams.clip_vloss else None
        value_loss = losses.value_loss(evaluation.value, old_value, value_target, value_clip, valid)
        entropy = losses.weighted_mean(evaluation.entropy, valid)
        # detail 10
        loss = policy_loss + self.hparams.vf_coef * value_loss - self.hparams.ent_coef * entropy
        parts = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
        detached = {name: part.detach() for name, part in parts.items()}
        return loss, detached | losses.diagnostics(log_ratio, clip_coef, valid)

    def update(self, minibatches: Iterable[Minibatch]) -> list[dict[str, Tensor]]:
        """Take one optimizer step on each minibatch and return the parts of its loss, scalars."""
        return self.optimize(minibatches)

    def kl_exceeded(self, approx_kl: Tensor) -> bool:
        """Return whether the epochs of this iteration end here; all ranks return the same."""
        # detail A3
        if self.hparams.target_kl is None:
            return False
        return bool(collectives.gather(approx_kl).mean() > self.hparams.target_kl)

    def step_schedule(self, metrics: list[dict[str, Tensor]]) -> None:
        """Step the learning-rate schedule, if ``configure_optimizers`` returned one.

        Args:
            metrics: Parts of the loss of each minibatch of the iteration.
        """
        schedule: Any = self.lr_schedulers()
        if isinstance(schedule, KLAdaptiveLR) and metrics:
            schedule.adapt(float(collectives.gather(mean_of(metrics)["approx_kl"]).mean()))
        if isinstance(schedule, torch.optim.lr_scheduler.LRScheduler):
            schedule.step()

    def log_rollout(self, rollout: TensorDictBase, metrics: list[dict[str, Tensor]]) -> None:
        """Log one iteration at the number of environment steps of all ranks.

        Losses are means over the minibatches, returns are means over the episodes that ended.
        """
        episodes = self.count_episodes(rollout)
        # detail 12
        values: dict[str, Any] = (
            {f"losses/{name}": value for name, value in mean_of(metrics).items()} if metrics else {}
        )
        keys = with_valid(rollout, ("state_value", "value_target"))
        everywhere = [collectives.gather(rollout[key]) for key in keys]  # [ranks, N, T, ...]
        values["losses/explained_variance"] = losses.explained_variance(*everywhere)
        values |= episodes
        values["charts/learning_rate"] = self.trainer.optimizers[0].param_groups[0]["lr"]
        values["charts/SPS"] = self.run_log.steps_per_second()
        self.run_log.log(values)

    # Lightning's hooks

    def configure_optimizers(self) -> Any:
        """Return Adam and the learning-rate schedule, which ``training_step`` steps once an iteration."""
        # Lightning does not clip the gradients of a fused optimizer in mixed precision.
        fused = self.trainer.precision == "32-true"
        # detail 3
        optimizer = torch.optim.Adam(
            self.trainable_parameters(), lr=self.hparams.learning_rate, eps=self.hparams.adam_eps, fused=fused
        )
        schedule = IterationLR(optimizer)
        if self.hparams.anneal_lr:
            schedule = LinearAnnealing(optimizer, self.data.num_rollouts)
        elif self.hparams.desired_kl is not None:
            schedule = KLAdaptiveLR(optimizer, self.hparams.desired_kl)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def setup(self, stage: str) -> None:
        """Check, before any environment is created, that the rollout can be split into minibatches."""
        super().setup(stage)
        if stage == "fit":
            self.check_split()

    def configure_model(self) -> None:
        """Build the agent.

        Raises:
            ConfigError: The agent has a memory, which this algorithm does not support, or lacks one.
        """
        super().configure_model()
        if self.agent is None:
            return
        if self.takes_memory and self.agent.memory is None:
            raise ConfigError(
                "RecurrentPPO needs an agent with a memory: set model.agent.memory to lstm, gru or min_gru."
            )
        if self.agent.memory is not None and not self.takes_memory:
            raise ConfigError(
                "model.agent has a memory: use ppo_lightning.RecurrentPPO, or set memory to null."
            )

    def on_train_start(self) -> None:
        """Override restored optimizer settings with those of this run, and create the update."""
        super().on_train_start()
        check_optimizers(self.optimizers(), self.lr_schedulers())
        if isinstance(self.lr_schedulers(), IterationLR):  # otherwise a subclass configures its own
            override_restored_settings(self.trainer.optimizers[0])
        self.clip_coef = torch.tensor(float(self.hparams.clip_coef), device=self.device)
        self.optimize = make_update(self, self.loss)

    def on_train_batch_start(self, rollout: TensorDictBase, batch_idx: int) -> None:
        """Set the clipping range of the iteration."""
        self._draws.clear()
        share = remaining(self.rollouts_done, self.data.num_rollouts)
        # detail A1
        self.clip_coef.fill_(self.hparams.clip_coef * (share if self.hparams.anneal_clip_coef else 1.0))

    def release_updates(self) -> None:
        """Release compiled graphs."""
        self.optimize = EagerUpdate(self)

    def on_train_end(self) -> None:
        """Release compiled graphs."""
        self.release_updates()

    def on_exception(self, exception: BaseException) -> None:
        """Release compiled graphs."""
        self.release_updates()

    # For updates, variants and callbacks

    def uniform(self, stream: Stream, num_envs: int, *shape: int, draw: int | None = None) -> Tensor:
        """Draw from U(0, 1), [num_envs, *shape].

        The numbers depend on the run's seed, the stream, the rollout and the number of the draw alone. Every
        rank draws for the environments of all ranks and keeps its own rows.

        Args:
            stream: Use of the numbers.
            num_envs: Rows of this rank.
            *shape: Shape of a row.
            draw: Number of the draw for this rollout. None: the draws of the stream are counted.
        """
        if draw is None:
            draw = self._draws[stream]
            self._draws[stream] += 1
        shard, generator = self.data.shard, self.data.shard.generator(stream, self.rollouts_done, draw)
        first = num_envs // shard.count * shard.first
        drawn = torch.rand(num_envs // shard.count * shard.total, *shape, generator=generator)
        return drawn[first : first + num_envs]

    def check_split(self) -> None:
        """Check that the rollout can be split into minibatches."""
        check_minibatches(self.hparams, self.data.num_envs, self.data.num_steps, self.trainer.world_size)

    @property
    def steps_per_rollout(self) -> int | None:
        """Number of optimizer steps per iteration, or None if it varies."""
        varies = self.hparams.target_kl is not None or self.data.has_valid
        return None if varies else self.hparams.update_epochs * self.hparams.num_minibatches

    @property
    def rows_at_once(self) -> int | None:
        """Number of rows of a minibatch that are differentiated at once; None: all."""
        return self.hparams.microbatch_size or (
            self.agent.rows_in_cache if self.device.type == "cpu" else None
        )

    def rows_differentiated_at_once(self) -> int:
        """Return the number of steps that are differentiated at once, at most a minibatch."""
        rows = self.data.frames_per_rollout // self.trainer.world_size // self.hparams.num_minibatches
        return min(rows, self.rows_at_once or rows)

    def log_probs_again(self, rollout: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Return recomputed and stored log-probabilities of some actions of a rollout [N, T]."""
        keys = with_valid(rollout, ("observation", "action", "action_log_prob"))
        observation, action, stored, *valid = (
            rollout[key].transpose(0, 1).flatten(0, 1)[: self.agent.rows_in_cache] for key in keys
        )
        if valid:  # at other steps, the environment may have replaced the action
            observation, action, stored = (rows[valid[0]] for rows in (observation, action, stored))
        return self.agent.evaluate(observation, action).log_prob, stored
