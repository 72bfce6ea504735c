"""Recurrent memory (LSTM or GRU) between an agent's body and heads."""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

MemoryName = Literal["lstm", "gru"]
# Function of features [N, F] and hidden state [N, M], updated in place. It returns the output [N, H].
ArrayStep = Callable[[np.ndarray, np.ndarray], np.ndarray]


class Memory(nn.Module):
    """A recurrent layer with its state in one row [M] per environment, zero at episode starts.

    The row of an LSTM is the hidden state followed by the cell state, M = 2 H. The row of a GRU is the hidden
    state, M = H.

    Args:
        kind: ``lstm`` or ``gru``.
        in_features: Width F of the features.
        out_features: Width H of the output.

    Example:
        >>> output, state = Memory("lstm", 4, 8).step(torch.zeros(2, 4), torch.zeros(2, 16))
        >>> output.shape, state.shape
        (torch.Size([2, 8]), torch.Size([2, 16]))
    """

    def __init__(self, kind: MemoryName, in_features: int, out_features: int) -> None:
        super().__init__()
        self.kind = kind
        self.out_features = out_features
        self.state_size = 2 * out_features if kind == "lstm" else out_features
        self.cell: Any = (
            nn.LSTM(in_features, out_features) if kind == "lstm" else nn.GRU(in_features, out_features)
        )
        # detail 32
        for parameter in self.cell.parameters():
            (nn.init.orthogonal_ if parameter.ndim == 2 else nn.init.zeros_)(parameter)

    def step(self, features: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Advance by one step, in float32.

        Args:
            features: Features, [B, F].
            state: State before the step, [B, M], zero at episode starts.

        Returns:
            Output [B, H] and state after the step [B, M].
        """
        cell = self.cell
        with torch.autocast(features.device.type, enabled=False):
            inputs = nn.functional.linear(features.float(), cell.weight_ih_l0, cell.bias_ih_l0)
            hidden = state[:, : self.out_features]
            recurrent = nn.functional.linear(hidden, cell.weight_hh_l0, cell.bias_hh_l0)
            if self.kind == "lstm":
                i, f, g, o = (inputs + recurrent).chunk(4, dim=1)
                next_cell = f.sigmoid() * state[:, self.out_features :] + i.sigmoid() * g.tanh()
                hidden = o.sigmoid() * next_cell.tanh()
                return hidden, torch.cat([hidden, next_cell], dim=1)
            r, z, n = inputs.chunk(3, dim=1)
            recurrent_r, recurrent_z, recurrent_n = recurrent.chunk(3, dim=1)
            n = (n + (r + recurrent_r).sigmoid() * recurrent_n).tanh()
            hidden = n + (z + recurrent_z).sigmoid() * (hidden - n)
            return hidden, hidden

    @torch.compiler.disable
    def forward(self, features: Tensor, state: Tensor, is_init: Tensor) -> Tensor:
        """Process whole sequences, in float32.

        Sequences are split where episodes begin. PyTorch's kernels process these segments in parallel, padded
        to the longest. With resets this is 1.5 to 8 times as fast as a packed sequence, for which PyTorch has
        no fused CPU kernel. If the padding exceeded three times the data, segments are grouped by length
        instead. The padding is not returned.

        Args:
            features: Features, [n, T, F].
            state: State before the first step, [n, M].
            is_init: True at the first step of an episode, where the state is zero, [n, T] bool.

        Returns:
            Output at each step, [n, T, H].
        """
        count, num_steps = is_init.shape
        begins = is_init.clone()
        begins[:, 0] = True
        first = begins.flatten().nonzero().squeeze(1)  # rows of [n * T]
        lengths = torch.diff(first, append=first.new_tensor([count * num_steps]))
        sequence = first // num_steps
        step = first % num_steps
        # detail 33
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
        """Run segments of rows in parallel.

        Args:
            rows: Features of all steps, [n * T, F].
            first: First row of each segment, [S].
            lengths: Number of steps of each segment, [S].
            start: Initial state of each segment, [S, M].

        Returns:
            Output of the R rows in these segments, [R, H], and their indices [R].
        """
        time = torch.arange(int(lengths.max()), device=rows.device)[:, None]  # [L, 1]
        indices = first + time  # [L, S]
        is_real = time < lengths
        state: Any = start.unsqueeze(0)
        if self.kind == "lstm":
            state = tuple(part.contiguous() for part in state.chunk(2, dim=-1))
        # detail 36
        with torch.autocast(rows.device.type, enabled=False):
            output, _ = self.cell(rows[indices.clamp(max=len(rows) - 1)], state)
        # Transposed, the segments follow each other: all segments together give the rows in order.
        return output.transpose(0, 1)[is_real.T], indices.T[is_real.T]

    def array_step(self) -> ArrayStep:
        """Return a NumPy version of :meth:`step` for the current weights."""
        size = self.out_features
        cell = self.cell
        to_gates, recurrent_to_gates = (w.detach().numpy().T for w in (cell.weight_ih_l0, cell.weight_hh_l0))
        bias, recurrent_bias = (b.detach().numpy() for b in (cell.bias_ih_l0, cell.bias_hh_l0))
        total_bias = bias + recurrent_bias

        def sigmoid(x: np.ndarray) -> np.ndarray:
            return np.float32(0.5) * np.tanh(np.float32(0.5) * x) + np.float32(0.5)

        def lstm(features: np.ndarray, state: np.ndarray) -> np.ndarray:
            hidden = state[:, :size]
            cell_state = state[:, size:]
            gates = features @ to_gates + hidden @ recurrent_to_gates + total_bias
            i_f = sigmoid(gates[:, : 2 * size])
            o = sigmoid(gates[:, 3 * size :])
            cell_state *= i_f[:, size:]
            cell_state += i_f[:, :size] * np.tanh(gates[:, 2 * size : 3 * size])
            return np.multiply(o, np.tanh(cell_state), out=hidden)

        def gru(features: np.ndarray, state: np.ndarray) -> np.ndarray:
            gates = features @ to_gates + bias
            recurrent = state @ recurrent_to_gates + recurrent_bias
            r_z = sigmoid(gates[:, : 2 * size] + recurrent[:, : 2 * size])
            n = np.tanh(gates[:, 2 * size :] + r_z[:, :size] * recurrent[:, 2 * size :])
            state -= n
            state *= r_z[:, size:]
            state += n
            return state

        return lstm if self.kind == "lstm" else gru
