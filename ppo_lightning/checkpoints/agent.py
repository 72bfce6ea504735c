"""An agent's recipe as plain data, so that a checkpoint can build it without its environment."""

import contextlib
import importlib
import inspect
import sys
import warnings
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torchrl.data import TensorSpec

from ppo_lightning.envs import BatchedEnv
from ppo_lightning.errors import ConfigError, first_line
from ppo_lightning.models.agent import ActorCritic
from ppo_lightning.spaces.specs import spec_from_plain, spec_to_plain

Known = TypeVar("Known")
LOCAL = "<locals>"  # in the qualified name of a class inside a function
SLACK = 2**24  # numbers: for buffers that are not saved


def agent_to_plain(
    agent: ActorCritic, observation_spec: TensorSpec, action_spec: TensorSpec
) -> dict[str, Any]:
    """Describes how to build the agent: class, arguments and the two specs.

    Raises:
        ConfigError: The agent's class does not keep its arguments.
    """
    arguments = list(inspect.signature(type(agent)).parameters.values())[2:]  # after the two specs
    names = {argument.name for argument in arguments if argument.kind != argument.VAR_KEYWORD}
    kept = dict(agent.hparams) if "_hparams" in vars(agent) else None
    if kept is None or not names <= kept.keys():
        name = type(agent).__name__
        raise ConfigError(
            f"{name}.__init__ must call self.save_hyperparameters(ignore=['observation_spec', 'action_spec'])."
        )
    if len(names) == len(
        arguments
    ):  # no **kwargs: what a base class kept for itself is not this class's argument
        kept = {name: kept[name] for name in names}
    class_path = f"{type(agent).__module__}.{type(agent).__qualname__}"
    if LOCAL in class_path:
        warnings.warn(
            f"The agent's class {class_path} is inside a function: this script can resume its runs, but"
            " load_from_checkpoint and the command line cannot load their checkpoints; define the class at the top level"
            " of a module.",
            stacklevel=2,
        )
    return {
        "class_path": class_path,
        "init_args": {key: list(arg) if isinstance(arg, tuple) else arg for key, arg in kept.items()},
        "observation_spec": spec_to_plain(observation_spec),
        "action_spec": spec_to_plain(action_spec),
    }


def known_class(class_path: Any, base: type[Known]) -> type[Known] | None:
    """Return the subclass of ``base`` that a file names, if it is one of this package or imported already.

    A file never decides what is imported.
    """
    module, _, name = str(class_path).rpartition(".")
    if is_ours(module):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) and issubclass(found, base) else None


def is_ours(module: str) -> bool:
    """Tell whether a module belongs to this package, by its name."""
    return module.partition(".")[0] == "ppo_lightning"


def agent_class_of(plain: dict[str, Any]) -> type[ActorCritic]:
    """Return the class that :func:`agent_to_plain` named.

    Raises:
        ConfigError: It is no agent that :func:`known_class` knows.
    """
    path = plain["class_path"]
    if (agent_class := known_class(path, ActorCritic)) is not None:
        return agent_class
    if LOCAL in path:
        raise ConfigError(
            f"The checkpoint's agent is {path}, a class inside a function, which no file can name: define it at the top level"
            " of a module, and train again."
        )
    raise ConfigError(
        f"The checkpoint's agent is {path}: import that class before loading the checkpoint, or, on the command line, pass"
        " --trust_checkpoint if you trust the file."
    )


class Budget(TorchDispatchMode):
    """Context in which PyTorch creates no more numbers than ``limit``, all new tensors together.

    A file may name layers of any size: they are refused before memory is taken for them.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = self.left = limit

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count what an operation with the argument ``device`` creates, which is found without memory, on ``meta``."""
        kwargs = kwargs or {}
        if any(argument.name == "device" for argument in func._schema.arguments):
            unused = {"pin_memory", "generator"}
            planned = func(
                *args, **{key: kwargs[key] for key in kwargs if key not in unused} | {"device": "meta"}
            )
            self.left -= planned.numel() if isinstance(planned, Tensor) else 0
            if self.left < 0:
                raise ConfigError(
                    f"The checkpoint names an agent or spaces of more than {self.limit} numbers, which its weights do not"
                    " need: the file is damaged, or was edited."
                )
        return func(*args, **kwargs)


def agent_from_plain(plain: dict[str, Any], limit: int = SLACK) -> ActorCritic:
    """Build the agent that :func:`agent_to_plain` described, with fresh weights.

    Args:
        plain: From a file, perhaps.
        limit: The most numbers that all new tensors may have together.

    Raises:
        ConfigError: The class is not known, its arguments do not fit, or it would be larger than ``limit``.
    """
    agent_class = agent_class_of(plain)
    try:
        with Budget(limit):
            observation_spec, action_spec = (
                spec_from_plain(plain[key]) for key in ("observation_spec", "action_spec")
            )
            return agent_class(observation_spec, action_spec, **plain["init_args"])
    except ConfigError:
        raise
    except Exception as error:  # whatever a class raises for arguments that are not its own
        raise ConfigError(
            f"The checkpoint's agent {plain['class_path']} cannot be built from its settings: {first_line(error)}."
        ) from error


def trained_agent(checkpoint: dict[str, Any]) -> ActorCritic:
    """Build the agent of a checkpoint or a Hub folder, with its weights and statistics.

    Args:
        checkpoint: From :func:`~ppo_lightning.checkpoints.file.read_checkpoint` or
            :func:`~ppo_lightning.checkpoints.file.read_hub_folder`.

    Raises:
        ConfigError: The class is not known, or its settings and the weights do not fit each other.
    """
    prefix = "agent."
    state = {key: tensor for key, tensor in checkpoint["state_dict"].items() if key.startswith(prefix)}
    # Each weight is created twice, the second time for its orthogonal initialization.
    agent = agent_from_plain(
        checkpoint["agent"], limit=4 * sum(tensor.numel() for tensor in state.values()) + SLACK
    )
    check_same_state(
        saved=state, current={f"{prefix}{key}": tensor for key, tensor in agent.state_dict().items()}
    )
    agent.load_state_dict({key.removeprefix(prefix): tensor for key, tensor in state.items()})
    return agent.eval()


def check_same_spaces(agent: ActorCritic, env: BatchedEnv) -> None:
    """Refuses an environment that the agent cannot play.

    Raises:
        ConfigError: The agent does not take its observations, or gives other actions.
    """
    observation_spec, device = env.observation_spec_unbatched["observation"], agent.device
    with torch.no_grad():
        try:
            observation = agent.normalize(observation_spec.zero().unsqueeze(0).to(device))
            agent.act(observation, memory=agent.initial_memory(1))
        except RuntimeError as error:
            raise ConfigError(
                f"The agent does not take observations of shape {list(observation_spec.shape)}: choose its environment."
            ) from error
    was, now = (
        _compared(plain, bounds=False) for plain in (agent.actions, spec_to_plain(env.agent_specs[1]))
    )
    if was.get("kind") == now.get("kind") == "Categorical" and was != now:
        raise ConfigError(
            f"The agent has {was['n']} actions and the environment {now['n']}: choose its environment."
        )
    if was != now:
        raise ConfigError(
            f"The agent's actions are {was} and the environment's {now}: choose its environment."
        )


def _compared(plain: dict[str, Any], bounds: bool) -> dict[str, Any]:
    """Returns what must be the same of two specs: kinds, names, numbers, shapes and types, and bounds where they matter."""
    if plain["kind"] == "Composite":
        return {name: _compared(part, bounds) for name, part in plain["parts"].items()}
    kind = "Box" if plain["kind"] in ("Bounded", "Unbounded") else plain["kind"]
    return {"kind": kind} | {
        key: value for key, value in plain.items() if key != "kind" and (bounds or key not in ("low", "high"))
    }


def check_same_agent(saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Refuses a checkpoint that was made for other spaces or by another network.

    Raises:
        ConfigError: Names what differs.
    """
    for key, field in (("observation_spec", "observations"), ("action_spec", "actions")):
        # The bounds of an observation may differ between backends; its shape and type may not, nor an action's bounds.
        was, now = (_compared(plain[key], bounds=key == "action_spec") for plain in (saved, current))
        if was != now:
            raise ConfigError(
                f"The checkpoint (ckpt_path) was trained on {field} {was} and data.env_id has {now}:"
                " choose its environment, or another checkpoint."
            )
    makes, made = ({"class_path": plain["class_path"], **plain["init_args"]} for plain in (current, saved))
    # An argument that the class did not have when the checkpoint was written has its default.
    if missing := makes.keys() - made.keys():
        parameters = inspect.signature(agent_class_of(current)).parameters
        made |= {name: parameters[name].default for name in missing if name in parameters}
    if makes != made:
        raise ConfigError(
            f"The checkpoint (ckpt_path) holds the agent {made} and model.agent makes {makes}: give the same."
        )


def check_same_state(saved: dict[str, Tensor], current: dict[str, Tensor]) -> None:
    """Refuses a checkpoint whose weights or statistics are not those of the module.

    Raises:
        ConfigError: Names the first that is missing on either side, or has another shape.
    """
    for name in [*current, *saved]:
        was, now = (list(state[name].shape) if name in state else "nothing" for state in (saved, current))
        if was != now:
            raise ConfigError(
                f"The checkpoint (ckpt_path) has {was} where the module has {now} for {name!r}: give the settings it was"
                " trained with (model.norm_reward, model.desired_kl and model.agent), or another checkpoint."
            )
