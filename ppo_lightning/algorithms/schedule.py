"""Learning-rate schedules that count iterations; Lightning saves and restores them."""

from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

KL_STEP, SLOWEST, FASTEST = 1.5, 1e-5, 1e-2


def remaining(rollouts_done: int, num_rollouts: int) -> float:
    """Return the share of the run that is left: 1 in the first iteration, 1 / num_rollouts in the last."""
    return max(0.0, 1 - rollouts_done / num_rollouts)


class IterationLR(LRScheduler):
    """Multiply the learning rate with :meth:`factor`; constant by default.

    A restored schedule keeps the learning rate of the run that restores it, and restores only how far the
    schedule is.
    """

    def factor(self) -> float:
        """Return the factor of the present iteration, ``last_epoch``."""
        return 1.0

    def get_lr(self) -> list[float]:  # type: ignore[override]
        """Return the learning rate of each group."""
        return [float(base) * self.factor() for base in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """Return the number of iterations."""
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the number of iterations, and override the restored optimizer's learning rate."""
        self.last_epoch = state_dict["last_epoch"]
        for group, base, lr in zip(self.optimizer.param_groups, self.base_lrs, self.get_lr(), strict=True):
            group.update(initial_lr=base, lr=lr)
        self._last_lr = [*self.get_lr()]


class LinearAnnealing(IterationLR):
    """Decrease the learning rate linearly to 0 over the run.

    Args:
        optimizer: Its learning rate is the one of the first iteration.
        num_rollouts: Iterations of the run.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, num_rollouts: int) -> None:
        self.num_rollouts = num_rollouts
        super().__init__(optimizer)

    def factor(self) -> float:
        """Return the share of the run that is left."""
        # detail 4
        return remaining(self.last_epoch, self.num_rollouts)


class KLAdaptiveLR(IterationLR):
    """Keep the KL divergence of an iteration near a desired value.

    After an iteration above twice the desired value the learning rate is divided by 1.5, and after one below
    half of it multiplied by 1.5; it stays between 1e-5 and 1e-2.

    Source: Rudin et al., "Learning to Walk in Minutes Using Massively Parallel Deep Reinforcement Learning"
        (2021).

    Args:
        optimizer: Its learning rate is the one of the first iteration.
        desired_kl: Desired mean approximate KL divergence of an iteration, in nats.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, desired_kl: float) -> None:
        self.desired_kl, self.kl_factor = desired_kl, 1.0
        super().__init__(optimizer)

    def factor(self) -> float:
        """Return the factor that past iterations led to."""
        return self.kl_factor

    def adapt(self, approx_kl: float) -> None:
        """Change the factor of the next iterations.

        Args:
            approx_kl: Mean approximate KL divergence of the iteration, of all ranks.
        """
        step = 1.0
        if approx_kl < self.desired_kl / 2:
            step = KL_STEP
        elif approx_kl > 2 * self.desired_kl:
            step = 1 / KL_STEP
        lr = float(self.base_lrs[0])
        self.kl_factor = min(max(self.kl_factor * step, SLOWEST / lr), FASTEST / lr)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of iterations and the factor."""
        return super().state_dict() | {"kl_factor": self.kl_factor}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the factor, too, if the checkpoint's run had one."""
        self.kl_factor = state_dict.get("kl_factor", 1.0)
        super().load_state_dict(state_dict)


def override_restored_settings(optimizer: torch.optim.Optimizer) -> None:
    """Override the settings of a restored optimizer with those of this run.

    The schedule overrides the learning rate.

    Args:
        optimizer: Adam, after Lightning restored its state from a checkpoint.
    """
    fused, eps = optimizer.defaults.get("fused"), optimizer.defaults.get("eps")
    for group in optimizer.param_groups:
        group.update(eps=eps, fused=fused)
    for parameter, state in optimizer.state.items():
        if fused and "step" in state:  # on the CPU, if the checkpoint is of another precision
            state["step"] = state["step"].to(parameter.device)
