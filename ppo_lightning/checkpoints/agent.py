"""Agents as plain data: a checkpoint can build its agent without the environment."""

import contextlib
import importlib
import inspect
import json
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torchrl.data import TensorSpec

from ppo_lightning import __version__
from ppo_lightning.envs import BatchedEnv
from ppo_lightning.errors import ConfigError, first_line
from ppo_lightning.models.actor import Actor, evaluating
from ppo_lightning.models.makers import sized
from ppo_lightning.models.networks import NetworkAgent
from ppo_lightning.spaces.specs import spec_from_plain, spec_to_plain
from ppo_lightning.utils.seeding import initial_weights

Known = TypeVar("Known")
LOCAL = "<locals>"  # part of the qualified name of a class inside a function
VERSION = "ppo_lightning"  # entry of checkpoints: the version that wrote them


def agent_to_plain(agent: Actor, observation_spec: TensorSpec, action_spec: TensorSpec) -> dict[str, Any]:
    """Describe in plain types how to build an agent: class, arguments and the specs of one environment."""
    arguments = list(inspect.signature(type(agent)).parameters.values())[2:]  # after the two specs
    names = dict.fromkeys(argument.name for argument in arguments if argument.kind != argument.VAR_KEYWORD)
    saved = dict(agent.hparams)
    if not names.keys() <= saved.keys():
        call = "self.save_hyperparameters(ignore=['observation_spec', 'action_spec'])"
        raise ConfigError(f"{type(agent).__name__}.__init__ must call {call}.")
    if len(names) == len(arguments):  # no **kwargs: leave out what a base class saved
        saved = {name: saved[name] for name in names}
    class_path = f"{type(agent).__module__}.{type(agent).__qualname__}"
    if LOCAL in class_path:
        warnings.warn(
            f"{class_path} is inside a function: to load its checkpoints, define it at the top of a module.",
            stacklevel=2,
        )
    return {
        "class_path": class_path,
        "init_args": {key: list(arg) if isinstance(arg, tuple) else arg for key, arg in saved.items()},
        "observation_spec": spec_to_plain(observation_spec),
        "action_spec": spec_to_plain(action_spec),
    }


def known_class(class_path: Any, base: type[Known]) -> type[Known] | None:
    """Return the subclass of ``base`` that a file names, None if it is unknown."""
    module, _, name = str(class_path).rpartition(".")
    # A file never decides what is imported: classes of others are known once something has imported them.
    if is_ours(module):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    candidate = getattr(sys.modules.get(module), name, None)
    return candidate if isinstance(candidate, type) and issubclass(candidate, base) else None


def is_ours(module: str) -> bool:
    """Return whether the name of a module belongs to this package."""
    return module.partition(".")[0] == "ppo_lightning"


def agent_from_plain(
    plain: dict[str, Any], given: Mapping[str, Any] | None = None, base: type = Actor
) -> Any:
    """Build an agent with fresh weights from a description by :func:`agent_to_plain`.

    An actor and a critic in ``given`` replace those of the description, whose base class is ``nn.Module``.
    """
    path = plain["class_path"]
    agent_class: Any = known_class(path, base)
    if agent_class is None or (is_ours(path) and base is nn.Module):  # whose sizes nothing has checked
        is_local = LOCAL in path  # in a function, where nothing can import it
        remedy = "define it at the top of a module" if is_local else "import that class before loading it"
        raise ConfigError(f"The checkpoint's agent is {path}: {remedy}.")
    try:
        with torch.device("cpu"):
            specs = [spec_from_plain(plain[key]) for key in ("observation_spec", "action_spec")]
        arguments = plain["init_args"]
        if issubclass(agent_class, NetworkAgent):
            if given and "actor" in given:
                arguments = given
            elif arguments["actor"] is None:
                remedy = "give them by --config, or to load_from_checkpoint(path, actor=..., critic=...)"
                raise ConfigError(f"The checkpoint's networks were objects: {remedy}.")
            else:
                parts = ((name, part and {**plain, **part}) for name, part in arguments.items())
                arguments = {name: part and agent_from_plain(part, base=nn.Module) for name, part in parts}
        made = agent_class(*specs, **arguments)
        return sized(made, specs[0]) if isinstance(made, Actor) else made
    except ConfigError:
        raise
    except Exception as error:  # a class may raise anything for wrong arguments
        raise ConfigError(f"The checkpoint's {path} cannot be built: {first_line(error)}.") from error


def trained_agent(checkpoint: dict[str, Any], given: Mapping[str, Any] | None = None) -> Any:
    """Build the agent of a checkpoint, as :func:`agent_from_plain`, with its weights, for evaluation."""
    plain = checkpoint["agent"]
    state = {
        key.removeprefix("agent."): tensor
        for key, tensor in checkpoint["state_dict"].items()
        if key.startswith("agent.")
    }
    with naming_writer(checkpoint), initial_weights():
        is_pair = known_class(plain["class_path"], NetworkAgent) is not None
        if is_ours(plain["class_path"]) and not is_pair:
            # A file may name layers of any size: none is allocated here.
            with torch.device("meta"):
                check_same_state(saved=state, current=agent_from_plain(plain).state_dict())
        agent = agent_from_plain(plain, given)
        check_same_state(saved=state, current=agent.state_dict())
    agent.load_state_dict(state)
    if "exploration" in checkpoint:  # of an off-policy algorithm; agents of older ones act greedily
        agent.head.exploration = checkpoint["exploration"]
    return agent.eval()


@contextlib.contextmanager
def naming_writer(checkpoint: Mapping[str, Any]) -> Iterator[None]:
    """Add the version that wrote a checkpoint to a ConfigError, if it is another one."""
    try:
        yield
    except ConfigError as error:
        if checkpoint.get(VERSION) == __version__:
            raise
        text = str(error).removesuffix(".")
        raise ConfigError(f"{text} ({writer_of(checkpoint)} wrote the checkpoint).") from error


def writer_of(checkpoint: Mapping[str, Any]) -> str:
    """Return the version that wrote a checkpoint."""
    return f"version {checkpoint[VERSION]}" if VERSION in checkpoint else "an older version"


def check_same_spaces(agent: Actor, env: BatchedEnv) -> None:
    """Check that an agent fits the spaces of an environment."""
    spec = env.observation_spec_unbatched["observation"]
    with evaluating(agent), torch.no_grad():
        try:
            observation = agent.normalize(spec.zero().unsqueeze(0).to(agent.device))
            agent.act(observation, memory=agent.initial_memory(1))
        except RuntimeError as error:
            raise ConfigError(f"The agent does not take observations of shape {list(spec.shape)}.") from error
    trained, present = (
        _comparable(plain, bounds=False) for plain in (agent.actions, spec_to_plain(env.agent_specs[1]))
    )
    if trained != present:
        problem = f"The agent's actions are {trained} and the environment's {present}"
        raise ConfigError(f"{problem}: choose that of its training.")


def _comparable(plain: dict[str, Any], bounds: bool) -> dict[str, Any]:
    """Return the properties of a spec that must match: kind, names, sizes, shape, dtype, and maybe bounds."""
    if plain["kind"] == "Composite":
        return {name: _comparable(part, bounds) for name, part in plain["parts"].items()}
    kind = "Box" if plain["kind"] in ("Bounded", "Unbounded") else plain["kind"]
    comparable = {"kind": kind} | {key: plain[key] for key in plain if key not in ("kind", "entries")}
    if plain.get("entries"):  # a number has none
        comparable["entries"] = list(plain["entries"].items())  # the order of the columns counts
    return {key: value for key, value in comparable.items() if bounds or key not in ("low", "high")}


def check_same_agent(saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Check that two descriptions by :func:`agent_to_plain` have the same spaces and the same agent."""
    for key, field in (("observation_spec", "observations"), ("action_spec", "actions")):
        # Backends may report different bounds of observations. Bounds of actions must match.
        trained, present = (
            _comparable(plain[key], bounds=key == "action_spec") for plain in (saved, current)
        )
        if trained != present:
            raise ConfigError(f"The agent was trained on {field} {trained} and data.env_id has {present}.")
    new, old = ({"class_path": plain["class_path"], **plain["init_args"]} for plain in (current, saved))
    if changes := changed_settings("model.agent", old, new):
        raise ConfigError(f"{changes}: give the setting of the run, or another ckpt_path.")


def changed_settings(group: str, saved: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """Name the settings of both sides that differ, with both values as in YAML."""
    return ", ".join(
        f"{group}.{key} was {json.dumps(saved[key], default=str)} in the run and is"
        f" {json.dumps(value, default=str)} now"
        for key, value in current.items()
        if key in saved and saved[key] != value
    )


def check_same_state(saved: dict[str, Tensor], current: dict[str, Tensor], changes: str = "") -> None:
    """Check names and shapes of a checkpoint's tensors, and refuse others with ``changes`` or a tensor."""
    for name in [*current, *saved]:
        old, new = (
            f"shape {list(state[name].shape)}" if name in state else "nothing" for state in (saved, current)
        )
        if old != new:
            found = f"The checkpoint (ckpt_path) has {old} where the module has {new} for {name!r}"
            raise ConfigError(f"{changes or found}: give the setting of the run, or another ckpt_path.")
