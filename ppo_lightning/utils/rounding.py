"""How many decimals of a return are shown."""


def decimals(value: float) -> str:
    """Returns a format with three digits for figures of this size, and one decimal at least: 487.1, 7.98, 0.976."""
    size = abs(value)
    return ".1f" if size >= 10 else ".2f" if size >= 1 else ".3f"
