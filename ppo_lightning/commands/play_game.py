"""Games of ``ppo-lightning play --opponent``: boards as text, other games as a video."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from ppo_lightning.envs.batched import BatchedEnv
from ppo_lightning.envs.factory import EnvFactory
from ppo_lightning.errors import ConfigError
from ppo_lightning.rollouts.minimax import BOARDS
from ppo_lightning.rollouts.players import Player
from ppo_lightning.spaces.specs import mask_columns
from ppo_lightning.video.record import open_video

HUMAN = "human"  # a player who reads moves from the terminal


def play_game(
    factory: EnvFactory,
    players: Mapping[str, Player | None],
    seed: int,
    output: str | Path,
    max_frames: int,
) -> None:
    """Play one game between two players and show it.

    Args:
        factory: Factory of a game of two players.
        players: The two players by name, player 0 first. None: a person at the terminal.
        seed: Seed of the game.
        output: Video file, ``.mp4`` or ``.gif``, of a game whose players act at once.
        max_frames: Maximum number of steps.

    Raises:
        ConfigError: A person plays a game whose players act at once, or the game cannot be recorded.
    """
    probe = factory.make(2, seed, stream="eval")
    assert isinstance(probe, BatchedEnv)
    turn_based = probe.turn_based
    probe.close()
    agents = {name: player for name, player in players.items() if player is not None}
    if not turn_based and len(agents) < 2:
        raise ConfigError("A person can play turn-based games only: give another --opponent.")
    env = factory.make(1 if turn_based else 2, seed, stream="eval", render=not turn_based)
    assert isinstance(env, BatchedEnv)
    generator = np.random.default_rng(seed)
    names = list(players)
    try:
        if turn_based:
            returns = _play_turns(env, factory.env_id, players, generator)
        else:
            returns = _record(env, list(agents.values()), generator, output, max_frames)
            print(f"video: {Path(output).resolve()}")
    except EOFError:
        print("\nThe game was not finished.")
        return
    finally:
        env.close()
    print(", ".join(f"{name}: {value:g}" for name, value in zip(names, returns, strict=True)))


def _play_turns(
    env: BatchedEnv,
    env_id: str | Callable[..., object],
    players: Mapping[str, Player | None],
    generator: np.random.Generator,
) -> np.ndarray:
    """Play a turn-based game in the terminal and return both returns, [2]."""
    names = list(players)
    mask = mask_columns(env.agent_specs[0])
    returns = np.zeros(2)
    observation = env.reset_arrays()
    while True:
        assert env.mover is not None
        mover = int(env.mover[0])
        print(position(str(env_id), observation[0], mover))
        legal = np.flatnonzero(observation[0, mask] > 0).tolist() if mask is not None else None
        name = names[mover]
        player = players[name]
        chosen = ask(legal) if player is None else int(player(observation, generator)[0])
        print(f"{name}: {chosen}\n")
        observation, reward, terminated, truncated = env.step_arrays(np.array([chosen]))
        returns += reward[0] * np.where(np.arange(2) == mover, 1, -1)
        if terminated[0] or truncated[0]:
            print(position(str(env_id), observation[0], int(env.mover[0])))
            return returns


def position(env_id: str, row: np.ndarray, mover: int) -> str:
    """Return a position as text: X is player 0, O is player 1.

    Args:
        env_id: Id of the game.
        row: Observation of the player to move, [D].
        mover: Player to move.

    Example:
        >>> row = np.array([1] * 9 + [1, 0] + [0, 0] * 7 + [0, 1], np.float32)
        >>> print(position("TicTacToe-v1", row, mover=0))
        X . .
        . . .
        . . O
    """
    board = BOARDS.get(env_id)
    if board is None:
        return f"player {mover} moves"
    cells = row[-2 * board.rows * board.columns :].reshape(board.rows, board.columns, 2) > 0
    own, other = ("X", "O") if mover == 0 else ("O", "X")
    return "\n".join(" ".join(own if a else other if b else "." for a, b in line) for line in cells)


def ask(legal: list[int] | None) -> int:
    """Ask for a move until the answer is legal.

    Args:
        legal: Legal moves. None: any number.

    Raises:
        EOFError: The input ended.
    """
    question = "your move: " if legal is None else f"your move ({', '.join(map(str, legal))}): "
    while True:
        answer = input(question).strip()
        if answer.isdecimal() and (legal is None or int(answer) in legal):
            return int(answer)
        print(f"{answer!r} is not a legal move.")


def _record(
    env: BatchedEnv,
    players: Sequence[Player],
    generator: np.random.Generator,
    output: str | Path,
    max_frames: int,
) -> np.ndarray:
    """Record a game whose players act at once and return both returns, [2]."""
    returns = np.zeros(2)
    with open_video(output, env.render_fps) as video:
        observation = env.reset_arrays()
        for _ in range(max_frames):
            picture = env.render()
            if picture is None:
                raise ConfigError("The game cannot be rendered: it has no picture for render_mode rgb_array.")
            video.append_data(picture)
            choices = [player(observation[[row]], generator)[0] for row, player in enumerate(players)]
            observation, reward, terminated, truncated = env.step_arrays(np.array(choices))
            returns += reward
            if (terminated | truncated).all():
                break
    return returns
