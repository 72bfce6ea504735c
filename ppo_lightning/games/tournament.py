"""Games between two players, round robins, and Elo ratings from their results."""

import contextlib
import itertools
import warnings
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ppo_lightning.envs import EnvFactory
from ppo_lightning.errors import ConfigError
from ppo_lightning.games.env import GameEnv
from ppo_lightning.games.players import Player

MAX_STEPS = 30_000
ELO_PER_NAT = 400 / np.log(10)  # 400 points are odds of 10 to 1
RESAMPLES = 200


class Outcomes(NamedTuple):
    """Numbers of games between two players by result, from the view of the first one."""

    wins: int
    draws: int
    losses: int

    @property
    def games(self) -> int:
        """Number of all games."""
        return sum(self)


class Rating(NamedTuple):
    """Rating of a player in Elo points, with the ends of the 95 % interval."""

    elo: float
    low: float
    high: float


def probe_game(factory: EnvFactory) -> GameEnv:
    """Return a closed environment of a game of two players, for its specs."""
    env = factory.make(2, stream="eval")
    env.close()
    if not isinstance(env, GameEnv) or env.num_players != 2:
        what = f"{factory.env_id!r} is not a game of two players, as tournaments and ratings need"
        raise ConfigError(f"{what}: name one, or set model.rating_games to 0 to train.")
    return env


def play_games(
    factory: EnvFactory,
    first: Player,
    second: Player,
    num_games: int,
    seed: int = 1,
    watch: Callable[[GameEnv], None] = lambda env: None,
    render: bool = False,
) -> Outcomes:
    """Play whole games between two players, who change sides after each game.

    The winner has the higher sum of the game's own rewards. A game that has not ended after 30 000 steps is
    decided by its rewards so far, with a warning.

    Args:
        factory: Factory of a game of two players.
        first: First player, who is player 0 in games 0, 2, ...
        second: Second player.
        num_games: Number of games.
        seed: Seed of the games and of the players' noise.
        watch: Called before each step and at the end with the environment.
        render: Make the first game able to render.

    Raises:
        ConfigError: The environment is not a game of two players.
    """
    generator = np.random.default_rng(seed)
    num_rows = num_games * probe_game(factory).rows_per_game
    env: Any = factory.make(num_rows, seed, stream="eval", render=render)
    game = np.arange(num_rows) * num_games // num_rows
    margin = np.zeros(num_games)  # return of the first player minus that of the second one
    over = np.zeros(num_rows, bool)
    with contextlib.closing(env):
        observation = env.reset_arrays()
        for _ in range(MAX_STEPS):
            watch(env)
            is_first = (env.mover + game) % 2 == 0
            choices = [
                (rows, choose(observation[rows], generator))
                for rows, choose in ((is_first, first), (~is_first, second))
                if rows.any()
            ]
            action = np.zeros((num_rows, *choices[0][1].shape[1:]), choices[0][1].dtype)
            for rows, chosen in choices:
                action[rows] = chosen
            step = env.step_arrays(action)
            observation = step.observation
            np.add.at(margin, game, np.where(over, 0, np.where(is_first, step.reward, -step.reward)))
            over |= step.over
            if over.all():
                break
            done = step.terminated | step.truncated
            if done.any():
                observation = np.array(env.reset_arrays(done))
        else:
            count = int((~over).sum())
            warnings.warn(f"{count} rows have not ended and count by their rewards so far.", stacklevel=2)
        watch(env)
    margin = margin.round(6)  # 0.1 + 0.2 - 0.3 is a draw
    return Outcomes(int((margin > 0).sum()), int((margin == 0).sum()), int((margin < 0).sum()))


def round_robin(
    factory: EnvFactory,
    players: Mapping[str, Player],
    num_games: int,
    seed: int = 1,
    rank: int = 0,
    world_size: int = 1,
) -> dict[tuple[str, str], Outcomes]:
    """Let each pair of players play, and return the outcomes of the pairs that this rank played.

    The games of a pair depend on the seed and on the two names only.
    """
    outcomes = {}
    for first, second in list(itertools.combinations(players, 2))[rank::world_size]:
        pair_seed = zlib.crc32(f"{seed} {first} {second}".encode()) >> 1
        outcomes[first, second] = play_games(factory, players[first], players[second], num_games, pair_seed)
    return outcomes


def rate(results: Mapping[tuple[str, str], Outcomes], anchor: str, seed: int = 0) -> dict[str, Rating]:
    """Return the ratings of all players, with intervals by a bootstrap over the games.

    The ratings are the most probable ones in the model of Bradley and Terry, in which a draw counts as half a
    win. One draw is added to each pair, so that a player who won every game still has a finite rating. The
    interval of such a player has no upper end, and its lower end is finite because the bootstrap draws from
    one game more, which is a win, a draw and a loss in equal parts.

    Args:
        results: Outcomes by the names of two players. Each pair appears once.
        anchor: Player whose rating is 0.
        seed: Seed of the bootstrap.

    Source: Bradley and Terry, "Rank Analysis of Incomplete Block Designs" (1952).

    Example:
        >>> ratings = rate({("a", "b"): Outcomes(10, 0, 0)}, anchor="b")
        >>> round(ratings["a"].elo)  # 10.5 of 11 points
        529
    """
    results = dict(sorted(results.items()))  # the draws do not depend on the order of the pairs
    names = sorted({name for pair in results for name in pair})
    # One row per pair: 1 for the first player, -1 for the second. The anchor has no column.
    sides = np.array([[(name == first) - (name == second) for name in names] for first, second in results])
    sides[:, names.index(anchor)] = 0
    counts = np.array(list(results.values()), dtype=np.int64)  # [pairs, 3]
    games = counts.sum(1)
    shares = (counts + 1 / 3) / (games[:, None] + 1)  # so that no result is impossible
    generator = np.random.default_rng(seed)
    resampled = [_elo(sides, generator.multinomial(games, shares)) for _ in range(RESAMPLES)]
    low, high = np.percentile(resampled, [2.5, 97.5], axis=0)
    gave = np.eye(len(names), dtype=bool)  # whether one player gave points to another
    for (first, second), result in results.items():
        i, j = names.index(first), names.index(second)
        gave[i, j], gave[j, i] = result.wins < result.games, result.losses < result.games
    gave = np.linalg.matrix_power(gave, len(names))  # directly or by way of others
    high[~gave[:, names.index(anchor)]] = np.inf
    low[~gave[names.index(anchor)]] = -np.inf
    ends = zip(names, _elo(sides, counts), low, high, strict=True)
    return {name: Rating(*map(float, rating)) for name, *rating in ends}


def _elo(sides: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the Elo ratings [K] from the ``sides`` [P, K] and ``counts`` [P, 3] of :func:`rate`."""
    games = counts.sum(1) + 1.0
    points = counts[:, 0] + 0.5 * counts[:, 1] + 0.5
    strength = np.zeros(sides.shape[1])  # logarithm of the odds against the anchor
    for _ in range(100):  # Newton's method; the likelihood is concave
        expected = 1 / (1 + np.exp(-sides @ strength))
        hessian = sides.T @ (sides * (games * expected * (1 - expected))[:, None])
        step = np.linalg.lstsq(hessian, sides.T @ (points - games * expected), rcond=None)[0]
        strength += np.clip(step, -1, 1)
        if np.abs(step).max() < 1e-9:
            break
    return strength * ELO_PER_NAT
