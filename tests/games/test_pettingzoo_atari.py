"""PettingZoo's Atari games: the preprocessing against a slow one through PettingZoo's own steps."""

import importlib
from pathlib import Path

import ale_py
import cv2
import numpy as np
import pytest
import torch
from torchrl.data import Categorical

from ppo_lightning import CNNAgent
from ppo_lightning.envs import EnvFactory, make_env
from ppo_lightning.errors import ConfigError
from ppo_lightning.games.pettingzoo_atari import PettingZooAtari
from ppo_lightning.models.cnn import scaled

GAMES = ("pong_v3", "surround_v2", "tennis_v3", "boxing_v2", "ice_hockey_v2")


class SlowGame:
    """One game, stepped frame by frame by PettingZoo, in the order of CleanRL's wrappers."""

    def __init__(self, name, max_frames=100_000):
        module = importlib.import_module(f"pettingzoo.atari.{name}")
        roms = str(Path(ale_py.__file__).parent)
        self.env = module.parallel_env(auto_rom_install_path=roms, max_cycles=max_frames)

    def reset(self, seed=None):
        observation, _ = self.env.reset(seed=seed)
        self.frames = [observation["first_0"]]
        self.pictures = [np.zeros((84, 84), np.uint8)] * 4
        return self.observe()

    def observe(self):
        blue = np.max(self.frames[-2:], axis=0)[:, :, 2]
        picture = cv2.resize(blue, (84, 84), interpolation=cv2.INTER_AREA)
        self.pictures = [*self.pictures[1:], picture]
        indicators = np.zeros((2, 2, 84, 84), np.uint8)
        indicators[0, 0] = indicators[1, 1] = 255
        return np.stack([np.concatenate([self.pictures, indicator]) for indicator in indicators])

    def step(self, actions):
        rewards = np.zeros(2)
        players = ("first_0", "second_0")
        for _ in range(4):
            observation, reward, terminated, truncated, _ = self.env.step(
                dict(zip(players, actions, strict=True))
            )
            self.frames.append(observation["first_0"])
            rewards += [reward[player] for player in players]
            flags = [[flag[player] for player in players] for flag in (terminated, truncated)]
            if any(map(any, flags)):
                break
        self.frames = self.frames[-2:]
        return self.observe(), rewards, *np.array(flags)


def same_steps(env, slow, num_steps, seed=0):
    """Step two games with the same actions, compare them, and return the first step that ended the game."""
    generator = np.random.default_rng(seed)
    for step in range(num_steps):
        action = generator.integers(0, env.spaces[1].n, env.num_envs)
        observation, reward, terminated, truncated, _ = env.step_arrays(action)
        for g, game in enumerate(slow):
            rows = slice(2 * g, 2 * g + 2)
            expected = game.step(action[rows])
            np.testing.assert_array_equal(reward[rows], expected[1])
            np.testing.assert_array_equal(terminated[rows], expected[2])
            np.testing.assert_array_equal(truncated[rows], expected[3])
            if not terminated[rows].any():
                np.testing.assert_array_equal(observation[rows], expected[0])
        if (terminated | truncated).any():
            return step
    return None


@pytest.mark.parametrize("name", GAMES)
def test_steps_equal_those_of_pettingzoo_frame_by_frame(name):
    env = PettingZooAtari(f"atari/{name}", [5, 6, 7, 8])
    slow = [SlowGame(name), SlowGame(name)]
    expected = np.concatenate([game.reset(seed) for game, seed in zip(slow, (5, 7), strict=True)])
    np.testing.assert_array_equal(env.reset_arrays(), expected)
    assert same_steps(env, slow, 60) is None


def test_a_game_ends_for_both_players_and_a_new_one_starts():
    env = PettingZooAtari("atari/surround_v2", [1, 2])
    slow = SlowGame("surround_v2")
    slow.reset(1)
    env.reset_arrays()
    assert same_steps(env, [slow], 2000) == 1534
    np.testing.assert_array_equal(env.reset_arrays(np.array([True, True])), slow.reset())
    assert same_steps(env, [slow], 30) is None


def test_the_time_limit_truncates_and_ends_no_other_game():
    env = PettingZooAtari("atari/pong_v3", [1, 2, 3, 4], max_episode_frames=41)
    env.reset_arrays()
    for _ in range(5):
        env.step_arrays(np.zeros(4, int))
    observation = env.reset_arrays(np.array([False, False, True, True])).copy()
    assert not observation[2:, :3].any()  # missing pictures are 0
    assert observation[:2, :3].any()
    slow = SlowGame("pong_v3", max_frames=40)
    slow.reset(1)
    for _ in range(5):
        slow.step([0, 0])
    for step in range(5):
        observation, _, terminated, truncated, _ = env.step_arrays(np.zeros(4, int))
        expected = slow.step([0, 0])
        assert truncated.tolist() == [step == 4] * 2 + [False] * 2
    assert expected[3].all()
    assert not terminated.any()
    np.testing.assert_array_equal(observation[:2], expected[0])


def test_the_network_reads_an_indicator_of_one():
    env = PettingZooAtari("atari/pong_v3", [1, 2])
    inputs = scaled(torch.from_numpy(env.reset_arrays()))
    assert torch.equal(inputs[:, 4:].amax((2, 3)), torch.eye(2))
    assert torch.equal(inputs[:, 4:].amin((2, 3)), torch.eye(2))
    agent = CNNAgent(env.agent_specs[0], Categorical(6, shape=()))
    values = agent.value(torch.from_numpy(env.reset_arrays()))
    assert values[0] != values[1]


def test_training_clips_rewards_and_returns_do_not():
    env = PettingZooAtari("atari/boxing_v2", [1, 2])
    rewards = np.array([[2.0, -2.0], [1.0, -1.0], [0.0, 0.0]])
    assert env.learning_reward(rewards).tolist() == [[1, -1], [1, -1], [0, 0]]


def test_the_screen_of_the_first_game_is_rendered():
    factory = EnvFactory("atari/pong_v3", "pettingzoo")
    env = factory.make(1, stream="eval", render=True)
    assert env.num_envs == 2  # a whole game
    env.reset_arrays()
    assert env.render().shape == (210, 160, 3)
    assert env.render_fps == 15
    assert factory.specs().observation.shape == (6, 84, 84)


@pytest.mark.parametrize(
    ("env_id", "num_envs", "options", "message"),
    [
        ("atari/pong_v2", 2, {}, "did you mean pong_v3"),
        ("atari/pong_v3", 3, {}, "multiple of the 2 players"),
        ("atari/pong_v3", 2, {"max_episode_frames": 3}, "must be at least 4"),
        ("atari/pong_v3", 2, {"obs_type": "ram"}, "does not fit"),
        ("atari/pong_v3", 2, {"num_players": 3}, "does not fit"),
        ("atari/tennis_v3", 2, {"sticky": 0.25}, "does not fit"),
    ],
)
def test_wrong_settings(env_id, num_envs, options, message):
    with pytest.raises(ConfigError, match=message):
        make_env(env_id, num_envs, "pettingzoo", env_kwargs=options)
