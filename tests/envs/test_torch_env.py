"""Classic control as tensors has Gymnasium's episodes."""

import gymnasium
import numpy as np
import pytest
import torch

from ppo_lightning.envs.factory import EnvFactory
from ppo_lightning.envs.torch_env import TASKS, TorchEnv, uniform

NUM_ENVS = 8


@pytest.mark.parametrize("env_id", TASKS)
def test_an_episode_is_that_of_gymnasium(env_id):
    env = TorchEnv(env_id, list(range(NUM_ENVS)))
    singles = [gymnasium.make(env_id) for _ in range(NUM_ENVS)]
    carrier = env.reset()
    for single in singles:
        single.reset(seed=1)
        single.action_space.seed(1)
    ended = np.zeros(NUM_ENVS, bool)
    held = None
    for single, state in zip(singles, env.state[0], strict=True):
        single.unwrapped.state = state.numpy().copy()
    for t in range(600):
        actions = [single.action_space.sample() for single in singles]
        if held is None or t % 7 == 0:
            held = actions
        actions[::2] = held[::2]  # repeated actions reach clipped states
        carrier["action"] = torch.as_tensor(np.array(actions))
        following = env.step(carrier)["next"]
        for i in np.flatnonzero(~ended):
            observation, reward, terminated, truncated, _ = singles[i].step(actions[i])
            np.testing.assert_allclose(following["observation"][i], observation, atol=1e-6)
            np.testing.assert_allclose(following["reward"][i], [reward], atol=1e-6)
            assert (following["terminated"][i], following["truncated"][i]) == (terminated, truncated)
            ended[i] = terminated or truncated
        carrier = following.exclude("reward")
        if ended.all():
            return
    raise AssertionError("no episode may outlast its time limit")


def test_initial_states_are_uniform_and_depend_on_seed_and_episode_alone():
    seeds, counts = torch.arange(2000), torch.zeros(2000, dtype=torch.int64)
    drawn = uniform(seeds, counts, 4)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    for column in (drawn[:, 0], drawn[:, 3], uniform(seeds[:1].repeat(2000), torch.arange(2000), 4)[:, 1]):
        shares = torch.histc(column, 10, 0, 1) / 2000
        assert (shares - 0.1).abs().max() < 0.03
    assert torch.corrcoef(drawn.T).fill_diagonal_(0).abs().max() < 0.1
    assert torch.equal(uniform(seeds[5:7], counts[5:7], 4), drawn[5:7])


def test_episodes_of_an_environment_differ():
    env = TorchEnv("CartPole-v1", [1, 2], max_episode_steps=3)
    first = env.rollout(9, break_when_any_done=False)["observation"][:, ::3, 0]
    assert first.unique().numel() == 6


def test_known_bits():
    """First outputs of SplitMix64 from the state 0, as other programs give them."""
    # The seed 0 is mixed to 0, so that the sequence is that of the state 0.
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    drawn = uniform(torch.tensor([0]), torch.tensor([0]), 3)[0]
    assert drawn.tolist() == [(bits >> 11) * 2.0**-53 for bits in expected]


def test_a_picture_needs_no_option_of_the_backend():
    env = EnvFactory("CartPole-v1", "torch", {"device": "cpu"}).make(1, render=True)
    env.reset_arrays()
    assert env.render().shape == (400, 600, 3)
    env.close()
