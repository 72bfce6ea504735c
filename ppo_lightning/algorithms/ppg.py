"""Phasic Policy Gradient: PPO whose features are also trained on values, in phases of their own.

Source: Cobbe et al., "Phasic Policy Gradient" (2020), arXiv:2009.04416.
"""

from collections.abc import Iterator
from typing import Annotated, Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from ppo_lightning.algorithms import checks, losses
from ppo_lightning.algorithms.defaults import CLEANRL
from ppo_lightning.algorithms.make_update import make_update
from ppo_lightning.algorithms.minibatches import (
    Minibatch,
    deal_sequences,
    mean_of,
    over_ranks,
    split_epoch,
    with_weight,
)
from ppo_lightning.algorithms.ppo import PPO
from ppo_lightning.algorithms.update import EagerUpdate
from ppo_lightning.envs.specs import Specs
from ppo_lightning.models import Evaluation
from ppo_lightning.models.actor import evaluating
from ppo_lightning.models.heads import Float32Linear
from ppo_lightning.models.init import orthogonal
from ppo_lightning.rollouts.datamodule import DEFAULT_NUM_ENVS
from ppo_lightning.utils import collectives
from ppo_lightning.utils.arguments import Range, check_arguments

STORED = ("observation", "action", "value_target")
POLICY = "policy_"  # prefix of the keys of the policy's parameters before the phase


class PPG(PPO):
    """PPO with an auxiliary phase after every ``n_iteration`` rollouts.

    The policy phase is PPO with advantages that are normalized over the whole rollout. Value gradients do not
    reach the body of the policy: with ``agent.shared`` true, the value function reads detached features, and
    with false it has a body of its own (``dual`` in the authors' program). The auxiliary phase trains the
    features of the policy on the value targets of the whole phase, with an auxiliary value function and a
    penalty on changes of the policy.

    Args:
        n_iteration: Rollouts of a policy phase.
        e_auxiliary: Passes of the auxiliary phase over the rollouts of the policy phase.
        beta_clone: Weight of KL(old policy || new policy) in the auxiliary phase.
        num_aux_rollouts: Sequences (one environment in one rollout) in a minibatch of the auxiliary phase, on
            all ranks together.
        update_epochs: Passes over each rollout in the policy phase.
        **hyperparameters: Those of :class:`~ppo_lightning.PPO`.

    Raises:
        ConfigError: A number is out of its range, the run ends before its first auxiliary phase, or the
            sequences cannot be split into minibatches.

    Example:
        >>> module = PPG(n_iteration=8, agent=functools.partial(MLPAgent, shared=True))
    """

    auxiliary_critic: nn.Module

    defaults = CLEANRL
    default_num_envs = DEFAULT_NUM_ENVS
    steps_per_rollout = None  # an iteration with an auxiliary phase has more optimizer steps

    def __init__(
        self,
        n_iteration: Annotated[int, Range(1)] = 32,
        e_auxiliary: Annotated[int, Range(1)] = 6,
        beta_clone: Annotated[float, Range(0)] = 1.0,
        num_aux_rollouts: Annotated[int, Range(1)] = 4,
        update_epochs: Annotated[int, Range(1)] = 1,
        **hyperparameters: Any,
    ) -> None:
        check_arguments(PPG.__init__, locals(), "model")
        super().__init__(update_epochs=update_epochs, **hyperparameters)
        self.rollouts: list[Minibatch] = []  # of the policy phase, in main memory, tensors [N, T, ...]

    def add_networks(self, specs: Specs) -> None:
        """Build the auxiliary value function on the features of the policy."""
        width = self.agent.actor_body.out_features
        assert isinstance(width, int)
        self.auxiliary_critic = orthogonal(Float32Linear(width, 1), gain=0.1)

    def trainable_parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters of the agent and of the auxiliary value function."""
        yield from super().trainable_parameters()
        yield from self.auxiliary_critic.parameters()

    def advantages(self, rollout: TensorDictBase) -> TensorDictBase:
        """Add ``advantage``, normalized over all ranks, and ``value_target``. Store a copy for the phase."""
        rollout = super().advantages(rollout)
        if self.hparams.norm_adv:
            advantage, weight = rollout["advantage"], rollout.get("weight", None)
            flat, weights = advantage.reshape(1, -1), None if weight is None else weight.reshape(1, -1)
            normalized = losses.normalize(flat, weights, over_ranks(flat, weights), self.hparams.adv_eps)
            rollout["advantage"] = normalized.view_as(advantage)
        keys = with_weight(rollout, STORED)
        self.rollouts.append({key: rollout[key].to("cpu", copy=True) for key in keys})
        return rollout

    def minibatches(self, rollout: TensorDictBase) -> Iterator[Minibatch]:
        """Yield random minibatches. The advantages are normalized already."""
        yield from split_epoch(self.shuffled(rollout), self.hparams.num_minibatches, norm_adv=False)

    def evaluate(self, minibatch: Minibatch) -> Evaluation:
        """Evaluate the actions of a minibatch, without value gradients to the body of the policy."""
        evaluation = super().evaluate(minibatch)
        if self.agent.critic_body is not None:
            return evaluation
        return evaluation._replace(value=self.agent.critic(evaluation.features.detach()).squeeze(-1))

    def loss(self, minibatch: Minibatch, evaluation: Evaluation) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of the policy phase, see :meth:`PPO.loss`."""
        loss, parts = super().loss(minibatch, evaluation)
        # Data parallel training expects a gradient for each parameter, and without one, Adam would skip it.
        return loss + 0 * self.auxiliary_critic(evaluation.features.detach()).sum(), parts

    def auxiliary_loss(self, minibatch: Minibatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of the auxiliary phase and its detached parts, see :meth:`PPO.total_loss`."""
        evaluation = self.evaluate(minibatch)
        target = minibatch["value_target"].squeeze(-1)
        weight = minibatch.get("weight")
        aux_value = self.auxiliary_critic(evaluation.features).squeeze(-1)
        aux_value_loss = losses.value_loss(aux_value, aux_value, target, None, weight)
        real_value_loss = losses.value_loss(evaluation.value, evaluation.value, target, None, weight)
        old = tuple(tensor for key, tensor in minibatch.items() if key.startswith(POLICY))
        kl_loss = losses.weighted_mean(self.agent.head.kl(old, evaluation.parameters), weight)
        parts = {"kl_loss": kl_loss, "aux_value_loss": aux_value_loss, "real_value_loss": real_value_loss}
        loss = aux_value_loss + self.hparams.beta_clone * kl_loss + real_value_loss
        return loss, {name: part.detach() for name, part in parts.items()}

    def end_iteration(self, rollout: TensorDictBase, metrics: list[dict[str, Tensor]]) -> None:
        """Run the auxiliary phase if it is due, at the learning rate of this iteration."""
        if len(self.rollouts) < self.hparams.n_iteration:
            return
        with evaluating(self.agent):
            self.store_policy()
        parts = []
        for _ in range(self.hparams.e_auxiliary):
            for minibatch in self.auxiliary_minibatches():  # all of them may not fit into memory
                parts += self.optimize_auxiliary([minibatch])
        self.rollouts = []
        self.run_log.log({f"losses/aux/{name}": x for name, x in mean_of(parts).items()}, rare=True)

    @torch.no_grad()
    def store_policy(self) -> None:
        """Store the parameters of the policy at each step."""
        for rollout in self.rollouts:
            inputs = zip(rollout["observation"], rollout["action"], strict=True)  # one sequence at a time
            parameters = [
                self.agent.evaluate(*(x.to(self.device) for x in pair)).parameters for pair in inputs
            ]
            for number, tensors in enumerate(zip(*parameters, strict=True)):
                rollout[f"{POLICY}{number}"] = torch.stack(tensors).cpu()

    def auxiliary_minibatches(self) -> Iterator[Minibatch]:
        """Yield all sequences once, in random minibatches of whole sequences, tensors [B, ...].

        A sequence is one environment in one rollout. That of environment n in rollout r of R has the index
        n * R + r, so that ranks, which have consecutive environments, have consecutive sequences.
        """
        num_rollouts = len(self.rollouts)
        num_sequences = num_rollouts * self.data.shard.count
        count = num_sequences * self.trainer.world_size // self.hparams.num_aux_rollouts
        keys = self.uniform("auxiliary", num_sequences)
        for indices in deal_sequences(keys, count).chunk(count):
            chosen = [(self.rollouts[i % num_rollouts], i // num_rollouts) for i in indices.tolist()]
            minibatch = {
                key: torch.cat([rollout[key][n] for rollout, n in chosen]) for key in self.rollouts[0]
            }
            if "weight" in minibatch:
                mean = collectives.gather(minibatch["weight"].mean()).mean()
                minibatch["weight"] /= mean.clamp(min=1e-8)
            yield {key: tensor.to(self.device) for key, tensor in minibatch.items()}

    def refusals(self) -> Iterator[str]:
        """Yield sizes and agents with which PPG cannot train."""
        yield from super().refusals()
        yield from checks.of_phases(self)
        yield from checks.of_features(self)

    # Lightning's hooks

    def setup(self, stage: str) -> None:
        """Forget the rollouts of an earlier run."""
        if stage == "fit":
            self.rollouts = []

    def on_train_start(self) -> None:
        """Create the updates of both phases."""
        super().on_train_start()
        self.optimize_auxiliary = make_update(self, self.auxiliary_loss)

    def release(self) -> None:
        """Release compiled graphs."""
        super().release()
        self.optimize_auxiliary = EagerUpdate(self, self.auxiliary_loss)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add, on rank 0, the rollouts of all ranks. This is a collective."""
        super().on_save_checkpoint(checkpoint)
        rollouts = []
        for rollout in self.rollouts:
            gathered = {key: collectives.gather(tensor).flatten(0, 1) for key, tensor in rollout.items()}
            rollouts.append(gathered if self.trainer.is_global_zero else {})
        checkpoint["auxiliary"] = {"rollouts": rollouts}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the rollouts of the running phase, if a resumed run has rollouts of their size."""
        super().on_load_checkpoint(checkpoint)
        if self.fitting:
            rows, size = self.data.shard.rows, (self.data.num_envs, self.data.num_steps)
            saved = [x for x in checkpoint["auxiliary"]["rollouts"] if x["value_target"].shape[:2] == size]
            # The next rollout completes the phase, if its number of rollouts is lower now.
            saved = saved[: self.hparams.n_iteration - 1]
            self.rollouts = [{key: x[rows].clone() for key, x in part.items()} for part in saved]
