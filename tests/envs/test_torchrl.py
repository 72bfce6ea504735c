"""TorchRL's view of batched environments."""

import gc

import pytest

from ppo_lightning.envs import EnvFactory, TorchRLEnv


def test_a_view_leaves_its_environments_open_until_it_is_closed():
    arrays = EnvFactory("CartPole-v1").make(2)
    view = TorchRLEnv(arrays)
    view.rollout(2)
    del view
    gc.collect()
    assert not arrays.is_closed
    TorchRLEnv(arrays).close()
    assert arrays.is_closed


def test_a_view_has_the_public_attributes_of_its_environments():
    arrays = EnvFactory("CartPole-v1").make(2)
    view = TorchRLEnv(arrays)
    assert view.agent_specs is arrays.agent_specs and view.envs is arrays.envs
    for name in ("_observation", "unknown"):
        with pytest.raises(AttributeError, match=name):
            getattr(view, name)
