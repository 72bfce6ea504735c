"""Losses and targets of the off-policy algorithms as pure functions of tensors [B, ...]."""

import torch
from torch import Tensor
from torch.nn import functional as F


def td_target(reward: Tensor, terminated: Tensor, next_value: Tensor, gamma: float) -> Tensor:
    """Return r + gamma V(s'), [B]. Only a termination (1) stops the bootstrap: a time limit does not."""
    return reward + gamma * (1 - terminated) * next_value


def categorical_target(
    reward: Tensor, terminated: Tensor, next_pmf: Tensor, support: Tensor, gamma: float
) -> Tensor:
    """Return the distribution of r + gamma Z(s'), projected onto the support, [B, K].

    Each shifted atom is split between its two neighbours in proportion to their distances. An atom on a
    neighbour keeps its whole mass.

    Source: Bellemare et al., "A Distributional Perspective on Reinforcement Learning" (2017).

    Args:
        reward: Rewards, [B].
        terminated: 1 where the episode terminated, 0 elsewhere, [B].
        next_pmf: Probabilities of the atoms at the next observation, for its best action, [B, K].
        support: The atoms in equal distances, [K].
        gamma: Discount.
    """
    shifted = td_target(reward[:, None], terminated[:, None], support, gamma)
    spacing = support[1] - support[0]
    position = (shifted.clamp(support[0], support[-1]) - support[0]) / spacing
    position = position.clamp(0, len(support) - 1)  # rounding may exceed the last atom
    lower, upper = position.floor(), position.ceil()
    to_lower = (upper + (lower == upper).float() - position) * next_pmf
    to_upper = (position - lower) * next_pmf
    empty = next_pmf.new_zeros(next_pmf.shape)
    return empty.scatter_add(1, lower.long(), to_lower).scatter_add(1, upper.long(), to_upper)


def categorical_loss(pmf: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy of distributions [B, K]. Probabilities are clamped by 1e-5."""
    return -(target * pmf.clamp(1e-5, 1 - 1e-5).log()).sum(-1).mean()


def critic_loss(values: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the sum of the mean squared errors of critics, values [C, B], and their metrics."""
    errors = [F.mse_loss(row, target) for row in values]
    metrics = {f"losses/qf{i}_loss": error.detach() for i, error in enumerate(errors, 1)}
    metrics |= {f"losses/qf{i}_values": row.detach().mean() for i, row in enumerate(values, 1)}
    loss = torch.stack(errors).sum()
    return loss, metrics | {"losses/qf_loss": loss.detach() / len(errors)}


def smoothed_action(action: Tensor, noise: Tensor, bounds: tuple[Tensor, Tensor], clip: float) -> Tensor:
    """Return actions with clipped noise, both in units of half the width of the bounds, [B, A].

    Source: Fujimoto et al., "Addressing Function Approximation Error in Actor-Critic Methods" (2018).
    """
    low, high = bounds
    return (action + noise.clamp(-clip, clip) * (high - low) / 2).clamp(low, high)


def temperature_loss(log_alpha: Tensor, log_prob: Tensor, target_entropy: float) -> Tensor:
    """Return the loss of the temperature alpha = exp(log_alpha).

    Its gradient is alpha times that of TorchRL and Stable-Baselines3, whose loss is linear in ``log_alpha``.
    """
    return -(log_alpha.exp() * (log_prob + target_entropy)).mean()
