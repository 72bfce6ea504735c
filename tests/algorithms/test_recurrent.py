"""Agents with a memory: sequences, resets, minibatches, runs, evaluation and export."""

import functools

import gymnasium as gym
import numpy as np
import pytest
import torch
from torchrl.envs import Compose, InitTracker, TransformedEnv

from ppo_lightning import CNNAgent, ConfigError, MLPAgent, RecurrentPPO, make_env
from ppo_lightning.algorithms.update import CompiledUpdate, EagerUpdate
from ppo_lightning.envs import EnvFactory
from ppo_lightning.export.onnx import largest_difference, random_observations, to_onnx
from ppo_lightning.models.memory import MEMORIES
from ppo_lightning.rollouts.make_collector import make_collector
from ppo_lightning.video.record import record_video
from tests.helpers import Recorder

DATA = {"num_envs": 4, "num_steps": 32, "total_timesteps": 3 * 128}
MODEL = {"num_minibatches": 2, "update_epochs": 2}
KINDS = pytest.mark.parametrize("kind", MEMORIES)


class Recorded(Recorder, RecurrentPPO):
    pass


def lstm(kind="lstm", agent=MLPAgent):
    return functools.partial(agent, shared=True, memory=kind, memory_size=16)


def strong(kind="lstm", agent=MLPAgent):
    """Return a factory of agents whose actions depend on the memory from the start."""

    def make(observation_spec, action_spec):
        made = lstm(kind, agent)(observation_spec, action_spec)
        torch.nn.init.normal_(made.head.linear.weight)
        for parameter in made.memory.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        return made

    return make


def agent_of(env, kind="lstm"):
    torch.manual_seed(1)
    return strong(kind)(*env.agent_specs)


@pytest.mark.detail("33")
@KINDS
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_sequences_give_the_result_of_single_steps(kind, share):
    """Resets are random, from none to every step; the arrays of the fast collector agree, too."""
    torch.manual_seed(0)
    memory, count, num_steps = MEMORIES[kind](5, 7), 3, 29
    for parameter in memory.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    features, state = torch.randn(count, num_steps, 5), torch.randn(count, memory.state_size)
    is_init = torch.rand(count, num_steps) < share
    is_init[0, 1:] &= share != 0.5  # one long stretch among many short ones
    steps, now, array, arrays = [], state, state.numpy().copy(), []
    for t in range(num_steps):
        now = now * ~is_init[:, t, None]
        array *= ~is_init[:, t, None].numpy()
        out, now = memory.step(features[:, t], now)
        steps.append(out)
        arrays.append(memory.array_step()(features[:, t].numpy(), array).copy())
    torch.testing.assert_close(
        memory(features, state, is_init), torch.stack(steps, dim=1), atol=1e-5, rtol=1e-5
    )
    torch.testing.assert_close(
        torch.from_numpy(np.stack(arrays, axis=1)), torch.stack(steps, dim=1), atol=1e-5, rtol=1e-5
    )
    torch.testing.assert_close(torch.from_numpy(array), now, atol=1e-5, rtol=1e-5)


@pytest.mark.detail("33")
@pytest.mark.detail("34")
@KINDS
@pytest.mark.parametrize("first", [0, 1, 6, 11])
def test_an_episode_depends_on_nothing_before_its_first_step(kind, first):
    """The step before still depends on the initial state: a reset comes neither early nor late."""
    torch.manual_seed(0)
    memory, is_init = MEMORIES[kind](5, 7), torch.zeros(1, 12, dtype=torch.bool)
    is_init[0, first] = True
    features = torch.randn(1, 12, 5)
    one, other = (memory(features, torch.randn(1, memory.state_size), is_init) for _ in range(2))
    assert (one != other).any(dim=2).tolist() == [[step < first for step in range(12)]]
    alone, _ = memory.step(features[:, first], torch.zeros(1, memory.state_size))
    torch.testing.assert_close(one[:, first], alone)


@KINDS
def test_a_memory_computes_in_float32_for_any_precision(kind):
    torch.manual_seed(0)
    memory, is_init = MEMORIES[kind](5, 7), torch.zeros(2, 4, dtype=torch.bool)
    features, state = torch.randn(2, 4, 5).bfloat16(), torch.randn(2, memory.state_size)
    expected = memory(features.float(), state, is_init), *memory.step(features[:, 0].float(), state)
    with torch.autocast("cpu", torch.bfloat16):
        results = memory(features, state, is_init), *memory.step(features[:, 0], state)
    assert all(map(torch.equal, results, expected))


@pytest.mark.detail("32")
@KINDS
def test_weights_are_orthogonal_and_biases_zero(kind):
    memory = MEMORIES[kind](16, 16)
    for name, parameter in memory.named_parameters():
        if "bias" in name:
            assert not parameter.any()
        else:
            torch.testing.assert_close(parameter.T @ parameter, torch.eye(16), atol=1e-5, rtol=0)


@pytest.mark.detail("33")
@pytest.mark.detail("34")
@pytest.mark.parametrize("collector", ["ours", "torchrl"])
@KINDS
def test_a_rollout_stores_the_memory_that_the_agent_acted_with(kind, collector):
    env = make_env("Script-v0", 3, seed=7)
    agent = agent_of(env, kind)
    if collector == "torchrl":
        env = TransformedEnv(env, Compose(InitTracker()))
    memory, ends = agent.initial_memory(3), 0
    for rollout in make_collector(env, agent, 8, 4, deterministic=True):
        torch.testing.assert_close(rollout["memory"][:, 0], memory, atol=1e-5, rtol=1e-5)
        for t in range(8):
            step = rollout[:, t]
            action, log_prob, value, memory = agent.act(step["observation"], memory=memory)
            assert torch.equal(step["action"], action)
            torch.testing.assert_close(step["action_log_prob"], log_prob.detach(), atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(step["state_value"], value.detach(), atol=1e-5, rtol=1e-5)
            done = step["next", "done"][:, 0]
            cut = done | torch.tensor(t == 7)
            torch.testing.assert_close(
                step["next", "memory"][cut], memory[cut].detach(), atol=1e-5, rtol=1e-5
            )
            memory, ends = (memory * ~done[:, None]).detach(), ends + int(done.sum())
    assert ends > 10


@pytest.mark.detail("36")
@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.integration)])
@KINDS
def test_the_first_ratio_is_1(kind, compile, fit):
    module = fit(DATA, MODEL | {"agent": strong(kind), "compile": compile}, ppo=Recorded)
    first = module.metrics[:: 2 * 2]
    assert len(first) == 3
    assert max(metrics["approx_kl"].abs() for metrics in first) < 1e-6
    assert max(metrics["clipfrac"] for metrics in first) == 0


def test_the_first_ratio_is_1_on_pictures(fit):
    data = {"env_id": "ALE/Breakout-v5", "backend": "envpool", "env_kwargs": {"frame_stack": 1}}
    data |= {"num_envs": 2, "num_steps": 16, "total_timesteps": 64}
    metrics = fit(data, MODEL | {"agent": strong(agent=CNNAgent)}, ppo=Recorded).metrics
    assert len(metrics) == 8
    assert max(metrics[0]["approx_kl"].abs(), metrics[4]["approx_kl"].abs()) < 1e-6


def test_a_time_limit_is_bootstrapped_with_the_memory_before_the_reset():
    env = make_env("Counter-v0", 2, env_kwargs={"max_episode_steps": 5})
    agent = agent_of(env)
    module = RecurrentPPO(gamma=0.9, gae_lambda=0.0)
    module.agent = agent
    rollout = make_collector(env, agent, 8, 1).rollout()
    targets = module.advantages(rollout.copy())["value_target"][0, :, 0]
    memory = agent.initial_memory(2)
    for t in range(8):
        observation, following = rollout["observation"][:, t], rollout["next", "observation"][:, t]
        *_, memory = agent.act(observation, memory=memory)
        value = agent.value(following, memory)[0]
        assert targets[t].item() == pytest.approx(1 + 0.9 * value.item(), abs=1e-4)
        if t == 4:
            memory = torch.zeros_like(memory)


def test_microbatches_of_sequences_have_no_more_rows_than_asked(fit):
    rows = set()

    class Parts(RecurrentPPO):
        def total_loss(self, minibatch):
            rows.add(minibatch["action"].numel())
            return super().total_loss(minibatch)

    fit(DATA, {"agent": lstm(), "num_minibatches": 1, "microbatch_size": 70}, ppo=Parts)
    assert rows == {2 * 32}


@pytest.mark.detail("35")
def test_minibatches_partition_the_sequences(fit):
    """Environment, episode and step name each observation of the environment."""
    data = {"env_id": "Script-v0", "num_envs": 6, "num_steps": 8, "total_timesteps": 48}
    model = {"agent": lstm(), "num_minibatches": 3, "update_epochs": 20}
    module = fit(data, model, ppo=Recorded)
    stored, orders = module.rollouts[0]["observation"], set()
    expected = stored[stored[:, 0, 0].argsort()]
    for minibatches in module.epochs:
        batches = [minibatch["observation"] for minibatch in minibatches]
        assert [batch.shape for batch in batches] == [(2, 8, 3)] * 3
        rows = torch.cat(batches)
        order = rows[:, 0, 0].argsort()
        assert torch.equal(rows[order], expected), "each sequence once, in the order of time"
        orders.add(tuple(order.tolist()))
        for minibatch in minibatches:
            advantage = minibatch["advantage"].flatten()
            assert advantage.mean().abs() < 1e-5
            assert advantage.std() == pytest.approx(1, abs=1e-4)
    assert len(module.epochs) == 20 and len(orders) > 5, "shuffled"


class Named(RecurrentPPO):
    """Recorder of the update that ``compile`` selects; the update itself is eager."""

    def update(self, minibatches):
        self.selected = type(self.optimize)
        return EagerUpdate(self, self.total_loss)(minibatches)


@KINDS
def test_the_update_is_one_graph_if_the_memory_is_traceable(kind, fit):
    module = fit(DATA, MODEL | {"agent": lstm(kind), "compile": True}, ppo=Named)
    assert module.selected is (CompiledUpdate if kind == "min_gru" else EagerUpdate)


@KINDS
def test_an_interrupted_run_resumes_to_the_bit(kind, fit_and_resume):
    fit_and_resume(2, DATA, MODEL | {"agent": lstm(kind)}, ppo=RecurrentPPO)


@KINDS
def test_onnx_and_a_video_carry_the_memory(kind, tmp_path):
    env = make_env("CartPole-v1", 1)
    agent = agent_of(env, kind)
    path = to_onnx(agent, env.agent_specs[0], tmp_path / "agent.onnx")
    assert largest_difference(agent, path, random_observations(env.agent_specs[0])) < 1e-5
    assert record_video(agent, EnvFactory("CartPole-v1"), tmp_path / "video.gif", overlay=True)[0] > 5
    with pytest.raises(ConfigError, match="has a memory"):
        agent.mode(torch.zeros(1, 4))


class Recall(gym.Env):
    """Environment that shows a bit at the first step only, and asks for it at the fourth."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)

    def observation(self):
        bit = self.bit if self.time == 0 else 0
        return np.array([bit, float(self.time == 3)], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time, self.bit = 0, int(self.np_random.integers(2)) * 2 - 1
        return self.observation(), {}

    def step(self, action):
        right = self.time == 3 and action == (self.bit > 0)
        self.time += 1
        return self.observation(), float(right), self.time == 4, False, {}


gym.register("Recall-v0", Recall)


@pytest.mark.parametrize("kind", [*MEMORIES, None])
def test_a_memory_solves_what_no_policy_without_one_can(kind, fit):
    model = {"learning_rate": 5e-3, "anneal_lr": False, "update_epochs": 4, "num_minibatches": 2}
    data = {"env_id": "Recall-v0", "num_envs": 8, "num_steps": 64, "total_timesteps": 30_720}
    if kind is None:
        assert np.mean(fit(data, model).episode_returns) < 0.75
    else:
        assert np.mean(fit(data, model | {"agent": lstm(kind)}, ppo=RecurrentPPO).episode_returns) > 0.9
