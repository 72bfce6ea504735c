"""Rollouts: the three kinds of episode end, through both collectors and both backends."""

import functools

import gymnasium
import pytest
import torch
from torchrl.collectors import BaseCollector
from torchrl.envs import Compose, InitTracker, TransformedEnv

from ppo_lightning import MLPAgent, RolloutCollector, make_env
from ppo_lightning.envs import EnvFactory
from ppo_lightning.envs.specs import specs_of
from ppo_lightning.envs.torchrl import as_torchrl
from ppo_lightning.models.normalizers import RewardScaler
from ppo_lightning.rollouts.make_collector import make_collector
from tests.environments import Counter, NextStepVector


def build(env, **options):
    torch.manual_seed(0)
    agent = MLPAgent(*specs_of(env), **options)
    torch.nn.init.normal_(agent.head.linear.weight)
    return agent


def counter_time(observation):
    return observation[..., 0].long()


def catch_time(observation):
    """Return the row of the ball, which EnvPool's Catch lowers by one row per step."""
    return (observation.sum(-1) > 0).int().argmax(-1)


def through(kind, env):
    return env if kind == "ours" else TransformedEnv(as_torchrl(env), Compose(InitTracker()))


# Environment, how to read the time, kind of end, and the time of the ends, which is only ever a next one.
GOLDEN = [
    ("Counter-v0", "gymnasium", {"max_episode_steps": 8}, counter_time, "truncated", 8),
    ("Counter-v0", "gymnasium", {"terminate_at": 10}, counter_time, "terminated", 10),
    ("Counter-v0", "gymnasium", {"terminate_at": 8, "max_episode_steps": 8}, counter_time, "both", 8),
    ("Counter-v0", "gymnasium", {}, counter_time, "rollout end", 99),
    ("Catch-v0", "envpool", {"max_episode_steps": 6}, catch_time, "truncated", 6),
    ("Catch-v0", "envpool", {}, catch_time, "terminated", 9),
]


@pytest.mark.detail("1")
@pytest.mark.parametrize("collector", ["ours", "torchrl"])
@pytest.mark.parametrize(("env_id", "backend", "kwargs", "time", "kind", "end"), GOLDEN)
def test_the_three_kinds_of_episode_end(collector, env_id, backend, kwargs, time, kind, end):
    env = through(collector, make_env(env_id, 1, backend, env_kwargs=kwargs))
    rollouts = make_collector(env, build(env), num_steps=5, num_rollouts=3)
    assert isinstance(rollouts, RolloutCollector) == (collector == "ours")
    assert isinstance(rollouts, BaseCollector)
    assert len(rollouts) == 3
    times = []
    for rollout in rollouts:
        assert rollout.batch_size == (1, 5)
        now, following = time(rollout["observation"])[0], time(rollout["next", "observation"])[0]
        assert (following == now + 1).all(), "what follows is the real next observation, never a reset one"
        done, terminated, truncated = (
            rollout["next", key][0, :, 0] for key in ("done", "terminated", "truncated")
        )
        ended = following == end
        assert torch.equal(done, ended)
        assert torch.equal(terminated, ended if kind in ("terminated", "both") else torch.zeros_like(ended))
        assert torch.equal(truncated, ended if kind in ("truncated", "both") else torch.zeros_like(ended))
        assert torch.equal(rollout["next", "step_count"][0, :, 0], following), "from the episode's start"
        if env_id == "Counter-v0":
            assert torch.equal(rollout["next", "episode_reward"][0, :, 0], following.float())
        times += now.tolist()
    assert times == [step % end for step in range(15)]
    rollouts.shutdown()


@pytest.mark.parametrize("statistics", [False, True])
def test_both_collectors_store_the_same_step_by_step(statistics):
    """Every shared key, with a deterministic policy, over several rollouts with many episode ends."""
    collectors = []
    for kind in ("ours", "torchrl"):
        env = through(kind, make_env("Reach-v0" if statistics else "Script-v0", 3, seed=7))
        agent = build(env, norm_obs=statistics)
        if statistics:  # practically deterministic, and the statistics are updated
            torch.nn.init.constant_(agent.head.log_std, -100)
        scaler = RewardScaler(0.9) if statistics else None
        options = {"deterministic": not statistics, "reward_scaler": scaler}
        collectors.append(make_collector(env, agent, 16, 4, **options))
    ends = 0
    # The statistics of few observations amplify rounding, which depends on the CPU (3.4e-5 on a Zen 4).
    tolerance = {"atol": 1e-4, "rtol": 1e-5} if statistics else {}
    for a, b in zip(*collectors, strict=True):
        for key in a.keys(include_nested=True, leaves_only=True):
            if key != "action_log_prob" or not statistics:
                torch.testing.assert_close(a[key], b[key], msg=str(key), **tolerance)
                assert a[key].dtype == b[key].dtype and a[key].shape == b[key].shape, key
        ends += a["next", "done"].sum()
    assert ends > 30
    for one, other in zip(*(collector.agent.buffers() for collector in collectors), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    for collector in collectors:
        collector.shutdown()


def test_each_rollout_comes_from_the_agent_as_it_is_now():
    """A bias that changes between two rollouts changes the next rollout: no weights are stale."""
    env = make_env("CartPole-v1", 2)
    agent = build(env)
    for rollout in make_collector(env, agent, 32, 3):
        evaluation = agent.evaluate(rollout["observation"], rollout["action"])
        torch.testing.assert_close(rollout["state_value"].squeeze(-1), evaluation.value.detach())
        torch.testing.assert_close(rollout["action_log_prob"], evaluation.log_prob.detach())
        assert len(rollout["action"].unique()) == 2, "actions are sampled"
        torch.nn.init.normal_(agent.critic.bias)
        torch.nn.init.normal_(agent.head.linear.bias)


@pytest.mark.parametrize(
    ("kind", "backend"),
    [("ours", "gymnasium"), ("ours", "envpool"), ("torchrl", "gymnasium"), ("ours", "torch")],
)
def test_set_seed_seeds_the_environments(kind, backend):
    first = []
    for seed in (5, 5, 6):
        env = through(kind, EnvFactory("CartPole-v1", backend).make(2, seed=1))
        collector = make_collector(env, build(env), 1)
        collector.set_seed(seed)
        first.append(collector.rollout()["observation"])
    assert torch.equal(first[0], first[1])
    assert not torch.equal(first[0], first[2])


def test_a_collector_without_an_end_has_no_length():
    collector = make_collector(make_env("CartPole-v1", 1), build(make_env("CartPole-v1", 1)), 4)
    with pytest.raises(RuntimeError, match="length"):
        len(collector)


def test_a_rollout_after_one_that_failed_begins_new_episodes(monkeypatch):
    env = make_env(Counter, 2)
    collector = RolloutCollector(env, build(env, memory="lstm"), 4)
    collector.rollout()
    with monkeypatch.context() as broken, pytest.raises(TypeError):
        broken.setattr(Counter, "step", None)
        collector.rollout()
    rollout = collector.rollout()
    assert rollout["next", "step_count"][..., 0].tolist() == [[1, 2, 3, 4]] * 2
    assert not rollout["memory"][:, 0].any()


@pytest.mark.parametrize(
    ("env_id", "backend"),
    [(lambda num_envs: NextStepVector("CartPole-v1", num_envs), "gymnasium"), ("TicTacToe-v1", "envpool")],
)
def test_environments_whose_steps_may_not_count_need_another_collector(env_id, backend):
    env = EnvFactory(env_id, backend).make(2)
    with pytest.raises(AssertionError, match="make_collector"):
        RolloutCollector(env, MLPAgent(*env.agent_specs), 4)


class Multiplies(gymnasium.Env):
    """An environment with a product of matrices by PyTorch, at steps and resets."""

    observation_space, action_space = gymnasium.spaces.Box(-9, 9, (2,)), gymnasium.spaces.Discrete(2)

    def observed(self):
        return (torch.full((1, 2), 1 / 3) @ torch.eye(2))[0].float().numpy()

    def reset(self, seed=None, options=None):
        return self.observed(), {}

    def step(self, action):
        return self.observed(), 0.0, True, False, {}


def test_an_environment_keeps_its_precision():
    env = EnvFactory(Multiplies).make(2, 1)
    precision = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    rollout = RolloutCollector(env, MLPAgent(*env.agent_specs), 4, precision=precision).rollout()
    for seen in (rollout["observation"], rollout["next", "observation"]):
        assert (seen == torch.tensor(1 / 3)).all()
