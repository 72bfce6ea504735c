"""Procgen: the library behind the interface of the other environments. Detail P2."""

import numpy as np
import pytest
import torch

from ppo_lightning import CNNAgent, ConfigError
from ppo_lightning.models.normalizers import RewardScaler
from ppo_lightning.rollouts.collector import RolloutCollector
from ppo_lightning.utils.seeding import derive_seed
from tests.helpers import NO_PROCGEN

procgen = pytest.importorskip("procgen", reason=NO_PROCGEN)


def raw(env_id, num, actions, rand_seed, **options):
    """Return Procgen's own results of each step: pictures, rewards, and whether an episode began."""
    env = procgen.ProcgenGym3Env(num=num, env_name=env_id, rand_seed=rand_seed, **options)
    steps = []
    for action in [None, *actions]:
        if action is not None:
            env.act(action)
        reward, observation, first = env.observe()
        steps.append((observation["rgb"].transpose(0, 3, 1, 2), reward, first))
    env.close()
    return steps


@pytest.mark.parametrize("game", ["starpilot", "coinrun"])
def test_a_rollout_holds_what_procgen_gives_and_no_transition_across_episodes(game, env):
    batch = env(game, 4, "procgen", seed=5, env_kwargs={"distribution_mode": "hard", "num_threads": 0})
    agent = CNNAgent(
        batch.observation_spec_unbatched["observation"], batch.action_spec_unbatched, body="impala"
    )
    steps = 150 if game == "starpilot" else 30
    rollout = RolloutCollector(batch, agent, steps).rollout()
    actions = rollout["action"].numpy().T
    seed = int(np.random.default_rng([derive_seed(5, "train", i) for i in range(4)]).integers(2**31))
    batch.close()
    expected = raw(
        game, 4, actions, seed, distribution_mode="hard", num_levels=0, start_level=0, num_threads=0
    )
    following = rollout["next"]
    assert rollout["observation"].dtype == torch.uint8
    assert rollout["observation"].shape == (4, steps, 3, 64, 64)
    for t in range(steps):
        pictures, rewards, first = expected[t + 1]
        np.testing.assert_array_equal(rollout["observation"][:, t], expected[t][0])
        np.testing.assert_array_equal(following["reward"][:, t, 0], rewards)
        for flag in ("done", "terminated", "episode_done"):
            np.testing.assert_array_equal(following[flag][:, t, 0], first)
        np.testing.assert_array_equal(following["observation"][:, t][~first], pictures[~first])
        np.testing.assert_array_equal(
            following["observation"][:, t][first], rollout["observation"][:, t][first]
        )
    assert not following["truncated"].any()
    assert following["done"].any() or game == "coinrun"


def test_the_same_seed_gives_the_same_levels_and_a_reset_new_ones(env):
    one, two, other = (
        env("bigfish", 2, "procgen", seed=seed, env_kwargs={"num_threads": 0}) for seed in (1, 1, 2)
    )
    first = one.reset_arrays().copy()
    np.testing.assert_array_equal(first, two.reset_arrays())
    assert not np.array_equal(first, other.reset_arrays())
    one.step_arrays(np.full(2, 4))
    assert not np.array_equal(first, one.reset_arrays())
    one.reseed([derive_seed(1, "train", i) for i in range(2)])
    np.testing.assert_array_equal(first, one.reset_arrays())


def test_levels_can_be_limited(env):
    options = {"num_levels": 1, "num_threads": 0}
    pictures, other = (
        env("coinrun", 2, "procgen", env_kwargs=options | {"start_level": level}).reset_arrays()
        for level in (7, 8)
    )
    np.testing.assert_array_equal(pictures[0], pictures[1])
    assert not np.array_equal(pictures, other)


@pytest.mark.detail("P2")
def test_procgens_rewards_are_scaled_with_the_gamma_of_ppo_and_its_pictures_are_not(fit):
    data = {"env_id": "bigfish", "backend": "procgen", "num_envs": 4, "num_steps": 8, "total_timesteps": 64}
    data["env_kwargs"] = {"num_threads": 0}
    model = {"norm_reward": True, "gamma": 0.999, "anneal_lr": False, "update_epochs": 1}
    module = fit(data, model | {"agent": lambda *specs: CNNAgent(*specs, body="impala")})
    assert isinstance(module.reward_scaler, RewardScaler) and module.reward_scaler.gamma == 0.999
    assert module.reward_scaler.count == 64
    assert module.agent.normalizer is None
    assert module.lr_schedulers().get_last_lr() == [module.hparams.learning_rate]


@pytest.mark.parametrize(
    ("env_id", "options", "sentence"),
    [
        ("starpilt", {}, "is not a game of Procgen: did you mean starpilot"),
        ("zelda", {}, "is not a game of Procgen: they are bigfish"),
        ("starpilot", {"distribution_mode": "memory"}, "distribution_mode is 'memory': .* 'easy', 'hard'"),
        ("starpilot", {"num_levels": -1}, "num_levels is -1: it must be between 0 and"),
        ("starpilot", {"start_level": 2.5}, "start_level is 2.5: it must be an integer"),
        ("starpilot", {"render_mode": "human"}, "data.env_kwargs does not fit env_id 'starpilot'"),
        ("starpilot", {"levels": 3}, "data.env_kwargs does not fit env_id 'starpilot'"),
        ("ALE/Pong-v5", {}, "is not a game of Procgen"),
    ],
)
def test_wrong_games_and_options(env_id, options, sentence, env):
    with pytest.raises(ConfigError, match=sentence):
        env(env_id, 1, "procgen", env_kwargs=options)
