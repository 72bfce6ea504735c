"""The collector for environments that are functions of tensors: one scan a rollout."""

import functools

import pytest
import torch
from torch import Tensor

from ppo_lightning import PPO, MLPAgent, RecurrentPPO
from ppo_lightning.envs.factory import EnvFactory
from ppo_lightning.envs.specs import specs_of
from ppo_lightning.envs.torch_env import TorchEnv
from ppo_lightning.errors import ConfigError
from ppo_lightning.models.normalizers import RewardScaler
from ppo_lightning.rollouts.make_collector import make_collector
from ppo_lightning.rollouts.scan_collector import ScanCollector
from ppo_lightning.rollouts.tensor_collector import TensorCollector
from ppo_lightning.utils.seeding import Shard

SMALL = {"backend": "torch", "num_envs": 4, "num_steps": 16, "total_timesteps": 4 * 16 * 12}
SHORT = {"max_episode_steps": 10}  # time limits, besides poles that fall


MEMORY = {"memory": "min_gru", "memory_size": 8, "shared": True}


def collector_of(env_id="CartPole-v1", kind=make_collector, agent=(), **options):
    env = EnvFactory(env_id, "torch", SHORT).make(num_envs=3, seed=5)
    torch.manual_seed(1)
    agent = MLPAgent(*specs_of(env), **dict(agent))
    shard = Shard.whole(3, seed=2)
    return kind(env, agent, 16, shard=shard, reward_scaler=RewardScaler(0.9, 10.0), **options)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("memory", [{}, MEMORY, MEMORY | {"memory": "lstm"}], ids=str)
@pytest.mark.parametrize("norm_obs", [False, True])
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_rollouts_are_those_of_the_collector_that_steps_one_by_one(env_id, norm_obs, memory, deterministic):
    agent = memory | {"norm_obs": norm_obs}
    scanned = collector_of(env_id, agent=agent, deterministic=deterministic)
    stepped = collector_of(env_id, TensorCollector, agent, deterministic=deterministic)
    assert isinstance(scanned, ScanCollector)
    for _ in range(3):
        rollout, other = scanned.rollout(), stepped.rollout()
        assert set(rollout.keys(True, True)) <= set(other.keys(True, True))
        for key, values in rollout.items(True, True):
            torch.testing.assert_close(values, other[key], atol=1e-5, rtol=1e-5, msg=str(key))
        assert rollout["next", "truncated"].any()
    if norm_obs:
        assert scanned.agent.normalizer.count > 0 or deterministic
        for name, values in scanned.agent.normalizer.state_dict().items():
            torch.testing.assert_close(values, stepped.agent.normalizer.state_dict()[name], msg=name)


class Doubles(TorchEnv):
    def reset_tensors(self, mask):
        return super().reset_tensors(mask).double()

    def transition(self, state, action):
        state, step, after = super().transition(state, action)
        doubles = {"observation": step.observation.double(), "reward": step.reward.double()}
        return state, step._replace(**doubles), after.double()


def test_doubles_of_an_environment_become_floats():
    env = Doubles("CartPole-v1", [1, 2, 3], **SHORT)
    collector = make_collector(env, MLPAgent(*specs_of(env)), 16, shard=Shard.whole(3, seed=2))
    assert isinstance(collector, ScanCollector)
    dtypes = {values.dtype for values in collector.rollout().values(True, True)}
    assert torch.float64 not in dtypes and torch.float32 in dtypes


@pytest.mark.integration
@pytest.mark.parametrize(
    ("env_id", "agent"),
    [("CartPole-v1", {}), ("Pendulum-v1", {}), ("CartPole-v1", MEMORY | {"norm_obs": True})],
)
def test_compiled_rollouts_are_those_of_python(env_id, agent):
    plain, compiled = (collector_of(env_id, agent=agent, compile=on) for on in (False, True))
    for _ in range(12):
        rollout, other = plain.rollout().to_dict(), compiled.rollout().to_dict()
        torch.testing.assert_close(rollout, other, atol=1e-4, rtol=1e-4)
        for collector in (plain, compiled):  # the graph reads the weights, and does not copy them
            with torch.no_grad():
                collector.agent.critic.bias += 1


@pytest.mark.parametrize("agent", [{}, {"norm_obs": True}, MEMORY], ids=str)
def test_no_step_moves_numbers_to_python(monkeypatch, agent):
    collector = collector_of(agent=agent)
    collector.rollout()  # the first observations

    def forbidden(*args, **kwargs):
        raise AssertionError("a synchronization within a rollout")

    noise = collector.agent.noise((16, 3))
    memory = () if collector._memory is None else (collector._memory,)
    statistics = () if collector.agent.normalizer is None else (collector.agent.normalizer.summary,)
    for name in ("item", "cpu", "numpy", "tolist", "__bool__", "__float__", "__int__"):
        monkeypatch.setattr(Tensor, name, forbidden)
    with torch.no_grad():
        collector._scan((collector.env.state, collector.observation, memory, statistics), noise)


@pytest.mark.parametrize("memory", [{}, MEMORY], ids=str)
def test_a_resumed_run_ends_as_the_uninterrupted_one_to_the_bit(fit_and_resume, capsys, memory):
    agent = functools.partial(MLPAgent, hidden_sizes=(16,), norm_obs=True, **memory)
    model = {"agent": agent, "norm_reward": True, "learning_rate": 1e-3}
    data = SMALL | {"env_id": "CartPole-v1", "env_kwargs": SHORT}
    fit_and_resume(11, data, model, ppo=RecurrentPPO if memory else PPO)
    assert "resumes its episode, to the bit" in capsys.readouterr().out


def test_environments_on_another_device_than_the_agent_are_refused():
    env = EnvFactory("CartPole-v1", "torch").make(num_envs=2)
    agent = MLPAgent(*specs_of(env)).to("meta")
    with pytest.raises(ConfigError, match="device 'meta'"):
        make_collector(env, agent, 4, shard=Shard.whole(2))
    moved = EnvFactory("CartPole-v1", "torch", {"device": "meta"}).make(num_envs=2)
    assert isinstance(make_collector(moved, agent, 4, shard=Shard.whole(2)), ScanCollector)


class Multiplies(TorchEnv):
    """A simulator with a product of matrices, which autocast would round to bfloat16."""

    def transition(self, state, action):
        state, step, after = super().transition(state, action)
        product = step.observation @ torch.eye(step.observation.shape[1])
        return state, step._replace(observation=product, reward=product[:, 0]), after


def test_a_simulator_keeps_its_precision():
    env = Multiplies("Pendulum-v1", [1, 2, 3])
    agent = MLPAgent(*env.agent_specs)
    precision = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    rollout = ScanCollector(env, agent, 8, shard=Shard.whole(3, seed=2), precision=precision).rollout()
    seen = rollout["next", "observation"]
    assert seen.dtype == torch.float32 and not torch.equal(seen, seen.bfloat16().float())
