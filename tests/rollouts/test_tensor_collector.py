"""The collector for TorchRL environments: tensors, user transforms, statistics and errors."""

import functools

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.envs import Compose, EnvBase, InitTracker, RewardSum, StepCounter, TransformedEnv, VecNormV2

from ppo_lightning import PPO, MLPAgent, make_env
from ppo_lightning.envs import EnvFactory
from ppo_lightning.envs.specs import specs_of
from ppo_lightning.envs.tensor_env import TensorEnv, TensorStep
from ppo_lightning.envs.torchrl import untransformed
from ppo_lightning.errors import ConfigError, NonFiniteError
from ppo_lightning.models.normalizers import CollectorMoments, ObservationNormalizer, RewardScaler
from ppo_lightning.rollouts import tensor_collector
from ppo_lightning.rollouts.make_collector import make_collector
from ppo_lightning.rollouts.tensor_collector import TensorCollector
from ppo_lightning.utils.scans import discounted_sum
from ppo_lightning.utils.seeding import Shard


class Walk(EnvBase):
    """Stateless environment: adds the action to the observation that it is given; terminates beyond 3.

    ``broken`` has the environment, the step and the key that is not finite there.
    """

    def __init__(self, num_envs=2, broken=None, raises_at=None):
        super().__init__(batch_size=[num_envs])
        self.observation_spec = Composite(observation=Unbounded((num_envs, 1)), shape=(num_envs,))
        self.action_spec = Bounded(-1.0, 1.0, (num_envs, 1))
        self.reward_spec = Unbounded((num_envs, 1))
        self.broken, self.raises_at, self.life, self.received = broken, raises_at, 0, []

    def observed(self, observation, key):
        if self.broken is not None and self.broken[1:] == (self.life, key):
            observation = observation.clone()
            observation[self.broken[0]] = torch.nan
        return observation

    def _reset(self, tensordict=None, **kwargs):
        observation = self.observed(torch.full((*self.batch_size, 1), 0.5), "reset")
        flags = {key: torch.zeros(*self.batch_size, 1, dtype=torch.bool) for key in ("done", "terminated")}
        return TensorDict({"observation": observation, **flags}, batch_size=self.batch_size)

    def _step(self, tensordict):
        if self.life == self.raises_at:
            raise ValueError("a simulator that refuses NaN")
        self.received.append(tensordict["action"].clone())
        observation = self.observed(tensordict["observation"] + tensordict["action"], "observation")
        reward = self.observed(-observation.abs(), "reward")
        self.life += 1
        done = observation.abs() > 3
        outcome = {"observation": observation, "reward": reward, "done": done, "terminated": done.clone()}
        return TensorDict(outcome, batch_size=self.batch_size)

    def _set_seed(self, seed):
        pass


def agent_of(env, **options):
    torch.manual_seed(0)
    return MLPAgent(env.observation_spec_unbatched["observation"], env.action_spec_unbatched, **options)


def collector_of(env, num_steps=16, **options):
    collector = make_collector(env, agent_of(env, **options), num_steps, reward_scaler=RewardScaler(0.9))
    assert isinstance(collector, TensorCollector)
    return collector


# Statistics in tensors


def test_tensors_and_arrays_normalize_alike():
    rng = np.random.default_rng(0)
    normalizer = ObservationNormalizer((3,), clip=2.0, leave=[slice(2, 3)])
    tensors, arrays = (CollectorMoments(normalizer, arrays) for arrays in (False, True))
    for size in (4, 0, 1, 4, 3):
        batches = [np.ones((1, 3), bool), rng.normal(5, 3, (4, 3)).astype(np.float32)]
        if size:
            batches.append(rng.normal(-5, 1, (size, 3)).astype(np.float32))
        got = tensors.normalize([torch.from_numpy(batch) for batch in batches])
        expected = arrays.normalize(batches)
        for a, b in zip(got, expected, strict=True):
            assert a.dtype == torch.float32
            torch.testing.assert_close(a, torch.from_numpy(b).float())
    assert tensors.count == arrays.count
    np.testing.assert_allclose(tensors.mean, arrays.mean, rtol=1e-13)
    np.testing.assert_allclose(tensors.m2, arrays.m2, rtol=1e-13)
    assert normalizer.count == 0, "the module changes only with store"
    tensors.store()
    observation = np.random.default_rng(1).normal(size=(5, 3)).astype(np.float32)
    (expected,) = arrays.normalize([observation], update=False)
    torch.testing.assert_close(normalizer(torch.from_numpy(observation)), torch.from_numpy(expected).float())


@pytest.mark.parametrize("num_envs", [1, 4])
def test_rewards_are_scaled_by_the_returns_up_to_their_step(num_envs):
    """The reference merges step by step half of the rewards, none at the first steps."""
    rng = np.random.default_rng(0)
    scaler = RewardScaler(gamma=0.8, clip=1.0)
    discounted = torch.zeros(num_envs, dtype=torch.float64)
    running, returns = np.zeros(num_envs), []
    for part in range(3):
        reward, done = rng.normal(1, 2, (16, num_envs)), rng.random((16, num_envs)) < 0.2
        valid = rng.random(reward.shape) < 0.5
        valid[: 2 * (part == 0)] = False
        reward_tensor, done_tensor, counted = map(torch.from_numpy, (reward, done, valid))
        got = scaler.scale(reward_tensor, done_tensor, discounted, counted)
        for t in range(16):
            running = 0.8 * running + reward[t]
            returns.extend(running[valid[t]])
            std = np.sqrt(np.var(returns) + 1e-8) if returns else 1.0
            np.testing.assert_allclose(got[t], np.clip(reward[t] / std, -1, 1), rtol=1e-9)
            running = np.where(done[t], 0, running)
        np.testing.assert_allclose(discounted, running, rtol=1e-12)
    assert (got.abs() == 1).any()
    assert scaler.count == len(returns)
    np.testing.assert_allclose(scaler.m2, np.var(returns) * len(returns), rtol=1e-10)


# Rollouts


@pytest.mark.parametrize("options", [{}, {"norm_obs": True}])
def test_a_step_reads_no_tensor_into_numpy_or_python_lists(options, monkeypatch):
    """On a GPU each of these calls would copy to the CPU and wait."""
    collector = collector_of(TransformedEnv(Walk(), StepCounter(5)), **options)

    def refuse(self, *args, **kwargs):
        raise AssertionError("a tensor leaves its device")

    # On a GPU, sums along the episodes of a rollout are a scan; on the CPU, NumPy computes them.
    monkeypatch.setattr(tensor_collector, "tensor_episode_sums", discounted_sum)
    for name in ("numpy", "__array__", "cpu", "tolist"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    for _ in range(2):
        rollout = collector.rollout()
    assert rollout["next", "done"].any()


@pytest.mark.parametrize("norm_obs", [False, True])
def test_a_stateless_environment_gets_raw_observations_and_clipped_actions(norm_obs):
    """Its next state follows from the observation, which the agent sees normalized."""
    env = Walk()
    collector = collector_of(env, norm_obs=norm_obs)
    with torch.no_grad():
        collector.agent.head.log_std.fill_(1.0)
    rollout = collector.rollout()
    received = torch.stack(env.received, dim=1)
    assert torch.equal(received, rollout["action"].clamp(-1, 1))
    assert (rollout["action"].abs() > 1).any(), "the drawn action is stored"
    state = torch.full((2, 1), 0.5)
    done = rollout["next", "done"]
    for t in range(16):
        state = state + received[:, t]
        assert torch.equal(state.abs() > 3, done[:, t])
        if not norm_obs:
            assert torch.equal(rollout["next", "observation"][:, t], state)
        state = torch.where(done[:, t], 0.5, state)
    assert done.any()


def test_transforms_of_the_user_keep_their_keys_and_sums_continue():
    """The user's StepCounter truncates; the rollout's own sums agree with those of the user's transforms."""
    transforms = Compose(StepCounter(5), RewardSum())
    collector = collector_of(TransformedEnv(make_env("Counter-v0", 2), transforms), num_steps=8)
    steps = []
    for _ in range(3):
        rollout = collector.rollout()
        count = rollout["next", "step_count"]
        assert torch.equal(rollout["next", "episode_reward"], count.float())
        assert torch.equal(rollout["next", "truncated"], count == 5)
        assert torch.equal(rollout["next", "done"], rollout["next", "episode_done"])
        steps += count[0, :, 0].tolist()
    assert steps == [t % 5 + 1 for t in range(24)]


@pytest.mark.parametrize("norm_obs", [False, True])
@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ((1, 20, "observation"), "observation of environment 5 is nan at its step 20"),
        ((0, 20, "reward"), "reward of environment 4 is nan at its step 20"),
        ((1, 0, "reset"), "observation of environment 5 is nan at its step 0"),
    ],
)
def test_nonfinite_values_are_named_and_enter_no_statistics(broken, said, norm_obs):
    env = Walk(broken=broken)
    agent, shard = agent_of(env, norm_obs=norm_obs), Shard(seed=0, first=4, count=2, total=8)
    collector = make_collector(env, agent, 16, shard=shard, reward_scaler=RewardScaler(0.9))
    with pytest.raises(NonFiniteError, match=said):
        for _ in range(2):
            collector.rollout()
    buffers = [*collector.agent.buffers(), *collector.reward_scaler.buffers()]
    assert all(buffer.isfinite().all() for buffer in buffers)


def test_an_exception_that_follows_a_nonfinite_observation_is_explained():
    collector = collector_of(Walk(broken=(0, 5, "observation"), raises_at=7))
    with pytest.raises(NonFiniteError, match="observation of environment 0 is nan at its step 5") as raised:
        collector.rollout()
    assert "refuses NaN" in str(raised.value.__context__)
    with pytest.raises(ValueError, match="refuses NaN"):
        collector_of(Walk(raises_at=7)).rollout()


def test_a_resumed_collector_continues_noise_counts_and_buffers_of_transforms():
    def make():
        env = TransformedEnv(make_env("Script-v0", 2), Compose(InitTracker(), VecNormV2(["observation"])))
        return make_collector(env, agent_of(env), 8, 3)

    first, second = make(), make()
    next(iter(first))
    second.load_state_dict(first.state_dict())
    norms = [collector.env.transform[1] for collector in (first, second)]
    assert norms[0].loc["observation"].any()
    assert torch.equal(norms[0].loc["observation"], norms[1].loc["observation"])
    assert torch.equal(first.draw_noise(), second.draw_noise())
    assert len(list(second)) == 2


class Counting(EnvBase):
    """Ends after three steps, with ``done`` alone, as in TorchRL's tutorial."""

    def __init__(self):
        super().__init__(batch_size=[])
        self.observation_spec, self.reward_spec = Composite(observation=Unbounded((1,))), Unbounded((1,))
        self.action_spec = Bounded(-1.0, 1.0, (1,))

    def observed(self, **values):
        return TensorDict({"observation": torch.tensor([self.count / 3]), **values}, [])

    def _reset(self, tensordict=None, **kwargs):
        self.count = 0
        return self.observed()

    def _step(self, tensordict):
        self.count += 1
        return self.observed(reward=torch.ones(1), done=torch.tensor([self.count == 3]))

    def _set_seed(self, seed):
        pass


@pytest.mark.parametrize(("limit", "key"), [(5, "terminated"), (2, "truncated")])
def test_an_end_that_is_not_cut_off_is_a_termination(limit, key):
    """Also of copies, for which TorchRL sets no flag."""
    env = EnvFactory(Counting, transforms=(StepCounter(limit),)).make(2, 1)
    following = TensorCollector(env, MLPAgent(*specs_of(env)), num_steps=12).rollout()["next"]
    for name in ("terminated", "truncated"):
        expected = following["done"] if name == key else torch.zeros_like(following["done"])
        assert torch.equal(following[name], expected)
    assert following["done"].sum() == 2 * 12 // min(limit, 3)


class Planner(Walk):
    """Walk whose observations have keys with a meaning in our rollouts, and another one here."""

    def _reset(self, tensordict=None, **kwargs):
        return super()._reset(tensordict, **kwargs).update(self.others())

    def _step(self, tensordict):
        return super()._step(tensordict).update(self.others())

    def others(self):
        zeros = torch.zeros(*self.batch_size, 1)
        return {"weight": zeros, "discount": zeros, "info": TensorDict(batch_size=self.batch_size)}


def test_keys_of_an_environment_do_not_mean_what_ours_mean(fit):
    walk, planner = (
        fit({"env_id": kind, "num_envs": 2, "num_steps": 16, "total_timesteps": 64})
        for kind in (Walk, Planner)
    )
    for one, other in zip(walk.parameters(), planner.parameters(), strict=True):
        assert torch.equal(one, other)


class Parts(TensorEnv):
    """Tensor environment that records actions of two parts."""

    def __init__(self, num_envs):
        action_space = spaces.Dict(a=spaces.Discrete(2), b=spaces.Box(-0.1, 0.1, (2,)))
        super().__init__(spaces.Box(-1, 1, (2,)), action_space, num_envs)
        self.received = []

    def reset_tensors(self, mask):
        return torch.zeros(self.num_envs, 2)

    def step_tensors(self, action):
        self.received.append(action.clone())
        flags = torch.zeros(self.num_envs, dtype=torch.bool)
        return TensorStep(torch.zeros(self.num_envs, 2), flags.float(), flags, flags)


def test_continuous_parts_of_actions_are_clipped():
    env = EnvFactory(Parts).make(4)
    make_collector(env, MLPAgent(*specs_of(env)), 16).rollout()
    choices, numbers = torch.stack(untransformed(env).received).split([1, 2], dim=-1)
    assert numbers.abs().max() == torch.tensor(0.1)
    assert choices.unique().tolist() == [0, 1]


class Dials(Counting):
    """Two dials of three positions: the reward counts those at the last one."""

    bonus = 0.0

    def __init__(self):
        super().__init__()
        self.action_spec = Categorical(3, shape=(2,))

    def _step(self, tensordict):
        reward = (tensordict["action"] == 2).sum().float().reshape(1) + self.bonus
        return super()._step(tensordict).set("reward", reward)


def test_several_choices_are_an_action():
    env = EnvFactory(Dials).make(3, 1)
    agent = MLPAgent(*specs_of(env))
    rollout = TensorCollector(env, agent, num_steps=30).rollout()
    assert rollout["action"].shape == (3, 30, 2) and rollout["action"].unique().tolist() == [0, 1, 2]
    counted = (rollout["action"] == 2).sum(-1, keepdim=True).float()
    assert torch.equal(rollout["next", "reward"], counted)


class Named(Counting):
    def __init__(self, *names):
        super().__init__()
        self.action_spec = Composite({name: Bounded(-1.0, 1.0, (1,)) for name in names})


@pytest.mark.parametrize("names", [("arm",), ("arm", "leg")])
def test_actions_with_other_names_are_refused(names):
    with pytest.raises(ConfigError, match="spaces of several parts"):
        EnvFactory(functools.partial(Named, *names)).specs()


@pytest.mark.parametrize("transforms", [None, [StepCounter()]])
def test_attributes_are_set_in_copies(fit, transforms):
    class Raises(PPO):
        def end_iteration(self, rollout, metrics):
            self.rewards = [*getattr(self, "rewards", []), rollout["next", "reward"].mean().item()]
            self.data.set_attr("bonus", 100.0)

    data = {"env_id": Dials, "num_envs": 2, "num_steps": 8, "total_timesteps": 32, "transforms": transforms}
    first, second = fit(data, ppo=Raises).rewards
    assert first < 3 and second > 100
