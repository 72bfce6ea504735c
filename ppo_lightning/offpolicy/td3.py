"""Twin delayed deep deterministic policy gradient."""

from typing import Annotated, Any

from torch import Tensor

from ppo_lightning.algorithms.minibatches import Minibatch
from ppo_lightning.offpolicy.ddpg import DDPG
from ppo_lightning.utils.arguments import Range, check_arguments


class TD3(DDPG):
    """DDPG with two critics, whose smaller value counts, and with noise on the actions of the target policy.

    Source: Fujimoto et al., "Addressing Function Approximation Error in Actor-Critic Methods" (2018), with
    the details of CleanRL's ``td3_continuous_action.py``.

    Args:
        policy_noise: Standard deviation of the noise on the target policy's actions, in units of half
            the width of their bounds.
        noise_clip: Largest absolute noise, in the same units.
        **hyperparameters: Those of :class:`~ppo_lightning.offpolicy.DDPG`.

    Example:
        >>> data = RolloutDataModule("HalfCheetah-v4", num_envs=1, num_steps=10, total_timesteps=1_000_000)
        >>> L.Trainer(accelerator="cpu").fit(TD3(), data)
    """

    num_critics = 2

    def __init__(
        self,
        policy_noise: Annotated[float, Range(0)] = 0.2,
        noise_clip: Annotated[float, Range(0)] = 0.5,
        **hyperparameters: Any,
    ) -> None:
        check_arguments(TD3.__init__, locals(), "model")
        super().__init__(**hyperparameters)

    @property
    def noise_shape(self) -> tuple[int, ...]:
        """Noise on the target policy's action."""
        return (len(self.agent.head.low),)

    def next_action(self, minibatch: Minibatch) -> Tensor:
        """Return the actions of the target policy plus clipped noise, [B, A]."""
        clip = self.hparams.noise_clip
        noise = (self.hparams.policy_noise * minibatch["noise"]).clamp(-clip, clip)
        return self.target.policy(minibatch["next_observation"], noise)
