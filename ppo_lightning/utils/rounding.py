"""Rounding of printed returns."""


def decimals(value: float) -> str:
    """Return a format specification with about three digits and at least one decimal.

    >>> f"{487.12:{decimals(487.12)}}", f"{7.98:{decimals(7.98)}}", f"{0.976:{decimals(0.976)}}"
    ('487.1', '7.98', '0.976')
    """
    magnitude = abs(value)
    return ".1f" if magnitude >= 10 else ".2f" if magnitude >= 1 else ".3f"
