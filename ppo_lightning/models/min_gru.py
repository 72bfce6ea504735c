"""Memory that is linear in its state, solved for all steps of a sequence at once."""

import numpy as np
import torch
from torch import Tensor, nn

from ppo_lightning.models.memory import ArrayStep, Memory, sigmoid
from ppo_lightning.utils.scans import LinearRecurrence


class MinGRU(Memory):
    """A GRU whose gates and candidate do not depend on the state, with the output gate of an LSTM.

    The state is ``h_t = (1 - z_t) * h_{t-1} + z_t * candidate_t``, and the output is ``o_t * h_t``. The gates
    z_t and o_t are sigmoids of linear functions of the features, and the candidate is linear. The recurrence
    is linear in the state, so that :class:`~ppo_lightning.utils.scans.LinearRecurrence` solves it for all
    steps at once. At the first step of an episode the previous state has the weight 0: resets need no
    padding. The state has the width of the output, M = H.

    The output gate is not in the paper. Without it, logits and value are linear in the state, and an action
    that depends on present and past features together is hard to learn (docs/memory.md).

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
        super().__init__(nn.Linear(in_features, 3 * out_features), out_features, out_features)

    def step(self, features: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Advance by one step, see :meth:`Memory.step`."""
        with torch.autocast(features.device.type, enabled=False):
            z, o, candidate = self._gates_and_candidate(features)
            state = (1 - z) * state + z * candidate
            return o * state, state

    def forward(self, features: Tensor, state: Tensor, is_init: Tensor) -> Tensor:
        """Process whole sequences, see :meth:`Memory.forward`."""
        with torch.autocast(features.device.type, enabled=False):
            z, o, candidate = self._gates_and_candidate(features)
            weight = (1 - z).masked_fill(is_init[..., None], 0.0)
            return o * LinearRecurrence.apply(weight, z * candidate, state)

    def _gates_and_candidate(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return z, o and the candidate, each [..., H]."""
        z, o, candidate = self.cell(features.float()).chunk(3, dim=-1)
        return z.sigmoid(), o.sigmoid(), candidate

    def array_step(self) -> ArrayStep:
        """Return a NumPy version of :meth:`step` for the current weights."""
        size = self.out_features
        weight, bias = self.cell.weight.detach().numpy().T, self.cell.bias.detach().numpy()

        def min_gru(features: np.ndarray, state: np.ndarray) -> np.ndarray:
            outputs = features @ weight + bias
            gates = sigmoid(outputs[:, : 2 * size])
            state += gates[:, :size] * (outputs[:, 2 * size :] - state)
            return gates[:, size:] * state

        return min_gru
