"""Nothing that is not finite gets into the statistics, the weights or a checkpoint."""

import math
from typing import Any

import numpy as np
import torch

from ppo_lightning.errors import NonFiniteError


def require_finite(
    key: str, values: np.ndarray, step: int, first_env: int = 0, rows: np.ndarray | None = None
) -> None:
    """Raises where what the environments gave is NaN or infinite.

    Args:
        key: What the values are.
        values: Of one step, [N, ...], or rewards of a rollout, [N, T].
        step: Steps that each environment made before.
        first_env: Global index of the first environment.
        rows: The environments that the rows stand for, as a mask of all; None: all of them.

    Raises:
        NonFiniteError: Names key, environment and step.
    """
    # The sum of squares is finite if every value is (or it overflows, which the second look settles).
    if values.dtype.kind != "f" or math.isfinite(np.vdot(values, values)) or np.isfinite(values).all():
        return
    bad = np.argwhere(~np.isfinite(values))[0]
    env = bad[0] if rows is None else np.flatnonzero(rows)[bad[0]]
    if key == "reward" and values.ndim > 1:
        step += int(bad[1])
    raise NonFiniteError(
        f"The {key} of environment {first_env + env} is {values[tuple(bad)]} at its step {step}."
    )


def require_finite_state(checkpoint: dict[str, Any]) -> None:
    """Refuses to save weights, statistics or optimizer states that are not finite.

    Raises:
        NonFiniteError: Names the first tensor.
    """
    if name := first_nonfinite(checkpoint):
        raise NonFiniteError(f"No checkpoint was written: {name} is not finite.")


def first_nonfinite(checkpoint: dict[str, Any]) -> str | None:
    """Return the name of the first weight, statistic or optimizer state that is NaN or infinite, if any."""
    tensors = dict(checkpoint["state_dict"])
    for optimizer in checkpoint.get("optimizer_states", []):
        for number, entries in optimizer["state"].items():
            tensors |= {
                f"{name} of parameter {number} in the optimizer": value for name, value in entries.items()
            }
    for name, value in tensors.items():
        if torch.is_tensor(value) and not value.isfinite().all():
            return name
    return None
