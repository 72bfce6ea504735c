"""Environments of tensors: resets by mask, and simulators with autoreset."""

import pytest
import torch
from gymnasium import spaces
from torchrl.envs import ObservationNorm, StepCounter, TransformedEnv

from ppo_lightning import PPO, MLPAgent
from ppo_lightning.envs.factory import EnvFactory
from ppo_lightning.envs.specs import specs_of
from ppo_lightning.envs.tensor_env import TensorEnv, TensorStep
from ppo_lightning.envs.torch_env import TorchEnv
from ppo_lightning.errors import ConfigError
from ppo_lightning.rollouts.tensor_collector import TensorCollector
from ppo_lightning.utils.seeding import Shard

SMALL = {"num_envs": 2, "num_steps": 16, "total_timesteps": 2 * 16 * 3}


class Clock(TensorEnv):
    """Environment n counts its steps, and its episodes are truncated after 3 + n steps."""

    def __init__(self, num_envs=2):
        super().__init__(spaces.Box(-99, 99, (1,)), spaces.Discrete(2), num_envs)
        self.limit = 3 + torch.arange(num_envs)
        self.time = torch.zeros(num_envs)

    def see(self):
        return self.time[:, None].clone()

    def reset_tensors(self, mask):
        self.time = torch.zeros(self.num_envs) if mask is None else self.time.masked_fill(mask, 0)
        return self.see()

    def step_tensors(self, action):
        self.time = self.time + 1
        over = self.time >= self.limit
        return TensorStep(self.see(), self.time, torch.zeros_like(over), over)


class SelfResetting(Clock):
    """The same as a simulator on a GPU: it has autoreset, in the same step."""

    autoresets = True
    tells_final = False

    def step_tensors(self, action):
        step = super().step_tensors(action)
        self.time = self.time.masked_fill(step.truncated, 0)
        final = step.observation if self.tells_final else None
        return step._replace(observation=self.see(), final_observation=final)


class TellsFinal(SelfResetting):
    """The simulator also gives final observations."""

    tells_final = True


class InPlace(Clock):
    """The same in buffers that each step writes again, and actions that it uses up."""

    def __init__(self, num_envs=2):
        super().__init__(num_envs)
        self.seen, self.reward = torch.zeros(num_envs, 1), torch.zeros(num_envs)
        self.never, self.over = torch.zeros(2, num_envs, dtype=torch.bool)

    def see(self):
        self.seen[:, 0] = self.time
        return self.seen

    def step_tensors(self, action):
        action.fill_(9)
        self.time += 1
        self.reward[:] = self.time
        self.over[:] = self.time >= self.limit
        return TensorStep(self.see(), self.reward, self.never, self.over)


def rollouts(kind, count=3, **options):
    env = kind()
    torch.manual_seed(1)
    collector = TensorCollector(
        env, MLPAgent(*specs_of(env), **options), 5, shard=Shard.whole(env.num_envs, seed=1)
    )
    return [collector.rollout().clone() for _ in range(count)]


@pytest.mark.parametrize("norm_obs", [False, True])
@pytest.mark.parametrize("kind", [TellsFinal, InPlace])
def test_autoreset_and_reused_tensors_give_the_same_rollouts(kind, norm_obs):
    one, other = ([x.to_dict() for x in rollouts(make, norm_obs=norm_obs)] for make in (Clock, kind))
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_without_final_observations_the_last_seen_one_takes_their_place():
    for one, other in zip(rollouts(Clock), rollouts(SelfResetting), strict=True):
        assert torch.equal(one["observation"], other["observation"])
        truncated = one["next", "truncated"]
        following = torch.where(truncated, one["observation"], one["next", "observation"])
        assert torch.equal(other["next", "observation"], following)


class NumberFlags(Clock):
    def step_tensors(self, action):
        step = super().step_tensors(action)
        return step._replace(terminated=step.terminated.float(), truncated=step.truncated.long())


def test_flags_may_be_numbers():
    one, other = ([x.to_dict() for x in rollouts(make)] for make in (Clock, NumberFlags))
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_the_last_seen_observation_is_transformed_once():
    norm = ObservationNorm(loc=1.0, scale=2.0, in_keys=["observation"], standard_normal=True)
    (rollout, *_) = rollouts(lambda: TransformedEnv(SelfResetting(), norm))
    truncated = rollout["next", "truncated"]
    assert truncated.any()
    assert torch.equal(rollout["next", "observation"][truncated], rollout["observation"][truncated])


@pytest.mark.parametrize("kind", [Clock, SelfResetting])
def test_it_trains_and_evaluates(fit, kind):
    """A class gets the number of environments. The second one inherits its constructor."""
    data = SMALL | {"env_id": kind, "num_envs": 3, "total_timesteps": 144}
    module = fit(data, {"num_minibatches": 2}, ppo=PPO, limit_val_batches=1)
    assert module.env_steps == 144
    assert set(module.episode_returns) == {6.0, 10.0, 15.0}


def cartpole(seeds):
    return TorchEnv("CartPole-v1", seeds)


def test_seeds_belong_to_the_global_index_of_an_environment():
    whole = EnvFactory(cartpole).make(4, seed=7).reset()["observation"]
    halves = [EnvFactory(cartpole).make(2, seed=7, first_env=first) for first in (0, 2)]
    assert torch.equal(whole, torch.cat([env.reset()["observation"] for env in halves]))
    assert torch.equal(whole, EnvFactory("CartPole-v1", "torch").make(4, seed=7).reset()["observation"])


class Parts(Clock):
    """Clock with a dictionary of observations, nested and not in alphabetical order."""

    def __init__(self, num_envs=2):
        super().__init__(num_envs)
        box = spaces.Box(-99, 99, (1,))
        space = spaces.Dict([("time", spaces.Dict(now=box)), ("privileged_limit", box)])
        TensorEnv.__init__(self, space, spaces.Discrete(2), num_envs)

    def see(self):
        return {"privileged_limit": self.limit[:, None].float(), "time": {"now": self.time[:, None].clone()}}


def test_a_dictionary_of_observations_is_joined_and_keeps_its_names():
    names = specs_of(Parts()).observation.entry_sizes
    assert names == {"time.now": 1, "privileged_limit": 1}
    for one, other in zip(rollouts(Clock), rollouts(Parts), strict=True):
        for key in ("observation", ("next", "observation")):
            assert torch.equal(other[key][..., :1], one[key])
            assert other[key][..., 1].unique(dim=1).flatten().tolist() == [3, 4]


def test_other_dictionaries_are_refused():
    space = spaces.Dict(place=spaces.Box(0, 1, (2,)), kind=spaces.Discrete(3))
    with pytest.raises(ConfigError, match="a dictionary of float vectors"):
        TensorEnv.__init__(Clock(), space, spaces.Discrete(2), 2)


def test_specs_follow_the_contract_of_torchrl():
    from torchrl.envs.utils import check_env_specs

    check_env_specs(Clock())


def collect(kind, transforms=(), num_steps=8):
    env = EnvFactory(kind, transforms=transforms).make(1, 1)
    return TensorCollector(env, MLPAgent(*specs_of(env)), num_steps).rollout()


def test_a_transform_that_ends_an_episode_resets_a_simulator_with_autoreset():
    for kind in (Clock, TellsFinal):
        rollout = collect(kind, (StepCounter(2),))
        assert rollout["observation"].flatten().tolist() == [0, 1] * 4, kind.__name__


class WithoutTheFlag(TellsFinal):
    autoresets = False


def test_final_observations_are_used_wherever_they_are_given():
    seen, expected = (collect(kind)["next", "observation"] for kind in (WithoutTheFlag, Clock))
    assert torch.equal(seen, expected)
