"""``ppo-lightning export``: a trained agent as ONNX, and as a folder for the Hugging Face Hub."""

import argparse
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchrl.data import Categorical, Composite, TensorSpec

import ppo_lightning
from ppo_lightning.checkpoint_file import CONFIG, WEIGHTS, read_checkpoint, read_hub_folder
from ppo_lightning.checkpoint_settings import environment_of
from ppo_lightning.envs import make_env
from ppo_lightning.envs.specs import columns, mask_columns, spec_from_plain, stored
from ppo_lightning.errors import ConfigError, first_line, import_extra
from ppo_lightning.models import ActorCritic
from ppo_lightning.models.rebuild import trained_agent
from ppo_lightning.options import FLAGS, TRUST
from ppo_lightning.video import record_video

CARD, VIDEO = "README.md", "replay.mp4"
CHECKED = 256  # observations of each kind


class Deployed(nn.Module):
    """What is exported: from raw observations [B, ...] to the most probable actions [B, ...] and values [B].

    A memory [B, M] is another input and another output.

    Args:
        agent: Its statistics are inside.
    """

    def __init__(self, agent: ActorCritic) -> None:
        super().__init__()
        self.agent = agent

    def forward(self, observation: Tensor, memory: Tensor | None = None) -> tuple[Tensor, ...]:
        """Returns ``action``, within the environment's bounds, ``state_value`` and, where there is one, ``next_memory``."""
        *outputs, after = self.agent.play(observation, memory)
        return tuple(outputs) if after is None else (*outputs, after)


def to_onnx(agent: ActorCritic, observation_spec: TensorSpec, path: str | Path) -> Path:
    """Writes ``observation`` [B, ...] -> ``action`` [B, ...], ``state_value`` [B] as ONNX, for any B.

    An agent with a memory takes ``memory`` [B, M], too, zero where an episode begins, and gives ``next_memory``.

    Args:
        agent: On the CPU.
        observation_spec: Of one environment.
        path: The file.

    Returns:
        The path.
    """
    import_extra("onnxscript", extra="export")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    spec, memory = stored(observation_spec), agent.initial_memory(2)
    inputs = {"observation": torch.zeros(2, *spec.shape, dtype=spec.dtype)} | ({} if memory is None else {"memory": memory})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program: Any = torch.onnx.export(
            Deployed(agent).eval(),
            tuple(inputs.values()),
            input_names=list(inputs),
            output_names=["action", "state_value", "next_memory"][: 2 + (memory is not None)],
            dynamic_shapes=tuple({0: torch.export.Dim("batch")} for _ in inputs),
            dynamo=True,
            verbose=False,
        )
    for node in program.model.graph.all_nodes():
        node.metadata_props.clear()  # stack traces, with the paths of this machine
    program.save(path)
    return path


@torch.no_grad()
def largest_difference(agent: ActorCritic, path: str | Path, observation: np.ndarray) -> float:
    """Returns how far an ONNX file's actions and values are from the agent's at most, for raw observations [B, ...].

    In proportion to 1 + the agent's; an action that is another counts as its index's distance.
    """
    session = import_extra("onnxruntime", extra="export").InferenceSession(str(path), providers=["CPUExecutionProvider"])
    inputs, memory = {"observation": torch.from_numpy(observation)}, agent.initial_memory(len(observation))
    if memory is not None:
        inputs["memory"] = memory.normal_(generator=torch.Generator().manual_seed(0)).tanh()
    found = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
    expected = [output.numpy() for output in Deployed(agent).eval()(*inputs.values())]
    return max(float((np.abs(a - b) / (1 + np.abs(b))).max()) for a, b in zip(found, expected, strict=True))


def random_observations(spec: TensorSpec, seed: int = 0) -> np.ndarray:
    """Returns observations [B, ...] that a spec allows: of pictures any bytes, of vectors some standard normals."""
    generator = np.random.default_rng(seed)
    if isinstance(spec, Composite | Categorical):
        rows = stored(spec)
        parts = [part.rand([CHECKED]).reshape(CHECKED, -1) for _, part, _ in columns(spec)]
        row = torch.cat([part.to(rows.dtype) for part in parts], dim=1)
        if (mask := mask_columns(spec)) is not None:
            row[:, mask] = 1
        return row.numpy()
    shape = (CHECKED, *spec.shape)
    if spec.dtype == torch.uint8:
        return generator.integers(0, 256, shape, np.uint8)
    return generator.normal(0, 3, shape).astype(torch.empty(0, dtype=spec.dtype).numpy().dtype)


@torch.no_grad()
def recorded_observations(agent: ActorCritic, spec: TensorSpec, data: dict[str, Any], seed: int) -> np.ndarray:
    """Returns observations [B, ...] that the agent meets in its environment, of the data module's settings."""
    env = make_env(data["env_id"], 1, data["backend"], seed, stream="eval", **data["env_kwargs"] or {})
    observation, met, memory = env.reset_arrays(), [], agent.initial_memory(1)
    dtype = torch.empty(0, dtype=stored(spec).dtype).numpy().dtype
    try:
        for _ in range(CHECKED):
            met.append(observation[0].astype(dtype))
            action, _, memory = agent.play(torch.from_numpy(met[-1][None]), memory)
            observation, _, terminated, truncated = env.step_arrays(action.numpy())
            if (done := terminated | truncated).any():
                observation, memory = env.reset_arrays(done), agent.initial_memory(1)
    finally:
        env.close()
    return np.stack(met)


def save_for_hub(checkpoint: dict[str, Any], folder: str | Path, video: bool = True) -> Path:
    """Writes a folder that the Hugging Face Hub shows: weights, configuration, model card, video.

    Args:
        checkpoint: From :func:`~ppo_lightning.models.rebuild.read_checkpoint`.
        folder: Is made if it does not exist.
        video: Whether to record an episode, where the environment can be rendered.

    Returns:
        The folder.
    """
    safetensors = import_extra("safetensors.torch", extra="export")
    folder, agent, data = Path(folder), trained_agent(checkpoint), checkpoint["datamodule_hyper_parameters"]
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.save_file({name: tensor.contiguous() for name, tensor in agent.state_dict().items()}, folder / WEIGHTS)
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
            backend = "procgen" if data["backend"] == "procgen" else "gymnasium"
            kwargs = {"backend": backend, "seed": checkpoint["seed"], "max_frames": 1000} | (data["env_kwargs"] or {})
            record_video(agent, data["env_id"], folder / VIDEO, **kwargs)
            said = f'\n<video controls autoplay loop src="{VIDEO}"></video>\n'
        except ConfigError as error:
            print(f"no video: {first_line(error)}")
    (folder / CARD).write_text(_card(config, said))
    return folder


def _public(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings without Lightning's own entries and without the user's file of observations."""
    return {key: value for key, value in settings.items() if not key.startswith("_") and key != "predict_observations"}


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
    metric = f"      - {{type: mean_reward, value: {result}, name: {kind.partition(' (')[0].lower()}}}\n" if result else ""
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
            raise ConfigError(f"{source} is no folder, and the Hub does not give it: {first_line(error)}.") from error
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


def main(args: Sequence[str]) -> None:
    """Runs ``ppo-lightning export``."""
    parser = argparse.ArgumentParser(
        "ppo-lightning export", description="Writes a trained agent as ONNX, or for the Hugging Face Hub.", allow_abbrev=False
    )
    parser.add_argument("--ckpt_path", required=True, help="the checkpoint")
    parser.add_argument("--onnx", type=Path, help="a file to write: observations in, actions and values out")
    parser.add_argument("--hub", type=Path, help="a folder to write: weights, configuration, model card, video")
    parser.add_argument("--push", metavar="USER/NAME", help="upload that folder, too")
    parser.add_argument("--no_video", action="store_true", help="leave out the video")
    parser.add_argument(TRUST, action="store_true", help=FLAGS[TRUST])
    own = parser.parse_args(args)
    if own.onnx is None and own.hub is None:
        raise ConfigError("export needs something to write: give --onnx FILE or --hub FOLDER.")
    if own.push and own.hub is None:
        raise ConfigError("--push uploads the folder of --hub: give both.")
    checkpoint = read_checkpoint(own.ckpt_path)
    environment_of(checkpoint, args)
    if own.onnx is not None:
        agent, spec = trained_agent(checkpoint), spec_from_plain(checkpoint["agent"]["observation_spec"])
        path = to_onnx(agent, spec, own.onnx)
        print(f"onnx: {path.resolve()}")
        recorded = recorded_observations(agent, spec, checkpoint["datamodule_hyper_parameters"], checkpoint["seed"])
        for kind, observation in (("random", random_observations(spec)), ("recorded", recorded)):
            print(f"largest difference to PyTorch, {kind} observations: {largest_difference(agent, path, observation):.2g}")
    if own.hub is not None:
        folder = save_for_hub(checkpoint, own.hub, video=not own.no_video)
        print(f"hub: {folder.resolve()}" if not own.push else f"hub: {push_to_hub(folder, own.push)}")
