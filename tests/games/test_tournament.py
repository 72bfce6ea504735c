"""Games between two players: minimax, sides, results."""

import numpy as np
import pytest
from gymnasium import spaces

from ppo_lightning import ConfigError, MLPAgent
from ppo_lightning.envs import BatchedEnv
from ppo_lightning.envs.factory import EnvFactory
from ppo_lightning.games.minimax import BOARDS, minimax_player, values
from ppo_lightning.games.players import agent_player, make_player, random_player
from ppo_lightning.games.tournament import play_games, probe_game, round_robin

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
    ("rows", "moves"),
    [
        (["XXX...."], {3}),  # wins
        (["OOO...."], {3}),  # blocks
        (["OOO....", "XXX...."], {3}),
        (["X......", "X......", "X......"], {0}),
        ([".O.....", ".OX....", ".OX...."], {1}),
        (["OOO.XXX"], {3}),
    ],
)
def test_minimax_of_depth_2_wins_and_blocks(rows, moves):
    chosen = {
        int(player("minimax:2", CONNECT_FOUR)(connect_four(*rows), np.random.default_rng(i))[0])
        for i in range(20)
    }
    assert chosen == moves


def test_minimax_of_depth_1_does_not_block():
    choices = {
        int(minimax_player("ConnectFour-v1", 1)(connect_four("OOO...."), np.random.default_rng(i))[0])
        for i in range(50)
    }
    assert choices == set(range(7))


def test_the_rules_of_minimax_are_those_of_the_game():
    """A stone that minimax calls a win ends the real game."""
    for factory in (TICTACTOE, CONNECT_FOUR):
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


def test_random_players_are_equal():
    random = player("random", CONNECT_FOUR)
    result = play_games(CONNECT_FOUR, random, random, 600)
    assert abs(result.wins - result.losses) < 72
    assert result.games == 600


def test_results_are_from_the_view_of_the_first_player():
    strong, weak = player("minimax:2", CONNECT_FOUR), player("random", CONNECT_FOUR)
    first = play_games(CONNECT_FOUR, strong, weak, 101)
    second = play_games(CONNECT_FOUR, weak, strong, 101)
    assert first.wins > 80 > 20 > second.wins
    assert first.games == second.games == 101


def test_each_pair_plays_once_and_ranks_share_the_pairs():
    players = {name: player(name) for name in ("random", "minimax:1", "minimax:9")}
    whole = round_robin(TICTACTOE, players, 20)
    assert list(whole) == [("random", "minimax:1"), ("random", "minimax:9"), ("minimax:1", "minimax:9")]
    shares = [round_robin(TICTACTOE, players, 20, rank=rank, world_size=2) for rank in (0, 1)]
    assert shares[0] | shares[1] == whole
    assert not shares[0].keys() & shares[1].keys()


def test_an_agent_plays_legal_moves():
    agent = MLPAgent(*TICTACTOE.specs(), hidden_sizes=(8,))
    for deterministic in (False, True):
        result = play_games(TICTACTOE, agent_player(agent, deterministic), player("minimax:9"), 50)
        assert result.wins == 0  # an illegal move loses, a legal one cannot win
        assert result.draws > 0 or deterministic


class HigherNumberWins(BatchedEnv):
    """Both players name a number at each of three steps; the higher one gets the reward 1, the other -1."""

    num_players = 2

    def __init__(self, seeds):
        super().__init__(spaces.Box(-1, 1, (1,)), spaces.Discrete(5), seeds)
        self.envs = []

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
        return (
            self.reset_arrays(np.zeros(self.num_envs, bool)),
            np.sign(own - other).astype(float),
            done,
            done & False,
        )

    def reseed(self, seeds):
        pass


class Factory:
    def make(self, num_envs, seed=1, first_env=0, stream="eval", render=False):
        return HigherNumberWins(list(range(num_envs)))


def test_simultaneous_games_have_both_sides():
    seen = []

    def high(observation, generator):
        seen.extend(observation[:, 0].tolist())
        return np.full(len(observation), 4)

    def low(observation, generator):
        return np.zeros(len(observation), int)

    assert play_games(Factory(), high, low, 7) == (7, 0, 0)
    assert play_games(Factory(), low, high, 7) == (0, 0, 7)
    assert play_games(Factory(), low, low, 6) == (0, 6, 0)
    assert set(seen) == {0.0, 1.0}


def test_the_players_change_sides_after_each_game():
    sides = []

    def first(observation, generator):
        sides.append(observation[:, 0].tolist())
        return np.zeros(len(observation), int)

    play_games(Factory(), first, lambda observation, generator: np.zeros(len(observation), int), 5)
    assert sides[0] == [0.0, 1.0, 0.0, 1.0, 0.0]


def test_each_game_counts_once():
    """Games last 3 and 4 steps: only the longer ones reach the step that the late player wins."""
    calls = []

    def late(observation, generator):
        calls.append(1)
        return np.full(len(observation), 4 * (len(calls) > 3))

    def low(observation, generator):
        return np.zeros(len(observation), int)

    assert play_games(Factory(), late, low, 7) == (3, 4, 0)


@pytest.mark.parametrize(
    ("name", "factory", "message"),
    [
        ("grandmaster", TICTACTOE, "unknown"),
        ("minimax:0", TICTACTOE, "at least 1"),
        ("minimax:two", TICTACTOE, "unknown"),
        ("missing.ckpt", TICTACTOE, "missing.ckpt"),
        ("minimax:2", EnvFactory("Hex-v1", "envpool"), "minimax plays TicTacToe-v1 and ConnectFour-v1"),
        ("random", EnvFactory("CartPole-v1"), "not a game of two players"),
    ],
)
def test_players_that_cannot_play_are_refused(name, factory, message):
    with pytest.raises(ConfigError, match=message):
        player(name, factory)


def test_random_play_needs_a_discrete_action():
    with pytest.raises(ConfigError, match="one discrete action"):
        random_player(EnvFactory("Pendulum-v1").make(2))
