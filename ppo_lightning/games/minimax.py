"""Minimax search for small board games, as an opponent of known strength."""

import functools
from collections.abc import Callable
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
        {0: 0}
    """

    rows: int
    columns: int
    length: int
    falls: bool

    def moves(self, occupied: int) -> dict[int, int]:
        """Return the cell of each legal action.

        Args:
            occupied: Bit ``row * columns + column`` is set where there is a stone.
        """
        free = [cell for cell in range(self.rows * self.columns) if not occupied >> cell & 1]
        return {cell % self.columns if self.falls else cell: cell for cell in free}


BOARDS = {"TicTacToe-v1": Board(3, 3, 3, falls=False), "ConnectFour-v1": Board(6, 7, 4, falls=True)}


@functools.cache
def lines_through(board: Board, cell: int) -> list[int]:
    """Return the winning rows that contain a cell, as bits."""
    lines = []
    for down, right in ((0, 1), (1, 0), (1, 1), (1, -1)):
        for start in range(board.rows * board.columns):
            row, column = divmod(start, board.columns)
            last_row = row + (board.length - 1) * down
            last_column = column + (board.length - 1) * right
            if last_row < board.rows and 0 <= last_column < board.columns:
                cells = [start + i * (down * board.columns + right) for i in range(board.length)]
                if cell in cells:
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
    for action, cell in board.moves(own | other).items():
        stones = own | 1 << cell
        if any(stones & line == line for line in lines_through(board, cell)):
            result[action] = 1.0
        elif depth > 1:
            replies = values(board, other, stones, depth - 1)
            result[action] = -DELAY * max(replies.values(), default=0.0)
        else:
            result[action] = 0.0
    return result


def minimax_player(env_id: str, depth: int) -> Callable[[np.ndarray, np.random.Generator], np.ndarray]:
    """Return a player who looks ahead and moves at random among the best moves.

    Args:
        env_id: ``TicTacToe-v1`` or ``ConnectFour-v1`` of EnvPool.
        depth: Number of moves to look ahead: 1 sees wins, 2 also the opponent's wins. 9 plays TicTacToe
            perfectly.

    Raises:
        ConfigError: The game is another one, or the depth is not positive.

    Example:
        >>> row = np.array([[0, 1, 1, 1, 1, 1, 1, 1, 1, *[0, 1], *[0, 0] * 8]], np.float32)
        >>> minimax_player("TicTacToe-v1", 9)(row, np.random.default_rng(1))  # only the center draws
        array([4])
    """
    if env_id not in BOARDS:
        raise ConfigError(f"minimax plays {' and '.join(BOARDS)}, not {env_id!r}: choose another opponent.")
    if depth < 1:
        raise ConfigError(f"The depth of minimax is {depth}: it must be at least 1.")
    board = BOARDS[env_id]

    def play(observation: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        cells = board.rows * board.columns
        stones = observation[:, -2 * cells :].reshape(len(observation), cells, 2) > 0
        bits = np.array([1 << cell for cell in range(cells)], dtype=object)
        moves = []
        for own, other in stones.transpose(0, 2, 1).astype(object) @ bits:
            # A full board has no move; its next step resets it.
            options = values(board, own, other, depth) or {0: 0.0}
            best = max(options.values())
            moves.append(generator.choice([action for action, value in options.items() if value == best]))
        return np.array(moves)

    return play
