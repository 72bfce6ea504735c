"""EnvPool's board and card games: who moves, who gets the reward, and the sign of the advantages."""

import numpy as np
import pytest
import torch

from ppo_lightning import ConfigError, MLPAgent, RecurrentPPO, RolloutDataModule, make_env
from ppo_lightning.algorithms import losses
from ppo_lightning.rollouts import RolloutCollector
from ppo_lightning.rollouts.storage import perspective

GAMES = [
    "TicTacToe-v1",
    "ConnectFour-v1",
    "KuhnPoker-v1",
    "LeducHoldem-v1",
    "Othello-v1",
    "Hex-v1",
    "Backgammon-v1",
]


def legal_moves(env, observation, generator):
    """Return a random legal move of each game."""
    masks = observation[:, : env.spaces[1].n]
    return np.array([generator.choice(np.flatnonzero(mask)) for mask in masks])


@pytest.mark.parametrize("game", GAMES)
def test_random_games_end_with_opposite_returns(game):
    env = make_env(game, 3, backend="envpool", seed=1)
    generator = np.random.default_rng(0)
    observation = env.reset_arrays()
    returns = np.zeros((3, 2))
    games = 0
    for _ in range(400):
        mover = env.mover
        observation, reward, terminated, truncated = env.step_arrays(legal_moves(env, observation, generator))
        returns[np.arange(3), mover] += reward
        done = terminated | truncated
        games += done.sum()
        assert not (~env.valid & done).any()
        assert not reward[~env.valid].any()
        assert set(env.mover.tolist()) <= {0, 1}
    assert games
    assert returns.any()
    env.close()


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
    env.close()


class Scripted(MLPAgent):
    """An agent that plays given moves."""

    moves = (0, 3, 1, 4, 2)  # the first player completes the row 0, 1, 2

    def array_policy(self):
        """Play the next free cell of the script."""

        def policy(observation, noise, memory):
            stones = observation[:, 9:].reshape(len(observation), 9, 2).sum((1, 2)).astype(int)
            return np.array([self.moves[count % 5] for count in stones]), None, None

        return policy


def test_advantages_of_a_game_computed_by_hand():
    env = make_env("TicTacToe-v1", 1, backend="envpool", seed=3)
    rollout = RolloutCollector(env, Scripted(*env.agent_specs), num_steps=12).rollout()
    first = rollout["player"][0, 0].item()
    players = [first, 1 - first, first, 1 - first, first]
    assert rollout["player"][0, :5, 0].tolist() == players
    assert rollout["next", "reward"][0, :6, 0].tolist() == [0, 0, 0, 0, 1, 0]
    assert rollout["next", "episode_reward"][0, 4].item() == (1 if first == 0 else -1)
    assert rollout["valid"][0].tolist() == [True] * 5 + [False] + [True] * 5 + [False]
    reward, terminated, done = (rollout["next", key].squeeze(-1) for key in ("reward", "terminated", "done"))

    def advantages(gamma, gae_lambda, value):
        next_value = value.roll(-1, dims=1)
        return losses.gae(
            reward, value, next_value, terminated, done, gamma, gae_lambda, perspective(rollout)
        )

    # Without discount and critic, each step gets the result of the game from its player's view.
    advantage, _ = advantages(1.0, 1.0, torch.zeros(1, 12))
    assert advantage[0, :5].tolist() == [1, -1, 1, -1, 1]
    # gamma 0.5, lambda 0: the loser's last step has the TD error 0 - 0.5 * V(winner) - V(loser).
    value = torch.zeros(1, 12)
    value[0, 3:5] = torch.tensor([-0.4, 0.6])
    advantage, target = advantages(0.5, 0.0, value)
    assert advantage[0, 3:5].tolist() == pytest.approx([0 - 0.5 * 0.6 + 0.4, 1 - 0.6])
    assert target[0, 3].item() == pytest.approx(-0.3)
    # gamma 0.5, lambda 1: 1, -0.5, 0.25, -0.125, 0.0625 from the last step backwards.
    advantage, _ = advantages(0.5, 1.0, torch.zeros(1, 12))
    assert advantage[0, :5].tolist() == [0.0625, -0.125, 0.25, -0.5, 1]
    env.close()


@pytest.mark.parametrize(
    "env_id, message", [("SparrowMahjong-v1", "3 players"), ("TicTacTo-v1", "TicTacToe-v1")]
)
def test_unplayable_games_are_refused(env_id, message):
    with pytest.raises(ConfigError, match=message):
        make_env(env_id, 2, backend="envpool")


def test_a_memory_is_refused(tmp_path):
    import lightning as L

    data = RolloutDataModule("TicTacToe-v1", "envpool", num_envs=4, num_steps=8, total_timesteps=64)
    module = RecurrentPPO(agent=lambda *specs: MLPAgent(*specs, memory="lstm", shared=True))
    trainer = L.Trainer(max_epochs=-1, accelerator="cpu", logger=False, default_root_dir=tmp_path)
    with pytest.raises(ConfigError, match="would share"):
        trainer.fit(module, datamodule=data)
