"""An agent's recipe as plain data, so that a checkpoint can build it without its environment."""

import inspect
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchrl.data import TensorSpec

from ppo_lightning.envs import BatchedEnv
from ppo_lightning.envs.specs import spec_from_plain, spec_to_plain
from ppo_lightning.errors import ConfigError
from ppo_lightning.models.agent import ActorCritic


def agent_to_plain(agent: ActorCritic, observation_spec: TensorSpec, action_spec: TensorSpec) -> dict[str, Any]:
    """Describes how to build the agent: class, arguments and the two specs.

    Raises:
        ConfigError: The agent's class does not keep its arguments.
    """
    arguments = list(inspect.signature(type(agent)).parameters.values())[2:]  # after the two specs
    names = {argument.name for argument in arguments if argument.kind != argument.VAR_KEYWORD}
    kept = dict(agent.hparams) if "_hparams" in vars(agent) else None
    if kept is None or not names <= kept.keys():
        name = type(agent).__name__
        raise ConfigError(f"{name}.__init__ must call self.save_hyperparameters(ignore=['observation_spec', 'action_spec']).")
    if len(names) == len(arguments):  # no **kwargs: what a base class kept for itself is not this class's argument
        kept = {name: kept[name] for name in names}
    return {
        "class_path": f"{type(agent).__module__}.{type(agent).__qualname__}",
        "init_args": {key: list(arg) if isinstance(arg, tuple) else arg for key, arg in kept.items()},
        "observation_spec": spec_to_plain(observation_spec),
        "action_spec": spec_to_plain(action_spec),
    }


def agent_class_of(plain: dict[str, Any]) -> type[ActorCritic]:
    """Returns the class that :func:`agent_to_plain` named.

    Raises:
        ConfigError: It is not an agent that has been imported already; a file never decides what is imported.
    """
    module, _, name = plain["class_path"].rpartition(".")
    agent_class = getattr(sys.modules.get(module), name, None)
    if not (isinstance(agent_class, type) and issubclass(agent_class, ActorCritic)):
        raise ConfigError(f"The checkpoint's agent is {plain['class_path']}: import that class before loading the checkpoint.")
    return agent_class


def agent_from_plain(plain: dict[str, Any]) -> ActorCritic:
    """Builds the agent that :func:`agent_to_plain` described, with fresh weights.

    Raises:
        ConfigError: The class is not an agent that has been imported already; a file never decides what is imported.
    """
    agent_class = agent_class_of(plain)
    observation_spec, action_spec = spec_from_plain(plain["observation_spec"]), spec_from_plain(plain["action_spec"])
    return agent_class(observation_spec, action_spec, **plain["init_args"])


def read_checkpoint(path: str) -> dict[str, Any]:
    """Reads a checkpoint of this package, without executing anything in it.

    Raises:
        ConfigError: The file is missing, or something else.
    """
    if not Path(path).is_file():
        raise ConfigError(f"ckpt_path {path!r} is not a file: give the path of a checkpoint.")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        missing = {"agent", "state_dict", "hyper_parameters", "datamodule_hyper_parameters", "seed"} - checkpoint.keys()
    except Exception as error:  # whatever torch.load raises for a file of another kind
        raise ConfigError(f"ckpt_path {path!r} is not a checkpoint of ppo_lightning ({type(error).__name__}).") from error
    if missing:
        raise ConfigError(f"ckpt_path {path!r} is not a checkpoint of ppo_lightning (no {', '.join(sorted(missing))}).")
    return checkpoint


def trained_agent(checkpoint: dict[str, Any]) -> ActorCritic:
    """Builds the agent of a checkpoint that :func:`read_checkpoint` read, with its weights and statistics."""
    agent, state, prefix = agent_from_plain(checkpoint["agent"]), checkpoint["state_dict"], "agent."
    agent.load_state_dict({key.removeprefix(prefix): state[key] for key in state if key.startswith(prefix)})
    return agent.eval()


def check_same_spaces(agent: ActorCritic, env: BatchedEnv) -> None:
    """Refuses an environment that the agent cannot play.

    Raises:
        ConfigError: The agent does not take its observations, or gives other actions.
    """
    observation_spec, device = env.observation_spec_unbatched["observation"], agent.critic.weight.device
    with torch.no_grad():
        try:
            observation = agent.normalize(observation_spec.zero().unsqueeze(0).to(device))
            agent.act(observation, memory=agent.initial_memory(1))
        except RuntimeError as error:
            raise ConfigError(
                f"The agent does not take observations of shape {list(observation_spec.shape)}: choose its environment."
            ) from error
    was, now = (_compared(plain, bounds=False) for plain in (agent.actions, spec_to_plain(env.agent_specs[1])))
    if was.get("kind") == now.get("kind") == "Categorical" and was != now:
        raise ConfigError(f"The agent has {was['n']} actions and the environment {now['n']}: choose its environment.")
    if was != now:
        raise ConfigError(f"The agent's actions are {was} and the environment's {now}: choose its environment.")


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
    parameters = inspect.signature(agent_class_of(current)).parameters
    made |= {name: parameters[name].default for name in makes.keys() - made.keys() if name in parameters}
    if makes != made:
        raise ConfigError(f"The checkpoint (ckpt_path) holds the agent {made} and model.agent makes {makes}: give the same.")


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
