"""Categorical deep Q-networks."""

import functools
from typing import Annotated, Any

import torch
from torch import Tensor

from ppo_lightning.algorithms.minibatches import Minibatch
from ppo_lightning.errors import ConfigError
from ppo_lightning.offpolicy import losses
from ppo_lightning.offpolicy.agents import QAgent
from ppo_lightning.offpolicy.dqn import DQN
from ppo_lightning.offpolicy.module import AgentMaker, Metrics
from ppo_lightning.utils.arguments import Range, check_arguments


class C51(DQN):
    """DQN with a categorical distribution of returns for each action.

    The target network selects and evaluates the next action, unless ``double``. Adam's epsilon is 0.01 /
    ``batch_size``.

    Source: Bellemare et al., "A Distributional Perspective on Reinforcement Learning" (2017), with the
    details of CleanRL's ``c51.py``.

    Args:
        n_atoms: Number of atoms of a distribution.
        v_min: Return of the first atom.
        v_max: Return of the last atom.
        agent: As for :class:`DQN`.
        **hyperparameters: Those of :class:`DQN`.

    Example:
        >>> data = RolloutDataModule("CartPole-v1", num_envs=1, num_steps=10)
        >>> L.Trainer(accelerator="cpu").fit(C51(), data)
    """

    def __init__(
        self,
        n_atoms: Annotated[int, Range(2)] = 101,
        v_min: Annotated[float, Range(-1e30)] = -100.0,
        v_max: Annotated[float, Range(-1e30)] = 100.0,
        agent: AgentMaker = QAgent,
        **hyperparameters: Any,
    ) -> None:
        check_arguments(C51.__init__, locals(), "model")
        if v_min >= v_max:
            raise ConfigError(f"model.v_min ({v_min:g}) must be below model.v_max ({v_max:g}).")
        agent = functools.partial(agent, atoms=[n_atoms, v_min, v_max])  # type: ignore[call-arg]
        super().__init__(agent=agent, **hyperparameters)
        self.adam_eps = 0.01 / self.hparams.batch_size

    def loss(self, minibatch: Minibatch) -> tuple[Tensor, Metrics]:
        """Return the loss and its metrics."""
        following, support = minibatch["next_observation"], self.agent.head.support
        rows = torch.arange(len(following), device=following.device)
        with torch.no_grad():
            chooser = self.agent if self.hparams.double else self.target
            next_pmf = self.target.distributions(following)[rows, chooser.q_values(following).argmax(-1)]
            reward, terminated = minibatch["reward"], minibatch["terminated"]
            target = losses.categorical_target(reward, terminated, next_pmf, support, self.hparams.gamma)
        pmf = self.agent.distributions(minibatch["observation"])[rows, minibatch["action"]]
        loss = losses.categorical_loss(pmf, target)
        return loss, {"losses/loss": loss.detach(), "losses/q_values": (pmf.detach() @ support).mean()}
