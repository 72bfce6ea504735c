"""Base class of recurrent memories between an agent's body and heads."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import numpy as np
from torch import Tensor, nn

MemoryName = Literal["lstm", "gru", "min_gru"]
# Function of features [N, F] and hidden state [N, M], updated in place. It returns the output [N, H].
ArrayStep = Callable[[np.ndarray, np.ndarray], np.ndarray]


class Memory(nn.Module):
    """Base class of recurrent layers with a state in one row [M] per environment, zero at episode starts.

    Args:
        cell: Layer with all weights.
        out_features: Width H of the output.
        state_size: Width M of the state.

    Example:
        >>> output, state = LSTM(4, 8).step(torch.zeros(2, 4), torch.zeros(2, 16))
        >>> output.shape, state.shape
        (torch.Size([2, 8]), torch.Size([2, 16]))
    """

    kind: ClassVar[MemoryName]
    traceable: ClassVar[bool]  # whether a compiler can trace `forward`

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
