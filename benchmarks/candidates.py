"""Published changes to PPO, which are measured before they become part of the package.

Each class is used through the command line, from the root of the repository:

    python -m ppo_lightning fit --config configs/mujoco/hopper.yaml --model benchmarks.candidates.AdamRel
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from ppo_lightning import PPO, MLPAgent
from ppo_lightning.algorithms import losses
from ppo_lightning.algorithms.minibatches import Minibatch
from ppo_lightning.models import Evaluation
from ppo_lightning.models.init import orthogonal
from ppo_lightning.spaces.entries import take_columns


class AdamRel(PPO):
    """Restarts Adam's step count in each iteration.

    Source: Ellis et al., "Adam on Local Time" (2024), arXiv:2412.17113.
    """

    def on_train_batch_start(self, rollout: TensorDictBase, batch_idx: int) -> None:
        """Set the step counts to 0."""
        super().on_train_batch_start(rollout, batch_idx)
        for state in self.trainer.optimizers[0].state.values():
            state["step"].zero_()


class SPO(PPO):
    """Replaces clipping by a quadratic penalty. The objective is greatest at the bound of the clipping range.

    Source: Xie et al., "Simple Policy Optimization" (2024), arXiv:2401.16025.
    """

    def loss(self, minibatch: Minibatch, evaluation: Evaluation) -> tuple[Tensor, dict[str, Tensor]]:
        """See :meth:`PPO.loss`."""
        loss, parts = super().loss(minibatch, evaluation)
        advantage = minibatch["advantage"].squeeze(-1)
        log_ratio = evaluation.log_prob - minibatch["action_log_prob"]
        distance = log_ratio.expm1()
        penalty = advantage.abs() * distance.square() / (2 * self.clip_coef)
        policy_loss = (penalty - advantage * log_ratio.exp()).mean()
        clipped = losses.policy_loss(log_ratio, advantage, self.clip_coef)
        return loss - clipped + policy_loss, parts | {"policy_loss": policy_loss.detach()}


class FreshAdvantages(PPO):
    """Computes the advantages again in each epoch, with the current value function.

    Source: Andrychowicz et al., "What Matters for On-Policy Deep Actor-Critic Methods?" (2021).
    """

    def training_step(self, rollout: TensorDictBase, batch_idx: int) -> None:
        """See :meth:`PPO.training_step`."""
        metrics = []
        for epoch in range(self.hparams.update_epochs):
            if epoch:
                with torch.no_grad():
                    rollout["state_value"] = self.agent.value(rollout["observation"]).unsqueeze(-1)
            rollout = self.advantages(rollout)
            metrics += self.update(self.minibatches(rollout))
            if metrics and self.kl_exceeded(metrics[-1]["approx_kl"]):
                break
        self.log_rollout(rollout, metrics)
        self.step_schedule(metrics)


class Reuse(PPO):
    """Trains on the last two rollouts, each of which should be half as long.

    Values and log-probabilities of the previous rollout are computed again, and its rows are weighted by the
    probability ratio of the current policy to the one that collected them, at most 1.

    Source: Queeney et al., "Generalized Proximal Policy Optimization with Sample Reuse" (2021),
    arXiv:2111.00072. This is a simplification: advantages without V-trace, the clipping range of PPO, and no
    adaptation of the learning rate.
    """

    minibatch_keys = (*PPO.minibatch_keys, "weight")

    def training_step(self, rollout: TensorDictBase, batch_idx: int) -> None:
        """See :meth:`PPO.training_step`."""
        fresh = rollout.clone()
        fresh["weight"] = torch.ones(*fresh.batch_size, 1)
        rollouts = fresh.copy()
        previous = getattr(self, "_previous", None)
        if previous is not None:
            previous = previous.clone()
            with torch.no_grad():
                evaluation = self.agent.evaluate(previous["observation"], previous["action"])
            ratio = (evaluation.log_prob - previous["action_log_prob"]).exp()
            previous["weight"] = ratio.clamp(max=1).unsqueeze(-1)
            previous["action_log_prob"] = evaluation.log_prob
            previous["state_value"] = evaluation.value.unsqueeze(-1)
            rollouts = torch.cat([fresh, previous])
        rollouts = self.advantages(rollouts)
        metrics = []
        for _ in range(self.hparams.update_epochs):
            metrics += self.update(self.minibatches(rollouts))
        self._previous = fresh
        self.log_rollout(rollouts[: len(fresh)], metrics)
        self.step_schedule(metrics)

    def loss(self, minibatch: Minibatch, evaluation: Evaluation) -> tuple[Tensor, dict[str, Tensor]]:
        """See :meth:`PPO.loss`."""
        return super().loss(minibatch | {"valid": minibatch["weight"].squeeze(-1)}, evaluation)


class MuonAndAdam(torch.optim.Optimizer):
    """Muon for the matrices of hidden layers, Adam for the rest."""

    def __init__(self, matrices: list[Tensor], rest: list[Tensor], lr: float, eps: float) -> None:
        muon = torch.optim.Muon(matrices, lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        self._optimizers = (muon, torch.optim.Adam(rest, lr=lr, eps=eps, fused=True))
        super().__init__([*matrices, *rest], {"lr": lr, "eps": eps, "betas": (0.9, 0.999)})
        self.param_groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of both optimizers."""
        result = None if closure is None else closure()
        for optimizer in self._optimizers:
            optimizer.step()
        return result


class MuonPPO(PPO):
    """Optimizes the hidden layers with Muon.

    Source: Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024).
    """

    def configure_optimizers(self) -> Any:
        """See :meth:`PPO.configure_optimizers`."""
        matrices = [
            parameter
            for name, parameter in self.agent.named_parameters()
            if parameter.ndim == 2 and not name.startswith(("head.", "critic."))
        ]
        matrix_ids = {id(parameter) for parameter in matrices}
        rest = [parameter for parameter in self.trainable_parameters() if id(parameter) not in matrix_ids]
        optimizer = MuonAndAdam(matrices, rest, self.hparams.learning_rate, self.hparams.adam_eps)
        configured = super().configure_optimizers()
        schedule = configured["lr_scheduler"]["scheduler"]
        configured["optimizer"] = optimizer
        configured["lr_scheduler"]["scheduler"] = type(schedule)(optimizer, schedule.lr_lambdas[0])
        return configured


class ColouredAgent(MLPAgent):
    """Samples actions with noise that is correlated in time: its spectrum falls with frequency^(-1/2).

    Source: Hollenstein et al., "Colored Noise in PPO" (2024), arXiv:2312.11091.
    """

    beta = 0.5

    def noise(self, batch_shape: tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        """Draw noise with variance 1 for a rollout, [T, N, A]. See :meth:`ActorCritic.noise`."""
        white = super().noise(batch_shape, generator)
        if len(batch_shape) < 2:
            return white
        num_steps = len(white)
        scale = torch.fft.fftfreq(num_steps).abs().clamp(min=1 / num_steps) ** (-self.beta / 2)
        scale = scale / scale.square().mean().sqrt()
        spectrum = torch.fft.rfft(white, dim=0) * scale[: num_steps // 2 + 1, None, None]
        return torch.fft.irfft(spectrum, n=num_steps, dim=0)


class ResidualBlock(nn.Module):
    """Layer normalization and two linear layers with a rectifier between them, added to the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        for layer in (self.up, self.down):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)

    def forward(self, features: Tensor) -> Tensor:
        """Map features [B, F] to the same shape."""
        return features + self.down(self.up(self.norm(features)).relu())


class ResidualMLP(nn.Module):
    """A linear layer, residual blocks, and layer normalization.

    Sources: Lee et al., "SimBa" (2025); Bian et al., "RN-D: Discretized Categorical Actors for On-Policy
    Reinforcement Learning" (2026).
    """

    def __init__(
        self, in_features: int, hidden_sizes: Sequence[int], columns: Sequence[slice] | None = None, **_: Any
    ) -> None:
        super().__init__()
        width = hidden_sizes[0]
        self.columns = columns
        self.out_features = width
        size = in_features if columns is None else sum(place.stop - place.start for place in columns)
        self.projection = orthogonal(nn.Linear(size, width), gain=1.0)
        self.blocks = nn.ModuleList(ResidualBlock(width) for _ in hidden_sizes)
        self.norm = nn.LayerNorm(width)

    def forward(self, observation: Tensor) -> Tensor:
        """Map observations [B, D] to features [B, F]."""
        rows = observation if self.columns is None else take_columns(observation, self.columns)
        features = self.projection(rows)
        for block in self.blocks:
            features = block(features)
        return self.norm(features)


class ResidualAgent(MLPAgent):
    """Has residual blocks with layer normalization, one for each of ``hidden_sizes``, all of one width."""

    network = ResidualMLP
