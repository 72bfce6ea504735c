"""Memory that is linear in its state, solved for all steps of a sequence at once."""

import numpy as np
import torch
from torch import Tensor, nn

from ppo_lightning.models.memory import ArrayStep, Memory, sigmoid
from ppo_lightning.utils.scans import LinearRecurrence


class MinGRU(Memory):
    """A GRU whose gate and candidate do not depend on the state.

    The state is ``h_t = (1 - z_t) * h_{t-1} + z_t * candidate_t``, with the gate z_t = sigmoid(Linear(x_t))
    and candidate_t = Linear(x_t). This recurrence is linear in the state, so that
    :class:`~ppo_lightning.utils.scans.LinearRecurrence` solves it for all steps at once. At the first step of
    an episode, the previous state has the weight 0: resets need no padding. The output is the state, M = H.

    Source: Feng et al., "Were RNNs All We Needed?" (2024).

    Args:
        in_features: Width F of the features.
        out_features: Width H of the output.

    Example:
        >>> MinGRU(4, 8)(torch.zeros(2, 5, 4), torch.zeros(2, 8), torch.zeros(2, 5) > 0).shape
        torch.Size([2, 5, 8])
    """

    kind = "min_gru"
    traceable = True

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(nn.Linear(in_features, 2 * out_features), out_features, out_features)

    def _gate_and_candidate(self, features: Tensor) -> tuple[Tensor, Tensor]:
        gate, candidate = self.cell(features.float()).chunk(2, dim=-1)
        return gate.sigmoid(), candidate

    def step(self, features: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Advance by one step, see :meth:`Memory.step`."""
        with torch.autocast(features.device.type, enabled=False):
            gate, candidate = self._gate_and_candidate(features)
            state = (1 - gate) * state + gate * candidate
        return state, state

    def forward(self, features: Tensor, state: Tensor, is_init: Tensor) -> Tensor:
        """Process whole sequences, see :meth:`Memory.forward`."""
        # detail 36
        with torch.autocast(features.device.type, enabled=False):
            gate, candidate = self._gate_and_candidate(features)
            # detail 33
            weight = (1 - gate).masked_fill(is_init[..., None], 0.0)
            return LinearRecurrence.apply(weight, gate * candidate, state)

    def array_step(self) -> ArrayStep:
        """Return a NumPy version of :meth:`step` for the current weights."""
        size = self.out_features
        weight, bias = self.cell.weight.detach().numpy().T, self.cell.bias.detach().numpy()

        def min_gru(features: np.ndarray, state: np.ndarray) -> np.ndarray:
            gate_and_candidate = features @ weight + bias
            candidate = gate_and_candidate[:, size:]
            candidate -= state
            candidate *= sigmoid(gate_and_candidate[:, :size])
            state += candidate
            return state

        return min_gru
