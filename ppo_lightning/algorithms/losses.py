"""The arithmetic of PPO as pure functions: advantages, losses, diagnostics.

``[N, T]`` is environments by time, ``[B]`` a minibatch. Source: Schulman et al., "Proximal Policy Optimization
Algorithms" (2017) and "High-Dimensional Continuous Control Using Generalized Advantage Estimation" (2016).
"""

import torch
from torch import Tensor

from ppo_lightning.utils.scans import add_following


def gae(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    done: Tensor,
    gamma: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation.

    The recursion is ``A_t = delta_t + gamma * lambda * (1 - done_t) * A_{t+1}``.

    Args:
        reward: r_t, [N, T].
        value: V(s_t), [N, T].
        next_value: V of the observation that followed, before any reset, [N, T].
        terminated: The task ended at t: no bootstrap, [N, T] bool.
        done: The episode ended at t for whatever reason: nothing flows back across, [N, T] bool.
        gamma: Discount.
        gae_lambda: Weight of longer returns.

    Returns:
        Advantages and value targets (advantage + value), both [N, T].
    """
    advantage = reward + gamma * next_value * ~terminated - value
    add_following(advantage.T, (gamma * gae_lambda * ~done).T[:-1])
    return advantage, advantage + value


def normalize(advantage: Tensor, of: Tensor | None = None) -> Tensor:
    """Shifts and scales the advantages of minibatches.

    Args:
        advantage: [..., B].
        of: Those whose mean shall be 0 and whose (unbiased) standard deviation shall be 1, [..., M]: where ranks share a
            minibatch those of all; None: the same.
    """
    # detail 7
    std, mean = torch.std_mean(advantage if of is None else of, dim=-1, keepdim=True)
    return (advantage - mean) / (std + 1e-8)


def policy_loss(log_ratio: Tensor, advantage: Tensor, clip_coef: float | Tensor) -> Tensor:
    """The clipped surrogate objective, negated.

    Args:
        log_ratio: New log-probability of the action minus the old one, [B].
        advantage: [B].
        clip_coef: The ratio counts only between 1 - clip_coef and 1 + clip_coef.

    Returns:
        A scalar.
    """
    # detail 8
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_coef, 1 + clip_coef)  # type: ignore[arg-type]
    return -torch.min(advantage * ratio, advantage * clipped).mean()


def value_loss(value: Tensor, old_value: Tensor, value_target: Tensor, clip_coef: float | Tensor | None) -> Tensor:
    """Half the mean squared error of the value, of the worse of the plain and the clipped prediction.

    Args:
        value: New V(s), [B].
        old_value: V(s) at collection, [B].
        value_target: [B].
        clip_coef: The clipped prediction stays within this distance of ``old_value``; None: no clipping.

    Returns:
        A scalar.
    """
    error = (value - value_target).square()
    if clip_coef is not None:
        # detail 9
        clipped = old_value + (value - old_value).clamp(-clip_coef, clip_coef)  # type: ignore[arg-type]
        error = torch.max(error, (clipped - value_target).square())
    return 0.5 * error.mean()


def diagnostics(log_ratio: Tensor, clip_coef: float | Tensor) -> dict[str, Tensor]:
    """How far the new policy is from the one that collected.

    Args:
        log_ratio: New log-probability of the action minus the old one, [B].
        clip_coef: The policy loss's.

    Returns:
        Scalars: ``old_approx_kl`` and ``approx_kl``, the k1 and k3 estimators of http://joschu.net/blog/kl-approx.html,
        and ``clipfrac``, the share of clipped ratios.
    """
    log_ratio = log_ratio.detach()
    ratio_minus_1 = log_ratio.expm1()  # exact where the policies are close, which exp(x) - 1 is not
    return {
        "old_approx_kl": -log_ratio.mean(),
        "approx_kl": (ratio_minus_1 - log_ratio).mean(),
        "clipfrac": (ratio_minus_1.abs() > clip_coef).float().mean(),
    }


def explained_variance(value: Tensor, value_target: Tensor) -> Tensor:
    """The share of the targets' variance that the values explain: 1 is perfect, 0 no better than a constant.

    Returns NaN where all targets are equal.
    """
    variance = value_target.var()
    return torch.where(variance == 0, torch.nan, 1 - (value_target - value).var() / variance)
