"""Recurrent memories between an agent's body and heads."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ppo_lightning.utils.scans import LinearRecurrence

MemoryName = Literal["lstm", "min_gru"]
# Function of features [N, F] and hidden state [N, M], updated in place. It returns the output [N, H].
ArrayStep = Callable[[np.ndarray, np.ndarray], np.ndarray]


class Memory(nn.Module):
    """Base class of recurrent layers with a state in one row [M] per environment, zero at episode starts.

    A subclass takes the width F of the features and the width H of the output.

    Args:
        cell: Layer with all weights.
        out_features: Width H of the output.
        state_size: Width M of the state.

    Example:
        >>> output, state = LSTM(4, 8).step(torch.zeros(2, 4), torch.zeros(2, 16))
        >>> output.shape, state.shape
        (torch.Size([2, 8]), torch.Size([2, 16]))
    """

    def __init__(self, cell: nn.Module, out_features: int, state_size: int) -> None:
        super().__init__()
        self.out_features = out_features
        self.state_size = state_size
        self.cell: Any = cell
        # detail 32
        for parameter in cell.parameters():
            (nn.init.orthogonal_ if parameter.ndim == 2 else nn.init.zeros_)(parameter)

    @abstractmethod
    def step(self, features: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Advance by one step, in float32.

        Args:
            features: Features, [B, F].
            state: State before the step, [B, M], zero at episode starts.

        Returns:
            Output [B, H] and state after the step [B, M].
        """

    @abstractmethod
    def forward(self, features: Tensor, state: Tensor, is_init: Tensor) -> Tensor:
        """Process whole sequences, in float32.

        Args:
            features: Features, [n, T, F].
            state: State before the first step, [n, M].
            is_init: True at the first step of an episode, where the state is zero, [n, T] bool.

        Returns:
            Output at each step, [n, T, H].
        """

    @abstractmethod
    def array_step(self) -> ArrayStep:
        """Return a NumPy version of :meth:`step` for the current weights."""


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Compute the logistic function of float32 arrays, faster by NumPy's hyperbolic tangent."""
    return np.float32(0.5) * np.tanh(np.float32(0.5) * x) + np.float32(0.5)


class LSTM(Memory):
    """A long short-term memory. The state is the hidden state followed by the cell state, M = 2 H.

    Sequences are split where episodes begin. PyTorch's kernel processes these segments in parallel, padded to
    the longest. With resets this is 1.5 to 8 times as fast as a packed sequence, for which PyTorch has no
    fused CPU kernel. If the padding exceeded three times the data, segments are grouped by length instead.
    The padding is not returned.

    Example:
        >>> LSTM(4, 8)(torch.zeros(2, 5, 4), torch.zeros(2, 16), torch.zeros(2, 5) > 0).shape
        torch.Size([2, 5, 8])
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(nn.LSTM(in_features, out_features), out_features, 2 * out_features)

    def step(self, features: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Advance by one step, see :meth:`Memory.step`."""
        cell = self.cell
        with torch.autocast(features.device.type, enabled=False):
            hidden, cell_state = state.chunk(2, dim=1)
            inputs = F.linear(features.float(), cell.weight_ih_l0, cell.bias_ih_l0)
            recurrent = F.linear(hidden, cell.weight_hh_l0, cell.bias_hh_l0)
            i, f, g, o = (inputs + recurrent).chunk(4, dim=1)
            cell_state = f.sigmoid() * cell_state + i.sigmoid() * g.tanh()
            hidden = o.sigmoid() * cell_state.tanh()
        return hidden, torch.cat([hidden, cell_state], dim=1)

    @torch.compiler.disable
    def forward(self, features: Tensor, state: Tensor, is_init: Tensor) -> Tensor:
        """Process whole sequences, see :meth:`Memory.forward`."""
        count, num_steps = is_init.shape
        begins = is_init.clone()
        begins[:, 0] = True
        first = begins.flatten().nonzero().squeeze(1)  # rows of [n * T]
        lengths = torch.diff(first, append=first.new_tensor([count * num_steps]))
        sequence = first // num_steps
        step = first % num_steps
        continues = (step == 0) & ~is_init[sequence, step]
        start = torch.where(continues[:, None], state[sequence], 0.0)
        rows = features.float().flatten(0, 1)
        if int(lengths.max()) * len(first) <= 4 * len(rows):
            return self._run_segments(rows, first, lengths, start)[0].unflatten(0, is_init.shape)
        sizes = lengths.float().log2().ceil()
        outputs, row_indices = [], []
        for size in sizes.unique():
            group = (sizes == size).nonzero().squeeze(1)
            output, row_index = self._run_segments(rows, first[group], lengths[group], start[group])
            outputs.append(output)
            row_indices.append(row_index)
        order = torch.cat(row_indices).argsort()
        return torch.cat(outputs)[order].unflatten(0, is_init.shape)

    def _run_segments(
        self, rows: Tensor, first: Tensor, lengths: Tensor, start: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run S segments of rows [n * T, F] in parallel; return output [R, H] and indices of R rows."""
        time = torch.arange(int(lengths.max()), device=rows.device)[:, None]  # [L, 1]
        indices = first + time  # [L, S]
        is_real = time < lengths
        with torch.autocast(rows.device.type, enabled=False):
            hidden, cell_state = (part.contiguous() for part in start.unsqueeze(0).chunk(2, dim=-1))
            output, _ = self.cell(rows[indices.clamp(max=len(rows) - 1)], (hidden, cell_state))
        # Transposed, the segments follow each other: all segments together give the rows in order.
        return output.transpose(0, 1)[is_real.T], indices.T[is_real.T]

    def array_step(self) -> ArrayStep:
        """Return a NumPy version of :meth:`step` for the current weights."""
        size = self.out_features
        weights = (weight.detach().numpy().T for weight in self.cell.all_weights[0])
        to_gates, recurrent_to_gates, bias, recurrent_bias = weights
        total_bias = bias + recurrent_bias

        def lstm(features: np.ndarray, state: np.ndarray) -> np.ndarray:
            hidden = state[:, :size]
            cell_state = state[:, size:]
            gates = features @ to_gates + hidden @ recurrent_to_gates + total_bias
            i_f = sigmoid(gates[:, : 2 * size])
            o = sigmoid(gates[:, 3 * size :])
            cell_state *= i_f[:, size:]
            cell_state += i_f[:, :size] * np.tanh(gates[:, 2 * size : 3 * size])
            return np.multiply(o, np.tanh(cell_state), out=hidden)

        return lstm


class MinGRU(Memory):
    """A GRU whose gate and candidate do not depend on the state.

    The state, which is also the output, is ``h_t = (1 - z_t) * h_{t-1} + z_t * candidate_t``. The gate z_t is
    the sigmoid of a linear function of the features, and the candidate is linear. The recurrence is linear in
    the state, so that :class:`~ppo_lightning.utils.scans.LinearRecurrence` solves it for all steps at once.
    At the first step of an episode the previous state has the weight 0: resets need no padding.

    Source: Feng et al., "Were RNNs All We Needed?" (2024).

    Example:
        >>> MinGRU(4, 8)(torch.zeros(2, 5, 4), torch.zeros(2, 8), torch.zeros(2, 5) > 0).shape
        torch.Size([2, 5, 8])
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(nn.Linear(in_features, 2 * out_features), out_features, out_features)

    def step(self, features: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Advance by one step, see :meth:`Memory.step`."""
        with torch.autocast(features.device.type, enabled=False):
            z, candidate = self._gate_and_candidate(features)
            state = (1 - z) * state + z * candidate
        return state, state

    def forward(self, features: Tensor, state: Tensor, is_init: Tensor) -> Tensor:
        """Process whole sequences, see :meth:`Memory.forward`."""
        with torch.autocast(features.device.type, enabled=False):
            z, candidate = self._gate_and_candidate(features)
            weight = (1 - z).masked_fill(is_init[..., None], 0.0)
            return LinearRecurrence.apply(weight, z * candidate, state)

    def _gate_and_candidate(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return z and the candidate, each [..., H]."""
        z, candidate = self.cell(features.float()).chunk(2, dim=-1)
        return z.sigmoid(), candidate

    def array_step(self) -> ArrayStep:
        """Return a NumPy version of :meth:`step` for the current weights."""
        size = self.out_features
        weight, bias = self.cell.weight.detach().numpy().T, self.cell.bias.detach().numpy()

        def min_gru(features: np.ndarray, state: np.ndarray) -> np.ndarray:
            outputs = features @ weight + bias
            state += sigmoid(outputs[:, :size]) * (outputs[:, size:] - state)
            return state

        return min_gru


# Memories by name: functions of the width of the features and the width of the output.
MEMORIES: dict[MemoryName, Callable[[int, int], Memory]] = {"lstm": LSTM, "min_gru": MinGRU}
