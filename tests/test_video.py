"""``ppo-lightning play``."""

import re

import gymnasium
import imageio.v2 as imageio
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from ppo_lightning import cli, evaluate, make_env
from ppo_lightning.video import record_video

CARTPOLE = {"num_envs": 2, "num_steps": 32, "total_timesteps": 64, "eval_episodes": 1}


@pytest.fixture
def trained(fit, tmp_path):
    module = fit(CARTPOLE, callbacks=[ModelCheckpoint(dirpath=tmp_path)], enable_checkpointing=True)
    return module, next(tmp_path.glob("*.ckpt"))


@pytest.mark.parametrize("name", ["video.mp4", "video.gif"])
def test_play_writes_every_frame_of_the_episodes_of_an_evaluation(trained, tmp_path, capsys, name):
    module, path = trained
    cli.main(["play", "--ckpt_path", str(path), "--output", str(tmp_path / name), "--episodes", "2", "--seed", "3"])
    printed = capsys.readouterr().out
    expected = evaluate(module.agent, make_env("CartPole-v1", 2, seed=3, stream="eval"))["episode_reward"].tolist()
    returns = [float(number) for number in printed.split("returns: ")[1].split("\n")[0].split(",")]
    assert returns == expected
    frames = imageio.mimread(tmp_path / name, memtest=False)
    if name.endswith("mp4"):  # a GIF shows equal frames as one
        assert len(frames) == sum(returns) + 2, "CartPole's reward is 1 a step, and an episode begins with a frame of its own"
    assert frames[0].shape[:2] == (400, 600)
    assert (frames[0] != frames[len(frames) // 2]).any()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--output", "video.avi"], "must end in .mp4 or .gif"),
        (["--episodes", "0"], "must be at least 1"),
        (["--env_id", "CartPol-v1"], "did you mean CartPole-v1"),
        (["--env_id", "Acrobot-v1"], "does not take observations of shape [6]"),
        (["--env_id", "Reach-v0"], "render_mode"),
    ],
)
def test_what_cannot_be_played_is_one_sentence(trained, options, sentence, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        cli.main(["play", "--ckpt_path", str(trained[1]), *options])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert re.search(sentence.replace("[6]", r"\[6\]"), error, re.IGNORECASE), error
    assert len(error.strip().splitlines()) == 1


def test_a_machine_that_cannot_render_says_what_is_missing(trained, tmp_path, monkeypatch):
    def render(self):
        raise RuntimeError("no EGL device was found")

    monkeypatch.setattr(gymnasium.Wrapper, "render", render)
    with pytest.raises(ValueError, match=r"no EGL device was found.*libegl1 with MUJOCO_GL=egl"):
        record_video(trained[0].agent, "CartPole-v1", tmp_path / "video.mp4")
