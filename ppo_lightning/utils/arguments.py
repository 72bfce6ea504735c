"""Validation of arguments against ranges declared in their annotations."""

import copy
import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from ppo_lightning.errors import SYNONYMS, ConfigError, nearest

_LARGE = re.compile(r"(\d+(?:\.\d+)?)(e\d{1,2}|k|M)")


def as_integer(value: Any) -> Any:
    """Return the integer that ``1e4``, ``500k`` or ``1.5M`` means, and any other value as it is."""
    if isinstance(value, str) and (match := _LARGE.fullmatch(value)):
        number = Decimal(match[1] + {"k": "e3", "M": "e6"}.get(match[2], match[2]))
        return int(number) if number == int(number) else value
    return int(value) if isinstance(value, float) and value.is_integer() else value


@dataclass(frozen=True, repr=False)
class Range:
    """Range of a numeric argument, declared as ``Annotated[float, Range(0, 1)]``."""

    low: float
    high: float | None = None  # None: any finite number; ``math.inf``: infinity, too, which disables a limit

    def __repr__(self) -> str:
        if self.low == -math.inf:
            return "a finite number"
        has_end = self.high is not None and self.high < math.inf
        return f"between {self.low} and {self.high}" if has_end else f"at least {self.low}"

    def holds(self, value: Any, kind: type) -> bool:
        """Return whether a value is a number of type ``kind`` within the bounds. NaN is not."""
        if not isinstance(value, kind):
            return False
        number: Any = value
        if self.high is None:
            return bool(self.low <= number < math.inf and number > -math.inf)
        return bool(self.low <= number <= self.high)


def is_left_out(module: Any, name: str) -> bool:
    """Return whether a hyperparameter has the value that its module chose, or will choose."""
    left_out = getattr(module, "left_out", {})
    return name in left_out and module.hparams[name] == left_out[name]


def arguments_of(cls: type) -> set[str]:
    """Return the names of the arguments of a class and its bases, all of which Lightning saves."""
    signatures = [inspect.signature(base.__init__) for base in cls.__mro__]  # type: ignore[misc]
    parameters = [parameter for signature in signatures for parameter in signature.parameters.values()]
    open_ended = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return {parameter.name for parameter in parameters if parameter.kind not in open_ended} - {"self"}


class ArgumentError(ConfigError, TypeError):
    """An argument that a class does not take."""


class NamedArguments:
    """Base of a class whose users may write an argument of another package."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Name the argument that was probably meant, which Python's error does not."""
        taken = dict(list(inspect.signature(cls.__init__).parameters.items())[1:])
        first = next(iter(taken.values()), None)
        if first is not None and args and isinstance(args[0], str) and "float" in str(first.annotation):
            remedy = "name the environment in RolloutDataModule(env_id=...), and a network by agent=..."
            raise ArgumentError(f"{cls.__name__}'s first argument is {first.name}, not {args[0]!r}: {remedy}")
        names = list(taken)
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
            # Classes of this package pass other arguments on; those of users may read any.
            names = sorted(arguments_of(cls)) if cls.__module__.startswith("ppo_lightning.") else list(kwargs)
        if unknown := [name for name in kwargs if name not in names]:
            ours = r"model\.\w+(=.*)?" if "agent" in names else r"data\.\w+"  # settings of such a class
            settings = re.findall(r"\w+\.\S+", " ".join(SYNONYMS.values()))
            known = {setting: setting for setting in settings if not re.fullmatch(ours, setting)}
            known |= {key: name for name in names for key in (f"model.{name}", f"data.{name}", name)}
            guess = nearest(unknown[0], known) or f": it takes {', '.join(names)}."
            raise ArgumentError(f"{cls.__name__} takes no argument {unknown[0]!r}{guess}")
        return super().__new__(cls)


def check_arguments(function: Callable[..., Any], values: Mapping[str, Any], group: str) -> None:
    """Check arguments against the annotations of a function: ``Range``, ``Literal``, bool or ``Callable``.

    Args:
        function: Function that declares the arguments.
        values: Value of each argument, by name: ``locals()`` in the first line of the function.
        group: Prefix of the arguments in a configuration, for example ``model``.
    """
    for name, parameter in inspect.signature(function).parameters.items():
        annotation = parameter.annotation
        value = values[name]
        bounds = None
        if get_origin(annotation) is Annotated:
            annotation, bounds = get_args(annotation)
        kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
        if value is None and NoneType in kinds:
            continue
        requirement = f"it must be {bounds}"
        if get_origin(kinds[0]) is Literal:
            valid = value in get_args(kinds[0])
            requirement = f"it must be one of {', '.join(map(repr, get_args(kinds[0])))}"
        elif kinds[0] is bool:
            valid = isinstance(value, bool)
            requirement = "it must be true or false"
        elif bounds is None:
            valid = get_origin(annotation) is not Callable or callable(value)
            requirement = "it must be a class or a function, such as functools.partial(MyAgent, width=64)"
        elif get_origin(kinds[0]) is Sequence:
            valid = isinstance(value, Sequence) and all(bounds.holds(entry, Integral) for entry in value)
            requirement = f"each entry must be {bounds}"
        else:
            valid = bounds.holds(value, Integral if int in kinds else Real)
            if int in kinds and isinstance(value, float):
                requirement = "it must be an integer"
            elif isinstance(value, int) and value.bit_length() > 62:
                valid, requirement = False, "it must be below 2**62"
        if not valid:
            requirement += ", or null" if NoneType in kinds else ""
            if callable(value):  # a schedule of Stable-Baselines3
                requirement += "; schedules are anneal_lr, or configure_optimizers of a subclass"
            raise ConfigError(f"{group}.{name} is {value!r}: {requirement}.")


def parameters_of(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the parameters of a function or class, none if they are unknown."""
    # The metaclass of TorchRL's environments hides the parameters of a class, also in a `partial`.
    made = getattr(function, "func", function)
    is_hidden = isinstance(made, type) and type(made).__call__ is not type.__call__
    shown: Any = inspect.getattr_static(made, "__init__") if is_hidden else function
    try:
        return inspect.signature(shown).parameters
    except (TypeError, ValueError):  # builtins have no signature
        return {}


def require_options(function: Callable[..., Any], what: str, options: Mapping[str, Any]) -> None:
    """Check that a function has all options among its keyword-only parameters."""
    known = [p.name for p in parameters_of(function).values() if p.kind is p.KEYWORD_ONLY]
    for name in sorted(options.keys() - set(known)):
        hint = nearest(name, known) or f": they are {', '.join(known)}."
        raise ConfigError(f"data.env_kwargs.{name} is not an option of {what}{hint}")


def copying(function: Callable[..., Any], keywords: Mapping[str, Any]) -> Callable[[], Any]:
    """Return a function that calls another one with copies of the arguments, which it may change."""
    return functools.partial(_call_with_copies, function, keywords)


def _call_with_copies(function: Callable[..., Any], keywords: Mapping[str, Any]) -> Any:
    return function(**copied(keywords))


def copied(value: Any) -> Any:
    """Return a deep copy, in which an object that cannot be copied, such as a lock, is the same object."""
    try:
        return copy.deepcopy(value)
    except Exception:  # as the object likes
        return {key: copied(part) for key, part in value.items()} if type(value) is dict else value
