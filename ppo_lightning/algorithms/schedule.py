"""Learning-rate schedules that count iterations. Lightning saves and restores them."""

from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

KL_STEP = 1.5  # factor between two learning rates
SLOWEST = 1e-5
FASTEST = 1e-2


def remaining(rollouts_done: int, num_rollouts: int) -> float:
    """Return the remaining share of the run: 1 in the first iteration, 1 / num_rollouts in the last."""
    return max(0.0, 1 - rollouts_done / num_rollouts)


class IterationLR(LambdaLR):
    """Learning rate of this run times a factor of the number of iterations done.

    The arguments are those of PyTorch's ``LambdaLR``. Only the number of iterations is restored from a
    checkpoint, not the initial learning rate.

    Example:
        >>> optimizer = torch.optim.Adam([torch.zeros(1)], lr=0.1)
        >>> schedule = IterationLR(optimizer, lambda done: remaining(done, num_rollouts=2))
        >>> optimizer.step(); schedule.step()
        >>> schedule.get_last_lr()
        [0.05]
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the number of iterations."""
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the number of iterations, and override the restored optimizer's learning rate."""
        self.last_epoch = state_dict["last_epoch"]
        groups = zip(self.optimizer.param_groups, self.base_lrs, self.lr_lambdas, strict=True)
        for group, base, factor in groups:
            group.update(initial_lr=base, lr=float(base) * factor(self.last_epoch))
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]


class KLAdaptiveLR(IterationLR):
    """Learning rate that keeps the KL divergence of an iteration near a desired value.

    If the divergence exceeds twice the desired value, the learning rate is divided by 1.5. If the divergence
    is below half the desired value, the learning rate is multiplied by 1.5. It stays between 1e-5 and 1e-2.

    Source: Rudin et al., "Learning to Walk in Minutes Using Massively Parallel Deep Reinforcement Learning"
        (2021).

    Args:
        optimizer: Optimizer with the learning rate of the first iteration.
        desired_kl: Desired mean approximate KL divergence of an iteration, in nats.

    Example:
        >>> optimizer = torch.optim.Adam([torch.zeros(1)], lr=3e-4)
        >>> schedule = KLAdaptiveLR(optimizer, desired_kl=0.01)
        >>> schedule.adapt(approx_kl=0.05)
        >>> round(schedule.kl_factor, 6)
        0.666667
    """

    def __init__(self, optimizer: torch.optim.Optimizer, desired_kl: float) -> None:
        self.desired_kl = desired_kl
        self.kl_factor = 1.0
        super().__init__(optimizer, lambda done: self._bounded(self.kl_factor))

    def _bounded(self, factor: float) -> float:
        """Return the nearest factor with which the learning rate stays between its bounds."""
        lr = float(self.base_lrs[0])  # of this run, which may resume one with another
        return min(max(factor, SLOWEST / lr), FASTEST / lr)

    def adapt(self, approx_kl: float) -> None:
        """Adapt the factor to the mean approximate KL divergence of an iteration over all ranks."""
        step = 1.0
        if approx_kl < self.desired_kl / 2:
            step = KL_STEP
        elif approx_kl > 2 * self.desired_kl:
            step = 1 / KL_STEP
        self.kl_factor = self._bounded(self.kl_factor * step)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of iterations and the factor."""
        return super().state_dict() | {"kl_factor": self.kl_factor}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the number of iterations and, if the checkpoint has one, the factor."""
        self.kl_factor = state_dict.get("kl_factor", 1.0)
        super().load_state_dict(state_dict)


def override_restored_settings(optimizer: torch.optim.Optimizer) -> None:
    """Override the settings of a restored Adam with those of this run. The schedule has the learning rate.

    Several groups are those of a subclass, and keep their epsilons.
    """
    groups, fused = optimizer.param_groups, optimizer.defaults.get("fused")
    if len(groups) == 1:
        groups[0].update(eps=optimizer.defaults.get("eps"))
    for group in groups:
        group.update(fused=fused)
    for parameter, state in optimizer.state.items():
        if fused and "step" in state:  # a run in another precision saves it on the CPU
            state["step"] = state["step"].to(parameter.device)
