"""Export of trained agents to the Hugging Face Hub."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from ppo_lightning import __version__
from ppo_lightning.checkpoints.agent import VERSION, agent_to_plain, trained_agent
from ppo_lightning.checkpoints.file import CONFIG, WEIGHTS, read_hub_folder
from ppo_lightning.checkpoints.settings import algorithm_of, module_settings
from ppo_lightning.envs import EnvFactory
from ppo_lightning.errors import ConfigError, first_line, import_extra
from ppo_lightning.export.actor import deployed_actor
from ppo_lightning.models import ActorCritic
from ppo_lightning.spaces.specs import spec_from_plain
from ppo_lightning.video.record import record_video

VIDEO = "replay.mp4"
CARD = """---
{{ card_data }}
---

# {{ algorithm }} on {{ data.env_id }}

{{ name | capitalize }} ({{ how }}): {{ result }}, after {{ env_steps }} environment steps of training.
{% if video %}
<video controls autoplay loop src="{{ video }}"></video>
{% endif %}
```python
from ppo_lightning.export import load_from_hub

agent = load_from_hub("USER/NAME")  # or this folder
memory = agent.initial_memory(len(observation))  # at episode starts; None for an agent without a memory
action, value, memory = agent.play(observation, memory)  # raw observations [B, ...]
```
{% if inputs %}
The observations are rows of the entries that the actor reads: {{ inputs }}.
{% endif %}{% if not has_value %}
There is no value function of these observations.
{% endif %}
| hyperparameter | |
|---|---|
{% for key, value in hyper_parameters.items() -%}
| {{ key }} | {{ value }} |
{% endfor %}"""


def save_for_hub(checkpoint: dict[str, Any], folder: str | Path, video: bool = True) -> Path:
    """Write a folder for the Hugging Face Hub with weights, configuration, model card and video.

    Args:
        checkpoint: Result of :func:`~ppo_lightning.checkpoints.file.read_checkpoint`.
        folder: Output folder, created if it does not exist.
        video: Record an episode if the environment can be rendered.

    Returns:
        The folder.
    """
    hub, safetensors = (import_extra(name, "export") for name in ("huggingface_hub", "safetensors.torch"))
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    agent = trained_agent(checkpoint)
    actor = deployed_actor(agent, spec_from_plain(checkpoint["agent"]["observation_spec"]))
    weights = {name: tensor.contiguous() for name, tensor in actor.agent.state_dict().items()}
    safetensors.save_file(weights, folder / WEIGHTS)
    data = {key: value for key, value in checkpoint["datamodule_hyper_parameters"].items() if key[0] != "_"}
    returns = checkpoint["episode_returns"]
    means = {"episodic_return": np.mean(returns), "episodic_return_std": np.std(returns)} if returns else {}
    config = {key: checkpoint.get(key) for key in ("details", "seed", "env_steps", "evaluation")} | {
        VERSION: __version__,
        "agent": agent_to_plain(actor.agent, actor.observation_spec, spec_from_plain(agent.actions)),
        "data": data,
        "hyper_parameters": module_settings(checkpoint),
        "training": {"episodes": len(returns)} | means,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=1, default=str) + "\n")
    if video:
        try:
            factory = EnvFactory(data["env_id"], data["backend"], data["env_kwargs"] or {})
            record_video(agent, factory, folder / VIDEO, seed=checkpoint["seed"], max_frames=1000)
        except Exception as error:  # an environment may raise anything
            print(f"no video: {first_line(error)}")
            video = False
    name, how = "return of the last training episodes", "sampled actions; no evaluation of these weights"
    if config["evaluation"]:
        name, how = "return of the last evaluation", "whole episodes, the most probable actions"
    result = "unknown"
    if results := config["evaluation"] or means:
        result = f"{results['episodic_return']:.2f} +/- {results['episodic_return_std']:.2f}"
    task, env_id, algorithm = "reinforcement-learning", str(data["env_id"]), algorithm_of(checkpoint)
    header = hub.ModelCardData(
        library_name="ppo_lightning",
        tags=[env_id, algorithm.lower(), task, "pytorch-lightning", "torchrl"],
        model_name=algorithm,
        eval_results=[hub.EvalResult(task, env_id, env_id, "mean_reward", result, metric_name=name)],
    )
    words: dict[str, Any] = {"name": name, "how": how, "result": result, "video": video and VIDEO}
    words |= {"inputs": actor.columns and actor.inputs, "has_value": actor.has_value, "algorithm": algorithm}
    hub.ModelCard.from_template(header, template_str=CARD, **config | words).save(folder / "README.md")
    return folder


def load_from_hub(source: str | Path) -> ActorCritic:
    """Load an agent from a folder of :func:`save_for_hub`, or from a repository ``"user/name"`` of the Hub.

    No code from the source is executed.

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


def push_to_hub(folder: str | Path, repo_id: str) -> str:
    """Upload a folder of :func:`save_for_hub` to ``"user/name"``, and return its address.

    Raises:
        ConfigError: There is no network, no token (``hf auth login``), or no write permission.
    """
    hub = import_extra("huggingface_hub", extra="export")
    try:
        address = hub.create_repo(repo_id, exist_ok=True)
        hub.upload_folder(repo_id=repo_id, folder_path=folder)
    except Exception as error:  # network, proxy and server errors have many types
        raise ConfigError(
            f"{folder} is written, but not uploaded to {repo_id} ({first_line(error)}): check the network,"
            " and log in with hf auth login."
        ) from error
    return str(address)
