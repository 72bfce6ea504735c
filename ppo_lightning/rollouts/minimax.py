"""Minimax search for small board games, as an opponent of known strength."""

import functools
from typing import NamedTuple

import numpy as np

from ppo_lightning.errors import ConfigError

DELAY = 0.99  # factor per move on the value of a result: prefer early wins and late losses


class Board(NamedTuple):
    """Rules of a game of stones in a row.

    Attributes:
        rows: Number of rows, from top to bottom.
        columns: Number of columns.
        length: Number of stones in a row that wins.
        falls: Whether a move names a column, in which the stone falls to the lowest free cell.

    Example:
        >>> Board(3, 3, 3, falls=False).moves(occupied=0b111111110)
        [(0, 0)]
    """

    rows: int
    columns: int
    length: int
    falls: bool

    def moves(self, occupied: int) -> list[tuple[int, int]]:
        """Return the legal moves as pairs of action and cell.

        Args:
            occupied: Bit ``row * columns + column`` is set where there is a stone.
        """
        if not self.falls:
            return [(cell, cell) for cell in range(self.rows * self.columns) if not occupied >> cell & 1]
        moves = []
        for column in range(self.columns):
            for row in reversed(range(self.rows)):
                cell = row * self.columns + column
                if not occupied >> cell & 1:
                    moves.append((column, cell))
                    break
        return moves

    def wins(self, stones: int, cell: int) -> bool:
        """Return whether the stone in a cell completes a row.

        Args:
            stones: Cells of the player, as bits.
            cell: Cell of the last stone.
        """
        return any(stones & line == line for line in lines_through(self, cell))


BOARDS = {"TicTacToe-v1": Board(3, 3, 3, falls=False), "ConnectFour-v1": Board(6, 7, 4, falls=True)}


@functools.cache
def lines_through(board: Board, cell: int) -> list[int]:
    """Return the winning rows that contain a cell, as bits."""
    lines = []
    for down, right in ((0, 1), (1, 0), (1, 1), (1, -1)):
        for row in range(board.rows):
            for column in range(board.columns):
                places = [(row + i * down, column + i * right) for i in range(board.length)]
                cells = [
                    r * board.columns + c for r, c in places if r < board.rows and 0 <= c < board.columns
                ]
                if len(cells) == board.length and cell in cells:
                    lines.append(sum(1 << place for place in cells))
    return lines


@functools.lru_cache(maxsize=100_000)  # about 70 MB
def values(board: Board, own: int, other: int, depth: int) -> dict[int, float]:
    """Return the value of each legal action for the player to move, from -1 (lost) to 1 (won).

    Args:
        board: Rules.
        own: Cells of the player to move, as bits.
        other: Cells of the opponent, as bits.
        depth: Number of moves to look ahead. A position without result at this depth has value 0.
    """
    result = {}
    for action, cell in board.moves(own | other):
        stones = own | 1 << cell
        if board.wins(stones, cell):
            result[action] = 1.0
        elif depth > 1:
            replies = values(board, other, stones, depth - 1)
            result[action] = -DELAY * max(replies.values(), default=0.0)
        else:
            result[action] = 0.0
    return result


class Minimax:
    """A player who looks ahead and moves at random among the best moves.

    Args:
        env_id: ``TicTacToe-v1`` or ``ConnectFour-v1`` of EnvPool.
        depth: Number of moves to look ahead: 1 sees wins, 2 also the opponent's wins. 9 plays TicTacToe
            perfectly.

    Raises:
        ConfigError: The game is another one, or the depth is not positive.

    Example:
        >>> row = np.array([[0, 1, 1, 1, 1, 1, 1, 1, 1, *[0, 1], *[0, 0] * 8]], np.float32)
        >>> Minimax("TicTacToe-v1", depth=9)(row, np.random.default_rng(1))  # only the center draws
        array([4])
    """

    def __init__(self, env_id: str, depth: int) -> None:
        if env_id not in BOARDS:
            raise ConfigError(
                f"minimax plays {' and '.join(BOARDS)}, not {env_id!r}: choose another opponent."
            )
        if depth < 1:
            raise ConfigError(f"The depth of minimax is {depth}: it must be at least 1.")
        self.board = BOARDS[env_id]
        self.depth = depth

    def __call__(self, observation: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Return moves, see :data:`~ppo_lightning.rollouts.players.Player`."""
        cells = self.board.rows * self.board.columns
        stones = observation[:, -2 * cells :].reshape(len(observation), cells, 2) > 0
        weights = np.array([1 << cell for cell in range(cells)], dtype=object)
        own, other = (stones[..., plane].astype(object) @ weights for plane in (0, 1))
        return np.array([self._move(*position, generator) for position in zip(own, other, strict=True)])

    def _move(self, own: int, other: int, generator: np.random.Generator) -> int:
        options = values(self.board, own, other, self.depth)
        if not options:  # a full board, whose next step resets it
            return 0
        best = max(options.values())
        return int(generator.choice([action for action, value in options.items() if value == best]))
