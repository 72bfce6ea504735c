"""Pure functions of PPO: advantages, losses and diagnostics.

``[N, T]`` is environments by time, ``[B]`` is a minibatch. ``weight`` is the weight of each row. The mean
weight over the minibatch of all ranks is 1, and a weight of 0 excludes a row from every mean.

Source: Schulman et al., "Proximal Policy Optimization Algorithms" (2017) and "High-Dimensional Continuous
Control Using Generalized Advantage Estimation" (2016).
"""

import torch
from torch import Tensor
from torch.nn import functional

from ppo_lightning.utils.scans import add_following


def gae(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    done: Tensor,
    gamma: float | Tensor,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Compute generalized advantage estimates.

    Args:
        reward: r_t, [N, T].
        value: V(s_t), [N, T].
        next_value: V of the observation after step t, before any reset, [N, T].
        terminated: True where the task ended at t, so that nothing is bootstrapped, [N, T] bool.
        done: True where the episode ended at t for any reason, which ends the recursion, [N, T] bool.
        gamma: Discount factor, or that of each step, [N, T].
        gae_lambda: Weight of longer returns.

    Returns:
        Advantages and value targets (advantage + value), both [N, T].
    """
    # delta_t = r_t + gamma * V(s_{t+1}) * (1 - terminated_t) - V(s_t)
    advantage = reward + gamma * next_value * ~terminated - value
    # A_t = delta_t + gamma * lambda * (1 - done_t) * A_{t+1}, backwards from the last step.
    # `advantage.T` is a view: each delta is overwritten with its A, without another tensor.
    add_following(advantage.T, (gamma * gae_lambda * ~done).T[:-1])
    return advantage, advantage + value


def before_uncounted(weight: Tensor) -> Tensor:
    """Return where the next step's weight [N, T] is 0, which ends the flow of advantages, [N, T] bool."""
    return functional.pad(weight[:, 1:] == 0, (0, 1))


def weighted_mean(values: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return the weighted mean of values [B], a scalar."""
    return values.mean() if weight is None else (values * weight).mean()


def normalize(
    advantage: Tensor, weight: Tensor | None = None, pooled: Tensor | None = None, eps: float = 1e-8
) -> Tensor:
    """Shift and scale the advantages of minibatches.

    Args:
        advantage: [..., B].
        weight: Weight of each advantage, 0 or 1, [..., B]. None: all are 1.
        pooled: Number, mean and sum of squared deviations of the advantages of all ranks, [3, ...]. None:
            those of ``advantage``.
        eps: Added to the standard deviation.

    Returns:
        Advantages [..., B].
    """
    # detail 7
    if pooled is not None:
        count, mean, m2 = pooled.to(advantage.dtype).unsqueeze(-1)
        std = (m2 / (count - 1)).sqrt()
    elif weight is None:
        std, mean = torch.std_mean(advantage, dim=-1, keepdim=True)
    else:
        count = weight.sum(-1, keepdim=True)
        mean = (weight * advantage).sum(-1, keepdim=True) / count
        std = ((weight * (advantage - mean).square()).sum(-1, keepdim=True) / (count - 1)).sqrt()
    return (advantage - mean) / (std + eps)


def policy_loss(
    log_ratio: Tensor, advantage: Tensor, clip_coef: float | Tensor, weight: Tensor | None = None
) -> Tensor:
    """Return the negative clipped surrogate objective, a scalar.

    Args:
        log_ratio: New log-probability of the action minus the old one, [B].
        advantage: [B].
        clip_coef: The ratio is clipped to [1 - clip_coef, 1 + clip_coef].
        weight: Weight of each row, [B].
    """
    # detail 8
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_coef, 1 + clip_coef)  # type: ignore[arg-type]
    return -weighted_mean(torch.min(advantage * ratio, advantage * clipped), weight)


def value_loss(
    value: Tensor,
    old_value: Tensor,
    value_target: Tensor,
    clip_coef: float | Tensor | None,
    weight: Tensor | None = None,
) -> Tensor:
    """Return half the mean squared error of the value, a scalar.

    With clipping, each row has the larger error of the prediction and the clipped prediction.

    Args:
        value: New V(s), [B].
        old_value: V(s) at collection, [B].
        value_target: [B].
        clip_coef: Maximum distance of the clipped prediction from ``old_value``. None: no clipping.
        weight: Weight of each row, [B].
    """
    error = (value - value_target).square()
    if clip_coef is not None:
        # detail 9
        clipped = old_value + (value - old_value).clamp(-clip_coef, clip_coef)  # type: ignore[arg-type]
        error = torch.max(error, (clipped - value_target).square())
    return 0.5 * weighted_mean(error, weight)


def diagnostics(
    log_ratio: Tensor, clip_coef: float | Tensor, weight: Tensor | None = None
) -> dict[str, Tensor]:
    """Measure the distance between the new policy and the policy that collected the rollout.

    Args:
        log_ratio: New log-probability of the action minus the old one, [B].
        clip_coef: Clipping range of the policy loss.
        weight: Weight of each row, [B].

    Returns:
        Scalars: ``old_approx_kl`` and ``approx_kl``, the k1 and k3 estimators of
        http://joschu.net/blog/kl-approx.html, and ``clipfrac``, the fraction of clipped ratios.
    """
    log_ratio = log_ratio.detach()
    ratio_minus_1 = log_ratio.expm1()  # for close policies, exp(x) - 1 loses precision
    return {
        "old_approx_kl": -weighted_mean(log_ratio, weight),
        "approx_kl": weighted_mean(ratio_minus_1 - log_ratio, weight),
        "clipfrac": weighted_mean((ratio_minus_1.abs() > clip_coef).float(), weight),
    }


def explained_variance(
    value: Tensor, value_target: Tensor, weight: Tensor | None = None, pooled: Tensor | None = None
) -> Tensor:
    """Return the fraction of the targets' variance that the values explain, NaN if all targets are equal.

    1 is perfect, 0 is no better than a constant. Steps whose ``weight`` is 0 are left out. None: all count.
    ``pooled`` has number, mean and sum of squared deviations of targets and errors of all ranks, [3, 2].
    """
    if pooled is not None:
        variance, unexplained = pooled[2]
        return torch.where(variance == 0, torch.nan, 1 - unexplained / variance)
    if weight is not None:
        value, value_target = value[weight > 0], value_target[weight > 0]
    variance = value_target.var()
    return torch.where(variance == 0, torch.nan, 1 - (value_target - value).var() / variance)
