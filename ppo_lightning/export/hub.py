"""A trained agent as a folder for the Hugging Face Hub."""

import json
from pathlib import Path
from typing import Any

import numpy as np

import ppo_lightning
from ppo_lightning.checkpoints.agent import trained_agent
from ppo_lightning.checkpoints.file import CONFIG, WEIGHTS, read_hub_folder
from ppo_lightning.envs import EnvFactory
from ppo_lightning.errors import ConfigError, first_line, import_extra
from ppo_lightning.models import ActorCritic
from ppo_lightning.video.record import record_video

CARD, VIDEO = "README.md", "replay.mp4"


def save_for_hub(checkpoint: dict[str, Any], folder: str | Path, video: bool = True) -> Path:
    """Writes a folder that the Hugging Face Hub shows: weights, configuration, model card, video.

    Args:
        checkpoint: From :func:`~ppo_lightning.checkpoints.agent.read_checkpoint`.
        folder: Is made if it does not exist.
        video: Whether to record an episode, where the environment can be rendered.

    Returns:
        The folder.
    """
    safetensors = import_extra("safetensors.torch", extra="export")
    folder, agent, data = Path(folder), trained_agent(checkpoint), checkpoint["datamodule_hyper_parameters"]
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.save_file(
        {name: tensor.contiguous() for name, tensor in agent.state_dict().items()}, folder / WEIGHTS
    )
    returns = checkpoint["episode_returns"]
    config = {
        "ppo_lightning": ppo_lightning.__version__,
        "agent": checkpoint["agent"],
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
    said = ""
    if video:
        try:
            factory = EnvFactory(data["env_id"], data["backend"], data["env_kwargs"] or {})
            record_video(agent, factory, folder / VIDEO, seed=checkpoint["seed"], max_frames=1000)
            said = f'\n<video controls autoplay loop src="{VIDEO}"></video>\n'
        except ConfigError as error:
            print(f"no video: {first_line(error)}")
    (folder / CARD).write_text(_card(config, said))
    return folder


def _public(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings without Lightning's own entries and without the user's file of observations."""
    return {
        key: value
        for key, value in settings.items()
        if not key.startswith("_") and key != "predict_observations"
    }


def _card(config: dict[str, Any], video: str) -> str:
    env_id, evaluated = config["data"]["env_id"], bool(config["evaluation"])
    results = config["evaluation"] if evaluated else config["training"]
    mean, std = (results.get(name) for name in ("episodic_return", "episodic_return_std"))
    result = "" if mean is None else f"{mean:.2f} +/- {std:.2f}"
    kind = (
        "Return of the last evaluation (whole episodes, the most probable actions)"
        if evaluated
        else f"Return of the last {results['episodes']} training episodes (sampled actions; no evaluation of these weights)"
    )
    metric = (
        f"      - {{type: mean_reward, value: {result}, name: {kind.partition(' (')[0].lower()}}}\n"
        if result
        else ""
    )
    act = "action = agent.mode(observation)  # raw observations [B, ...]"
    if config["agent"]["init_args"].get("memory"):
        act = """memory = agent.initial_memory(len(observation))  # zero where an episode begins
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

| hyperparameter | |
|---|---|
{settings}
"""


def load_from_hub(source: str | Path) -> ActorCritic:
    """Builds the agent of a folder that :func:`save_for_hub` wrote, or of a repository of the Hub; executes nothing from it.

    Args:
        source: A folder, or ``"user/name"``.

    Raises:
        ConfigError: It is neither, a file in it is damaged, or its agent's class is not imported.
    """
    folder = Path(source)
    if not folder.is_dir():
        hub = import_extra("huggingface_hub", extra="export")
        try:
            folder = Path(hub.snapshot_download(str(source), allow_patterns=[WEIGHTS, CONFIG]))
        except Exception as error:  # whatever lies between here and the Hub
            raise ConfigError(
                f"{source} is no folder, and the Hub does not give it: {first_line(error)}."
            ) from error
    return trained_agent(read_hub_folder(folder))


def push_to_hub(folder: str | Path, repo_id: str, private: bool = False) -> str:
    """Upload a folder that :func:`save_for_hub` wrote, and return its address; ``huggingface_hub`` knows the account.

    Raises:
        ConfigError: There is no network, no token, or no right to write there.
    """
    api = import_extra("huggingface_hub", extra="export").HfApi()
    try:
        address = api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo_id, folder_path=str(folder))
    except Exception as error:  # whatever lies between here and the Hub
        raise ConfigError(
            f"{folder} is written, but not uploaded to {repo_id} ({first_line(error)}): check the network, and log in with"
            " hf auth login."
        ) from error
    return str(address)
