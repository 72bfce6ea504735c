"""Elo ratings against closed forms and simulated games."""

import itertools

import numpy as np
import pytest

from ppo_lightning.games.tournament import Outcomes, rate


@pytest.mark.parametrize("counts", [(10, 0, 0), (3, 4, 5), (0, 0, 7), (0, 8, 0), (900, 50, 50)])
def test_two_players_have_a_closed_form(counts):
    """One drawn game is added to the games of a pair."""
    wins, draws, losses = counts
    odds = (wins + draws / 2 + 0.5) / (losses + draws / 2 + 0.5)
    ratings = rate({("a", "b"): Outcomes(*counts)}, anchor="b")
    assert ratings["a"].elo == pytest.approx(400 * np.log10(odds), abs=1e-6)
    assert ratings["b"].elo == 0


def test_the_order_of_a_pair_and_the_anchor_do_not_matter():
    forwards = {("a", "b"): Outcomes(7, 1, 2), ("b", "c"): Outcomes(6, 2, 2), ("a", "c"): Outcomes(9, 0, 1)}
    backwards = {(second, first): Outcomes(*reversed(result)) for (first, second), result in forwards.items()}
    by_a, by_c = (rate(results, anchor) for results, anchor in ((forwards, "a"), (backwards, "c")))
    for name in "abc":
        assert by_a[name].elo - by_a["c"].elo == pytest.approx(by_c[name].elo, abs=1e-6)


def simulated(true, games, generator):
    """Return the results of a round robin between players of known ratings."""
    results = {}
    for first, second in itertools.combinations(true, 2):
        expected = 1 / (1 + 10 ** ((true[second] - true[first]) / 400))
        wins = int(generator.binomial(games, expected))
        results[first, second] = Outcomes(wins, 0, games - wins)
    return results


def test_ratings_of_simulated_games_are_recovered():
    true = {"random": 0.0, "a": 250.0, "b": 400.0, "c": -100.0}
    ratings = rate(simulated(true, 20_000, np.random.default_rng(1)), "random")
    for name, value in true.items():
        assert ratings[name].elo == pytest.approx(value, abs=8)


def test_intervals_cover_the_true_rating():
    true = {"random": 0.0, "a": 150.0, "b": 300.0}
    generator = np.random.default_rng(2)
    runs = [rate(simulated(true, 100, generator), "random", seed)["b"] for seed in range(60)]
    covered = np.mean([run.low <= 300 <= run.high for run in runs])
    assert covered >= 0.85
    assert np.mean([run.high - run.low for run in runs]) < 150


def test_the_rating_of_a_player_who_won_all_games_is_finite():
    ratings = rate({("a", "b"): Outcomes(1000, 0, 0), ("b", "c"): Outcomes(1000, 0, 0)}, "c")
    assert ratings["a"].elo > ratings["b"].elo > 1000
    assert np.isfinite(ratings["a"].high)


@pytest.mark.parametrize("games", [10, 1000])
def test_the_interval_of_a_player_who_won_all_games_has_a_width(games):
    rating = rate({("a", "b"): Outcomes(games, 0, 0)}, "b")["a"]
    assert rating.low < rating.elo - 50
    assert rating.low <= rating.elo <= rating.high


def test_the_order_of_the_pairs_does_not_change_the_intervals():
    results = {("a", "b"): Outcomes(7, 1, 2), ("b", "c"): Outcomes(6, 2, 2), ("a", "c"): Outcomes(9, 0, 1)}
    assert rate(results, "c") == rate(dict(reversed(results.items())), "c")
