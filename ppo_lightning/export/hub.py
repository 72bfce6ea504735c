"""Export of trained agents to the Hugging Face Hub."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from ppo_lightning import __version__
from ppo_lightning.checkpoints.agent import agent_to_plain, trained_agent
from ppo_lightning.checkpoints.file import CONFIG, WEIGHTS, read_hub_folder
from ppo_lightning.checkpoints.versions import VERSION
from ppo_lightning.envs import EnvFactory
from ppo_lightning.errors import ConfigError, first_line, import_extra
from ppo_lightning.export.actor import DeployedActor, deployed_actor
from ppo_lightning.models import ActorCritic
from ppo_lightning.spaces.specs import spec_from_plain
from ppo_lightning.video.record import record_video

CARD, VIDEO = "README.md", "replay.mp4"


def save_for_hub(checkpoint: dict[str, Any], folder: str | Path, video: bool = True) -> Path:
    """Write a folder for the Hugging Face Hub with weights, configuration, model card and video.

    Args:
        checkpoint: Result of :func:`~ppo_lightning.checkpoints.agent.read_checkpoint`.
        folder: Output folder, created if it does not exist.
        video: Record an episode if the environment can be rendered.

    Returns:
        The folder.
    """
    safetensors = import_extra("safetensors.torch", extra="export")
    folder = Path(folder)
    agent = trained_agent(checkpoint)
    data = checkpoint["datamodule_hyper_parameters"]
    folder.mkdir(parents=True, exist_ok=True)
    actor = deployed_actor(agent, spec_from_plain(checkpoint["agent"]["observation_spec"]))
    plain = checkpoint["agent"]
    if actor.columns is not None:
        plain = agent_to_plain(actor.agent, actor.observation_spec, spec_from_plain(agent.actions))
    weights = {name: tensor.contiguous() for name, tensor in actor.agent.state_dict().items()}
    safetensors.save_file(weights, folder / WEIGHTS)
    returns = checkpoint["episode_returns"]
    config = {
        VERSION: __version__,
        "agent": plain,
        "data": _public(data),
        "hyper_parameters": _public(checkpoint["hyper_parameters"]),
        "details": checkpoint["details"],
        "seed": checkpoint["seed"],
        "env_steps": checkpoint["env_steps"],
        "evaluation": checkpoint.get("evaluation"),
        "training": {
            "episodic_return": float(np.mean(returns)) if returns else None,
            "episodic_return_std": float(np.std(returns)) if returns else None,
            "episodes": len(returns),
        },
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=1, default=str) + "\n")
    video_tag = ""
    if video:
        try:
            factory = EnvFactory(data["env_id"], data["backend"], data["env_kwargs"] or {})
            record_video(agent, factory, folder / VIDEO, seed=checkpoint["seed"], max_frames=1000)
            video_tag = f'\n<video controls autoplay loop src="{VIDEO}"></video>\n'
        except Exception as error:  # an environment may raise anything
            print(f"no video: {first_line(error)}")
    (folder / CARD).write_text(_card(config, video_tag, _input(actor)))
    return folder


def _input(actor: DeployedActor) -> str:
    """Return the sentences of the model card about the input of an actor that reads some entries only."""
    if actor.columns is None:
        return ""
    text = f"\nThe observations are rows of the entries that the actor reads: {actor.inputs}.\n"
    return text if actor.has_value else f"{text}The value function, which reads other entries, is left out.\n"


def _public(settings: dict[str, Any]) -> dict[str, Any]:
    """Drop Lightning's own entries from settings."""
    return {key: value for key, value in settings.items() if not key.startswith("_")}


def _card(config: dict[str, Any], video: str, inputs: str) -> str:
    env_id = config["data"]["env_id"]
    evaluated = bool(config["evaluation"])
    results = config["evaluation"] if evaluated else config["training"]
    mean, std = (results.get(name) for name in ("episodic_return", "episodic_return_std"))
    result = "" if mean is None else f"{mean:.2f} +/- {std:.2f}"
    kind = (
        "Return of the last evaluation (whole episodes, the most probable actions)"
        if evaluated
        else f"Return of the last {results['episodes']} training episodes"
        " (sampled actions; no evaluation of these weights)"
    )
    metric = (
        f"      - {{type: mean_reward, value: {result}, name: {kind.partition(' (')[0].lower()}}}\n"
        if result
        else ""
    )
    act = "action = agent.mode(observation)  # raw observations [B, ...]"
    if config["agent"]["init_args"].get("memory"):
        act = """memory = agent.initial_memory(len(observation))  # zero at episode starts
action, value, memory = agent.play(observation, memory)  # raw observations [B, ...]"""
    settings = "\n".join(f"| {name} | {value} |" for name, value in config["hyper_parameters"].items())
    return f"""---
library_name: ppo_lightning
tags: [{env_id}, ppo, reinforcement-learning, deep-reinforcement-learning, pytorch-lightning, torchrl]
model-index:
  - name: PPO
    results:
    - task: {{type: reinforcement-learning, name: reinforcement-learning}}
      dataset: {{name: {env_id}, type: {env_id}}}
      metrics:
{metric}---

# PPO on {env_id}

{kind}: {result or "unknown"}, after {config["env_steps"]} environment steps of training.
{video}
```python
from ppo_lightning.export import load_from_hub

agent = load_from_hub("USER/NAME")  # or this folder
{act}
```
{inputs}
| hyperparameter | |
|---|---|
{settings}
"""


def load_from_hub(source: str | Path) -> ActorCritic:
    """Load an agent from a folder of :func:`save_for_hub` or a repository of the Hub.

    No code from the source is executed.

    Args:
        source: A folder, or ``"user/name"``.

    Returns:
        The agent.

    Raises:
        ConfigError: The source does not exist, a file is damaged, or the agent's class is not imported.
    """
    folder = Path(source)
    if not folder.is_dir():
        hub = import_extra("huggingface_hub", extra="export")
        try:
            folder = Path(hub.snapshot_download(str(source), allow_patterns=[WEIGHTS, CONFIG]))
        except Exception as error:  # network, proxy and server errors have many types
            raise ConfigError(
                f"{source} is not a folder, and the download from the Hub failed: {first_line(error)}."
            ) from error
    return trained_agent(read_hub_folder(folder))


def push_to_hub(folder: str | Path, repo_id: str, private: bool = False) -> str:
    """Upload a folder of :func:`save_for_hub` and return its address.

    Args:
        folder: The folder.
        repo_id: Repository, ``"user/name"``. The account is the one of ``hf auth login``.
        private: Whether a new repository is private.

    Raises:
        ConfigError: There is no network, no token, or no write permission.
    """
    api = import_extra("huggingface_hub", extra="export").HfApi()
    try:
        address = api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo_id, folder_path=str(folder))
    except Exception as error:  # network, proxy and server errors have many types
        raise ConfigError(
            f"{folder} is written, but not uploaded to {repo_id} ({first_line(error)}): check the network,"
            " and log in with hf auth login."
        ) from error
    return str(address)
