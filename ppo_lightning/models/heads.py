"""Action distributions. Each draws its noise apart from its parameters, so that the collector can draw it ahead."""

import numpy as np
import torch
from torch import Tensor, nn
from torchrl.data import Categorical, OneHot, TensorSpec

from ppo_lightning.errors import ConfigError
from ppo_lightning.models.init import orthogonal


class CategoricalHead(nn.Module):
    """A categorical distribution over discrete actions.

    Args:
        in_features: Width of the features.
        action_spec: The environment's actions.

    Raises:
        ConfigError: The actions are not discrete, or not given as indices.
    """

    def __init__(self, in_features: int, action_spec: TensorSpec) -> None:
        super().__init__()
        if isinstance(action_spec, OneHot):
            raise ConfigError("env_id has one-hot actions: make the environment with categorical_action_encoding=True.")
        if not isinstance(action_spec, Categorical):
            raise ConfigError(
                f"env_id has continuous actions of shape {tuple(action_spec.shape)} and the agent's Categorical head takes"
                " discrete ones only: choose an environment with discrete actions, or an agent with a head for continuous ones."
            )
        self.num_actions = int(action_spec.space.n)
        self.logits = orthogonal(nn.Linear(in_features, self.num_actions), gain=0.01)

    def noise(self, batch_shape: tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        """Draws standard Gumbel noise [*batch_shape, A]: the argmax of logits plus it is a sample of the softmax."""
        return -torch.empty(*batch_shape, self.num_actions).exponential_(generator=generator).log()

    def sample(self, features: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns the action [...] that the noise selects (the most probable one when None), and its log-probability."""
        logits = self.logits(features)
        action = (logits if noise is None else logits + noise).argmax(-1)
        return action, logits.log_softmax(-1).gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def sample_array(self, logits: np.ndarray, noise: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Does what :meth:`sample` does, from logits [N, A] to action [N] and log-probability [N], with NumPy."""
        action = (logits if noise is None else logits + noise).argmax(-1)
        logits = logits - logits.max(-1, keepdims=True)
        return action, logits[np.arange(len(logits)), action] - np.log(np.exp(logits).sum(-1))

    def evaluate(self, features: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the log-probability of the action and the entropy, both [...]."""
        log_prob = self.logits(features).log_softmax(-1)
        entropy = -(log_prob.exp() * log_prob).sum(-1)
        return log_prob.gather(-1, action.unsqueeze(-1)).squeeze(-1), entropy
