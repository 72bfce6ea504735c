"""Export of trained agents to ONNX."""

import copy
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchrl.data import Categorical, TensorSpec

from ppo_lightning.checkpoints.file import user_path
from ppo_lightning.errors import import_extra
from ppo_lightning.models import Actor
from ppo_lightning.models.normalizers import ObservationNormalizer
from ppo_lightning.private import ONNX_REGISTRATION
from ppo_lightning.spaces.entries import entry_columns, take_columns
from ppo_lightning.spaces.specs import columns, is_mask, mask_columns, stored

NUM_CHECKS = 256  # observations per comparison


class Deployed(nn.Module):
    """The exported module, which maps raw observations [B, ...] to actions [B, ...] and values [B].

    The actions are the most probable ones. A memory adds the hidden state [B, M] as an input and an output.
    Of an observation with entries, the module takes those of the actor and the action mask. It returns no
    values if the value function reads others, too.

    Args:
        agent: The agent, whose statistics become part of the file.
        observation_spec: Spec of the full observations of one environment.

    Attributes:
        columns: Columns of the full row of observations that the module takes. None: the full row.

    Example:
        >>> from ppo_lightning import MLPAgent, make_env
        >>> specs = make_env("Go1JoystickFlatTerrain-v1", backend="envpool").agent_specs
        >>> actor = Deployed(MLPAgent(*specs), specs[0])
        >>> actor.columns, list(actor.outputs(torch.zeros(3, 48)))
        ([slice(123, 171, None)], ['action'])
    """

    index: Tensor  # of each column of the full row in the taken ones, which a zero follows

    def __init__(self, agent: Actor, observation_spec: TensorSpec) -> None:
        super().__init__()
        self.agent = agent
        self.columns: list[slice] | None = None
        self._hidden: set[str] = set()  # outputs of the agent that need more than these columns
        entries = agent.entries
        if entries is not None and entries.actor.keys() != entry_columns(observation_spec).keys():
            if not entries.critic.keys() <= entries.actor.keys():
                self._hidden.add("state_value")
            named = columns(observation_spec)
            self.columns = [place for name, _, place in named if name in entries.actor or is_mask(name)]
            taken = torch.cat([torch.arange(place.start, place.stop) for place in self.columns])
            index = torch.full((stored(observation_spec).shape.numel(),), len(taken))
            index[taken] = torch.arange(len(taken))
            self.register_buffer("index", index)

    def outputs(self, observation: Tensor, memory: Tensor | None = None) -> dict[str, Tensor]:
        """Return the outputs of the file by name, see :meth:`~ppo_lightning.models.actor.Actor.play`."""
        if self.columns is not None:  # a full row, with zeros where only the critic reads
            observation = nn.functional.pad(observation, (0, 1))[:, self.index]
        outputs = self.agent.play(observation, memory)
        return {name: output for name, output in outputs.items() if name not in self._hidden}

    def forward(self, observation: Tensor, memory: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return the outputs in their order."""
        return tuple(self.outputs(observation, memory).values())


def to_onnx(agent: Actor, observation_spec: TensorSpec, path: str | Path, **options: Any) -> Path:
    """Export an agent to ONNX for any batch size B, see :class:`Deployed`.

    The input is ``observation`` [B, ...], the outputs are ``action`` [B, ...] and ``state_value`` [B]. With a
    memory, the file also has the input ``memory`` [B, M], zero at episode starts, and the output
    ``next_memory``.
    If float32 would round raw observations, such as seconds since 1970, the input is float64.

    Args:
        agent: The agent.
        observation_spec: Spec of the full observations of one environment.
        path: Output file.
        **options: Of ``torch.onnx.export``, such as ``opset_version``.

    Returns:
        The path.

    Raises:
        torch._dynamo.exc.UserError: A network fixes the number of rows, as ``len(x)`` does; ``x.shape[0]``
            does not.

    Example:
        >>> to_onnx(module.agent, module.observation_spec, "agent.onnx")
    """
    import_extra("onnxscript", extra="export")
    path = user_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    deployed = Deployed(copy.deepcopy(agent).cpu(), observation_spec).eval()
    spec = stored(observation_spec)
    observation = torch.zeros(2, *spec.shape, dtype=_input_dtype(spec, agent.normalizer))
    if deployed.columns is not None:
        observation = take_columns(observation, deployed.columns)
    memory = deployed.agent.initial_memory(2)
    inputs = {"observation": observation} | ({} if memory is None else {"memory": memory})
    with torch.no_grad():
        names = list(deployed.outputs(*inputs.values()))
    shapes = tuple({0: torch.export.Dim("batch")} for _ in inputs)
    defaults: dict[str, Any] = {
        "input_names": list(inputs),
        "output_names": names,
        "dynamo": True,
        "verbose": False,
    }
    # Messages about torchvision.
    logging.getLogger(ONNX_REGISTRATION).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Without it, `torch.onnx.export` would fall back on a graph for two rows.
        graph = torch.export.export(deployed, tuple(inputs.values()), dynamic_shapes=shapes)
        program: Any = torch.onnx.export(graph, **defaults | options)
    for node in program.model.graph.all_nodes():
        node.metadata_props.clear()  # removes stack traces with local paths
    program.save(path)
    return path


@torch.no_grad()
def largest_difference(
    agent: Actor, path: str | Path, observation: np.ndarray, columns: Sequence[slice] | None = None
) -> float:
    """Return the largest difference between the outputs of an ONNX file and the agent.

    Differences are divided by 1 + the absolute output. The file takes columns of raw observations [B, ...].
    """
    session = import_extra("onnxruntime", extra="export").InferenceSession(
        str(path), providers=["CPUExecutionProvider"]
    )
    inputs = {"observation": torch.from_numpy(observation)}
    memory = agent.initial_memory(len(observation))
    if memory is not None:
        inputs["memory"] = memory.normal_(generator=torch.Generator().manual_seed(0)).tanh()
    outputs = agent.play(*inputs.values())
    expected = [outputs[output.name].numpy() for output in session.get_outputs()]
    arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
    if columns is not None:
        arrays["observation"] = take_columns(observation, columns)
    if observation.dtype.kind == "f":
        double = session.get_inputs()[0].type == "tensor(double)"
        arrays["observation"] = arrays["observation"].astype(np.float64 if double else np.float32)
    return max(
        float((np.abs(actual - reference) / (1 + np.abs(reference))).max())
        for actual, reference in zip(session.run(None, arrays), expected, strict=True)
    )


def random_observations(spec: TensorSpec, normalizer: ObservationNormalizer | None = None) -> np.ndarray:
    """Draw observations [256, ...]: bytes and choices that a spec allows, and normal numbers.

    A normalizer gives the numbers the moments of training. Otherwise a network may see clipped numbers only.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parts = [_draw(part).flatten(1).double() for _, part, _ in columns(spec)]
    rows = torch.cat(parts, dim=1).unflatten(1, stored(spec).shape)
    if (mask := mask_columns(spec)) is not None:
        rows[:, mask] = 1
    if normalizer is not None:
        rows = normalizer.raw(rows)
    return rows.to(_input_dtype(spec, normalizer)).numpy()


def _draw(part: TensorSpec) -> Tensor:
    if isinstance(part, Categorical):
        return part.rand([NUM_CHECKS]).reshape(NUM_CHECKS, -1)
    shape = (NUM_CHECKS, part.shape.numel())
    return torch.randint(0, 256, shape) if part.dtype == torch.uint8 else 3 * torch.randn(shape)


def _input_dtype(spec: TensorSpec, normalizer: ObservationNormalizer | None) -> torch.dtype:
    """Return float64 if float32 would round raw observations, otherwise the type in rollouts."""
    dtype = stored(spec).dtype
    is_rounded = dtype.is_floating_point and normalizer is not None and normalizer.is_beyond_float32
    return torch.float64 if is_rounded else dtype
