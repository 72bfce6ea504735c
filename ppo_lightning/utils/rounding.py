"""Rounding of printed returns, and the tolerance of computed numbers."""

import torch


def decimals(value: float) -> str:
    """Return a format specification with about three digits and at least one decimal.

    >>> f"{487.12:{decimals(487.12)}}", f"{7.98:{decimals(7.98)}}", f"{0.976:{decimals(0.976)}}"
    ('487.1', '7.98', '0.976')
    """
    magnitude = abs(value)
    return ".1f" if magnitude >= 10 else ".2f" if magnitude >= 1 else ".3f"


def tolerance(precision: str, device: torch.device) -> float:
    """Return the largest accepted difference between two ways to compute the same numbers in a run."""
    if precision != "32-true":
        return 0.1
    return 1e-3 if device.type == "cpu" else 1e-2
