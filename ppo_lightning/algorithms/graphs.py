"""CUDA graphs: what a GPU does for a call, recorded once and launched again as one piece."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from tensordict.nn import CudaGraphModule
from torch import Tensor

from ppo_lightning.models import ActorCritic


def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that records what a GPU does for the second call, and launches that for those after it.

    They get tensors of the same shapes. TensorDicts are none of PyTorch's pytrees from then on, which nothing here needs.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of that
        return CudaGraphModule(function)


class GraphedAct:
    """:meth:`ActorCritic.act <ppo_lightning.models.ActorCritic.act>` from a CUDA graph, for the collector.

    The graph is of the shapes of the first call under inference mode, and of the memory that the weights lay in then, where
    training changes them. A call with other shapes or weights, without noise, or outside of inference mode, whose results may
    have to be differentiated, is an ordinary one.

    Args:
        agent: On a GPU, without memory.
    """

    def __init__(self, agent: ActorCritic) -> None:
        self._agent, self._act = agent, functools.partial(type(agent).act, agent)
        self._of: Any = None
        self._graph = recorded(lambda observation, noise: self._act(observation, noise)[:3])

    def __call__(self, observation: Tensor, noise: Tensor | None = None, memory: Tensor | None = None) -> Any:
        """See :meth:`ActorCritic.act <ppo_lightning.models.ActorCritic.act>`."""
        if noise is None or not torch.is_inference_mode_enabled():
            return self._act(observation, noise, memory)
        this = observation.shape, noise.shape, self._agent.critic.weight.data_ptr()
        self._of = self._of or this
        return (*self._graph(observation, noise), None) if this == self._of else self._act(observation, noise, memory)
