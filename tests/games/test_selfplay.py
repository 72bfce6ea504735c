"""Self-play: what the agent learns from both sides, ratings, and what is refused."""

import functools
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
import yaml
from gymnasium import spaces
from lightning.pytorch.callbacks import ModelCheckpoint

from ppo_lightning import PPO, ConfigError, MLPAgent, RolloutDataModule, SelfPlay
from ppo_lightning.algorithms.run_log import episode_means
from ppo_lightning.envs import BatchedEnv
from ppo_lightning.envs.factory import EnvFactory
from ppo_lightning.games.players import agent_player, make_player
from ppo_lightning.games.tournament import play_games, probe_game

ROOT = Path(__file__).parents[2]


def fit(tmp_path, rollouts=6, ckpt_path=None, seed=1, env_id="TicTacToe-v1", data=None, **model):
    """Train on TicTacToe and return the module and its Trainer."""
    L.seed_everything(seed, verbose=False)
    size = {"num_envs": 8, "num_steps": 16}
    settings = {"backend": "envpool", "rollouts_per_epoch": 1} | size | (data or {})
    datamodule = RolloutDataModule(env_id, total_timesteps=8 * 16 * rollouts, **settings)
    algorithm = model.pop("algorithm", SelfPlay)
    ratings = {"rating_games": 0} if algorithm is SelfPlay else {}
    module = algorithm(**{"learning_rate": 1e-3, "agent": small_agent} | ratings | model)
    trainer = L.Trainer(
        max_epochs=-1,
        accelerator="cpu",
        logger=False,
        callbacks=[ModelCheckpoint(tmp_path, save_top_k=-1, filename="{step}", save_last=True)],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, datamodule=datamodule, ckpt_path=ckpt_path)
    return module, trainer


def small_agent(*specs):
    return MLPAgent(*specs, hidden_sizes=(16,))


def flat(module):
    return torch.nn.utils.parameters_to_vector(module.agent.parameters()).detach()


def test_without_ratings_self_play_is_ppo(tmp_path):
    module, _ = fit(tmp_path / "selfplay")
    ppo, _ = fit(tmp_path / "ppo", algorithm=PPO)
    assert torch.equal(flat(module), flat(ppo))


def test_returns_of_both_players_are_logged(tmp_path):
    _, trainer = fit(tmp_path, rollouts=3)
    metrics = trainer.callback_metrics
    first, second = (metrics[f"charts/episodic_return-player{i}"] for i in (0, 1))
    assert first == -second == metrics["charts/episodic_return"]
    assert metrics["charts/episodic_length-player1"] == metrics["charts/episodic_length"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"env_id": "CartPole-v1", "data": {"backend": "gymnasium"}, "rating_games": 2},
            "not a game of two players",
        ),
        ({"rating_games": -1}, "rating_games"),
        ({"rating_opponents": ["missing.ckpt"], "rating_games": 2}, "missing.ckpt"),
        ({"rating_opponents": ["grandmaster"], "rating_games": 2}, "'grandmaster' is unknown"),
        ({"rating_opponents": ["minimax:2"], "rating_games": 2, "env_id": "Hex-v1"}, "minimax plays"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        fit(tmp_path, **options)


def test_means_by_player():
    # Return, length and player: player 0 has two episodes, player 1 one, player 2 none.
    episodes = torch.tensor([[1.0, 10.0, 0.0], [2.0, 20.0, 0.0], [-3.0, 40.0, 1.0]])
    means = episode_means(episodes)
    assert means["charts/episodic_return-player0"] == 1.5
    assert means["charts/episodic_length-player0"] == 15
    assert means["charts/episodic_return-player1"] == -3
    assert not any(name.endswith("player2") for name in means)
    assert means["charts/episodic_return"] == 0
    rows = torch.tensor([[1.0, 10.0, -1.0], [2.0, 20.0, -1.0]])
    turns = episode_means(rows, zero_sum=True)
    assert turns["charts/episodic_return-player0"] == 1.5
    assert turns["charts/episodic_return-player1"] == -1.5
    assert not any("player" in name for name in episode_means(rows))
    assert episode_means(episodes[:0]) == {}


def test_a_validation_rates_the_agent(tmp_path):
    fit(tmp_path / "other", rollouts=2)
    other = str(tmp_path / "other/last.ckpt")
    options = {"rating_games": 20, "rating_opponents": ["minimax:1", "random", other]}
    _, trainer = fit(tmp_path, rollouts=12, **options)
    metrics = trainer.callback_metrics
    assert metrics["charts/elo_low"] < metrics["charts/elo"] < metrics["charts/elo_high"]
    for name in ("random", "minimax:1", other):
        shares = [metrics[f"charts/{outcome}-{name}"] for outcome in ("win", "draw", "loss")]
        assert sum(shares) == pytest.approx(1)
    loaded = SelfPlay.load_from_checkpoint(tmp_path / "last.ckpt")
    trainer.validate(loaded, datamodule=trainer.datamodule)
    assert trainer.callback_metrics["charts/elo"] == metrics["charts/elo"]
    trainer.test(loaded, datamodule=trainer.datamodule)
    assert trainer.callback_metrics["charts/elo"] == metrics["charts/elo"]


class GiftGame(BatchedEnv):
    """Player 0 gives the game to itself (action 0) or the opponent (1). Player 1 moves without effect."""

    num_players = 2

    def __init__(self, num_envs):
        super().__init__(spaces.Box(0, 1, (2,)), spaces.Discrete(2), list(range(num_envs)))
        self.envs = []
        self.mover = np.zeros(num_envs, np.int64)
        self.gift = np.zeros(num_envs)

    def reset_arrays(self, mask=None):
        rows = slice(None) if mask is None else mask
        self.mover[rows] = self.gift[rows] = 0
        return self.observation()

    def observation(self):
        return np.stack([self.mover, self.gift], axis=1).astype(np.float32)

    def _step_arrays(self, action):
        ends = self.mover == 1
        reward = np.where(ends, np.where(self.gift == 1, 1.0, -1.0), 0.0)
        self.gift = np.where(ends, self.gift, action)
        self.mover = np.ones_like(self.mover)
        return self.observation(), reward, ends, np.zeros_like(ends)

    def reseed(self, seeds):
        pass


class WithoutSign(PPO):
    """The reward of the opponent's last step counts as one's own."""

    def advantages(self, rollout):
        rollout["sign"] = rollout["sign"].abs()
        return super().advantages(rollout)


def share_of_gifts(tmp_path, algorithm):
    """Train on the game and return the probability that player 0 gives it to the opponent."""
    data = {"backend": "gymnasium", "rollouts_per_epoch": 1000}
    options = {"algorithm": algorithm, "ent_coef": 0.0, "learning_rate": 5e-3}
    module, _ = fit(tmp_path, rollouts=20, env_id=lambda num_envs: GiftGame(num_envs), data=data, **options)
    observation = torch.zeros(1, 2)
    return module.agent.evaluate(observation, torch.ones(1, dtype=torch.int64)).log_prob.exp().item()


def test_a_player_learns_from_the_reward_of_the_opponents_last_step(tmp_path):
    assert share_of_gifts(tmp_path / "right", PPO) < 0.1
    assert share_of_gifts(tmp_path / "wrong", WithoutSign) > 0.9


@pytest.mark.slow
def test_the_tictactoe_recipe_does_not_lose_against_perfect_play(tmp_path):
    recipe = yaml.safe_load((ROOT / "configs/selfplay/tictactoe.yaml").read_text())
    settings = recipe["model"]["init_args"]
    settings |= {"agent": functools.partial(MLPAgent, **settings["agent"]["init_args"])}
    data = {name: recipe["data"][name] for name in ("num_envs", "num_steps")} | {"rollouts_per_epoch": 1000}
    module, _ = fit(tmp_path, rollouts=recipe["data"]["total_timesteps"] // (8 * 16), data=data, **settings)
    factory = EnvFactory("TicTacToe-v1", "envpool")
    perfect = make_player("minimax:9", "TicTacToe-v1", probe_game(factory))
    assert play_games(factory, agent_player(module.agent, deterministic=True), perfect, 1000).losses == 0
