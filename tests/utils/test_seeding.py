"""Random numbers as functions of seed, stream and number."""

import itertools
import random
from collections import Counter
from typing import get_args

import numpy as np
import pytest
import torch

from ppo_lightning import PPG, PPO, RND, RPO
from ppo_lightning.utils.seeding import Shard, Stream, derive_seed, isolated, seed_globally
from tests.helpers import SaveAfter

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
    """Four rollouts with two epochs each."""
    fit(
        DATA | {"env_id": env_id},
        {"update_epochs": 2, "num_minibatches": 2} | options,
        ppo=ppo,
        limit_val_batches=0,
    )
    assert set(drawn.values()) == {1}, "nothing is drawn twice"
    assert Counter(stream for _, stream, *_ in drawn) == streams


def test_a_resumed_run_keeps_the_numbers_of_its_seed(fit, drawn, tmp_path):
    fit(DATA, limit_val_batches=0, seed=1, callbacks=[SaveAfter(tmp_path / "half.ckpt", 2)])
    second_half = {key for key in drawn if key[2] >= 2}
    drawn.clear()
    fit(DATA, limit_val_batches=0, seed=2, ckpt_path=tmp_path / "half.ckpt")
    assert drawn.keys() == second_half


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
