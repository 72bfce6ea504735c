"""PPO as a LightningModule: one ``training_step`` is one PPO iteration."""

from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import TensorSpec

from ppo_lightning.algorithms import losses
from ppo_lightning.algorithms.checks import check_cuda_graphs, check_minibatches
from ppo_lightning.algorithms.minibatches import Minibatch, mean_of, take, valid_minibatches
from ppo_lightning.algorithms.optimizer import OptimizerModule
from ppo_lightning.errors import ConfigError
from ppo_lightning.models import ActorCritic, MLPAgent
from ppo_lightning.models.normalizers import RewardScaler
from ppo_lightning.utils import collectives
from ppo_lightning.utils.arguments import Range, check_arguments
from ppo_lightning.utils.finite import Snapshot

CHECK_EVERY = 100  # rollouts


class PPO(OptimizerModule):
    """Proximal Policy Optimization with the implementation details of Huang et al. (2022).

    Variants override ``advantages``, ``minibatches`` or ``loss``. How the agent is built, evaluated and saved stands in
    :class:`~ppo_lightning.algorithms.agent_module.AgentModule`.

    Args:
        learning_rate: Adam's step size at the start.
        anneal_lr: Let the learning rate fall linearly to 0 over the run.
        desired_kl: Without ``anneal_lr``: after an iteration whose mean approximate KL divergence is more than twice this,
            divide the learning rate by 1.5, and multiply it by 1.5 after one with less than half; between 1e-5 and 1e-2.
        gamma: Discount of future rewards.
        gae_lambda: Weight of longer returns in the advantage estimate.
        num_minibatches: Minibatches a rollout is split into.
        update_epochs: Passes over each rollout.
        norm_adv: Normalise the advantages of each minibatch.
        clip_coef: Clipping range of the probability ratio, and of the value if ``clip_vloss``.
        anneal_clip_coef: Let the clipping range fall linearly to 0 over the run.
        clip_vloss: Clip the value loss.
        ent_coef: Weight of the entropy bonus.
        vf_coef: Weight of the value loss.
        max_grad_norm: Largest norm of the gradient of all parameters together.
        target_kl: Stop the epochs of an iteration once the approximate KL divergence exceeds this; None: never.
        adam_eps: Adam's epsilon.
        norm_reward: Divide the rewards by the running standard deviation of their discounted sum.
        clip_reward: Bound of the absolute value of a reward so scaled.
        bootstrap_truncated: Continue with the value of the last observation where a time limit cut an episode; off, a
            time limit counts as a terminal state, as in CleanRL.
        microbatch_size: Largest number of rows of a minibatch that are differentiated at once, their gradients added: less
            memory, and the same result. None: on the CPU what its cache holds (MLP 4096, Nature 128, IMPALA 64), otherwise all.
        compile: Compile the update: one graph for loss, gradients, clipping and Adam on a single device, the loss alone on
            several ranks. It takes some ten seconds at the start and needs a C++ compiler, and the weights are those of
            the uncompiled update to float tolerance. On a single device, Lightning's hooks around the optimizer do not run.
        cuda_graphs: Record what a GPU does for a compiled update and for a choice of actions, and launch it as one piece: on
            one GPU, in 32-true, without memory. A minibatch in parts is not recorded.
        nonfinite: What an update does that makes a weight NaN or infinite: end the run with an ``error``; or be taken back, all
            of its iteration, whose rollout is then left out (``skip``), or is the last (``stop``).
        num_threads: PyTorch's threads on the CPU while it trains; None: as many as PyTorch has if the agent has convolutions
            or wide layers, otherwise one, which is safe beside other processes.
        agent: Makes the agent from the specs of observations and actions.

    Raises:
        ConfigError: A number is out of its range, or the rollout cannot be split as asked.
    """

    takes_memory = False  # whether the agent has one
    whole_graph = True  # whether a compiler sees all of the loss

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
        clip_reward: Annotated[float, Range(1e-6)] = 10.0,
        bootstrap_truncated: bool = True,
        microbatch_size: Annotated[int | None, Range(1)] = None,
        compile: bool = False,
        cuda_graphs: bool = False,
        nonfinite: Literal["error", "skip", "stop"] = "error",
        num_threads: Annotated[int | None, Range(1, 1024)] = None,
        agent: Callable[[TensorSpec, TensorSpec], ActorCritic] = MLPAgent,
    ) -> None:
        check_arguments(PPO.__init__, locals(), "model")
        if desired_kl is not None and anneal_lr:
            raise ConfigError("model.desired_kl and model.anneal_lr set the learning rate: set anneal_lr to false.")
        super().__init__(agent)
        self.save_hyperparameters(ignore=["agent"])
        self.automatic_optimization = False
        # detail P2
        self.reward_scaler = RewardScaler(gamma, clip_reward) if norm_reward else None
        self.clip_coef: float | Tensor = clip_coef  # of this iteration; a tensor where a compiled graph reads it
        self._loss = self.loss

    def training_step(self, rollout: TensorDictBase, batch_idx: int) -> None:
        """Runs one PPO iteration.

        Args:
            rollout: From a collector, batch size [N, T].
            batch_idx: Lightning's count of rollouts in this epoch.
        """
        # detail A1
        clip_coef = self.hparams.clip_coef * (self.remaining(self.rollouts_done) if self.hparams.anneal_clip_coef else 1.0)
        self.clip_coef = self.clip_coef.fill_(clip_coef) if isinstance(self.clip_coef, Tensor) else clip_coef
        if self.rollouts_done % CHECK_EVERY == 0:
            self.check_log_probs(rollout)
        rollout = self.advantages(self.agree_on_valid(rollout))
        before = None if self.hparams.nonfinite == "error" else Snapshot(self.trainer.optimizers[0])
        metrics = []
        for _ in range(self.hparams.update_epochs):
            metrics += [self.update(minibatch) for minibatch in self.minibatches(rollout)]
            if metrics and self.kl_exceeded(metrics[-1]["approx_kl"]):
                break
        if before is not None and before.spoilt():
            metrics = self.take_back(before)
        self.log_rollout(rollout, metrics)
        if metrics:
            self.adapt_learning_rate(mean_of(metrics)["approx_kl"])
        if self.schedule is not None:
            self.schedule.step()
        if self.rollouts_done >= self.data.num_rollouts:
            self.trainer.should_stop = True  # whatever max_epochs says; Lightning validates once more before it stops

    def advantages(self, rollout: TensorDictBase) -> TensorDictBase:
        """Adds ``advantage`` and ``value_target``, both [N, T, 1].

        V(s_t) was stored when acting; only where the following observation is not the next stored one (a time limit, the
        end of the rollout) is the critic asked again.
        """
        following, value = rollout["next"], rollout["state_value"].squeeze(-1)
        done, terminated = following["done"].squeeze(-1), following["terminated"].squeeze(-1)
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
            following["reward"].squeeze(-1), value, next_value, terminated, done, self.hparams.gamma, self.hparams.gae_lambda
        )
        rollout["advantage"], rollout["value_target"] = advantage.unsqueeze(-1), value_target.unsqueeze(-1)
        return rollout

    def minibatches(self, rollout: TensorDictBase) -> Iterator[Minibatch]:
        """Yields the rollout in random minibatches of tensors [B, ...], their advantages normalised; each valid step once.

        Every environment is shuffled by itself and the columns are dealt out, so that (if ``num_minibatches`` divides T) a
        minibatch has equally many steps of each environment: split over ranks, it is the union of their minibatches.
        """
        (num_envs, num_steps), count = rollout.batch_size, self.hparams.num_minibatches
        # detail 6
        steps = self.uniform(num_envs, num_steps).numpy().argsort(axis=1)  # in a seventh of PyTorch's time
        order = (steps * num_envs + np.arange(num_envs)[:, None]).T.ravel()
        keys = ("observation", "action", "action_log_prob", "state_value", "advantage", "value_target")
        # All of an epoch at once; step by step, as the collector stores it.
        epoch = {key: take(rollout[key].transpose(0, 1).flatten(0, 1), order) for key in keys}
        if "valid" in rollout.keys():  # noqa: SIM118  (a TensorDict)
            valid = take(rollout["valid"].T.flatten(), order)
            yield from valid_minibatches(epoch, valid, count, self.hparams.norm_adv)
            return
        if self.hparams.norm_adv:
            advantage = epoch["advantage"].view(count, -1)
            of_all_ranks = collectives.gather(advantage).transpose(0, 1).flatten(1)  # [count, B of all]
            epoch["advantage"] = losses.normalize(advantage, of_all_ranks).view(-1, 1)
        for parts in zip(*(tensor.chunk(count) for tensor in epoch.values()), strict=True):
            yield dict(zip(keys, parts, strict=True))

    def loss(self, minibatch: Minibatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes the total loss of a minibatch and its detached parts, by tensor operations only: it may be compiled."""
        return self.loss_of(minibatch, *self.agent.evaluate(minibatch["observation"], minibatch["action"]))

    def loss_of(
        self, minibatch: Minibatch, log_prob: Tensor, entropy: Tensor, value: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes what :meth:`loss` does from what the agent says of a minibatch, tensors of the minibatch's shape."""
        old_value, advantage, value_target = (
            minibatch[key].squeeze(-1) for key in ("state_value", "advantage", "value_target")
        )
        log_ratio, clip_coef = log_prob - minibatch["action_log_prob"], self.clip_coef
        policy_loss = losses.policy_loss(log_ratio, advantage, clip_coef)
        value_clip = clip_coef if self.hparams.clip_vloss else None
        value_loss = losses.value_loss(value, old_value, value_target, value_clip)
        entropy = entropy.mean()
        # detail 10
        loss = policy_loss + self.hparams.vf_coef * value_loss - self.hparams.ent_coef * entropy
        parts = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
        return loss, {k: v.detach() for k, v in parts.items()} | losses.diagnostics(log_ratio, clip_coef)

    def kl_exceeded(self, approx_kl: Tensor) -> bool:
        """Tells whether the epochs of this iteration end here; all ranks give the same answer."""
        # detail A3
        if self.hparams.target_kl is None:
            return False
        return bool(collectives.gather(approx_kl).mean() > self.hparams.target_kl)

    def log_rollout(self, rollout: TensorDictBase, metrics: list[dict[str, Tensor]]) -> None:
        """Logs one iteration: losses as the mean over its minibatches, returns as the mean over its finished episodes.

        The x axis of every logger is the number of environment steps of all ranks.
        """
        following = rollout["next"]
        done = following["episode_done"]
        episodes = torch.stack([following[key][done].float() for key in ("episode_reward", "step_count")], dim=-1)
        returns, lengths = collectives.concatenate(episodes).unbind(-1)
        self.episode_returns.extend(returns.tolist())
        self.env_steps += self.data.frames_per_rollout
        # detail 12
        values: dict[str, Any] = {f"losses/{key}": value for key, value in mean_of(metrics).items()} if metrics else {}
        pairs = collectives.gather(torch.stack([rollout["state_value"], rollout["value_target"]]))  # [W, 2, N, T, 1]
        value, target = pairs.unbind(dim=1)
        if "valid" in rollout.keys():  # noqa: SIM118  (a TensorDict)
            valid = collectives.gather(rollout["valid"])
            value, target = value[valid], target[valid]
        values["losses/explained_variance"] = losses.explained_variance(value, target)
        if len(returns):
            values["charts/episodic_return"], values["charts/episodic_length"] = returns.mean(), lengths.mean()
        values["charts/learning_rate"] = self.trainer.optimizers[0].param_groups[0]["lr"]
        values["charts/SPS"] = self.steps_per_second()
        self.log_values(values)

    def setup(self, stage: str) -> None:
        """Checks, before any environment is created, that the rollout can be split into minibatches."""
        super().setup(stage)
        if stage == "fit":
            self.check_split()
            trainer = self.trainer
            device = trainer.strategy.root_device.type
            check_cuda_graphs(self.hparams, device, trainer.world_size, trainer.precision, self.whole_graph)

    @property
    def steps_per_rollout(self) -> int | None:
        """Optimizer steps of an iteration; None if they vary."""
        varies = self.hparams.target_kl is not None or self.data.max_restarts
        return None if varies else self.hparams.update_epochs * self.hparams.num_minibatches

    def check_split(self) -> None:
        """Demands that the rollout can be split into minibatches."""
        check_minibatches(self.hparams, self.data.num_envs, self.data.num_steps, self.trainer.world_size)
