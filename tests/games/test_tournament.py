"""Games between two players: minimax, sides, results, and Elo ratings."""

import itertools

import numpy as np
import pytest
from gymnasium import spaces

from ppo_lightning import ConfigError, MLPAgent
from ppo_lightning.envs.batched import Step
from ppo_lightning.envs.factory import EnvFactory
from ppo_lightning.games.env import GameEnv
from ppo_lightning.games.players import BOARDS, agent_player, make_player, values
from ppo_lightning.games.tournament import Outcomes, play_games, probe_game, rate, round_robin

TICTACTOE = EnvFactory("TicTacToe-v1", "envpool")
CONNECT_FOUR = EnvFactory("ConnectFour-v1", "envpool")


def player(name, factory=TICTACTOE):
    return make_player(name, factory.env_id, probe_game(factory))


def connect_four(*rows):
    """Return the observation of a position, rows from the top: X moves."""
    cells = ["." * 7] * (6 - len(rows)) + list(rows)
    board = np.array([[[cell == "X", cell == "O"] for cell in row] for row in cells], np.float32)
    return np.concatenate([np.ones(7), board.ravel()])[None].astype(np.float32)


@pytest.mark.parametrize(
    ("depth", "rows", "moves"),
    [
        (2, ["XXX...."], {3}),  # wins
        (2, ["OOO...."], {3}),  # blocks
        (2, ["OOO....", "XXX...."], {3}),
        (2, ["X......", "X......", "X......"], {0}),
        (2, [".O.....", ".OX....", ".OX...."], {1}),
        (2, ["OOO.XXX"], {3}),
        (1, ["OOO...."], set(range(7))),  # does not block
    ],
)
def test_minimax_looks_ahead(depth, rows, moves):
    minimax = player(f"minimax:{depth}", CONNECT_FOUR)
    assert {int(minimax(connect_four(*rows), np.random.default_rng(i))[0]) for i in range(50)} == moves


def test_minimax_prefers_early_wins():
    """Two cells complete a row at once; after another move, the opponent blocks one of them only."""
    board = BOARDS["TicTacToe-v1"]
    own, other = (
        sum(board.bit(*cell) for cell in cells) for cells in ([(0, 0), (0, 1), (1, 0)], [(1, 1), (2, 2)])
    )
    found = values(board, own, other, 9)
    assert found[2] == found[6] == 1
    assert found[5] == pytest.approx(0.99**2)


@pytest.mark.parametrize("factory", [TICTACTOE, CONNECT_FOUR], ids=lambda factory: factory.env_id)
def test_the_rules_of_minimax_are_those_of_the_game(factory):
    """A stone that minimax calls a win ends the real game."""
    env = factory.make(64, stream="eval")
    board = BOARDS[factory.env_id]
    cells = board.rows * board.columns
    generator = np.random.default_rng(1)
    observation = env.reset_arrays()
    wins = 0
    for _ in range(100):
        legal = observation[:, : -2 * cells] > 0
        action = np.array([generator.choice(np.flatnonzero(row)) for row in legal])
        stones = observation[:, -2 * cells :].reshape(64, cells, 2) > 0
        expected = []
        for game in range(64):
            own, other = (
                sum(board.bit(*divmod(int(cell), board.columns)) for cell in np.flatnonzero(plane))
                for plane in stones[game].T
            )
            value = values(board, own, other, 1).get(int(action[game]))
            expected.append(value == 1)
        observation, reward, *_ = env.step_arrays(action)
        counts = env.valid
        np.testing.assert_array_equal(reward[counts] == 1, np.array(expected)[counts])
        wins += (reward == 1).sum()
    assert wins > 50
    env.close()


def test_perfect_players_draw_and_do_not_lose():
    perfect = player("minimax:9")
    assert play_games(TICTACTOE, perfect, perfect, 50) == (0, 50, 0)
    result = play_games(TICTACTOE, perfect, player("random"), 300)
    assert result.losses == 0
    assert result.wins > 200
    assert max(values(BOARDS["TicTacToe-v1"], 0, 0, 9).values()) == 0


def test_random_play_is_uniform_over_the_legal_actions():
    observation = connect_four().repeat(3000, axis=0)
    observation[:, [1, 4]] = 0
    chosen = player("random", CONNECT_FOUR)(observation, np.random.default_rng(1))
    shares = np.bincount(chosen, minlength=7) / 3000
    np.testing.assert_allclose(shares, [0.2, 0, 0.2, 0.2, 0, 0.2, 0.2], atol=0.03)
    assert not shares[[1, 4]].any()


def test_random_players_are_equal():
    """In PettingZoo's TicTacToe, player 0 begins, and the first move is worth 0.3 points."""
    factory = EnvFactory("pettingzoo/classic/tictactoe_v3", "pettingzoo")
    random = player("random", factory)
    result = play_games(factory, random, random, 300)
    assert abs(result.wins - result.losses) < 48
    assert result.games == 300


def test_each_pair_plays_once_and_ranks_share_the_pairs():
    players = {name: player(name) for name in ("random", "minimax:1", "minimax:9")}
    whole = round_robin(TICTACTOE, players, 20)
    assert list(whole) == [("random", "minimax:1"), ("random", "minimax:9"), ("minimax:1", "minimax:9")]
    shares = [round_robin(TICTACTOE, players, 20, rank=rank, world_size=2) for rank in (0, 1)]
    assert shares[0] | shares[1] == whole
    assert not shares[0].keys() & shares[1].keys()


@pytest.mark.parametrize("deterministic", [False, True])
def test_an_agent_plays_legal_moves(deterministic):
    agent = MLPAgent(*TICTACTOE.specs(), hidden_sizes=(8,))
    result = play_games(TICTACTOE, agent_player(agent, deterministic), player("minimax:9"), 50)
    assert result.wins == 0  # an illegal move loses, a legal one cannot win
    assert result.draws > 0 or deterministic


class HigherNumberWins(GameEnv):
    """Both players name a number at each of three steps; the higher one gets the reward 1, the other -1."""

    num_players = 2

    def __init__(self, seeds):
        super().__init__(spaces.Box(-1, 1, (1,)), spaces.Discrete(5), seeds)

    def reset_arrays(self, mask=None):
        rows = np.ones(self.num_envs, bool) if mask is None else mask
        if mask is None:
            self.steps = np.zeros(self.num_envs, int)
        self.steps[rows] = 0
        return (np.arange(self.num_envs) % 2)[:, None].astype(np.float32)

    def _step_arrays(self, action):
        self.steps += 1
        own, other = action, action.reshape(-1, 2)[:, ::-1].ravel()
        done = self.steps == 3 + np.arange(self.num_envs) // 2 % 2
        observation = self.reset_arrays(np.zeros(self.num_envs, bool))
        return Step(observation, np.sign(own - other).astype(float), done, done & False, done)


class Tie(HigherNumberWins):
    """Both players get 0.3, one of them in two parts, whose sum rounds to another number."""

    def _step_arrays(self, action):
        observation, _, *flags = super()._step_arrays(action)
        rewards = np.array([(0, 0), (0.1, 0), (0.2, 0), (0, 0.3), (0, 0)])[self.steps[::2]]
        return Step(observation, rewards.ravel(), *flags)


class Factory:
    kind = HigherNumberWins

    def make(self, num_envs, seed=1, first_env=0, stream="eval", render=False):
        return self.kind(list(range(num_envs)))


def first_action(observation, generator):
    return np.zeros(len(observation), int)


def test_equal_sums_of_rewards_are_a_draw(monkeypatch):
    monkeypatch.setattr(Factory, "kind", Tie)
    assert play_games(Factory(), first_action, first_action, 10) == Outcomes(0, 10, 0)


class Names:
    """Player who names a number from a step on, and remembers what it saw."""

    def __init__(self, number, first_step=1):
        self.number, self.first_step, self.seen = number, first_step, []

    def __call__(self, observation, generator):
        self.seen.append(observation[:, 0].tolist())
        return np.full(len(observation), self.number * (len(self.seen) >= self.first_step))


def test_simultaneous_games_have_both_sides_which_change_after_each_game():
    high, low = Names(4), Names(0)
    assert play_games(Factory(), high, low, 7) == (7, 0, 0)
    assert high.seen[0] == [0, 1, 0, 1, 0, 1, 0]
    assert low.seen[0] == [1, 0, 1, 0, 1, 0, 1]
    assert play_games(Factory(), low, high, 7) == (0, 0, 7)
    assert play_games(Factory(), low, low, 6) == (0, 6, 0)


def test_each_game_counts_once():
    """Games last 3 and 4 steps: only the longer ones reach the step that the late player wins."""
    assert play_games(Factory(), Names(4, first_step=4), Names(0), 7) == (3, 4, 0)


@pytest.mark.parametrize(
    ("name", "factory", "message"),
    [
        ("grandmaster", TICTACTOE, "unknown"),
        ("minimax:0", TICTACTOE, "unknown"),
        ("minimax:two", TICTACTOE, "unknown"),
        ("missing.ckpt", TICTACTOE, "missing.ckpt"),
        ("minimax:2", EnvFactory("Hex-v1", "envpool"), "minimax plays TicTacToe-v1 and ConnectFour-v1"),
        ("random", EnvFactory("CartPole-v1"), "not a game of two players"),
    ],
)
def test_players_that_cannot_play_are_refused(name, factory, message):
    with pytest.raises(ConfigError, match=message):
        player(name, factory)


# Ratings


@pytest.mark.parametrize("counts", [(10, 0, 0), (3, 4, 5), (0, 0, 7), (0, 8, 0), (900, 50, 50), (1000, 0, 0)])
def test_two_players_have_a_closed_form(counts):
    """One drawn game is added to the games of a pair, so that unbeaten players have an interval."""
    wins, draws, losses = counts
    odds = (wins + draws / 2 + 0.5) / (losses + draws / 2 + 0.5)
    ratings = rate({("a", "b"): Outcomes(*counts)}, anchor="b")
    assert ratings["a"].elo == pytest.approx(400 * np.log10(odds), abs=1e-6)
    assert ratings["b"].elo == 0
    assert ratings["a"].low < ratings["a"].elo < ratings["a"].high, "also if all games were drawn"
    assert losses + draws or ratings["a"].low < ratings["a"].elo - 50


def test_the_order_of_a_pair_and_of_the_pairs_and_the_anchor_do_not_matter():
    forwards = {("a", "b"): Outcomes(7, 1, 2), ("b", "c"): Outcomes(6, 2, 2), ("a", "c"): Outcomes(9, 0, 1)}
    backwards = {(second, first): Outcomes(*reversed(result)) for (first, second), result in forwards.items()}
    by_a, by_c = (rate(results, anchor) for results, anchor in ((forwards, "a"), (backwards, "c")))
    for name in "abc":
        assert by_a[name].elo - by_a["c"].elo == pytest.approx(by_c[name].elo, abs=1e-6)
    assert rate(forwards, "c") == rate(dict(reversed(forwards.items())), "c")


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


def test_an_interval_has_the_width_of_a_normal_distribution():
    ratings = [rate({("a", "b"): Outcomes(5000, 0, 5000)}, "b", seed)["a"] for seed in range(10)]
    expected = 2 * 1.96 * 400 / np.log(10) / np.sqrt(10_000 * 0.5 * 0.5)
    assert np.mean([rating.high - rating.low for rating in ratings]) == pytest.approx(expected, rel=0.08)


@pytest.mark.parametrize(
    ("true", "width"),
    [
        ({"random": 0.0, "a": 150.0, "b": 300.0}, 150),
        ({"random": 0.0, "b": 1200.0}, np.inf),  # of 100 games, 90 % of the series are won without a loss
    ],
)
def test_intervals_cover_the_true_rating(true, width):
    generator = np.random.default_rng(2)
    runs = [rate(simulated(true, 100, generator), "random", seed)["b"] for seed in range(40)]
    assert np.mean([run.low <= true["b"] <= run.high for run in runs]) >= 0.85
    assert np.mean([run.high - run.low for run in runs]) <= width


@pytest.mark.parametrize(
    ("ab", "bc", "ends"),  # results of a against b and of b against c, finite ends of the interval of a
    [
        ((9, 0, 0), (9, 0, 0), (True, False)),
        ((9, 0, 0), (5, 0, 4), (True, False)),
        ((5, 0, 4), (9, 0, 0), (True, False)),
        ((5, 0, 4), (8, 1, 0), (True, True)),
        ((0, 1, 8), (0, 0, 9), (False, True)),
    ],
)
def test_an_interval_is_open_where_no_point_was_given(ab, bc, ends):
    rating = rate({("a", "b"): Outcomes(*ab), ("b", "c"): Outcomes(*bc)}, "c")["a"]
    assert np.isfinite(rating).tolist() == [True, *ends]
    assert rating.low < rating.elo < rating.high
