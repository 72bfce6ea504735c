"""TorchRL's transforms around environments."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch.nn.parameter import UninitializedBuffer, is_lazy
from torchrl.envs import Compose, Transform, TransformedEnv

from ppo_lightning.envs.specs import specs_of
from ppo_lightning.envs.torchrl import AnyEnv, as_torchrl
from ppo_lightning.errors import ConfigError, first_line
from ppo_lightning.utils.seeding import isolated


def transform(env: AnyEnv, transforms: Iterable[Transform]) -> TransformedEnv:
    """Return an environment with copies of transforms around it."""
    return TransformedEnv(as_torchrl(env), Compose(*map(copy_of, single(transforms))))


def try_transforms(transforms: Iterable[Transform], env: AnyEnv) -> None:
    """Step environments, which are then closed, with one transform more at a time."""
    transforms, env = [*single(transforms)], as_torchrl(env)
    with isolated(), contextlib.closing(env):
        specs_of(transform(env, []))  # refuses masks, which random actions would break
        env.rollout(2)
        for i, added in enumerate(transforms, start=1):
            try:
                transformed = transform(env, transforms[:i])
                _ = transformed.observation_spec_unbatched
                if -1 in transformed.action_spec.shape:  # MultiAction
                    raise ValueError("its actions have no fixed shape.")
                keys = transformed.rollout(2).keys(include_nested=True)
                if i == len(transforms) and ("next", "observation") not in keys:  # a later one may restore it
                    raise ValueError("it removes the observation.")
            except Exception as error:
                raise ConfigError(
                    f"data.transforms: {type(added).__name__} does not work with these environments:"
                    f" {first_line(error)}"
                ) from error


def single(transforms: Iterable[Transform]) -> Iterator[Transform]:
    """Yield transforms one by one, without a ``Compose`` around some of them."""
    for part in transforms:
        yield from single(part.transforms) if type(part) is Compose else [part]


def copy_of(transform: Transform) -> Transform:
    """Return a copy of a transform with own buffers, which the method ``clone`` shares."""
    copied = transform.clone()
    make: Any = UninitializedBuffer
    for name, buffer in transform.named_buffers(recurse=False):
        setattr(copied, name, make(dtype=buffer.dtype) if is_lazy(buffer) else buffer.clone())
    return copied
