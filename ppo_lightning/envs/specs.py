"""Gymnasium spaces as TorchRL specs, and specs as plain data that a checkpoint can hold."""

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torchrl.data import Bounded, Categorical, TensorSpec, Unbounded

from ppo_lightning.errors import ConfigError


def spec_from_space(space: spaces.Space) -> TensorSpec:
    """Describes a Gymnasium space of one environment as a TorchRL spec.

    Floating point boxes become float32; integer boxes (pixels) keep their dtype, so that they are stored as they are.

    Args:
        space: A ``Box`` or a ``Discrete`` that starts at 0.

    Raises:
        ConfigError: The space is of another kind.
    """
    if isinstance(space, spaces.Discrete):
        if space.start != 0:
            raise ConfigError(f"The space {space} starts at {space.start}: wrap the environment so that it starts at 0.")
        return Categorical(int(space.n), shape=(), dtype=torch.int64)
    if isinstance(space, spaces.Box):
        floating = np.issubdtype(space.dtype, np.floating)
        dtype = torch.float32 if floating else torch.from_numpy(np.empty(0, space.dtype)).dtype
        low, high = torch.from_numpy(np.asarray(space.low)).to(dtype), torch.from_numpy(np.asarray(space.high)).to(dtype)
        if floating and not (low.isfinite().all() and high.isfinite().all()):
            return Unbounded(shape=space.shape, dtype=dtype)
        return Bounded(low, high, shape=space.shape, dtype=dtype)
    raise ConfigError(f"The space {space} is not supported: the environment needs a Box or a Discrete space.")


def spec_to_plain(spec: TensorSpec) -> dict[str, Any]:
    """Describes a spec by strings, numbers and lists only (``torch.load(..., weights_only=True)`` reads them)."""
    if isinstance(spec, Categorical):
        return {"kind": "Categorical", "n": int(spec.space.n)}
    plain = {"kind": "Unbounded", "shape": list(spec.shape), "dtype": str(spec.dtype).removeprefix("torch.")}
    if isinstance(spec, Bounded):
        plain |= {"kind": "Bounded", "low": _shrink(spec.space.low), "high": _shrink(spec.space.high)}
    return plain


def spec_from_plain(plain: dict[str, Any]) -> TensorSpec:
    """Rebuilds the spec that :func:`spec_to_plain` described."""
    if plain["kind"] == "Categorical":
        return Categorical(plain["n"], shape=(), dtype=torch.int64)
    shape, dtype = tuple(plain["shape"]), getattr(torch, plain["dtype"])
    if plain["kind"] == "Unbounded":
        return Unbounded(shape=shape, dtype=dtype)
    low, high = (torch.as_tensor(plain[key], dtype=dtype).expand(shape).clone() for key in ("low", "high"))
    return Bounded(low, high, shape=shape, dtype=dtype)


def _shrink(bound: torch.Tensor) -> Any:
    """Returns one number for a bound that is equal everywhere (84 x 84 pixels), nested lists otherwise."""
    return bound.flatten()[0].item() if bound.numel() and (bound == bound.flatten()[0]).all() else bound.tolist()
