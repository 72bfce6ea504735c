"""Ranges of arguments, declared beside them and checked before anything starts."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, get_args, get_origin

from ppo_lightning.errors import ConfigError


@dataclass(frozen=True, repr=False)
class Range:
    """The values of a numeric argument that can work, declared beside it: ``Annotated[float, Range(0, 1)]``.

    A bound excludes what cannot learn or does not fit into memory, not what is unusual: it is orders of magnitude
    away from the literature's values. Without an upper bound, infinity is allowed: it switches a limit off.

    Args:
        low: The smallest value.
        high: The largest value.
    """

    low: float
    high: float = math.inf

    def __repr__(self) -> str:
        return f"at least {self.low}" if self.high == math.inf else f"between {self.low} and {self.high}"

    def holds(self, value: Any, kind: type) -> bool:
        """Tell whether a value is a number of this kind within the bounds; NaN is not."""
        return isinstance(value, kind) and bool(self.low <= value <= self.high)  # type: ignore[operator]


def check_arguments(function: Callable[..., Any], values: Mapping[str, Any], group: str) -> None:
    """Check arguments against the annotations of their function: a ``Range``, a ``Literal`` or a ``Callable``.

    Args:
        function: Declares the arguments.
        values: Argument name -> value; ``locals()`` in the function's first line.
        group: Prefix of the arguments in a configuration, such as ``model``.

    Raises:
        ConfigError: Names the first argument that cannot work.
    """
    for name, parameter in inspect.signature(function).parameters.items():
        annotation, value, bounds = parameter.annotation, values[name], None
        if get_origin(annotation) is Annotated:
            annotation, bounds = get_args(annotation)
        kinds = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
        if value is None and NoneType in kinds:
            continue
        must = f"it must be {bounds}"
        if bounds is None and get_origin(kinds[0]) is Literal:
            good, must = (
                value in get_args(kinds[0]),
                f"it must be one of {', '.join(map(repr, get_args(kinds[0])))}",
            )
        elif bounds is None:
            good, must = (
                get_origin(annotation) is not Callable or callable(value),
                "it must be a class or a function",
            )
        elif get_origin(annotation) is Sequence:
            good, must = isinstance(value, Sequence), f"each entry must be {bounds}"
            good = good and all(bounds.holds(entry, Integral) for entry in value)
        else:
            good = bounds.holds(value, Integral if int in kinds else Real)
        if not good:
            or_null = ", or null" if NoneType in kinds else ""
            raise ConfigError(f"{group}.{name} is {value!r}: {must}{or_null}.")
