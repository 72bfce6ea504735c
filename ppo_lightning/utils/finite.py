"""Checks that keep non-finite values out of statistics, weights and checkpoints."""

from typing import Any

import numpy as np
import torch

from ppo_lightning.errors import NonFiniteError

LARGEST = float(np.finfo(np.float32).max)


def require_finite(
    key: str, values: np.ndarray, step: int, first_env: int = 0, rows: np.ndarray | None = None
) -> None:
    """Raise an error if an output of the environments is non-finite, also as float32, which networks take.

    The values are of one step [N, ...], or rewards of a rollout [N, T], after a number of steps. ``rows`` is
    a mask over all environments that marks those of ``values``, None for all.
    """
    # A small sum of squares proves that all values are finite. It may be large: then check each value.
    if values.dtype.kind != "f" or np.vdot(values, values) < LARGEST or (abs(values) <= LARGEST).all():
        return
    index = np.argwhere(~(abs(values) <= LARGEST))[0]
    env = index[0] if rows is None else np.flatnonzero(rows)[index[0]]
    if key == "reward" and values.ndim > 1:
        step += int(index[1])
    raise NonFiniteError(
        f"The {key} of environment {first_env + env} is {values[tuple(index)]} at its step {step}."
    )


def first_nonfinite(checkpoint: dict[str, Any]) -> str | None:
    """Return the name of the first non-finite weight, statistic or optimizer state, if any."""
    tensors = dict(checkpoint["state_dict"])
    for optimizer in checkpoint.get("optimizer_states", []):
        for number, state in optimizer["state"].items():
            tensors |= {f"{name} of parameter {number} in the optimizer": x for name, x in state.items()}
    return next((name for name, x in tensors.items() if torch.is_tensor(x) and not x.isfinite().all()), None)
