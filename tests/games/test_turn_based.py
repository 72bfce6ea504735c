"""Turn-based games: who moves, who gets the reward, the sign of the advantages, and random openings."""

import functools

import numpy as np
import pytest
import torch

from ppo_lightning import ConfigError, MLPAgent, RecurrentPPO, make_env
from ppo_lightning.envs import EnvFactory
from ppo_lightning.rollouts.make_collector import make_collector
from ppo_lightning.utils.seeding import Shard

GAMES = [
    "TicTacToe-v1",
    "ConnectFour-v1",
    "KuhnPoker-v1",
    "LeducHoldem-v1",
    "Othello-v1",
    "Hex-v1",
    "Backgammon-v1",
]


@pytest.mark.parametrize("game", GAMES)
def test_random_games_end_with_rewards(game):
    env = make_env(game, 3, backend="envpool", seed=1)
    rollout = make_collector(env, MLPAgent(*env.agent_specs), 400).rollout()
    reward, terminated = (rollout["next", name].squeeze(-1) for name in ("reward", "terminated"))
    assert terminated.any() and reward.any()
    invalid = rollout["weight"] == 0
    assert not terminated[invalid].any() and not reward[invalid].any()
    assert set(rollout["player"].unique().tolist()) <= {0, 1}


def test_a_row_shows_the_player_to_move():
    env = make_env("TicTacToe-v1", 1, backend="envpool", seed=3)
    env.reset_arrays()
    first = env.mover.copy()
    observation, *_ = env.step_arrays(np.array([4]))
    assert env.mover != first
    board = observation[0, 9:].reshape(9, 2)
    np.testing.assert_array_equal(board[4], [0, 1])  # the stone is the opponent's
    np.testing.assert_array_equal(observation[0, :9], [1, 1, 1, 1, 0, 1, 1, 1, 1])
    observation, *_ = env.step_arrays(np.array([0]))
    board = observation[0, 9:].reshape(9, 2)
    np.testing.assert_array_equal(board[[4, 0]], [[1, 0], [0, 1]])


def test_a_reset_of_all_games_forgets_those_that_ended():
    env = make_env("TicTacToe-v1", 1, backend="envpool", seed=3)
    env.reset_arrays()
    ended = [env.step_arrays(np.array([move]))[2][0] for move in Scripted.moves]
    assert ended == [False] * 4 + [True]
    env.reset_arrays()
    env.step_arrays(np.array([4]))
    assert env.valid.all()


class Scripted(MLPAgent):
    """An agent that plays given moves."""

    moves = (0, 3, 1, 4, 2)  # the first player completes the row 0, 1, 2

    def array_policy(self):
        """Play the next free cell of the script."""

        def policy(observation, noise, memory):
            stones = observation[:, 9:].reshape(len(observation), 9, 2).sum((1, 2)).astype(int)
            return (np.array([self.moves[count % 5] for count in stones]),)

        return policy


def test_the_players_the_winner_and_the_steps_that_count():
    env = make_env("TicTacToe-v1", 1, backend="envpool", seed=3)
    rollout = make_collector(env, Scripted(*env.agent_specs), num_steps=12).rollout()
    first = rollout["player"][0, 0].item()
    players = [first, 1 - first, first, 1 - first, first]
    assert rollout["player"][0, :5, 0].tolist() == players
    assert rollout["next", "reward"][0, :6, 0].tolist() == [0, 0, 0, 0, 1, 0]
    assert rollout["next", "episode_reward"][0, 4].item() == (1 if first == 0 else -1)
    assert rollout["weight"][0].tolist() == [1] * 5 + [0] + [1] * 5 + [0]


@pytest.mark.parametrize(
    ("env_id", "options", "message"),
    [
        ("SparrowMahjong-v1", {}, "3 players"),
        ("TicTacTo-v1", {}, "TicTacToe-v1"),
        ("TicTacToe-v1", {"opening_moves": -1}, "opening_moves"),
        ("TicTacToe-v1", {"opening_moves": "two"}, "opening_moves"),
    ],
)
def test_games_and_openings_that_cannot_be_played(env_id, options, message):
    with pytest.raises(ConfigError, match=message):
        make_env(env_id, 2, "envpool", env_kwargs=options)


def test_a_memory_is_refused(fit):
    data = {"env_id": "TicTacToe-v1", "backend": "envpool", "num_envs": 4, "num_steps": 8}
    agent = functools.partial(MLPAgent, memory="lstm", shared=True)
    with pytest.raises(ConfigError, match="players of a turn-based game would share"):
        fit(data | {"total_timesteps": 64}, {"agent": agent}, ppo=RecurrentPPO)


both_backends = pytest.mark.parametrize(
    ("env_id", "backend"), [("TicTacToe-v1", "envpool"), ("pettingzoo/classic/tictactoe_v3", "pettingzoo")]
)


def openings_of(rollout):
    """Return the number of random moves, and these moves, of each whole game of a rollout."""
    lengths, moves = [], []
    for game in rollout:
        ends = game["next", "episode_done"].squeeze(-1).nonzero().squeeze(-1).tolist()
        resets = (game["observation"][:, 9:].sum(-1) == 0).nonzero().squeeze(-1).tolist()
        for end in ends:
            start = max((step for step in resets if step <= end), default=None)
            if start is None:
                continue
            counted = game["weight"][start : end + 1]
            opening = int(counted.int().argmax())
            assert counted[opening:].all(), "only the first moves are random"
            lengths.append(opening)
            seen = game["observation"][start : start + opening + 1, 9:].reshape(-1, 9, 2).sum(-1)
            moves += seen.diff(dim=0).nonzero()[:, 1].tolist()
    return lengths, moves


@both_backends
def test_openings_are_random_legal_moves_with_weight_0(env_id, backend):
    options = {"env_kwargs": {"opening_moves": 3}}
    env = make_env(env_id, 16, backend, seed=1, **options)
    collector = make_collector(env, MLPAgent(*env.agent_specs), num_steps=128)
    lengths, moves = openings_of(collector.rollout())
    assert set(lengths) == {0, 1, 2, 3}
    assert min(np.bincount(lengths)) > len(lengths) / 8
    assert set(moves) == set(range(9))
    # Matches and evaluations begin at the first position.
    env = make_env(env_id, 16, backend, stream="eval", **options)
    rollout = make_collector(env, MLPAgent(*env.agent_specs), num_steps=5).rollout()
    assert rollout.get("weight", torch.ones(16, 5)).all()


@both_backends
def test_other_seeds_give_other_openings(env_id, backend):
    env = make_env(env_id, 16, backend, seed=1, env_kwargs={"opening_moves": 3})

    def openings(seed):
        env.set_seed(seed)  # as a resumed run that starts fresh episodes
        return make_collector(env, MLPAgent(*env.agent_specs), num_steps=3).rollout()["weight"].clone()

    first, second, again = openings(5), openings(6), openings(5)
    assert not torch.equal(first, second)
    assert torch.equal(first, again)


def test_ranks_have_the_openings_of_one_rank():
    def rollout(num_envs, first_env):
        options = {"first_env": first_env, "env_kwargs": {"opening_moves": 3}}
        env = make_env("TicTacToe-v1", num_envs, "envpool", seed=1, **options)
        torch.manual_seed(1)
        agent = MLPAgent(*env.agent_specs, hidden_sizes=(8,))
        return make_collector(env, agent, 16, shard=Shard(1, first_env, num_envs, 8)).rollout()

    whole, first, second = rollout(8, 0), rollout(4, 0), rollout(4, 4)
    assert not whole["weight"].all()
    for key in ("observation", "weight", "player", ("next", "reward")):
        assert torch.equal(whole[key], torch.cat([first[key], second[key]])), key


def test_a_picture_shows_the_stones():
    env = make_env("TicTacToe-v1", 1, backend="envpool", seed=3)
    env.reset_arrays()
    first = env.mover[0]
    for move in (4, 0):
        env.step_arrays(np.array([move]))
    centers = env.render()[20::40, 20::40]
    colors = [tuple(color.tolist()) for color in centers.reshape(9, 3)]
    red, blue = (200, 60, 50), (50, 90, 200)
    assert (colors[4], colors[0]) == ((red, blue) if first == 0 else (blue, red))
    assert len(set(colors)) == 3


def test_a_board_game_has_no_time_limit():
    factory = EnvFactory("ConnectFour-v1", "envpool")
    assert factory.time_limit(factory.make(2)) is None
