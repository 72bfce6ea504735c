"""A memory between an agent's body and its heads: LSTM or GRU."""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

MemoryName = Literal["lstm", "gru"]
# Features [N, F] and memory [N, M], which is brought up to date in place, to what the heads take [N, H].
ArrayStep = Callable[[np.ndarray, np.ndarray], np.ndarray]


class Memory(nn.Module):
    """A recurrent layer whose state, one row [M] an environment, is zero at the start of an episode.

    Of an LSTM the row is the hidden state followed by the cell state, M = 2 H; of a GRU it is the hidden
    state, M = H.

    Args:
        kind: ``lstm`` or ``gru``.
        in_features: F.
        out_features: H.
    """

    def __init__(self, kind: MemoryName, in_features: int, out_features: int) -> None:
        super().__init__()
        self.kind, self.out_features = kind, out_features
        self.state_size = 2 * out_features if kind == "lstm" else out_features
        self.cell: Any = (
            nn.LSTM(in_features, out_features) if kind == "lstm" else nn.GRU(in_features, out_features)
        )
        # detail 32
        for parameter in self.cell.parameters():
            (nn.init.orthogonal_ if parameter.ndim == 2 else nn.init.zeros_)(parameter)

    def step(self, features: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Goes on by one step.

        Args:
            features: [B, F].
            state: [B, M], zero where an episode begins.

        Returns:
            What the heads take, [B, H], and the state after the step, [B, M].
        """
        cell = self.cell
        with torch.autocast(features.device.type, enabled=False):
            inputs = nn.functional.linear(features.float(), cell.weight_ih_l0, cell.bias_ih_l0)
            hidden = state[:, : self.out_features]
            own = nn.functional.linear(hidden, cell.weight_hh_l0, cell.bias_hh_l0)
            if self.kind == "lstm":
                i, f, g, o = (inputs + own).chunk(4, dim=1)
                after = f.sigmoid() * state[:, self.out_features :] + i.sigmoid() * g.tanh()
                hidden = o.sigmoid() * after.tanh()
                return hidden, torch.cat([hidden, after], dim=1)
            (r, z, n), (own_r, own_z, own_n) = inputs.chunk(3, dim=1), own.chunk(3, dim=1)
            n = (n + (r + own_r).sigmoid() * own_n).tanh()
            hidden = n + (z + own_z).sigmoid() * (hidden - n)
            return hidden, hidden

    @torch.compiler.disable
    def forward(self, features: Tensor, state: Tensor, is_init: Tensor) -> Tensor:
        """Goes through whole sequences, in float32.

        They fall into stretches where episodes begin, which PyTorch's own kernels take side by side, padded
        to the longest: where there are resets, one and a half to eight times as fast as a packed sequence,
        for which PyTorch has no fused kernel on the CPU. Where that would be more padding than three times
        the data, stretches of similar lengths go together. Nothing of the padding comes back.

        Args:
            features: [n, T, F].
            state: Before the first step, [n, M].
            is_init: Where an episode begins and the state is zero, [n, T] bool.

        Returns:
            What the heads take at each step, [n, T, H].
        """
        count, num_steps = is_init.shape
        begins = is_init.clone()
        begins[:, 0] = True
        first = begins.flatten().nonzero().squeeze(1)  # rows of [n * T]
        lengths = torch.diff(first, append=first.new_tensor([count * num_steps]))
        sequence, step = first // num_steps, first % num_steps
        # detail 33
        goes_on = (step == 0) & ~is_init[sequence, step]
        start = torch.where(goes_on[:, None], state[sequence], 0.0)
        rows = features.float().flatten(0, 1)
        if int(lengths.max()) * len(first) <= 4 * len(rows):
            return self._side_by_side(rows, first, lengths, start)[0].unflatten(0, is_init.shape)
        size, outs, places = lengths.float().log2().ceil(), [], []
        for same in size.unique():
            group = (size == same).nonzero().squeeze(1)
            out, place = self._side_by_side(rows, first[group], lengths[group], start[group])
            outs.append(out)
            places.append(place)
        order = torch.cat(places).argsort()
        return torch.cat(outs)[order].unflatten(0, is_init.shape)

    def _side_by_side(
        self, rows: Tensor, first: Tensor, lengths: Tensor, start: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Goes through stretches of rows [B, F], from states [S, M]; returns [R, H] of their rows, and which those are."""
        time = torch.arange(int(lengths.max()), device=rows.device)[:, None]  # [L, 1]
        padded, real = first + time, time < lengths
        states = start.unsqueeze(0)
        parts = (
            tuple(part.contiguous() for part in states.chunk(2, dim=-1)) if self.kind == "lstm" else states
        )
        # detail 36
        with torch.autocast(rows.device.type, enabled=False):
            out, _ = self.cell(rows[padded.clamp(max=len(rows) - 1)], parts)
        # Stretch by stretch: all of them together are the rows in their order.
        return out.transpose(0, 1)[real.T], padded.T[real.T]

    def array_step(self) -> ArrayStep:
        """Returns what :meth:`step` does as a function of NumPy arrays, for the present weights."""
        size, weights = self.out_features, (self.cell.weight_ih_l0, self.cell.weight_hh_l0)
        to_gates, own_to_gates = (weight.detach().numpy().T for weight in weights)
        bias, own_bias = (bias.detach().numpy() for bias in (self.cell.bias_ih_l0, self.cell.bias_hh_l0))

        def sigmoid(x: np.ndarray) -> np.ndarray:
            return np.float32(0.5) * np.tanh(np.float32(0.5) * x) + np.float32(0.5)

        def lstm(features: np.ndarray, state: np.ndarray) -> np.ndarray:
            hidden, old = state[:, :size], state[:, size:]
            gates = features @ to_gates + hidden @ own_to_gates + both
            i_f, o = sigmoid(gates[:, : 2 * size]), sigmoid(gates[:, 3 * size :])
            old *= i_f[:, size:]
            old += i_f[:, :size] * np.tanh(gates[:, 2 * size : 3 * size])
            return np.multiply(o, np.tanh(old), out=hidden)

        def gru(features: np.ndarray, state: np.ndarray) -> np.ndarray:
            gates, own = features @ to_gates + bias, state @ own_to_gates + own_bias
            r_z = sigmoid(gates[:, : 2 * size] + own[:, : 2 * size])
            n = np.tanh(gates[:, 2 * size :] + r_z[:, :size] * own[:, 2 * size :])
            state -= n
            state *= r_z[:, size:]
            state += n
            return state

        both = bias + own_bias
        return lstm if self.kind == "lstm" else gru
