"""Checks of settings, made before anything starts."""

import argparse
import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from lightning.pytorch.trainer.states import TrainerFn

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
            good, must = value in get_args(kinds[0]), f"it must be one of {', '.join(map(repr, get_args(kinds[0])))}"
        elif bounds is None:
            good, must = get_origin(annotation) is not Callable or callable(value), "it must be a class or a function"
        elif get_origin(annotation) is Sequence:
            good, must = isinstance(value, Sequence), f"each entry must be {bounds}"
            good = good and all(bounds.holds(entry, Integral) for entry in value)
        else:
            good = bounds.holds(value, Integral if int in kinds else Real)
        if not good:
            or_null = ", or null" if NoneType in kinds else ""
            raise ConfigError(f"{group}.{name} is {value!r}: {must}{or_null}.")


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a mapping that has a key twice: YAML's own rule, where PyYAML takes the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                line = key.start_mark.line + 1
                raise ConfigError(f"has the key {key.value!r} twice (line {line}): remove one.")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def check_config_files(args: Sequence[str]) -> None:
    """Check that the files of ``--config`` can be read.

    Raises:
        ConfigError: A file is not text, is not YAML, or has a key twice.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-c", "--config", action="append", default=[])
    for path in parser.parse_known_args(args)[0].config:
        if not os.path.isfile(path):
            continue  # jsonargparse says what is wrong; or it is YAML itself
        try:
            with open(path, encoding="utf-8") as file:
                yaml.load(file.read(), _UniqueKeys)
        except (UnicodeDecodeError, OSError) as error:
            raise ConfigError(f"--config {path} cannot be read as text in UTF-8: {error}.") from error
        except ConfigError as error:
            raise ConfigError(f"--config {path} {error}") from error
        except yaml.YAMLError as error:
            raise ConfigError(f"--config {path} is not YAML: {' '.join(str(error).split())}.") from error


def check_trainer(trainer: Any) -> None:
    """Refuse the options of a Trainer that PPO cannot honour.

    Raises:
        ConfigError: Names the first option and what to do instead.
    """
    if trainer.gradient_clip_val is not None:
        raise ConfigError("trainer.gradient_clip_val does not act on PPO's minibatches: set model.max_grad_norm instead.")
    if trainer.precision not in ("32-true", "bf16-mixed"):
        raise ConfigError(f"trainer.precision is {trainer.precision!r}: PPO takes '32-true' or 'bf16-mixed'.")
    if trainer.state.fn != TrainerFn.FITTING:
        return
    nothing = "it must not be 0, which trains nothing; data.total_timesteps ends a run"
    for name, refused, must in (
        ("min_steps", trainer.min_steps, "leave it out and set data.total_timesteps, which ends the run"),
        ("min_epochs", trainer.min_epochs, "leave it out and set data.total_timesteps, which ends the run"),
        ("max_steps", trainer.max_steps == 0, nothing),
        ("max_epochs", trainer.max_epochs == 0, nothing),
        ("limit_train_batches", trainer.limit_train_batches == 0, nothing),
        ("accumulate_grad_batches", trainer.accumulate_grad_batches != 1, "set model.num_minibatches lower instead"),
        ("overfit_batches", trainer.overfit_batches, "leave it out, because every rollout is new"),
        ("val_check_interval", trainer.val_check_interval == 0, "it must be at least 1 rollout"),
        ("log_every_n_steps", trainer.log_every_n_steps == 0, "it must be at least 1; trainer.logger false logs nothing"),
    ):
        if refused:
            raise ConfigError(f"trainer.{name} is {getattr(trainer, name)}: {must}.")


def check_memory(num_envs: int, num_steps: int, bytes_per_step: int) -> None:
    """Refuse a rollout larger than the machine's memory, where the operating system tells its size.

    Raises:
        ConfigError: Names the sizes and both numbers of gigabytes.
    """
    needed = num_envs * num_steps * bytes_per_step
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else math.inf
    if needed > memory:
        raise ConfigError(
            f"data.num_envs * data.num_steps = {num_envs * num_steps} steps take {needed / 1e9:.0f} GB and this"
            f" machine has {memory / 1e9:.0f} GB of memory: lower one of the two."
        )


def check_minibatches(hparams: Any, num_envs: int, num_steps: int, world_size: int) -> None:
    """Demands that a rollout can be split into equal minibatches of at least two steps.

    Raises:
        ConfigError: Names the fields and what to change.
    """
    size, rest = divmod(num_envs * num_steps // world_size, hparams.num_minibatches)
    if world_size > 1 and num_steps % hparams.num_minibatches:
        raise ConfigError(
            f"data.num_steps = {num_steps} is not divisible by model.num_minibatches = {hparams.num_minibatches}, which"
            f" {world_size} ranks need: change one of the two."
        )
    if rest:
        raise ConfigError(
            f"data.num_envs * data.num_steps = {num_envs * num_steps} is not divisible by model.num_minibatches ="
            f" {hparams.num_minibatches}: change one of the three."
        )
    check_minibatch_size(hparams, size)


def check_cuda_graphs(hparams: Any, device: str, world_size: int, precision: str, whole_graph: bool) -> None:
    """Demands what ``cuda_graphs`` needs: one GPU, a compiled update of one graph, and no casts of weights that it would keep.

    Raises:
        ConfigError: Something of that is missing.
    """
    needs = {
        "accelerator gpu": device == "cuda",
        "devices 1": world_size == 1,
        "precision 32-true": precision == "32-true",
        "model.compile": hparams.compile,
        "an agent without memory": whole_graph,
    }
    if hparams.cuda_graphs and not all(needs.values()):
        missing = ", ".join(name for name, there in needs.items() if not there)
        raise ConfigError(f"model.cuda_graphs does not work without {missing}: leave it off.")


def check_minibatch_size(hparams: Any, size: int) -> None:
    """Demands minibatches of two steps at least, where their advantages are normalised.

    Raises:
        ConfigError: They have one.
    """
    if size == 1 and hparams.norm_adv:
        raise ConfigError(
            f"model.num_minibatches = {hparams.num_minibatches} makes minibatches of one step, whose advantage cannot be"
            " normalised: lower it, or collect more steps."
        )
