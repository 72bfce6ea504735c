"""Robust Policy Optimization: PPO whose Gaussian policy is kept from narrowing too early.

Source: Rahman and Xue, "Robust Policy Optimization in Deep Reinforcement Learning" (2022), arXiv:2212.07536.
"""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from tensordict import TensorDictBase
from torch import Tensor

from ppo_lightning.algorithms import losses
from ppo_lightning.algorithms.minibatches import Minibatch
from ppo_lightning.algorithms.ppo import PPO
from ppo_lightning.models import Evaluation
from ppo_lightning.models.heads import GaussianHead
from ppo_lightning.utils.arguments import Range, check_arguments


class RPO(PPO):
    """PPO with uniform noise on the mean of the Gaussian policy, in the update only.

    For each transition and epoch the noise z is drawn anew from U(-rpo_alpha, rpo_alpha), component by
    component, and the log-probability is that of the action under N(mean + z, std). That equals the
    log-probability of action - z under N(mean, std), so the actions are moved instead of the mean. The ratio
    of the first minibatch is therefore not 1. The logged divergences, to which ``target_kl`` and
    ``desired_kl`` respond, are those of the policy without the noise.

    Args:
        rpo_alpha: Bound of the noise; the authors recommend 0.5, and 0.01 where PPO is better than RPO with
            it (Ant, Hopper, InvertedDoublePendulum, Reacher and Pusher).
        **hyperparameters: Those of :class:`~ppo_lightning.algorithms.ppo.PPO`.

    Raises:
        ConfigError: ``rpo_alpha`` is negative, or the agent has no Gaussian head.
    """

    minibatch_keys: ClassVar = (*PPO.minibatch_keys, "noise")

    def __init__(self, rpo_alpha: Annotated[float, Range(0)] = 0.5, **hyperparameters: Any) -> None:
        check_arguments(RPO.__init__, locals(), "model")
        super().__init__(**hyperparameters)

    def refusals(self) -> Iterator[str]:
        """Yield an agent without a Gaussian head, and what PPO cannot train."""
        yield from super().refusals()
        if self.agent is not None and type(self.agent.head) is not GaussianHead:
            yield "RPO needs continuous actions and an agent with a Gaussian head: use ppo_lightning.PPO."

    def minibatches(self, rollout: TensorDictBase) -> Iterator[Minibatch]:
        """Yield minibatches with the noise of this epoch."""
        action, noisy = rollout["action"], rollout.copy()
        noise = self.hparams.rpo_alpha * (2 * self.uniform("mean", *action.shape) - 1)
        noisy["noise"] = noise.to(action.device)
        yield from super().minibatches(noisy)

    def evaluate(self, minibatch: Minibatch) -> Evaluation:
        """Evaluate the actions as if the mean were moved by the noise."""
        return super().evaluate(minibatch | {"action": minibatch["action"] - minibatch["noise"]})

    def loss(self, minibatch: Minibatch, evaluation: Evaluation) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of PPO, and the divergences of the policy itself, see :meth:`PPO.loss`."""
        loss, parts = super().loss(minibatch, evaluation)
        (mean, log_std), noise = evaluation.parameters, minibatch["noise"]
        # log N(action | mean, std) - log N(action - noise | mean, std)
        moved = noise * (noise - 2 * (minibatch["action"] - mean)) * (-2 * log_std).exp() / 2
        log_ratio = evaluation.log_prob + moved.sum(-1) - minibatch["action_log_prob"]
        own = losses.diagnostics(log_ratio, self.clip_coef, minibatch.get("weight"))
        return loss, parts | own | {"clipfrac": parts["clipfrac"]}  # of the ratios in the loss
