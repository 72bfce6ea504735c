"""Self-play: what the agent learns from both sides, ratings, and what is refused."""

import functools

import numpy as np
import pytest
import torch
import yaml
from torch.utils.data import DataLoader

from ppo_lightning import PPO, ConfigError, MLPAgent, SelfPlay
from ppo_lightning.envs.factory import EnvFactory
from ppo_lightning.games.players import agent_player, make_player
from ppo_lightning.games.tournament import play_games, probe_game
from ppo_lightning.spaces.specs import stored
from tests.helpers import ROOT, SaveAfter, weights

TICTACTOE = {"env_id": "TicTacToe-v1", "backend": "envpool", "num_envs": 8, "num_steps": 16}


@pytest.fixture
def learn(fit):
    """Return a function that trains a small agent, without ratings unless the options say so."""

    def run(
        rollouts=6, data=None, ppo=SelfPlay, rating_games=0, limit_val_batches=0, callbacks=None, **model
    ):
        data = TICTACTOE | {"total_timesteps": 128 * rollouts} | (data or {})
        model |= {"rating_games": rating_games} if ppo is SelfPlay else {}
        model = {"agent": functools.partial(MLPAgent, hidden_sizes=(16,)), "learning_rate": 1e-3} | model
        return fit(data, model, ppo=ppo, limit_val_batches=limit_val_batches, callbacks=callbacks)

    return run


def test_without_ratings_self_play_is_ppo(learn):
    assert torch.equal(weights(learn()), weights(learn(ppo=PPO)))


def test_predict_needs_no_game(learn, make_trainer):
    module = learn(1, rating_games=2)
    rows = torch.ones(4, *stored(module.observation_spec).shape)
    assert len(make_trainer().predict(module, DataLoader(rows))) == 4


def test_returns_of_both_players_are_logged(learn):
    metrics = learn(3).trainer.callback_metrics
    first, second = (metrics[f"charts/episodic_return-player{i}"] for i in (0, 1))
    assert first == -second == metrics["charts/episodic_return"]
    assert metrics["charts/episodic_length-player1"] == metrics["charts/episodic_length"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": {"env_id": "CartPole-v1", "backend": "gymnasium"}}, "not a game of two players"),
        ({"rating_games": -1}, "rating_games"),
        ({"rating_opponents": ["grandmaster"]}, "'grandmaster' is unknown"),
    ],
)
def test_settings_that_cannot_work_are_refused(learn, options, message):
    with pytest.raises(ConfigError, match=message):
        learn(**{"rating_games": 2} | options)


def test_a_validation_rates_the_agent(learn, tmp_path):
    other, last = str(tmp_path / "other.ckpt"), tmp_path / "last.ckpt"
    learn(2, callbacks=[SaveAfter(other, 2)])
    options = {"rating_games": 20, "rating_opponents": ["minimax:1", "random", other]}
    trainer = learn(12, callbacks=[SaveAfter(last, 12)], limit_val_batches=1, **options).trainer
    metrics = trainer.callback_metrics.copy()
    assert metrics["charts/elo_low"] < metrics["charts/elo"] < metrics["charts/elo_high"]
    for name in ("random", "minimax:1", other):
        shares = [metrics[f"charts/{outcome}-{name}"] for outcome in ("win", "draw", "loss")]
        assert sum(shares) == pytest.approx(1)
    loaded = SelfPlay.load_from_checkpoint(last)
    for evaluate in (trainer.validate, trainer.test):
        evaluate(loaded, datamodule=trainer.datamodule, verbose=False)
        assert trainer.callback_metrics["charts/elo"] == metrics["charts/elo"]
    loaded.hparams.rating_games = 100
    loaded.hparams.rating_opponents = ()  # two players have a closed form, with one more draw
    trainer.validate(loaded, datamodule=trainer.datamodule, verbose=False)
    elo, *shares = (
        trainer.callback_metrics[f"charts/{name}"]
        for name in ("elo", *(f"{x}-random" for x in ("win", "draw", "loss")))
    )
    win, draw, loss = (100 * float(share) for share in shares)
    assert win != loss
    assert elo == pytest.approx(400 * np.log10((win + draw / 2 + 0.5) / (loss + draw / 2 + 0.5)), abs=1e-3)


@pytest.mark.slow
def test_the_tictactoe_recipe_does_not_lose_against_perfect_play(learn):
    recipe = yaml.safe_load((ROOT / "configs/selfplay/tictactoe.yaml").read_text())
    settings = recipe["model"]["init_args"]
    settings |= {"agent": functools.partial(MLPAgent, **settings["agent"]["init_args"])}
    data = {name: recipe["data"][name] for name in ("num_envs", "num_steps", "total_timesteps")}
    agent = learn(data=data, **settings).agent
    factory = EnvFactory("TicTacToe-v1", "envpool")
    perfect = make_player("minimax:9", "TicTacToe-v1", probe_game(factory))
    assert play_games(factory, agent_player(agent, deterministic=True), perfect, 1000).losses == 0
