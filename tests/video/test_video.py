"""``ppo-lightning play``."""

import re

import gymnasium
import imageio.v2 as imageio
import numpy as np
import pytest
import torch
from torchrl.data import Bounded, Unbounded
from torchrl.envs.transforms import RewardScaling

from ppo_lightning import PPO, CNNAgent, ConfigError, MLPAgent, evaluate, make_env
from ppo_lightning.envs import BatchedEnv, EnvFactory
from ppo_lightning.models.heads import Head
from ppo_lightning.video import overlay, record
from ppo_lightning.video.record import record_video
from tests.games.test_pettingzoo import Mortals
from tests.helpers import NO_PROCGEN

CARTPOLE = {"num_envs": 2, "num_steps": 32, "total_timesteps": 64, "eval_episodes": 1}


@pytest.fixture
def trained(fit, tmp_path):
    module = fit(CARTPOLE)
    module.trainer.save_checkpoint(tmp_path / "trained.ckpt")
    return module, tmp_path / "trained.ckpt"


@pytest.mark.parametrize("name", ["video.mp4", "video.gif"])
def test_play_writes_every_frame_of_the_episodes_of_an_evaluation(trained, tmp_path, output_of, name):
    module, path = trained
    printed = output_of("play", "--ckpt_path", path, "--output", name, "--episodes", "2", "--seed", "3")
    played = evaluate(module.agent, make_env("CartPole-v1", 2, seed=3, stream="eval"))
    returns = [float(number) for number in printed.split("returns: ")[1].split("\n")[0].split(",")]
    assert returns == played["episode_reward"].tolist()
    frames = imageio.mimread(tmp_path / name, memtest=False)
    if name.endswith("mp4"):  # a GIF merges equal frames
        assert len(frames) == sum(returns) + 2, "a reward of 1 a step, and a frame before each first step"
    assert frames[0].shape[:2] == (400, 600)
    assert (frames[0] != frames[len(frames) // 2]).any()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--output", "video.avi"], "must end in .mp4 or .gif"),
        (["--episodes", "0"], "must be at least 1"),
        (["--max_frames", "0"], "--max_frames: 0 must be at least 1"),
        (["--seed", "-1"], "--seed: -1 must be at least 0"),
        (["--env_id", "CartPol-v1"], "did you mean CartPole-v1"),
        (["--env_id", "Acrobot-v1"], r"does not take observations of shape \[6\]"),
        (["--env_id", "Reach-v0"], "data.env_kwargs does not fit env_id 'Reach-v0': .*render_mode"),
    ],
)
def test_what_cannot_be_played_ends_in_one_sentence(trained, options, sentence, refusal_of):
    error = refusal_of("play", "--ckpt_path", trained[1], "--output", "video.mp4", *options)
    assert re.search(sentence, error), error


def test_a_machine_that_cannot_render_says_what_is_missing(trained, tmp_path, monkeypatch):
    def render(self):
        raise RuntimeError("no EGL device was found")

    monkeypatch.setattr(gymnasium.Wrapper, "render", render)
    with pytest.raises(ValueError, match=r"no EGL device was found.*libegl1 with MUJOCO_GL=egl"):
        record_video(trained[0].agent, EnvFactory("CartPole-v1"), tmp_path / "video.mp4")


class Painted(gymnasium.Env):
    """Environment with a given picture."""

    observation_space, action_space = gymnasium.spaces.Box(-1, 1, (4,)), gymnasium.spaces.Discrete(2)
    render_mode = "rgb_array"

    def __init__(self, picture):
        self.picture = picture

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(4, np.float32), {}

    def step(self, action):
        return np.zeros(4, np.float32), 1.0, False, True, {}

    def render(self):
        return self.picture


@pytest.mark.parametrize("shape", [(33, 31), (33, 31, 1), (33, 31, 3), (33, 31, 4)])
def test_gray_pictures_and_pictures_with_transparency_are_recorded(trained, tmp_path, shape):
    path = tmp_path / "video.gif"
    record_video(
        trained[0].agent, EnvFactory(lambda: Painted(np.full(shape, 7, np.uint8))), path, overlay=True
    )
    assert imageio.mimread(path)[0].shape[2] == 3


@pytest.mark.parametrize(
    "picture",
    [
        np.zeros((8, 8, 3)),
        np.zeros((8, 8, 2), np.uint8),
        [np.zeros((8, 8, 3), np.uint8)],
        "art",
        np.zeros(0, "u1"),
    ],
    ids=["float", "two channels", "list", "text", "empty"],
)
def test_what_is_no_picture_ends_in_one_sentence(trained, tmp_path, picture):
    with pytest.raises(ConfigError, match=r"render\(\) returns .*: with render_mode rgb_array it must"):
        record_video(trained[0].agent, EnvFactory(lambda: Painted(picture)), tmp_path / "video.mp4")
    assert not (tmp_path / "video.mp4").exists()


class White(Painted):
    """An environment of a user, whose picture can be asked for."""

    def __init__(self, render_mode=None):
        super().__init__(np.full((32, 32, 3), 255, np.uint8))
        self.render_mode = render_mode


def test_play_makes_the_environment_of_a_function_or_class(fit, tmp_path, output_of, refusal_of):
    path, name = tmp_path / "trained.ckpt", "tests.video.test_video.White"
    fit(CARTPOLE | {"env_id": White, "total_timesteps": 512}).trainer.save_checkpoint(path)
    play = ["play", "--ckpt_path", path, "--output", tmp_path / "it.gif", "--max_frames", "3"]
    assert f"--env_id {name}" in refusal_of(*play)
    assert "returns: 1.0" in output_of(*play, "--env_id", name)
    assert imageio.mimread(tmp_path / "it.gif")


def test_play_says_that_it_leaves_transforms_out(fit, tmp_path, output_of):
    path = tmp_path / "trained.ckpt"
    fit(CARTPOLE | {"transforms": [RewardScaling(0, 2)]}).trainer.save_checkpoint(path)
    out = output_of("play", "--ckpt_path", path, "--output", "it.mp4", "--max_frames", "3")
    assert "trained with data.transforms, played without them" in out


@pytest.mark.parametrize(("backend", "game"), [("envpool", "ALE/Breakout-v5"), ("procgen", "starpilot")])
def test_play_records_whole_games_with_the_panel_beside_them(
    fit, tmp_path, output_of, refusal_of, backend, game
):
    if backend == "procgen":
        pytest.importorskip("procgen", reason=NO_PROCGEN)
    kwargs = {"max_episode_frames": 2400} if backend == "envpool" else {"num_threads": 0}
    data = {"env_id": game, "backend": backend, "env_kwargs": kwargs}
    data |= {"num_envs": 2, "num_steps": 4, "total_timesteps": 8}
    path = tmp_path / "trained.ckpt"
    fit(data, {"agent": CNNAgent}).trainer.save_checkpoint(path)
    printed = output_of("play", "--ckpt_path", path, "--output", "game.mp4", "--overlay")
    assert ("played through Gymnasium" in printed) == (backend == "envpool")
    frames = imageio.mimread(tmp_path / "game.mp4", memtest=False)
    assert imageio.get_reader(tmp_path / "game.mp4").get_meta_data()["fps"] == 15
    if backend == "envpool":
        error = refusal_of("play", "--ckpt_path", path, "--output", "b.mp4", "--env_id", "ALE/Pong-v5")
        assert re.search("actions are {.*'n': 4.* environment's {.*'n': 6", error)
        played = evaluate(
            PPO.load_from_checkpoint(path).agent,
            make_env(game, 1, "gymnasium", stream="eval", env_kwargs=kwargs),
        )
        assert float(printed.split("returns: ")[1].split("\n")[0]) == played["episode_reward"].item()
        assert len(frames) == played["step_count"].item() + 1, "lost lives do not end the video"
        assert frames[0].shape == (420, 540, 3)
    else:
        assert frames[0].shape == (512, 732, 3)


@pytest.mark.parametrize("overlay", [False, True])
def test_the_return_of_a_game_with_turns_is_that_of_player_0(tmp_path, monkeypatch, overlay):
    factory, drawn = EnvFactory("TicTacToe-v1", "envpool"), []
    monkeypatch.setattr(record, "draw", lambda picture, *args: drawn.append(args[-1][:]) or picture)
    agent = MLPAgent(*factory.specs())
    torch.nn.init.normal_(agent.head.linear.weight)
    torch.nn.init.constant_(agent.critic.bias, 9)
    episodes = evaluate(agent, factory.make(6, 3, stream="eval"))
    returns = record_video(agent, factory, tmp_path / "game.gif", 6, seed=3, overlay=overlay)
    assert returns == episodes["episode_reward"].tolist() and min(returns) == -1
    if overlay:
        values = np.array(max(drawn, key=len))
        assert (np.sign(values[1:]) == -np.sign(values[:-1])).all(), "the player to move expects to win"


class Filmed(Mortals):
    """Game whose pictures show the number of steps."""

    render_mode = "rgb_array"

    def render(self):
        return np.full((48, 48, 3), 40 * self.time, np.uint8)


@pytest.mark.parametrize("memory", [None, "lstm"])
def test_a_video_of_a_game_lasts_until_all_players_are_over(tmp_path, memory):
    factory = EnvFactory(lambda: Filmed((2, 6)))
    agent = MLPAgent(*factory.specs(), memory=memory)
    assert record_video(agent, factory, tmp_path / "game.gif", overlay=True) == [2]
    assert len(imageio.mimread(tmp_path / "game.gif")) == 7


def bar_lengths(frame, count, lines):
    """Return the drawn lengths of the bars, relative to the longest possible one."""
    rows = [overlay.MARGIN + (lines + 1 + i) * overlay.ROW + 6 for i in range(count)]
    bars = frame[rows, frame.shape[1] - overlay.WIDTH + 90 : frame.shape[1] - 50]
    return (bars != np.array(overlay.GRAY)).any(-1).mean(1)


def test_the_bars_are_as_long_as_the_policy_says():
    picture = np.full((210, 160, 3), 9, np.uint8)
    frame = overlay.draw(
        picture, ["value 1"], ["NOOP", "FIRE", "LEFT"], np.array([0.0, 0.25, 1.0]), ["a", "b", "c"], 1
    )
    assert (frame[:420, :320] == 9).all(), "the picture, twice as large"
    np.testing.assert_allclose(bar_lengths(frame, 3, 1), [0, 0.25, 1], atol=0.02)
    assert (frame == np.array(overlay.CHOSEN)).all(-1).any()
    beyond = overlay.draw(picture, [], ["x", "y"], np.array([-0.5, 1.5]), ["", ""], None)
    np.testing.assert_allclose(bar_lengths(beyond, 2, 0), [0, 1], atol=0.02)
    many = overlay.draw(picture, ["one", "two"], [f"{i}" for i in range(40)], np.zeros(40), [""] * 40, None)
    assert many.shape[0] >= 40 * overlay.ROW and not (many == np.array(overlay.CHOSEN)).all(-1).any()


def test_the_curve_shows_the_newest_values():
    """A value that rises ends at the top of the curve, a value that falls at the bottom."""
    picture = np.full((400, 160, 3), 9, np.uint8)
    ends = []
    for values in (np.arange(500.0), -np.arange(500.0)):
        frame = overlay.draw(picture, ["value 1"], ["NOOP"], np.zeros(1), ["a"], None, list(values))
        rows, columns = np.nonzero((frame == np.array(overlay.CHOSEN)).all(-1))
        assert columns.max() - columns.min() + 1 >= overlay.WIDTH - 2 * overlay.MARGIN - 1
        ends.append(rows[columns == columns.max()].mean() - rows[columns == columns.min()].mean())
    assert ends[0] < -overlay.CURVE / 2 and ends[1] > overlay.CURVE / 2


class Linear(Head):
    """A head of a user: the largest output."""

    def __init__(self, in_features, action_spec):
        super().__init__(in_features, action_spec.space.n)

    def sample(self, features, noise, mask=None):
        scores = self.linear(features)
        return scores.argmax(-1), scores.amax(-1)


def test_a_head_without_bars_is_played_with_the_other_parts_of_the_panel(env, tmp_path, monkeypatch):
    monkeypatch.setattr(BatchedEnv, "action_names", ("LEFT", "RIGHT"))
    specs = env("CartPole-v1").agent_specs
    agent = MLPAgent(*specs)
    agent.head = Linear(64, specs[1])
    (total,) = record_video(agent, EnvFactory("CartPole-v1"), tmp_path / "a.gif", overlay=True, max_frames=3)
    assert total == 3 and len(imageio.mimread(tmp_path / "a.gif")) == 4


def test_explain_returns_the_policy(fit):
    module = fit(CARTPOLE)
    observation = torch.randn(5, 4)
    numbers, lengths = module.agent.explain(observation)
    action, log_prob, *_ = module.agent.act(observation)
    assert torch.equal(numbers.argmax(-1), action) and torch.equal(numbers, lengths)
    torch.testing.assert_close(numbers.amax(-1), log_prob.exp())
    agent = MLPAgent(
        Unbounded(shape=(3,)), Bounded(-torch.tensor([2.0, 1.0]), torch.tensor([2.0, 3.0]), shape=(2,))
    )
    agent.head.linear.bias.data[:] = torch.tensor([1.0, 9.0])
    agent.head.linear.weight.data.zero_()
    numbers, lengths = agent.explain(torch.zeros(1, 3))
    assert numbers.tolist() == [[1.0, 3.0]] and lengths.tolist() == [[0.75, 1.0]], "clipped to its bounds"
