"""A trained agent as ONNX."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchrl.data import Categorical, Composite, TensorSpec

from ppo_lightning.envs import make_env
from ppo_lightning.errors import import_extra
from ppo_lightning.models import ActorCritic
from ppo_lightning.spaces.specs import columns, mask_columns, stored

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
    inputs = {"observation": torch.zeros(2, *spec.shape, dtype=spec.dtype)} | (
        {} if memory is None else {"memory": memory}
    )
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
    session = import_extra("onnxruntime", extra="export").InferenceSession(
        str(path), providers=["CPUExecutionProvider"]
    )
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
def recorded_observations(
    agent: ActorCritic, spec: TensorSpec, data: dict[str, Any], seed: int
) -> np.ndarray:
    """Returns observations [B, ...] that the agent meets in its environment, of the data module's settings."""
    env = make_env(data["env_id"], 1, data["backend"], seed, stream="eval", env_kwargs=data["env_kwargs"])
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
