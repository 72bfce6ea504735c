"""``ppo-lightning tournament`` and ``play --opponent``, with checkpoints of a short run."""

import re
import shutil

import imageio.v2 as imageio
import lightning as L
import pytest

from ppo_lightning import MLPAgent, RolloutDataModule, SelfPlay
from ppo_lightning.commands import cli
from ppo_lightning.commands.tournament import result_table
from ppo_lightning.games.tournament import Outcomes, Rating


def checkpoint(folder, env_id, backend="envpool", **data):
    """Train for two rollouts and return the path of a checkpoint."""
    L.seed_everything(1, verbose=False)
    datamodule = RolloutDataModule(env_id, backend, num_envs=8, num_steps=16, total_timesteps=256, **data)
    module = SelfPlay(rating_games=0, agent=small_agent)
    trainer = L.Trainer(
        max_epochs=-1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(module, datamodule=datamodule)
    trainer.save_checkpoint(folder / "last.ckpt")
    return folder / "last.ckpt"


def small_agent(*specs):
    return MLPAgent(*specs, hidden_sizes=(8,))


@pytest.fixture(scope="module")
def tictactoe(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("tictactoe"), "TicTacToe-v1")


def test_a_tournament_prints_results_and_ratings(tictactoe, tmp_path, capsys):
    again = tmp_path / "again" / "last.ckpt"
    again.parent.mkdir()
    shutil.copy(tictactoe, again)
    names = [str(tictactoe), str(again), "minimax:9", "random"]
    cli.main(["tournament", *names, "--games", "30"])
    header, *lines = capsys.readouterr().out.strip().splitlines()
    assert "Elo (random = 0)" in header
    rows = [re.split("  +", line) for line in lines]
    assert {row[1] for row in rows} == set(names)
    assert rows[0][1] == "minimax:9"
    cells = [row[-4:] for row in rows]
    for i in range(4):
        assert cells[i][i] == "-"
        for j in range(4):
            if i != j:  # the other player's view
                assert cells[i][j].split("/") == cells[j][i].split("/")[::-1]
    rated = next(row for row in rows if row[1] == "random")
    assert rated[2] == "0" and rows[0][int(rated[0]) - 1 + len(rows[0]) - 4].endswith("/0")


def test_the_first_player_is_the_anchor_without_random_play(tictactoe, capsys):
    cli.main(["tournament", str(tictactoe), "minimax:9", "--games", "10", "--deterministic"])
    assert f"Elo ({tictactoe} = 0)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("players", "message"),
    [
        (["random"], "two different players"),
        (["random", "random"], "two different players"),
        (["random", "minimax:9"], "No player is a checkpoint"),
        (["{}", "random", "--games", "0"], "--games is 0"),
        (["{}", "grandmaster"], "is unknown"),
        (["{}", "missing.ckpt"], "missing.ckpt"),
    ],
)
def test_tournaments_that_cannot_be_played_are_refused(tictactoe, capsys, players, message):
    with pytest.raises(SystemExit) as end:
        cli.main(["tournament", *(name.format(tictactoe) for name in players)])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_checkpoints_of_different_games_are_refused(tictactoe, tmp_path, capsys):
    other = checkpoint(tmp_path, "KuhnPoker-v1")
    with pytest.raises(SystemExit):
        cli.main(["tournament", str(tictactoe), str(other)])
    assert "need one game" in capsys.readouterr().err


@pytest.mark.parametrize("opponent", ["minimax:9", "random", "{}"])
def test_a_game_is_recorded(tictactoe, tmp_path, capsys, opponent):
    video = tmp_path / "game.gif"
    flags = ["--opponent", opponent.format(tictactoe), "--output", str(video)]
    cli.main(["play", "--ckpt_path", str(tictactoe), *flags])
    assert re.search(r"^the agent (won|lost|drew)$", capsys.readouterr().out, re.M)
    pictures = imageio.mimread(video)
    assert 5 < len(pictures) <= 10


def test_an_agent_is_recorded_against_itself(tictactoe, tmp_path):
    video = tmp_path / "game.gif"
    cli.main(["play", "--ckpt_path", str(tictactoe), "--output", str(video)])
    assert 5 < len(imageio.mimread(video)) <= 10


def test_the_table_has_both_views():
    ratings = {"a": Rating(0, 0, 0), "b": Rating(100, 50, 150)}
    rows = result_table({("a", "b"): Outcomes(1, 1, 2)}, ratings, "a").splitlines()
    assert rows[1].split() == ["1", "b", "100", "50", "to", "150", "-", "50/25/25"]
    assert rows[2].split() == ["2", "a", "0", "25/25/50", "-"]
