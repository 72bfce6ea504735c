"""``ppo-lightning tournament`` and ``play --opponent``, with checkpoints of a short run."""

import io
import re
import shutil

import lightning as L
import numpy as np
import onnxruntime
import pytest
import torch

from ppo_lightning import MLPAgent, RolloutDataModule, SelfPlay
from ppo_lightning.commands import cli
from ppo_lightning.commands.tournament import cross_table, short_names
from ppo_lightning.utils.ratings import Outcomes


def checkpoint(folder, env_id, backend="envpool", **data):
    """Train for two rollouts and return the path of a checkpoint."""
    L.seed_everything(1, verbose=False)
    datamodule = RolloutDataModule(env_id, backend, num_envs=8, num_steps=16, total_timesteps=256, **data)
    module = SelfPlay(rating_games=0, snapshot_every=1, agent=small_agent)
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
    cli.main(["tournament", str(tictactoe), str(again), "perfect", "random", "--games", "30"])
    table, ratings = capsys.readouterr().out.strip().split("\n\n")
    rows = {line.split()[0]: line.split()[1:] for line in table.splitlines()[1:]}
    assert list(rows) == [f"{tictactoe.parent.name}/last", "again/last", "perfect", "random"]
    for i, (name, cells) in enumerate(rows.items()):
        assert cells[i] == "-"
        for j, other in enumerate(rows.values()):
            if i != j:  # the other player's view
                assert cells[j].split("/") == other[i].split("/")[::-1], name
    assert rows["perfect"][3].endswith("/0")
    order = [line.split()[0] for line in ratings.splitlines()[1:]]
    assert order[0] == "perfect"
    assert re.search(r"^random +0$", ratings, re.M)
    assert "Elo (random = 0)" in ratings


def test_the_first_player_is_the_anchor_without_random_play(tictactoe, capsys):
    cli.main(["tournament", str(tictactoe), "perfect", "--games", "10", "--deterministic"])
    assert "Elo (last = 0)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("players", "message"),
    [
        (["random"], "two different players"),
        (["random", "random"], "two different players"),
        (["random", "perfect"], "No player is a checkpoint"),
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


@pytest.mark.parametrize("opponent", ["perfect", "random", "{}"])
def test_a_game_is_shown_in_the_terminal(tictactoe, capsys, opponent):
    cli.main(["play", "--ckpt_path", str(tictactoe), "--opponent", opponent.format(tictactoe)])
    out = capsys.readouterr().out
    boards = re.findall(r"(?:^[XO.] [XO.] [XO.]\n){3}", out, re.M)
    stones = [len(re.findall("[XO]", board)) for board in boards]
    assert stones == list(range(len(boards)))
    assert 5 < len(boards) <= 10
    scores = re.search(r"last: (-?\d), .*: (-?\d)$", out.strip())
    assert int(scores[1]) == -int(scores[2])


def test_a_person_plays_in_the_terminal(tictactoe, capsys, monkeypatch):
    """Illegal answers are asked again; the person tries all fields in turn."""
    monkeypatch.setattr("sys.stdin", io.StringIO("nine\n42\n" + "\n".join(map(str, range(9))) * 9 + "\n"))
    cli.main(["play", "--ckpt_path", str(tictactoe), "--opponent", "human", "--seed", "2"])
    out = capsys.readouterr().out
    assert "'nine' is not a legal move." in out
    assert "'42' is not a legal move." in out
    assert re.search(r"last: -?\d, human: -?\d$", out.strip())


def test_the_end_of_the_input_ends_the_game(tictactoe, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    cli.main(["play", "--ckpt_path", str(tictactoe), "--opponent", "human"])
    assert "was not finished" in capsys.readouterr().out


def test_a_board_has_no_video(tictactoe, tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli.main(["play", "--ckpt_path", str(tictactoe), "--output", str(tmp_path / "video.mp4")])
    assert "play --opponent" in capsys.readouterr().err


@pytest.mark.integration
def test_an_agent_with_a_pool_is_exported(tictactoe, tmp_path, capsys):
    """The export has the agent without the snapshots, and respects the mask."""
    path = tmp_path / "agent.onnx"
    cli.main(["export", "--ckpt_path", str(tictactoe), "--onnx", str(path)])
    session = onnxruntime.InferenceSession(path)
    observation = np.random.default_rng(1).integers(0, 2, (50, 27)).astype(np.float32)
    observation[:, 4] = 1
    actions, *_ = session.run(None, {session.get_inputs()[0].name: observation})
    module = SelfPlay.load_from_checkpoint(tictactoe)
    assert len(module.pool) == 2
    assert actions.tolist() == module.predict(torch.from_numpy(observation)).tolist()
    assert observation[np.arange(50), actions].all()


def test_short_names_differ():
    assert short_names(["a/last.ckpt", "b/last.ckpt"]) == ["a/last", "b/last"]
    assert short_names(["a/x.ckpt", "b/y.ckpt", "random"]) == ["x", "y", "random"]


def test_a_cross_table_has_both_views():
    table = cross_table({("a", "b"): Outcomes(1, 1, 2)}, ["a", "b"]).splitlines()
    assert table[1].split() == ["a", "-", "25/25/50"]
    assert table[2].split() == ["b", "50/25/25", "-"]
