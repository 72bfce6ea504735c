"""Phasic Policy Gradient: PPO whose features are also trained on values, in phases of their own.

Source: Cobbe et al., "Phasic Policy Gradient" (2020), arXiv:2009.04416.
"""

from collections.abc import Iterator
from typing import Annotated, Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from ppo_lightning.algorithms import losses
from ppo_lightning.algorithms.auxiliary import POLICY, AuxiliaryPhase, bytes_per_step
from ppo_lightning.algorithms.checks import check_phases
from ppo_lightning.algorithms.minibatches import Minibatch, all_ranks, mean_of
from ppo_lightning.algorithms.ppo import PPO
from ppo_lightning.algorithms.update import make_update
from ppo_lightning.callbacks.preemption import save_beside_checkpoints
from ppo_lightning.models import Evaluation
from ppo_lightning.models.heads import Float32Linear
from ppo_lightning.models.init import orthogonal
from ppo_lightning.rollouts.storage import check_memory
from ppo_lightning.utils import collectives
from ppo_lightning.utils.arguments import Range, check_arguments


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

    norm_adv_of = "rollout"
    auxiliary_critic: nn.Module

    def __init__(
        self,
        n_iteration: Annotated[int, Range(1, 1_000_000)] = 32,
        e_auxiliary: Annotated[int, Range(1, 10_000)] = 6,
        beta_clone: Annotated[float, Range(0, 1000)] = 1.0,
        num_aux_rollouts: Annotated[int, Range(1, 1_000_000)] = 4,
        update_epochs: Annotated[int, Range(1, 10_000)] = 1,
        **hyperparameters: Any,
    ) -> None:
        check_arguments(PPG.__init__, locals(), "model")
        super().__init__(update_epochs=update_epochs, **hyperparameters)
        self.save_hyperparameters("n_iteration", "e_auxiliary", "beta_clone", "num_aux_rollouts")
        self.auxiliary = AuxiliaryPhase(self)
        self._approx_kl = 0.0  # of the last iteration, for the schedule after the auxiliary phase

    def add_networks(self) -> None:
        """Build the auxiliary value function on the features of the policy."""
        width = self.agent.actor_body.out_features
        assert isinstance(width, int)
        self.auxiliary_critic = orthogonal(Float32Linear(width, 1), gain=0.1)

    def trainable_parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters of the agent and of the auxiliary value function."""
        yield from super().trainable_parameters()
        yield from self.auxiliary_critic.parameters()

    def advantages(self, rollout: TensorDictBase) -> TensorDictBase:
        """Add ``advantage``, normalized over the rollouts of all ranks, and ``value_target``. Store them."""
        rollout = super().advantages(rollout)
        if self.hparams.norm_adv:
            flat = rollout["advantage"].reshape(1, -1)
            valid = rollout.get("valid", None)
            weight = None if valid is None else all_ranks(valid.reshape(1, -1).float())
            rollout["advantage"] = losses.normalize(flat, all_ranks(flat), weight).view_as(
                rollout["advantage"]
            )
        self.auxiliary.store(rollout)
        return rollout

    def evaluate(self, minibatch: Minibatch) -> Evaluation:
        """Evaluate the actions of a minibatch, without value gradients to the body of the policy."""
        evaluation = self.agent.evaluate(minibatch["observation"], minibatch["action"])
        if self.agent.critic_body is not None:
            return evaluation
        return evaluation._replace(value=self.agent.critic(evaluation.features.detach()).squeeze(-1))

    def loss(self, minibatch: Minibatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of the policy phase, see :meth:`PPO.loss`."""
        evaluation = self.evaluate(minibatch)
        loss, parts = self.loss_of(minibatch, evaluation)
        # Data parallel training and the compiled update expect a gradient for each parameter.
        return loss + 0 * self.auxiliary_critic(evaluation.features.detach()).sum(), parts

    def auxiliary_loss(self, minibatch: Minibatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of the auxiliary phase and its detached parts, see :meth:`PPO.loss`."""
        evaluation = self.evaluate(minibatch)
        target = minibatch["value_target"].squeeze(-1)
        valid = minibatch.get("valid")
        aux_value = self.auxiliary_critic(evaluation.features).squeeze(-1)
        aux_value_loss = losses.value_loss(aux_value, aux_value, target, None, valid)
        real_value_loss = losses.value_loss(evaluation.value, evaluation.value, target, None, valid)
        old = tuple(tensor for key, tensor in minibatch.items() if key.startswith(POLICY))
        kl_loss = losses.weighted_mean(self.agent.head.kl(old, evaluation.parameters), valid)
        parts = {"kl_loss": kl_loss, "aux_value_loss": aux_value_loss, "real_value_loss": real_value_loss}
        loss = aux_value_loss + self.hparams.beta_clone * kl_loss + real_value_loss
        return loss, {name: part.detach() for name, part in parts.items()}

    def step_schedule(self, metrics: list[dict[str, Tensor]]) -> None:
        """Run the auxiliary phase if it is due, at the learning rate of this iteration. Step the schedule."""
        if len(self.auxiliary.rollouts) >= self.hparams.n_iteration:
            if metrics:
                self._approx_kl = float(collectives.gather(mean_of(metrics)["approx_kl"]).mean())
            parts = self.auxiliary.run()
            self.run_log.log({f"losses/aux/{name}": value for name, value in parts.items()}, rare=True)
        super().step_schedule(metrics)

    # Lightning's hooks

    def setup(self, stage: str) -> None:
        """Forget the rollouts of an earlier run."""
        super().setup(stage)
        if stage == "fit" and self.trainer.ckpt_path is None:
            self.auxiliary.clear()

    def configure_model(self) -> None:
        """Build the networks, and check that a phase fits into the memory of a rank."""
        super().configure_model()
        if self.fitting:
            steps = self.hparams.n_iteration * self.data.frames_per_rollout // self.trainer.world_size
            size = bytes_per_step(self.data.specs.observation)
            check_memory(steps, size, "model.n_iteration * data.num_envs * data.num_steps")

    def check_split(self) -> None:
        """Check that rollouts and phases can be split into minibatches."""
        super().check_split()
        check_phases(self.hparams, self.data, self.trainer.world_size)

    def on_train_start(self) -> None:
        """Create the updates, and finish the auxiliary phase in which a resumed run was preempted."""
        super().on_train_start()
        self.auxiliary.optimize = make_update(self, self.auxiliary_loss)
        if self.auxiliary.epochs_done:
            with self.trainer.precision_plugin.train_step_context():
                self.step_schedule([{"approx_kl": torch.tensor(self._approx_kl)}])
            if self.trainer.should_stop:  # only this phase was missing, and Lightning saves nothing
                print(
                    f"Finished the last auxiliary phase: {save_beside_checkpoints(self.trainer, 'finished')}"
                )

    def release_updates(self) -> None:
        """Release compiled graphs."""
        super().release_updates()
        self.auxiliary.optimize = None

    @property
    def steps_per_rollout(self) -> int | None:
        """None: an iteration with an auxiliary phase has more optimizer steps."""
        return None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the rollouts of the running phase and the position in it."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["auxiliary"] = self.auxiliary.state_dict()
        checkpoint["approx_kl"] = self._approx_kl

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the rollouts of the running phase, to resume a run."""
        super().on_load_checkpoint(checkpoint)
        if self.fitting:
            self.auxiliary.load_state_dict(checkpoint["auxiliary"], self.data.shard.rows)
            self._approx_kl = checkpoint["approx_kl"]
