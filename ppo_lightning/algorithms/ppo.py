"""Proximal Policy Optimization: one ``training_step`` is one PPO iteration."""

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from torchrl.data import TensorSpec

from ppo_lightning.algorithms import checks, losses
from ppo_lightning.algorithms.agent_module import AgentModule
from ppo_lightning.algorithms.defaults import SHORT_RUNS, keep_from, settle, settle_by_run
from ppo_lightning.algorithms.make_update import make_update
from ppo_lightning.algorithms.minibatches import (
    Minibatch,
    mean_of,
    over_ranks,
    split_epoch,
    take,
    with_weight,
)
from ppo_lightning.algorithms.schedule import IterationLR, KLAdaptiveLR, override_restored_settings, remaining
from ppo_lightning.algorithms.update import CompiledUpdate, EagerUpdate
from ppo_lightning.models import ActorCritic, Evaluation
from ppo_lightning.models.actor import evaluating
from ppo_lightning.models.default import DefaultAgent
from ppo_lightning.models.networks import Network, choose_agent
from ppo_lightning.utils import collectives
from ppo_lightning.utils.arguments import Range, check_arguments
from ppo_lightning.utils.seeding import Stream


class PPO(AgentModule):
    """Proximal Policy Optimization with the implementation details of Huang et al. (2022).

    Variants override ``advantages``, ``shuffled``, ``minibatches``, ``evaluate``, ``loss`` or
    ``end_iteration``. The base class :class:`AgentModule` builds, evaluates and saves the agent.

    What is left out (None) has a value for short runs: ``learning_rate`` 1e-3, ``num_minibatches`` 8,
    ``update_epochs`` 10, ``adv_eps`` 0.03, ``clip_vloss`` false, ``ent_coef`` 0, ``norm_reward`` true,
    ``norm_obs`` of the default agent true (200 or more numbers in [0, 1]: false), ``data.num_envs`` 8. Runs
    of more than 500 000 steps have 3e-4 and 16, or the largest number below that divides the rollout, and
    keep them when resumed. Pictures, RecurrentPPO, PPG, RND and SelfPlay have those of CleanRL's ``ppo.py``:
    2.5e-4, 4, 4, 1e-8, true, 0.01, false, false, 4 (pictures 8). A run prints its values.

    Args:
        learning_rate: Initial learning rate of Adam.
        anneal_lr: Decrease the learning rate linearly to 0 over the run.
        desired_kl: Desired mean approximate KL divergence of an iteration in nats, to which the learning rate
            adapts (:class:`~ppo_lightning.algorithms.schedule.KLAdaptiveLR`). It needs ``anneal_lr=False``.
            None: off.
        gamma: Discount of future rewards.
        gae_lambda: Weight of longer returns in the advantage estimate.
        num_minibatches: Number of minibatches per rollout.
        update_epochs: Passes over each rollout.
        norm_adv: Normalize the advantages of each minibatch.
        adv_eps: Added to their standard deviation, so that noise stays small. Without ``norm_reward`` 1e-8.
        clip_coef: Clipping range of the probability ratio, and of the value if ``clip_vloss``.
        anneal_clip_coef: Decrease the clipping range linearly to 0 over the run.
        clip_vloss: Clip the value loss.
        ent_coef: Weight of the entropy bonus.
        vf_coef: Weight of the value loss.
        max_grad_norm: Maximum norm of the gradient of all parameters together.
        target_kl: Stop the epochs of an iteration when the approximate KL divergence exceeds this number of
            nats. None: never.
        adam_eps: Adam's epsilon.
        norm_reward: Divide the rewards by the running standard deviation of their discounted sum, and clip
            them to [-10, 10].
        bootstrap_truncated: Bootstrap from the value of the final observation at a time limit. If False, a
            time limit counts as a terminal state, as in CleanRL.
        microbatch_size: Maximum number of rows that are differentiated at once, if a minibatch has equal
            parts of about that size. Gradients of the parts are added, which gives the same result with less
            memory. None: on the CPU the rows that fit into the cache (MLP 4096, Nature 128, IMPALA 64),
            otherwise all rows.
        compile: Compile the update. Compilation takes about ten seconds and needs a C++ compiler. Loss,
            gradients, clipping and Adam are compiled, and Lightning's hooks around the optimizer do not run.
            With a memory that cannot be compiled, a strategy other than DDP or a communication hook, only the
            loss is compiled. Weights equal those of the eager update to float tolerance.
        agent: Makes the agent from the specs of observations and actions. By default, CNNAgent for a picture,
            otherwise MLPAgent.
        actor: In the place of ``agent``: TorchRL's ``ProbabilisticActor`` or ``ActorValueOperator``, or a
            network, or what makes one, see :class:`~ppo_lightning.models.networks.NetworkAgent`.
        critic: The value function beside ``actor``.

    Raises:
        ConfigError: A number is out of its range, or the rollout cannot be split into these minibatches.

    Example:
        >>> L.seed_everything(1)
        >>> data = RolloutDataModule("CartPole-v1", total_timesteps=100_000)
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
    agent: ActorCritic
    agent_kind = ActorCritic
    defaults: ClassVar[Mapping[str, Any]] = SHORT_RUNS
    default_num_envs = 8

    def __init__(
        self,
        learning_rate: Annotated[float | None, Range(1e-15)] = None,
        anneal_lr: bool = True,
        desired_kl: Annotated[float | None, Range(1e-12)] = None,
        gamma: Annotated[float, Range(0, 1)] = 0.99,
        gae_lambda: Annotated[float, Range(0, 1)] = 0.95,
        num_minibatches: Annotated[int | None, Range(1)] = None,
        update_epochs: Annotated[int | None, Range(1)] = None,
        norm_adv: bool = True,
        adv_eps: Annotated[float | None, Range(1e-30)] = None,
        clip_coef: Annotated[float, Range(1e-6, math.inf)] = 0.2,
        anneal_clip_coef: bool = False,
        clip_vloss: bool | None = None,
        ent_coef: Annotated[float | None, Range(-math.inf)] = None,
        vf_coef: Annotated[float, Range(0)] = 0.5,
        max_grad_norm: Annotated[float, Range(1e-6, math.inf)] = 0.5,
        target_kl: Annotated[float | None, Range(1e-12)] = None,
        adam_eps: Annotated[float, Range(1e-30)] = 1e-5,
        norm_reward: bool | None = None,
        bootstrap_truncated: bool = True,
        microbatch_size: Annotated[int | None, Range(1)] = None,
        compile: bool = False,
        agent: Callable[[TensorSpec, TensorSpec], ActorCritic] = DefaultAgent,
        actor: Network | None = None,
        critic: Network | None = None,
    ) -> None:
        check_arguments(PPO.__init__, locals(), "model")
        super().__init__(choose_agent(agent, actor, critic))
        self.save_hyperparameters(ignore=["agent", "actor", "critic"])
        self.automatic_optimization = False
        self.left_out = {name: None for name in self.defaults if self.hparams.get(name, 0) is None}
        settle(self, self.defaults)
        # A tensor, because a compiled graph treats numbers as constants.
        self.clip_coef = torch.tensor(clip_coef, dtype=torch.float32)
        self.optimize: EagerUpdate | CompiledUpdate = EagerUpdate(self, self.total_loss)

    def training_step(self, rollout: TensorDictBase, batch_idx: int) -> None:
        """Run one PPO iteration on a rollout [N, T]."""
        profile = self.trainer.profiler.profile  # type: ignore[attr-defined]
        with profile("advantages"), evaluating(self.agent):
            rollout = self.advantages(rollout)
        metrics = []
        with profile("update"):
            # Without an early stop, all epochs are one sequence of minibatches: one graph if compiled.
            for minibatches in self.epoch_minibatches(rollout):
                metrics += self.update(minibatches)
                if self.hparams.target_kl and metrics and self.kl_exceeded(metrics[-1]["approx_kl"]):
                    break
        with profile("log"):
            self.log_rollout(rollout, metrics)
        self.end_iteration(rollout, metrics)
        self.step_schedule(metrics)

    def advantages(self, rollout: TensorDictBase) -> TensorDictBase:
        """Add ``advantage`` and ``value_target``, both [N, T, 1].

        The rollout holds V(s_t). The critic evaluates only observations that are not the first of a stored
        step: final observations at time limits, and those at the end of the rollout.
        """
        following = rollout["next"]
        value = rollout["state_value"].squeeze(-1)
        done = following["done"].squeeze(-1)
        terminated = following["terminated"].squeeze(-1) if self.hparams.bootstrap_truncated else done
        boundary = done & ~terminated
        boundary[:, -1] = ~terminated[:, -1]
        if (weight := rollout.get("weight", None)) is not None:
            # Bootstrap from a step that does not count: it has an observation and its value.
            done = done | losses.before_uncounted(weight)
        next_value = value.roll(-1, dims=1)
        if boundary.any():  # a network of a user may not take zero rows
            memory = following["memory"][boundary] if self.agent.memory is not None else None
            with torch.no_grad():
                next_value[boundary] = self.agent.value(following["observation"][boundary], memory)
        reward, gamma = following["reward"].squeeze(-1), self.discount(rollout)
        # detail 5
        advantage, value_target = losses.gae(
            reward, value, next_value, terminated, done, gamma, self.hparams.gae_lambda
        )
        rollout["advantage"] = advantage.unsqueeze(-1)
        rollout["value_target"] = value_target.unsqueeze(-1)
        return rollout

    def discount(self, rollout: TensorDictBase) -> float | Tensor:
        """Return the discount of the next value: gamma, times the ``discount`` of a step [N, T] if any."""
        factor = rollout.get("discount", None)
        return self.hparams.gamma if factor is None else self.hparams.gamma * factor

    def epoch_minibatches(self, rollout: TensorDictBase) -> Iterator[Iterable[Minibatch]]:
        """Yield the minibatches of each call of :meth:`update`: of all epochs, or of one with ``target_kl``.

        The compiled update draws all minibatches of a call before its first step, so that they cannot depend
        on the new weights. A variant with such minibatches yields those of each epoch. For small networks, an
        iteration then takes 20 % longer and more.
        """
        epochs = (self.minibatches(rollout) for _ in range(self.hparams.update_epochs))
        if self.hparams.target_kl is None:
            yield itertools.chain.from_iterable(epochs)
        else:
            yield from epochs

    def minibatches(self, rollout: TensorDictBase) -> Iterator[Minibatch]:
        """Yield the rollout in random minibatches of tensors [B, ...], with normalized advantages."""
        settings = self.hparams.num_minibatches, self.hparams.norm_adv, self.hparams.adv_eps
        yield from split_epoch(self.shuffled(rollout), *settings)

    def shuffled(self, rollout: TensorDictBase) -> Minibatch:
        """Return the steps of the rollout in the order of the minibatches, tensors [N * T, ...].

        The steps of each environment are shuffled separately and dealt out to the minibatches. If
        ``num_minibatches`` divides T, a minibatch has the same number of steps of each environment, so that
        the minibatches of N ranks together are the minibatch of one rank.
        """
        num_envs, num_steps = rollout.batch_size
        # detail 6
        keys = self.uniform("shuffle", num_envs, num_steps).numpy()
        steps = keys.argsort(axis=1)  # in a seventh of PyTorch's time
        order = (steps * num_envs + np.arange(num_envs)[:, None]).T.ravel()
        # Gather a whole epoch at once, from rows in the order in which the collector stores them.
        names = with_weight(rollout, self.minibatch_keys)
        return {name: take(rollout[name].transpose(0, 1).flatten(0, 1), order) for name in names}

    def total_loss(self, minibatch: Minibatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Evaluate a minibatch and return its loss and the detached parts, for the update."""
        return self.loss(minibatch, self.evaluate(minibatch))

    def evaluate(self, minibatch: Minibatch) -> Evaluation:
        """Evaluate the actions of a minibatch with the current weights."""
        return self.agent.evaluate(minibatch["observation"], minibatch["action"])

    def loss(self, minibatch: Minibatch, evaluation: Evaluation) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the total loss of a minibatch and its detached parts.

        Only tensor operations are allowed, because the method may be compiled.

        Args:
            minibatch: ``observation`` and ``action`` [B, ...], ``action_log_prob`` [B]; ``state_value``,
                ``advantage`` and ``value_target`` [B, 1]; ``weight`` [B] if some steps do not count.
            evaluation: From :meth:`evaluate`. A variant adds to the loss without another call of the agent.
        """
        keys = ("state_value", "advantage", "value_target")
        old_value, advantage, value_target = (minibatch[key].squeeze(-1) for key in keys)
        weight = minibatch.get("weight")
        log_ratio = evaluation.log_prob - minibatch["action_log_prob"]
        policy_loss = self.policy_loss(log_ratio, advantage, weight)
        value_clip = self.clip_coef if self.hparams.clip_vloss else None
        value_loss = losses.value_loss(evaluation.value, old_value, value_target, value_clip, weight)
        entropy = losses.weighted_mean(evaluation.entropy, weight)
        # detail 10
        loss = policy_loss + self.hparams.vf_coef * value_loss - self.hparams.ent_coef * entropy
        parts = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
        detached = {name: part.detach() for name, part in parts.items()}
        return loss, detached | losses.diagnostics(log_ratio, self.clip_coef, weight)

    def policy_loss(self, log_ratio: Tensor, advantage: Tensor, weight: Tensor | None) -> Tensor:
        """Return the loss of the policy, a scalar, from tensors [B], with the annealed ``self.clip_coef``."""
        return losses.policy_loss(log_ratio, advantage, self.clip_coef, weight)

    def update(self, minibatches: Iterable[Minibatch]) -> list[dict[str, Tensor]]:
        """Take one optimizer step on each minibatch and return the parts of its loss, scalars."""
        # detail A1
        share = remaining(self.rollouts_done - 1, self.data.num_rollouts)
        self.clip_coef.fill_(self.hparams.clip_coef * (share if self.hparams.anneal_clip_coef else 1.0))
        return self.optimize(minibatches)

    def kl_exceeded(self, approx_kl: Tensor) -> bool:
        """Return whether the epochs of this iteration end here; all ranks return the same."""
        # detail A3
        limit = self.hparams.target_kl
        return limit is not None and bool(collectives.gather(approx_kl).mean() > limit)

    def log_rollout(self, rollout: TensorDictBase, metrics: list[dict[str, Tensor]]) -> None:
        """Log one iteration at the number of environment steps of all ranks.

        Losses are means over the minibatches, returns are means over the episodes that ended.
        """
        # detail 12
        means = mean_of(metrics) if metrics else {}
        values: dict[str, Any] = {f"losses/{name}": value for name, value in means.items()}
        value, target, weight = (rollout.get(key, None) for key in ("state_value", "value_target", "weight"))
        errors = torch.stack([target.flatten(), (target - value).flatten()])
        pooled = over_ranks(errors, None if weight is None else weight.flatten())
        values["losses/explained_variance"] = losses.explained_variance(value, target, weight, pooled)
        values["charts/learning_rate"] = self.trainer.optimizers[0].param_groups[0]["lr"]
        values["charts/SPS"] = self.progress.steps_per_second()
        self.run_log.log(values)

    def end_iteration(self, rollout: TensorDictBase, metrics: list[dict[str, Tensor]]) -> None:
        """Do what follows an iteration, before the learning rate changes. By default, this is nothing.

        ``metrics`` are the parts of the loss of each minibatch.
        """

    def step_schedule(self, metrics: list[dict[str, Tensor]]) -> None:
        """Step the learning-rate schedule, if ``configure_optimizers`` returned one."""
        schedule: Any = self.lr_schedulers()
        if isinstance(schedule, KLAdaptiveLR) and metrics:
            schedule.adapt(float(collectives.gather(mean_of(metrics)["approx_kl"]).mean()))
        if isinstance(schedule, LRScheduler):
            schedule.step()

    # Lightning's hooks

    def configure_callbacks(self) -> Any:
        """Give what was left out its value again: a subclass may have saved None."""
        settle(self, self.left_out)
        return super().configure_callbacks()

    def configure_model(self) -> None:
        """Give what was left out its value, and build the agent."""
        settle_by_run(self)
        super().configure_model()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore a run. A longer one keeps what the first chose by its length."""
        keep_from(self, checkpoint)
        super().on_load_checkpoint(checkpoint)

    def configure_optimizers(self) -> Any:
        """Return Adam and the learning-rate schedule, which ``training_step`` steps once an iteration."""
        # Lightning does not clip the gradients of a fused optimizer in mixed precision.
        fused = self.trainer.precision == "32-true"
        # detail 3
        optimizer = torch.optim.Adam(
            self.trainable_parameters(), lr=self.hparams.learning_rate, eps=self.hparams.adam_eps, fused=fused
        )
        if self.hparams.desired_kl is not None:
            schedule: IterationLR = KLAdaptiveLR(optimizer, self.hparams.desired_kl)
        else:
            total, anneals = self.data.num_rollouts, self.hparams.anneal_lr
            # detail 4
            schedule = IterationLR(optimizer, lambda done: remaining(done, total) if anneals else 1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_start(self) -> None:
        """Override restored optimizer settings with those of this run, and create the update."""
        super().on_train_start()
        schedule = self.lr_schedulers()
        assert len(self.trainer.optimizers) == 1 and isinstance(schedule, LRScheduler | None), (
            "configure_optimizers must return one optimizer, with at most one schedule"
        )
        if isinstance(schedule, IterationLR):  # otherwise a subclass configures its own
            override_restored_settings(self.trainer.optimizers[0])
        self.clip_coef = self.clip_coef.new_tensor(self.hparams.clip_coef, device=self.device)
        self.optimize = make_update(self, self.total_loss)

    def release(self) -> None:
        """Release compiled graphs."""
        self.optimize = EagerUpdate(self, self.total_loss)

    # For updates, variants and callbacks

    def uniform(self, stream: Stream, num_envs: int, *shape: int) -> Tensor:
        """Draw from U(0, 1), [num_envs, *shape].

        The numbers depend on the run's seed, the stream, the rollout and the number of the draw alone. Every
        rank draws for the environments of all ranks and keeps its own rows.
        """
        shard = self.data.shard
        draws = self.progress.draws
        generator = shard.generator(stream, self.rollouts_done - 1, draws[stream])
        draws[stream] += 1
        # PPG asks for numbers for sequences, of which each environment has several.
        first = num_envs // shard.count * shard.first
        drawn = torch.rand(
            num_envs // shard.count * shard.total, *shape, generator=generator, dtype=torch.float32
        )
        return drawn[first : first + num_envs]

    def refusals(self) -> Iterator[str]:
        """Yield the numbers of minibatches and the agents with which PPO cannot train."""
        yield from checks.of_minibatches(self)
        yield from checks.of_memory(self)

    @property
    def steps_per_rollout(self) -> int | None:
        """Number of optimizer steps per iteration, or None if it varies."""
        varies = self.hparams.target_kl is not None or self.data.has_weights
        return None if varies else self.hparams.update_epochs * self.hparams.num_minibatches

    @property
    def minibatch_size(self) -> int:
        """Number of steps of a minibatch on this rank."""
        return self.data.frames_per_rollout // self.trainer.world_size // self.hparams.num_minibatches

    @property
    def microbatch_size(self) -> int:
        """Maximum number of rows of a minibatch that are differentiated at once."""
        in_cache = self.agent.microbatch_size if self.device.type == "cpu" else sys.maxsize
        return self.hparams.microbatch_size or in_cache
