"""What a Gymnasium environment returned, before an adapter copies and converts it."""

import copy
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from ppo_lightning.envs.conformance import Finding, Findings
from ppo_lightning.spaces.specs import entries

KEPT_STEPS = 200  # steps whose observations a witness keeps


class Witness(gymnasium.Wrapper):
    """Wrapper that keeps what an environment returned, before an adapter copies and converts it.

    Attributes:
        observations: Copies of the first observations, at most ``KEPT_STEPS``.
        changed: Number of observations that the next call of the environment changed.

    Example:
        >>> env = Witness(gymnasium.make("CartPole-v1"))
        >>> _ = env.reset(seed=1)
        >>> len(env.observations), env.changed
        (1, 0)
    """

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self.observations: list[Any] = []
        self.changed = 0
        self._returned: Any = None

    def reset(self, **kwargs: Any) -> Any:
        """Reset the environment."""
        return self._keep(self.env.reset(**kwargs))

    def step(self, action: Any) -> Any:
        """Step the environment."""
        return self._keep(self.env.step(action))

    def _keep(self, result: Any) -> Any:
        if self._returned is not None:
            self.changed += not _equal(self._returned, self.observations[-1])
            self._returned = None
        if len(self.observations) < KEPT_STEPS:
            self._returned = result[0]
            self.observations.append(copy.deepcopy(result[0]))
        return result


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return all(_equal(one[key], other[key]) for key in other)
    if isinstance(one, list | tuple):
        return all(map(_equal, one, other))
    array = np.asarray(one)
    return np.array_equal(array, other, equal_nan=array.dtype.kind == "f")


def values_of(
    space: spaces.Space, value: Any, name: str = "observation"
) -> Iterator[tuple[str, Any, np.ndarray]]:
    """Yield name, space and value of each part of an observation, without text."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        for key, part in entries(space):
            yield from values_of(
                part, value[key if isinstance(space, spaces.Dict) else int(key)], f"{name}.{key}"
            )
    else:
        yield name, space, np.asarray(value)


def check_observation_space(space: spaces.Space, observations: list[Any]) -> Findings:
    """Check that observations fit the declared space.

    Args:
        space: The observation space.
        observations: Observations as the environment returned them.
    """
    findings: dict[str, Finding] = {}
    for observation in observations:
        for name, part, value in values_of(space, observation):
            if finding := _judge_value(name, part, value):
                findings.setdefault(name, finding)
    yield from findings.values()


def _judge_value(name: str, space: Any, value: np.ndarray) -> Finding | None:
    integers = np.issubdtype(space.dtype, np.integer)
    if integers and value.dtype.kind == "f" and not np.array_equal(value, np.trunc(value), equal_nan=True):
        return Finding(
            "error",
            "space",
            f"The {name} has fractions, and its space has the dtype {space.dtype}: they are cut off.",
            "Declare a Box of dtype float32.",
        )
    if not isinstance(space, spaces.Box):
        if space.contains(value.reshape(space.shape).astype(space.dtype)):
            return None
        return Finding("error", "space", f"The {name} is {value}, which {space} lacks.", "Correct the space.")
    value = value.reshape(space.shape)
    outside = (value < space.low) | (value > space.high)
    if not outside.any():
        return None
    what = f"The {name} leaves the bounds of its space, for example with {value[outside][0]:g}."
    if integers and (value.min() < np.iinfo(space.dtype).min or value.max() > np.iinfo(space.dtype).max):
        return Finding("error", "space", what, f"The dtype {space.dtype} cannot store it: correct the space.")
    return Finding("note", "space", what, "This package ignores the bounds of a Box. Other libraries do not.")


def check_buffers(changed: int) -> Findings:
    """Check that a returned observation stays as it is.

    Args:
        changed: Number of observations that the next call changed.
    """
    if changed:
        yield Finding(
            "warning",
            "buffer",
            f"The environment changed {changed} observations after it had returned them.",
            "Wrappers that keep observations, and other libraries, read wrong ones. Return a copy.",
        )
