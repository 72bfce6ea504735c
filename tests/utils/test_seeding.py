"""Random numbers as functions of seed, stream and number."""

import functools
import itertools
import random
import warnings
from collections import Counter
from typing import get_args

import gymnasium
import numpy as np
import pytest
import torch
from torchrl.envs import GymWrapper

from ppo_lightning import DQN, PPG, PPO, RND, RPO, SAC, MLPAgent, RecurrentPPO
from ppo_lightning.utils import seeding
from ppo_lightning.utils.seeding import Shard, Stream, derive_seed, isolated, seed_globally
from tests import environments
from tests.helpers import RecordedPPO

DATA = {"num_envs": 2, "num_steps": 8, "total_timesteps": 64}


def test_nothing_random_shares_a_seed_within_or_between_runs():
    seeds = [derive_seed(*each) for each in itertools.product(range(20), get_args(Stream), range(50))]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)
    draws = itertools.product(range(20), get_args(Stream), range(30), range(2))
    generators = [Shard.whole(1, run).generator(*draw) for run, *draw in draws]
    assert len({generator.initial_seed() for generator in generators}) == len(generators)


@pytest.fixture
def drawn(monkeypatch):
    """Count the generators by seed of the run, stream and numbers."""
    counts = Counter()
    generator = Shard.generator

    def counting(self, stream, *numbers):
        counts[self.seed, stream, *numbers] += 1
        return generator(self, stream, *numbers)

    monkeypatch.setattr(Shard, "generator", counting)
    return counts


@pytest.mark.parametrize(
    ("ppo", "env_id", "options", "streams"),
    [
        (PPO, "CartPole-v1", {}, {"noise": 4, "shuffle": 8}),
        (RPO, "Pendulum-v1", {}, {"noise": 4, "shuffle": 8, "mean": 8}),
        (RND, "CartPole-v1", {"num_iterations_obs_norm_init": 3}, {"noise": 7, "shuffle": 8, "predictor": 8}),
        (
            PPG,
            "CartPole-v1",
            {"n_iteration": 2, "e_auxiliary": 3},
            {"noise": 4, "shuffle": 8, "auxiliary": 6},
        ),
    ],
)
def test_each_use_has_numbers_of_its_own(fit, drawn, ppo, env_id, options, streams):
    fit(
        DATA | {"env_id": env_id},
        {"update_epochs": 2, "num_minibatches": 2} | options,
        ppo=ppo,
        limit_val_batches=0,
    )
    assert set(drawn.values()) == {1}, "nothing is drawn twice"
    assert Counter(stream for _, stream, *_ in drawn) == streams


def test_the_initial_seed_stays_when_the_global_generators_are_seeded():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(4)
    seed_globally(5)
    assert torch.equal(torch.rand(3), expected)
    assert torch.initial_seed() == 4


def test_the_global_generators_are_kept_after_an_error_too():
    def states():
        numpy_state = np.random.get_state()[1].tolist()  # noqa: NPY002
        return random.getstate(), numpy_state, torch.get_rng_state().tolist()

    before = states()
    with pytest.raises(RuntimeError), isolated():
        seed_globally(3)
        raise RuntimeError
    assert states() == before


class Learner(environments.Counter):
    """Environment that trains its own network and changes a mode, where it is made, reset and stepped."""

    def __init__(self, change=None):
        super().__init__(terminate_at=8)
        self.change = change or (lambda: None)
        self.net = torch.nn.Linear(2, 1)
        self.learn()

    def learn(self):
        self.change()
        self.net(self.net.weight.new_ones(1, 2)).sum().backward()

    def reset(self, **options):
        self.learn()
        return super().reset(**options)

    def step(self, action):
        self.learn()
        return super().step(action)


def torchrl_env():
    return GymWrapper(Learner(), categorical_action_encoding=True)


def vector_env(num_envs):
    return gymnasium.vector.SyncVectorEnv([Learner] * num_envs)


SMALL = {"num_envs": 2, "num_steps": 8, "total_timesteps": 32, "eval_episodes": 2}


@pytest.mark.parametrize("make", [Learner, vector_env, torchrl_env])
def test_environments_have_gradients_also_in_evaluations(fit, make):
    assert fit(SMALL | {"env_id": make}, limit_val_batches=1).env_steps == 32


@pytest.mark.parametrize(
    "change",
    [
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.manual_seed(0),
        lambda: np.seterr(all="raise"),
        lambda: warnings.simplefilter("error"),
    ],
)
def test_modes_that_an_environment_sets_stay_with_it(fit, monkeypatch, change):
    monkeypatch.setattr(seeding, "_modes_of_users", {})
    weights, data = [], SMALL | {"env_id": lambda: Learner(change)}
    for seed in (1, 2):
        before = torch.get_default_dtype(), np.geterr(), warnings.filters[:]
        module = fit(data, ppo=RecordedPPO, seed=seed)
        assert (torch.get_default_dtype(), np.geterr(), warnings.filters[:]) == before
        assert torch.initial_seed() == module.data.seed == seed
        weights.append(module.initial)
    assert not weights[0].equal(weights[1])


@pytest.mark.parametrize("module", [PPO, RecurrentPPO, DQN, SAC, RND])
def test_weights_and_noise_are_float32_whatever_the_default_is(fit, tmp_path, module):
    settings = {"agent": functools.partial(MLPAgent, memory="lstm"), "num_minibatches": 2}
    if module is not RecurrentPPO:
        settings = {"learning_starts": 8} if issubclass(module, DQN | SAC) else {}
    env_id = "Reach-v0" if module is SAC else Learner
    torch.set_default_dtype(torch.float64)
    try:
        trained = fit(SMALL | {"env_id": env_id}, settings, ppo=module, limit_val_batches=1)
        trained.trainer.save_checkpoint(tmp_path / "a.ckpt")
        loaded = module.load_from_checkpoint(tmp_path / "a.ckpt")
    finally:
        torch.set_default_dtype(torch.float32)
    assert {x.dtype for x in (*trained.parameters(), *loaded.parameters())} == {torch.float32}
