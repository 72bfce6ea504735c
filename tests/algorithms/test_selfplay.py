"""Self-play: the pool of snapshots, its checkpoints, and what is refused."""

import functools
from collections import Counter
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
import yaml
from gymnasium import spaces
from lightning.pytorch.callbacks import ModelCheckpoint

from ppo_lightning import PPO, ConfigError, MLPAgent, RolloutDataModule, SelfPlay
from ppo_lightning.algorithms import ppo
from ppo_lightning.algorithms.run_log import episode_means
from ppo_lightning.envs import BatchedEnv
from ppo_lightning.envs.factory import EnvFactory
from ppo_lightning.rollouts.players import AgentPlayer, make_player
from ppo_lightning.rollouts.tournament import play_games

ROOT = Path(__file__).parents[2]


def fit(tmp_path, rollouts=6, ckpt_path=None, seed=1, env_id="TicTacToe-v1", data=None, **model):
    """Train on TicTacToe and return the module and its Trainer."""
    L.seed_everything(seed, verbose=False)
    size = {"num_envs": 8, "num_steps": 16}
    settings = {"backend": "envpool", "rollouts_per_epoch": 1} | size | (data or {})
    datamodule = RolloutDataModule(env_id, total_timesteps=8 * 16 * rollouts, **settings)
    options = {
        "past_share": 0.5,
        "snapshot_every": 2,
        "learning_rate": 1e-3,
        "agent": small_agent,
        "rating_games": 0,
    } | model
    module = options.pop("algorithm", SelfPlay)(**options)
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


def test_the_pool_holds_the_latest_snapshots(tmp_path):
    module, _ = fit(tmp_path, rollouts=10, pool_size=3)
    assert [snapshot.step for snapshot in module.pool] == [128 * 6, 128 * 8, 128 * 10]
    latest = torch.cat([tensor.flatten() for tensor in module.pool[-1].weights.values()])
    assert torch.equal(latest, torch.cat([t.flatten() for t in module.agent.state_dict().values()]))
    earliest = torch.cat([tensor.flatten() for tensor in module.pool[0].weights.values()])
    assert not torch.equal(latest, earliest)


def test_without_a_share_there_is_no_pool(tmp_path):
    module, trainer = fit(tmp_path, rollouts=4, past_share=0.0)
    assert not module.pool
    assert "charts/score-past" not in trainer.callback_metrics


def test_without_a_pool_self_play_is_ppo(tmp_path):
    module, _ = fit(tmp_path / "selfplay", past_share=0.0)
    unused = {"past_share": None, "snapshot_every": None, "rating_games": None}
    ppo, _ = fit(
        tmp_path / "ppo",
        algorithm=lambda past_share, snapshot_every, rating_games, **model: PPO(**model),
        **unused,
    )
    assert torch.equal(flat(module), flat(ppo))


def test_returns_of_both_players_are_logged(tmp_path):
    _, trainer = fit(tmp_path, rollouts=3)
    metrics = trainer.callback_metrics
    first, second = (metrics[f"charts/episodic_return-player{i}"] for i in (0, 1))
    assert first == -second == metrics["charts/episodic_return"]
    assert metrics["charts/episodic_length-player1"] == metrics["charts/episodic_length"]


@pytest.mark.parametrize(
    ("results", "added"), [(Counter(win=8, loss=2), True), (Counter(win=5, draw=2, loss=3), False)]
)
def test_a_snapshot_may_depend_on_the_score_against_the_latest_one(tmp_path, results, added):
    module, _ = fit(tmp_path, rollouts=3, snapshot_every=3, snapshot_win_rate=0.7)
    assert len(module.pool) == 1  # the first one has nothing to beat
    module._latest = results
    module.env_steps += 128
    module.add_snapshot()
    assert len(module.pool) == 1 + added


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.integration)])
def test_a_resumed_run_has_its_pool(tmp_path, compiled):
    whole, _ = fit(tmp_path / "run", rollouts=8, compile=compiled)
    part, _ = fit(
        tmp_path / "resumed", rollouts=8, ckpt_path=checkpoint_at(tmp_path / "run", 128 * 5), compile=compiled
    )
    assert [snapshot.step for snapshot in part.pool] == [snapshot.step for snapshot in whole.pool]
    for name, tensor in part.pool[0].weights.items():
        assert torch.equal(tensor, whole.pool[0].weights[name])
    assert part.env_steps == whole.env_steps
    assert flat(part).isfinite().all()


def checkpoint_at(folder, step):
    return next(
        path for path in folder.glob("*.ckpt") if torch.load(path, weights_only=True)["env_steps"] == step
    )


def test_a_checkpoint_has_the_pool_and_predicts(tmp_path):
    module, _ = fit(tmp_path)
    loaded = SelfPlay.load_from_checkpoint(tmp_path / "last.ckpt")
    assert [snapshot.step for snapshot in loaded.pool] == [snapshot.step for snapshot in module.pool]
    observation = torch.zeros(2, 27)
    observation[:, 3] = 1  # the only legal move
    assert loaded.predict(observation).tolist() == [3, 3]


def test_a_checkpoint_of_another_algorithm_is_refused(tmp_path):
    unused = {"past_share": None, "snapshot_every": None, "rating_games": None}
    fit(tmp_path, algorithm=lambda past_share, snapshot_every, rating_games, **model: PPO(**model), **unused)
    with pytest.raises(ConfigError, match="no pool of snapshots"):
        SelfPlay.load_from_checkpoint(tmp_path / "last.ckpt")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"env_id": "CartPole-v1", "data": {"backend": "gymnasium"}}, "has 1 players"),
        ({"agent": lambda *specs: MLPAgent(*specs, norm_obs=True)}, "norm_obs"),
        ({"past_share": 1.5}, "past_share"),
        ({"pool_size": 0}, "pool_size"),
        ({"rating_opponents": ["grandmaster"], "rating_games": 2}, "'grandmaster' is unknown"),
        ({"rating_opponents": ["minimax:2"], "rating_games": 2, "env_id": "Hex-v1"}, "minimax plays"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        fit(tmp_path, **options)


def test_a_trial_without_a_snapshot_trains_with_a_warning(tmp_path):
    with pytest.warns(UserWarning, match=r"snapshot_every \(7\) is more than the 2 rollouts of the run"):
        module, _ = fit(tmp_path, rollouts=2, snapshot_every=7)
    assert module.rollouts_done == 2 and not module.pool


def test_means_by_player():
    # Return, length and player: player 0 has two episodes, player 1 one, player 2 none.
    episodes = torch.tensor([[1.0, 10.0, 0.0], [2.0, 20.0, 0.0], [-3.0, 40.0, 1.0]])
    means = episode_means(episodes, num_players=3)
    assert means["charts/episodic_return-player0"] == 1.5
    assert means["charts/episodic_length-player0"] == 15
    assert means["charts/episodic_return-player1"] == -3
    assert not any(name.endswith("player2") for name in means)
    assert means["charts/episodic_return"] == 0
    turns = episode_means(episodes, num_players=2, turn_based=True)
    assert turns["charts/episodic_return-player0"] == 0
    turns = episode_means(episodes[:2], num_players=2, turn_based=True)
    assert turns["charts/episodic_return-player0"] == 1.5
    assert turns["charts/episodic_return-player1"] == -1.5
    assert episode_means(episodes[:0]) == {}


def test_a_validation_rates_the_agent(tmp_path):
    options = {"rating_games": 20, "rating_opponents": ["minimax:1", "random"], "rated_snapshots": 2}
    module, trainer = fit(tmp_path, rollouts=12, **options)
    metrics = trainer.callback_metrics
    assert metrics["charts/elo_low"] < metrics["charts/elo"] < metrics["charts/elo_high"]
    names = ["random", "minimax:1", "step=256", "step=1536"]
    for name in ("random", "minimax:1", "snapshots"):
        assert sum(
            metrics[f"charts/{outcome}-{name}"] for outcome in ("win", "draw", "loss")
        ) == pytest.approx(1)
    assert not any("step=" in name for name in metrics)
    assert {name for pair in module._outcomes for name in pair} == set(names)
    # Players that do not change do not play again, and the results are in the checkpoint.
    loaded = SelfPlay.load_from_checkpoint(tmp_path / "last.ckpt")
    assert loaded._outcomes == module._outcomes
    trainer.validate(loaded, datamodule=trainer.datamodule)
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


def share_of_gifts(tmp_path):
    """Train on the game and return the probability that player 0 gives it to the opponent."""
    data = {"backend": "gymnasium", "rollouts_per_epoch": 1000}
    options = {"algorithm": lambda past_share, snapshot_every, rating_games, **model: PPO(**model)}
    options |= {
        "past_share": None,
        "snapshot_every": None,
        "rating_games": None,
        "ent_coef": 0.0,
        "learning_rate": 5e-3,
    }
    module, _ = fit(tmp_path, rollouts=20, env_id=lambda num_envs: GiftGame(num_envs), data=data, **options)
    observation = torch.zeros(1, 2)
    return module.agent.evaluate(observation, torch.ones(1, dtype=torch.int64)).log_prob.exp().item()


def test_a_player_learns_from_the_reward_of_the_opponents_last_step(tmp_path, monkeypatch):
    assert share_of_gifts(tmp_path / "right") < 0.1
    # Without the sign, the opponent's reward counts as one's own.
    monkeypatch.setattr(ppo, "perspective", lambda rollout: None)
    assert share_of_gifts(tmp_path / "wrong") > 0.9


@pytest.mark.slow
def test_the_tictactoe_recipe_does_not_lose_against_perfect_play(tmp_path):
    recipe = yaml.safe_load((ROOT / "configs/selfplay/tictactoe.yaml").read_text())
    settings = recipe["model"]["init_args"]
    settings |= {"agent": functools.partial(MLPAgent, **settings["agent"]["init_args"])}
    data = {name: recipe["data"][name] for name in ("num_envs", "num_steps", "rollouts_per_epoch")}
    module, _ = fit(tmp_path, rollouts=recipe["data"]["total_timesteps"] // (8 * 16), data=data, **settings)
    factory = EnvFactory("TicTacToe-v1", "envpool")
    perfect = make_player("perfect", "TicTacToe-v1", factory.specs())
    assert play_games(factory, AgentPlayer(module.agent, deterministic=True), perfect, 1000).losses == 0
