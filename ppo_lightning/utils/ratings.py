"""Elo ratings of players from the results of their games."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

ELO_PER_NAT = 400 / np.log(10)  # 400 points are odds of 10 to 1
RESAMPLES = 200


class Outcomes(NamedTuple):
    """Results of games between two players, from the view of the first one.

    Attributes:
        wins: Games that the first player won.
        draws: Drawn games.
        losses: Games that the first player lost.

    Example:
        >>> Outcomes(3, 2, 5).score
        0.4
    """

    wins: int
    draws: int
    losses: int

    @property
    def games(self) -> int:
        """Number of games."""
        return self.wins + self.draws + self.losses

    @property
    def score(self) -> float:
        """Mean result: 1 for a win, 1/2 for a draw."""
        return (self.wins + 0.5 * self.draws) / self.games


class Rating(NamedTuple):
    """Rating of a player.

    Attributes:
        elo: Rating in Elo points.
        low: Lower end of the 95 % interval.
        high: Upper end of the 95 % interval.

    Example:
        >>> Rating(elo=100.0, low=80.0, high=130.0).elo
        100.0
    """

    elo: float
    low: float
    high: float


Results = Mapping[tuple[str, str], Outcomes]


def rate(results: Results, anchor: str, seed: int = 0) -> dict[str, Rating]:
    """Return the ratings of all players, with intervals by a bootstrap over the games.

    The ratings are the most probable ones in the model of Bradley and Terry, in which a draw counts as half a
    win. Each pair that met has one drawn game more, which keeps the rating of a player who won all games
    finite. The bootstrap draws from these games too, so that the interval of such a player has a width.

    Args:
        results: Outcomes by the names of two players. Each pair appears once.
        anchor: Player whose rating is 0.
        seed: Seed of the bootstrap.

    Source: Bradley and Terry, "Rank Analysis of Incomplete Block Designs" (1952); Hunter, "MM Algorithms for
    Generalized Bradley-Terry Models" (2004).

    Example:
        >>> ratings = rate({("a", "b"): Outcomes(10, 0, 0)}, anchor="b")
        >>> round(ratings["a"].elo)  # 10.5 of 11 points
        529
    """
    results = dict(sorted(results.items()))  # the draws do not depend on the order of the pairs
    names = sorted({name for pair in results for name in pair})
    index = {name: i for i, name in enumerate(names)}
    pairs = np.array([[index[first], index[second]] for first, second in results])
    counts = np.array(list(results.values()), dtype=np.int64)  # [pairs, 3]
    ratings = _elo(pairs, counts, len(names), index[anchor])
    generator = np.random.default_rng(seed)
    games = counts.sum(1)
    shares = (counts + np.array([0, 1, 0])) / (games[:, None] + 1)
    resampled = np.array(
        [
            _elo(pairs, generator.multinomial(games, shares), len(names), index[anchor])
            for _ in range(RESAMPLES)
        ]
    )
    low, high = np.percentile(resampled, [2.5, 97.5], axis=0)
    return {name: Rating(*map(float, (ratings[i], low[i], high[i]))) for name, i in index.items()}


def _elo(pairs: np.ndarray, counts: np.ndarray, num_players: int, anchor: int) -> np.ndarray:
    """Return the Elo ratings, [K].

    Args:
        pairs: Indices of the two players of each pair, [P, 2].
        counts: Wins, draws and losses of each pair, [P, 3].
        num_players: Number of players K.
        anchor: Index of the player whose rating is 0.
    """
    games = counts.sum(1) + 1.0
    points = counts[:, 0] + 0.5 * counts[:, 1] + 0.5
    first, second = pairs.T
    strength = np.zeros(num_players)  # logarithm of the odds against the anchor
    free = np.delete(np.arange(num_players), anchor)
    for _ in range(100):  # Newton's method; the likelihood is concave
        expected = 1 / (1 + np.exp(strength[second] - strength[first]))
        gradient = np.zeros(num_players)
        np.add.at(gradient, first, points - games * expected)
        np.add.at(gradient, second, games * expected - points)
        information = games * expected * (1 - expected)
        hessian = np.zeros((num_players, num_players))
        for row, column, sign in ((first, first, 1), (second, second, 1), (first, second, -1)):
            np.add.at(hessian, (row, column), sign * information)
        np.add.at(hessian, (second, first), -information)
        step = np.linalg.lstsq(hessian[np.ix_(free, free)], gradient[free], rcond=None)[0]
        strength[free] += np.clip(step, -1, 1)
        if np.abs(step).max(initial=0) < 1e-9:
            break
    return strength * ELO_PER_NAT
