"""``ppo-lightning tournament`` and ``play --opponent``, with checkpoints of a short run."""

import functools
import re
import shutil

import imageio.v2 as imageio
import pytest

from ppo_lightning import MLPAgent, SelfPlay
from ppo_lightning.commands.tournament import result_table
from ppo_lightning.games.tournament import Outcomes, Rating


@pytest.fixture(scope="module")
def checkpoint(fit_once, tmp_path_factory):
    """Return a function that trains a game for two rollouts and returns the path of a checkpoint."""

    @functools.cache
    def train(env_id):
        data = {"env_id": env_id, "backend": "envpool", "num_envs": 8, "num_steps": 16}
        model = {"rating_games": 0, "agent": functools.partial(MLPAgent, hidden_sizes=(8,))}
        path = tmp_path_factory.mktemp("run") / "last.ckpt"
        fit_once(data | {"total_timesteps": 256}, model, ppo=SelfPlay).trainer.save_checkpoint(path)
        return path

    return train


@pytest.fixture
def tictactoe(checkpoint):
    return checkpoint("TicTacToe-v1")


def test_a_tournament_prints_results_and_ratings(tictactoe, tmp_path, output_of):
    again = tmp_path / "again.ckpt"
    shutil.copy(tictactoe, again)
    names = [str(tictactoe), str(again), "minimax:9", "random"]
    header, *lines = output_of("tournament", *names, "--games", "30").strip().splitlines()
    assert "Elo (random = 0)" in header
    rows = [re.split("  +", line) for line in lines]
    assert {row[1] for row in rows} == set(names)
    assert rows[0][1] == "minimax:9"
    rated = next(row for row in rows if row[1] == "random")
    assert rated[2] == "0"
    assert rows[0][-4:][int(rated[0]) - 1].endswith("/0")


def test_the_first_player_is_the_anchor_without_random_play(tictactoe, output_of):
    out = output_of("tournament", tictactoe, "minimax:9", "--games", "10", "--deterministic")
    assert f"Elo ({tictactoe} = 0)" in out


def test_bundled_agents_and_folders_are_players(tictactoe, tmp_path, output_of):
    SelfPlay.load_from_checkpoint(tictactoe).save_pretrained(tmp_path / "mine")
    players = ["selfplay/tictactoe", str(tmp_path / "mine"), "random"]
    _, *lines = output_of("tournament", *players, "--games", "30").strip().splitlines()
    assert {re.split("  +", line)[1] for line in lines} == set(players)
    assert "selfplay/tictactoe" in lines[0], "which has learnt the game"
    assert "video: " in output_of("play", "selfplay/tictactoe", "--opponent", "selfplay/tictactoe")


@pytest.mark.parametrize(
    ("players", "message"),
    [
        (["random"], "two different players"),
        (["random", "random"], "two different players"),
        (["random", "minimax:9"], "must be of one game: there is none"),
        (["{}", "{other}"], "must be of one game: .*TicTacToe-v1.*KuhnPoker-v1"),
        (["{}", "random", "--games", "0"], "--games: 0 must be at least 1"),
        (["{}", "random", "--seed", "-1"], "--seed: -1 must be at least 0"),
    ],
)
def test_tournaments_that_cannot_be_played_are_refused(tictactoe, checkpoint, refusal_of, players, message):
    other = checkpoint("KuhnPoker-v1") if "{other}" in players else ""
    names = (name.format(tictactoe, other=other) for name in players)
    assert re.search(message, refusal_of("tournament", *names))


@pytest.mark.parametrize("opponent", ["minimax:9", "random", "{}", None])
def test_a_game_is_recorded(tictactoe, tmp_path, output_of, opponent):
    video = tmp_path / "game.gif"
    flags = [] if opponent is None else ["--opponent", opponent.format(tictactoe)]
    out = output_of("play", "--ckpt_path", tictactoe, *flags, "--output", video)
    printed = r"returns: -?\d" if opponent is None else r"the agent (won|lost|drew)$"
    assert re.search(f"^{printed}", out, re.M)
    assert 5 < len(imageio.mimread(video)) <= 10


@pytest.mark.parametrize("flag", ["--overlay", "--episodes=3", "--max_frames=9", "--env_id=TicTacToe-v1"])
def test_flags_that_have_no_effect_on_a_game_are_refused(tictactoe, refusal_of, flag):
    refusal = refusal_of("play", "--ckpt_path", tictactoe, "--opponent", "random", flag)
    assert refusal.endswith(f"omit {flag.partition('=')[0]}.")


def test_the_table_has_both_views():
    ratings = {"a": Rating(0, 0, 0), "b": Rating(100, 50, 150)}
    rows = result_table({("a", "b"): Outcomes(1, 1, 2)}, ratings, "a").splitlines()
    assert rows[1].split() == ["1", "b", "100", "50", "to", "150", "-", "50/25/25"]
    assert rows[2].split() == ["2", "a", "0", "25/25/50", "-"]
