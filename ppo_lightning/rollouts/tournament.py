"""Games between two players, and round robins."""

import itertools
import warnings
import zlib
from collections.abc import Mapping

import numpy as np

from ppo_lightning.envs.batched import BatchedEnv
from ppo_lightning.envs.factory import EnvFactory
from ppo_lightning.errors import ConfigError
from ppo_lightning.rollouts.players import Player
from ppo_lightning.utils.ratings import Outcomes

MAX_STEPS = 30_000
MAX_GAMES_AT_ONCE = 256


def play_games(factory: EnvFactory, first: Player, second: Player, num_games: int, seed: int = 1) -> Outcomes:
    """Play whole games between two players, who change sides after each game.

    The winner has the higher sum of the game's own rewards. A game that has not ended after 30 000 steps is
    decided by its rewards so far, with a warning.

    Args:
        factory: Factory of a game of two players.
        first: First player, who is player 0 in games 0, 2, ...
        second: Second player.
        num_games: Number of games.
        seed: Seed of the games and of the players' noise.

    Returns:
        Outcomes from the view of the first player.

    Raises:
        ConfigError: The environment is not a game of two players.
    """
    generator = np.random.default_rng(seed)
    margins = []
    for start in range(0, num_games, MAX_GAMES_AT_ONCE):
        count = min(MAX_GAMES_AT_ONCE, num_games - start)
        margins.append(_play(factory, (first, second), count, seed + start, generator))
    margin = np.concatenate(margins)
    return Outcomes(int((margin > 0).sum()), int((margin == 0).sum()), int((margin < 0).sum()))


def require_two_players(env: object) -> BatchedEnv:
    """Return the environment if it is a game of two players.

    Raises:
        ConfigError: It is not.
    """
    if not isinstance(env, BatchedEnv) or env.num_players != 2:
        raise ConfigError("data.env_id is not a game of two players, which matches and ratings need.")
    return env


def _play(
    factory: EnvFactory,
    players: tuple[Player, Player],
    num_games: int,
    seed: int,
    generator: np.random.Generator,
) -> np.ndarray:
    """Return the return of the first player minus that of the second one, [num_games]."""
    probe = require_two_players(factory.make(2, seed, stream="eval"))
    turn_based = probe.turn_based
    probe.close()
    rows_per_game = 1 if turn_based else 2
    env = require_two_players(factory.make(num_games * rows_per_game, seed, stream="eval"))
    game = np.repeat(np.arange(num_games), rows_per_game)
    side = np.tile([0, 1], num_games) if rows_per_game == 2 else None  # player of each row
    margin = np.zeros(num_games)
    over = np.zeros(len(game), bool)
    try:
        observation = env.reset_arrays()
        for _ in range(MAX_STEPS):
            player = env.mover if side is None else side
            assert player is not None
            is_first = (player + game) % 2 == 0
            action: np.ndarray | None = None
            for rows, choose in ((is_first, players[0]), (~is_first, players[1])):
                if rows.any():
                    chosen = choose(observation[rows], generator)
                    action = (
                        np.zeros((len(game), *chosen.shape[1:]), chosen.dtype) if action is None else action
                    )
                    action[rows] = chosen
            assert action is not None
            observation, reward, terminated, truncated = env.step_arrays(action)
            gain = np.where(over, 0, np.where(is_first, reward, -reward))
            if side is None:
                margin += gain
            else:
                np.add.at(margin, game, gain)
            done = terminated | truncated
            over |= env.episodes_over(done)
            if over.all():
                break
            if done.any():
                observation = np.array(env.reset_arrays(done))
        else:
            warnings.warn(
                f"{int((~over).sum())} rows have not ended after {MAX_STEPS} steps: their games count by the"
                " rewards so far.",
                stacklevel=3,
            )
    finally:
        env.close()
    return margin


def round_robin(
    factory: EnvFactory,
    players: Mapping[str, Player],
    num_games: int,
    seed: int = 1,
    rank: int = 0,
    world_size: int = 1,
    known: Mapping[tuple[str, str], Outcomes] | None = None,
) -> dict[tuple[str, str], Outcomes]:
    """Let each pair of players play.

    The games of a pair depend on the seed and on the two names only.

    Args:
        factory: Factory of a game of two players.
        players: Players by name.
        num_games: Number of games of each pair.
        seed: Seed.
        rank: This rank, which plays its share of the pairs.
        world_size: Number of ranks.
        known: Outcomes of pairs that need not play again.

    Returns:
        Outcomes of the pairs that this rank played.
    """
    pairs = [pair for pair in itertools.combinations(players, 2) if pair not in (known or {})]
    outcomes = {}
    for first, second in pairs[rank::world_size]:
        pair_seed = zlib.crc32(f"{seed} {first} {second}".encode()) >> 1
        outcomes[first, second] = play_games(factory, players[first], players[second], num_games, pair_seed)
    return outcomes
