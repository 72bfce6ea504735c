"""``ppo-lightning tournament`` and ``play --opponent``, with checkpoints of a short run."""

import functools
import re
import shutil

import imageio.v2 as imageio
import lightning as L
import pytest

from ppo_lightning import MLPAgent, RolloutDataModule, SelfPlay
from ppo_lightning.commands import cli
from ppo_lightning.commands.tournament import result_table
from ppo_lightning.games.tournament import Outcomes, Rating


def checkpoint(folder, env_id, backend="envpool"):
    """Train for two rollouts and return the path of a checkpoint."""
    data = RolloutDataModule(env_id, backend, num_envs=8, num_steps=16, total_timesteps=256)
    module = SelfPlay(rating_games=0, agent=functools.partial(MLPAgent, hidden_sizes=(8,)))
    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = L.Trainer(accelerator="cpu", default_root_dir=folder, **dict.fromkeys(names, False))
    trainer.fit(module, data)
    trainer.save_checkpoint(folder / "last.ckpt")
    return folder / "last.ckpt"


@pytest.fixture(scope="module")
def tictactoe(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("tictactoe"), "TicTacToe-v1")


def test_a_tournament_prints_results_and_ratings(tictactoe, tmp_path, capsys):
    again = tmp_path / "again.ckpt"
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
    assert rated[2] == "0" and cells[0][int(rated[0]) - 1].endswith("/0")


def test_the_first_player_is_the_anchor_without_random_play(tictactoe, capsys):
    cli.main(["tournament", str(tictactoe), "minimax:9", "--games", "10", "--deterministic"])
    assert f"Elo ({tictactoe} = 0)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("players", "message"),
    [
        (["random"], "two different players"),
        (["random", "random"], "two different players"),
        (["random", "minimax:9"], "must be of one game: there is none"),
        (["{}", "{other}"], "must be of one game: .*TicTacToe-v1.*KuhnPoker-v1"),
        (["{}", "random", "--games", "0"], "--games is 0"),
        (["{}", "grandmaster"], "is unknown"),
        (["{}", "missing.ckpt"], "missing.ckpt"),
    ],
)
def test_tournaments_that_cannot_be_played_are_refused(tictactoe, tmp_path, capsys, players, message):
    other = checkpoint(tmp_path, "KuhnPoker-v1") if "{other}" in players else ""
    with pytest.raises(SystemExit) as end:
        cli.main(["tournament", *(name.format(tictactoe, other=other) for name in players)])
    assert end.value.code == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("opponent", ["minimax:9", "random", "{}", None])
def test_a_game_is_recorded(tictactoe, tmp_path, capsys, opponent):
    video = tmp_path / "game.gif"
    flags = [] if opponent is None else ["--opponent", opponent.format(tictactoe)]
    cli.main(["play", "--ckpt_path", str(tictactoe), *flags, "--output", str(video)])
    printed = r"returns: -?\d" if opponent is None else r"the agent (won|lost|drew)$"
    assert re.search(f"^{printed}", capsys.readouterr().out, re.M)
    assert 5 < len(imageio.mimread(video)) <= 10


def test_the_table_has_both_views():
    ratings = {"a": Rating(0, 0, 0), "b": Rating(100, 50, 150)}
    rows = result_table({("a", "b"): Outcomes(1, 1, 2)}, ratings, "a").splitlines()
    assert rows[1].split() == ["1", "b", "100", "50", "to", "150", "-", "50/25/25"]
    assert rows[2].split() == ["2", "a", "0", "25/25/50", "-"]
