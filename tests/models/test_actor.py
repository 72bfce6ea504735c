"""Actors: agents without a value function."""

import pytest
import torch
from tensordict import TensorDict

from ppo_lightning import Actor, MLPAgent
from ppo_lightning.envs import EnvFactory
from ppo_lightning.export.onnx import largest_difference, random_observations, to_onnx
from ppo_lightning.models import MLP
from ppo_lightning.rollouts.evaluation import evaluate
from ppo_lightning.rollouts.make_collector import make_collector
from ppo_lightning.video.record import record_video


class Plain(Actor):
    def __init__(self, observation_spec, action_spec, memory=None):
        super().__init__(action_spec, lambda: MLP(observation_spec.shape[0], [8]), memory=memory)
        self.save_hyperparameters(ignore=["observation_spec", "action_spec"])


@pytest.mark.parametrize("backend", ["gymnasium", "torch"])
@pytest.mark.parametrize("memory", [None, "min_gru"])
def test_collectors_store_the_actions_of_an_actor_alone(backend, memory):
    batch = EnvFactory("CartPole-v1", backend).make(3, 1)
    agent = Plain(*batch.agent_specs, memory=memory)
    rollout = make_collector(batch, agent, 8, 1).rollout()
    outputs = {"observation", "action"} | ({"memory"} if memory else set())
    assert outputs == {*rollout.keys()} - {"next", "done", "terminated", "truncated"}
    assert len(rollout["action"].unique()) == 2


def test_an_actor_is_evaluated_recorded_and_exported(env, tmp_path):
    batch = env("CartPole-v1", 2)
    agent = Plain(*batch.agent_specs)
    assert (evaluate(agent, batch)["step_count"] > 0).all()
    record_video(agent, EnvFactory("CartPole-v1"), tmp_path / "a.gif", overlay=True, max_frames=3)
    observation_spec = batch.agent_specs[0]
    path = to_onnx(agent, observation_spec, tmp_path / "a.onnx")
    assert largest_difference(agent, path, random_observations(observation_spec)) < 1e-5
    rows = torch.randn(5, 4)
    assert [*agent.play(rows)] == ["action"]
    assert [*agent(TensorDict({"observation": rows}, [5])).keys()] == ["observation", "action"]


def test_the_order_of_the_weights_is_that_of_saved_optimizers(env):
    specs = env("CartPole-v1").agent_specs
    agent = MLPAgent(*specs, hidden_sizes=(8,), memory="lstm", shared=False)
    parts = dict.fromkeys(name.split(".")[0] for name, _ in agent.named_parameters())
    assert [*parts] == ["actor_body", "critic_body", "memory", "head", "critic"]
