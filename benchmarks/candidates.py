"""Published changes to PPO, which are measured before they become part of the package.

Each class is used through the command line, from the root of the repository:

    python -m ppo_lightning fit --config configs/ppo/mujoco.yaml --model benchmarks.candidates.AdamRel
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch import distributions as D
from torch.nn import functional as F
from torchrl.data import TensorSpec

from ppo_lightning import PPO, MLPAgent
from ppo_lightning.algorithms import losses
from ppo_lightning.algorithms.minibatches import Minibatch
from ppo_lightning.models import Evaluation
from ppo_lightning.models.heads import (
    Float32Linear,
    GaussianHead,
    Head,
    Parameters,
    action_bounds,
)
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

    def policy_loss(self, log_ratio: Tensor, advantage: Tensor, weight: Tensor | None) -> Tensor:
        """Return the negative of r A - |A| (r - 1)^2 / (2 epsilon)."""
        penalty = advantage.abs() * log_ratio.expm1().square() / (2 * self.clip_coef)
        return losses.weighted_mean(penalty - advantage * log_ratio.exp(), weight)


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

    minibatch_keys = (*PPO.minibatch_keys, "importance")

    def training_step(self, rollout: TensorDictBase, batch_idx: int) -> None:
        """See :meth:`PPO.training_step`."""
        fresh = rollout.clone()
        fresh["importance"] = torch.ones(*fresh.batch_size, 1)
        rollouts = fresh.copy()
        previous = getattr(self, "_previous", None)
        if previous is not None:
            previous = previous.clone()
            with torch.no_grad():
                evaluation = self.agent.evaluate(previous["observation"], previous["action"])
            ratio = (evaluation.log_prob - previous["action_log_prob"]).exp()
            previous["importance"] = ratio.clamp(max=1).unsqueeze(-1)
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
        return super().loss(minibatch | {"weight": minibatch["importance"].squeeze(-1)}, evaluation)


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
        """Draw noise with variance 1 for a rollout, [T, N, A]. See :meth:`Actor.noise`."""
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

    Sources: Lee et al., "SimBa" (2025), arXiv:2410.09754; Bian et al., "RN-D: Discretized Categorical Actors
    for On-Policy Reinforcement Learning" (2026), arXiv:2601.23075.
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
        features = self.projection(
            observation if self.columns is None else take_columns(observation, self.columns)
        )
        for block in self.blocks:
            features = block(features)
        return self.norm(features)


class ResidualAgent(MLPAgent):
    """Has residual blocks with layer normalization, one for each of ``hidden_sizes``, all of one width."""

    network = ResidualMLP


class ResidualValueAgent(MLPAgent):
    """Has residual blocks with layer normalization in the value function alone."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        body: Any = self.critic_body
        self.critic_body = ResidualMLP(body.in_features, (64, 64), body.columns)
        self.critic = orthogonal(Float32Linear(64, 1), gain=1.0)


class DistributionCritic(nn.Module):
    """Maps features [B, F] to parameters of a distribution of returns, whose mean is the value."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.linear = orthogonal(Float32Linear(in_features, out_features), gain=0.01)

    def loss(self, features: Tensor, value_target: Tensor) -> Tensor:
        """Return the loss of each row, [B]."""
        raise NotImplementedError


class HLGaussCritic(DistributionCritic):
    """A categorical distribution over 101 bins from -20 to 20, trained on Gaussians around the targets.

    The standard deviation is 0.75 of a bin's width. Source: Farebrother et al., "Stop Regressing" (2024),
    arXiv:2403.03950. Scaled rewards (``norm_reward``) keep the values within the bins.
    """

    edges: Tensor

    def __init__(self, in_features: int) -> None:
        super().__init__(in_features, 101)
        self.register_buffer("edges", torch.linspace(-20, 20, 102), persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        """Return the value, [B, 1]."""
        centres = (self.edges[1:] + self.edges[:-1]) / 2
        return (self.linear(features).softmax(-1) * centres).sum(-1, keepdim=True)

    def loss(self, features: Tensor, value_target: Tensor) -> Tensor:
        """Return the cross entropy."""
        width = 0.75 * (self.edges[1] - self.edges[0])
        target = value_target.clamp(self.edges[0], self.edges[-1])
        below = torch.erf((self.edges - target.unsqueeze(-1)) / (math.sqrt(2) * width))
        share = below.diff(dim=-1) / (below[..., -1:] - below[..., :1])
        return -(share * self.linear(features).log_softmax(-1)).sum(-1)


class QuantileCritic(DistributionCritic):
    """32 quantiles of the return, trained by the quantile Huber loss.

    Source: Dabney et al., "Distributional Reinforcement Learning with Quantile Regression" (2018),
    arXiv:1710.10044.
    """

    def __init__(self, in_features: int) -> None:
        super().__init__(in_features, 32)

    def forward(self, features: Tensor) -> Tensor:
        """Return the value, [B, 1]."""
        return self.linear(features).mean(-1, keepdim=True)

    def loss(self, features: Tensor, value_target: Tensor) -> Tensor:
        """Return the mean over the quantiles."""
        quantiles = self.linear(features)
        error = value_target.unsqueeze(-1) - quantiles
        level = (torch.arange(32, device=error.device) + 0.5) / 32
        huber = F.huber_loss(quantiles, value_target.unsqueeze(-1).expand_as(quantiles), reduction="none")
        return ((level - (error.detach() < 0).float()).abs() * huber).mean(-1)


class DistributionalAgent(MLPAgent):
    """Has a :class:`DistributionCritic`."""

    make_critic: Callable[[int], DistributionCritic]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.critic: Any = self.make_critic(self.critic.in_features)


class HLGaussAgent(DistributionalAgent):
    """Has an :class:`HLGaussCritic`."""

    make_critic = HLGaussCritic


class QuantileAgent(DistributionalAgent):
    """Has a :class:`QuantileCritic`."""

    make_critic = QuantileCritic


class DistributionalPPO(PPO):
    """Replaces the value loss by the loss of an agent's :class:`DistributionCritic`."""

    def loss(self, minibatch: Minibatch, evaluation: Evaluation) -> tuple[Tensor, dict[str, Tensor]]:
        """See :meth:`PPO.loss`."""
        loss, parts = super().loss(minibatch, evaluation._replace(value=evaluation.value.detach()))
        critic: Any = self.agent.critic
        rows = critic.loss(evaluation.critic_features, minibatch["value_target"].squeeze(-1))
        return loss + self.hparams.vf_coef * losses.weighted_mean(rows, minibatch.get("weight")), parts


class StateStdHead(GaussianHead):
    """A normal distribution whose deviation depends on the observation."""

    def __init__(self, in_features: int, action_spec: TensorSpec) -> None:
        super().__init__(in_features, action_spec)
        self.spread = orthogonal(Float32Linear(in_features, len(self.low)), gain=0.01)

    def _moments(self, features: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(features), (self.log_std + self.spread(features)).clamp(-5, 2)

    def sample(
        self, features: Tensor, noise: Tensor | None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`Head.sample`."""
        mean, log_std = self._moments(features)
        action = mean if noise is None else mean + log_std.exp() * noise
        return action, D.Normal(mean, log_std.exp()).log_prob(action).sum(-1)

    def evaluate(
        self, features: Tensor, action: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Parameters]:
        """See :meth:`Head.evaluate`."""
        mean, log_std = self._moments(features)
        normal = D.Normal(mean, log_std.exp(), validate_args=False)
        return normal.log_prob(action).sum(-1), normal.entropy().sum(-1), (mean, log_std)


class BetaHead(Head):
    """A Beta distribution over the action bounds, with one mode.

    Source: Chou et al., "Improving Stochastic Policy Gradients in Continuous Control with Deep Reinforcement
    Learning using the Beta Distribution" (2017). A sample is the share of one of two Gamma variates, each the
    first of six proposals that Marsaglia and Tsang's method accepts (all six fail once in 10^7 draws).
    """

    proposals = 6
    low: Tensor
    high: Tensor

    def __init__(self, in_features: int, action_spec: TensorSpec) -> None:
        low, high = action_bounds(action_spec, math.inf)
        super().__init__(in_features, 2 * len(low))
        self.noise_shape = torch.Size([len(low), 2, self.proposals, 2])
        self.register_buffer("low", low, persistent=False)
        self.register_buffer("high", high, persistent=False)
        # The deviation before the first update, in units of half the bounds' width. MLPAgent sets it.
        self.log_std = nn.Parameter(torch.zeros(1), requires_grad=False)

    def noise(self, batch_shape: tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        """Draw normal and exponential numbers, [*batch_shape, A, 2, 6, 2]."""
        normal = torch.randn(*batch_shape, *self.noise_shape[:-1], generator=generator)
        exponential = torch.empty_like(normal).exponential_(generator=generator)
        return torch.stack([normal, exponential], -1)

    def _shapes(self, features: Tensor) -> Tensor:
        # For a = b, the variance in units of half the width is 1 / (2 a + 1).
        start = (((-2 * self.log_std).exp() - 1) / 2 - 1).clamp(min=0.05)
        pair = self.linear(features).unflatten(-1, (-1, 2))
        return 1 + F.softplus(pair + start.expm1().log())

    def _distribution(self, shapes: Tensor) -> D.Beta:
        return D.Beta(shapes[..., 0], shapes[..., 1], validate_args=False)

    def _log_prob(self, shapes: Tensor, action: Tensor) -> Tensor:
        width = self.high - self.low
        share = ((action - self.low) / width).clamp(1e-6, 1 - 1e-6)
        return (self._distribution(shapes).log_prob(share) - width.log()).sum(-1)

    def sample(
        self, features: Tensor, noise: Tensor | None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`Head.sample`."""
        shapes = self._shapes(features)
        if noise is None:
            gammas = shapes  # the mean
        else:
            d = (shapes - 1 / 3).unsqueeze(-1)
            normal, exponential = noise.unbind(-1)
            cube = (1 + normal / (9 * d).sqrt()).clamp(min=0) ** 3
            bound = 0.5 * normal.square() + d - d * cube + d * cube.clamp(min=1e-30).log()
            accepted = (cube > 0) & (-exponential < bound)
            first = accepted.int().argmax(-1, keepdim=True)
            gammas = (d * cube).gather(-1, first).squeeze(-1)
        share = gammas[..., 0] / gammas.sum(-1)
        action = self.low + (self.high - self.low) * share
        return action, self._log_prob(shapes, action)

    def evaluate(
        self, features: Tensor, action: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Parameters]:
        """See :meth:`Head.evaluate`."""
        shapes = self._shapes(features)
        entropy = (self._distribution(shapes).entropy() + (self.high - self.low).log()).sum(-1)
        return self._log_prob(shapes, action), entropy, (shapes,)

    def kl(self, old: Parameters, new: Parameters) -> Tensor:
        """See :meth:`Head.kl`."""
        return D.kl_divergence(self._distribution(*old), self._distribution(*new)).sum(-1)

    def bars(self, features: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See :meth:`Head.bars`."""
        action, _ = self.sample(features, None)
        return action, (action - self.low) / (self.high - self.low)


class StateStdAgent(MLPAgent):
    """Has a :class:`StateStdHead`, whatever the head of the recipe."""

    default_head: Any = StateStdHead

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs | {"head": None})


class BetaAgent(StateStdAgent):
    """Has a :class:`BetaHead`, whatever the head of the recipe."""

    default_head = BetaHead


def time_left(env_id: str, **kwargs: Any) -> gymnasium.Env:
    """Make an environment whose observation ends with the elapsed share of the time limit.

    With ``bootstrap_truncated: false``, this is the time-aware agent of Pardo et al., "Time Limits in
    Reinforcement Learning" (2018), arXiv:1712.00378.
    """
    env = gymnasium.make(env_id, **kwargs)
    return gymnasium.wrappers.TimeAwareObservation(env, normalize_time=True)


# With --data.env_id benchmarks.candidates:TimeLeft/Hopper-v4.
for task in (
    "HalfCheetah-v4",
    "Hopper-v4",
    "Walker2d-v4",
    "Ant-v4",
    "Humanoid-v4",
    "Swimmer-v4",
    "Pusher-v4",
):
    gymnasium.register(f"TimeLeft/{task}", functools.partial(time_left, task))
