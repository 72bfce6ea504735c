"""Observations keep their precision until they are normalized, whatever their space and their backend."""

import functools
import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torchrl.envs import StepCounter

from ppo_lightning import DQN, PPO, SAC, TD3, ConfigError, MLPAgent, RolloutDataModule, evaluate
from ppo_lightning.envs.tensor_env import TensorEnv, TensorStep
from ppo_lightning.errors import NonFiniteError
from ppo_lightning.export.onnx import largest_difference, random_observations
from ppo_lightning.spaces.specs import spec_from_space
from tests.environments import Counter
from tests.helpers import RecordedPPO, SaveAfter

START = 1.7e9  # seconds since 1970
DATA = {"num_envs": 2, "num_steps": 32, "total_timesteps": 256}
NORMALIZED = {"agent": functools.partial(MLPAgent, norm_obs=True)}
DOUBLE = spaces.Box(0, 4e9, (1,), np.float64)
LONG = spaces.Box(0, 4_000_000_000, (1,), np.int64)


KINDS = {  # the space, and an observation with the clock [1]
    "double": (DOUBLE, lambda clock: clock),
    "negative": (spaces.Box(-4e9, 0, (1,), np.float64), lambda clock: -clock),
    "long": (LONG, lambda clock: clock.astype(np.int64)),
    "scalar": (spaces.Box(0, 4e9, (), np.float64), lambda clock: clock[0]),
    "floats": (
        spaces.Dict(clock=DOUBLE, speed=spaces.Box(-1, 1, (2,))),
        lambda clock: {"clock": clock, "speed": np.zeros(2, np.float32)},
    ),
    "choice": (spaces.Dict(clock=DOUBLE, gear=spaces.Discrete(3)), lambda clock: {"clock": clock, "gear": 1}),
    "long and choice": (
        spaces.Dict(clock=LONG, gear=spaces.Discrete(3)),
        lambda clock: {"clock": clock.astype(np.int64), "gear": 1},
    ),
    "tuple": (
        spaces.Tuple((spaces.MultiBinary(2), spaces.Dict(clock=DOUBLE))),
        lambda clock: (np.ones(2, np.int8), {"clock": clock}),
    ),
    "mask": (
        spaces.Dict(action_mask=spaces.MultiBinary(2), clock=DOUBLE),
        lambda clock: {"action_mask": np.ones(2, np.int8), "clock": clock},
    ),
}


class Clock(Counter):
    """Environment with a clock among its observations, and maybe with a mask outside of them."""

    def __init__(self, kind="double", masked=False):
        super().__init__()
        self.observation_space, self.see = KINDS[kind]
        if masked:
            self.action_masks = lambda: np.ones(2, np.int8)

    def observation(self):
        return self.see(np.array([START + self.time]))

    def step(self, action):
        observation, *_ = super().step(action)
        return observation, 1.0, False, self.time == 50, {}


class TensorClock(TensorEnv):
    def __init__(self, num_envs):
        super().__init__(DOUBLE, spaces.Discrete(2), num_envs)

    def reset_tensors(self, mask):
        fresh = torch.zeros(self.num_envs, 1, dtype=torch.float64)
        self.time = fresh if mask is None else torch.where(mask[:, None], fresh, self.time)
        return self.time + START

    def step_tensors(self, action):
        self.time = self.time + 1
        return TensorStep(self.time + START, action.float(), self.time[:, 0] > 1e9, self.time[:, 0] == 50)


@pytest.mark.parametrize(
    "data",
    [
        *[{"env_id": Clock, "env_kwargs": {"kind": kind}} for kind in KINDS],
        *[{"env_id": Clock, "env_kwargs": {"kind": kind, "masked": True}} for kind in ("double", "floats")],
        {"env_id": lambda num_envs: gym.vector.SyncVectorEnv([lambda: Clock("choice")] * num_envs)},
        {"env_id": TensorClock},
        {"env_id": Clock, "env_kwargs": {"kind": "negative"}, "transforms": [StepCounter(50)]},
        pytest.param(
            {"env_id": Clock, "env_kwargs": {"kind": "choice"}, "num_workers": 2},
            marks=pytest.mark.integration,
        ),
    ],
)
def test_statistics_see_the_exact_values(fit, data):
    module = fit(DATA | data, NORMALIZED, ppo=RecordedPPO)
    seen = module.rollouts[-1]["observation"]
    assert max(len(column.unique()) for column in seen[0].T) == 32, "every second is another number"
    assert seen.dtype == torch.float32
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        evaluate(module.agent, RolloutDataModule(**DATA | data).factory.make(2), num_steps=50)


@pytest.mark.parametrize(
    "data", [{"env_id": Clock}, {"env_id": Clock, "env_kwargs": {"kind": "choice"}}, {"env_id": TensorClock}]
)
def test_without_statistics_one_warning_names_the_setting(fit, data):
    data = DATA | {"total_timesteps": 192} | data
    with pytest.warns(UserWarning, match="float32 rounds .* 16777216: set model.agent.norm_obs") as said:
        fit(data)
    assert sum("float32 rounds" in str(warning.message) for warning in said) == 1
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*float32 rounds")
        fit(data, NORMALIZED)


@pytest.mark.parametrize("kind", KINDS)
def test_predictions_and_exports_see_the_exact_values(fit, tmp_path, kind):
    data = DATA | {"env_id": Clock, "env_kwargs": {"kind": kind}}
    fit(data, NORMALIZED | {"learning_rate": 0.01}, callbacks=[SaveAfter(tmp_path / "a.ckpt", 4)])
    module = PPO.load_from_checkpoint(tmp_path / "a.ckpt")
    torch.nn.init.normal_(module.agent.head.linear.weight, std=10)
    env, rows = Clock(kind), RolloutDataModule(**data).factory.make(1)
    observation, row = env.reset()[0], rows.reset_arrays()
    for _ in range(40):
        action = module.predict(observation)
        (expected,) = module.agent.mode(torch.from_numpy(row))
        assert action == expected
        observation, row = env.step(0)[0], rows.step_arrays(np.zeros(1, np.int64))[0]
    onnx = module.to_onnx(tmp_path / "a.onnx")
    observations = random_observations(module.observation_spec, normalizer=module.agent.normalizer)
    assert largest_difference(module.agent, onnx, observations) < 1e-4
    assert module.agent.normalize(torch.from_numpy(observations)).abs().mean() < 5


# Ends of ranges


class Ends(Counter):
    """Counter with other spaces, or with one large number at step 5."""

    def __init__(self, observation_space=None, action_space=None, largest=None, reward=1.0):
        super().__init__(terminate_at=16, reward=1.0)
        self.largest, self.last_reward = largest, reward
        self.observation_space = observation_space or spaces.Box(-np.inf, np.inf, (1,), np.float64)
        self.action_space = action_space or Counter.action_space

    def observation(self):
        if not isinstance(self.observation_space, spaces.Box):
            return self.observation_space.sample()
        return np.full(
            (1,), self.largest if self.time == 5 and self.largest else 1, self.observation_space.dtype
        )

    def step(self, action):
        assert self.action_space.contains(action), action
        observation, reward, *rest = super().step(action)
        return observation, self.last_reward if self.time == 5 else reward, *rest


ROLLOUTS = {"num_envs": 1, "num_steps": 32, "total_timesteps": 64}


@pytest.mark.parametrize(
    ("ends", "sentence"),
    [
        ({"largest": 1e300}, "observation of environment 0 is 1e.300 at its step 4"),
        ({"largest": -1e39}, "observation of environment 0 is -1e.39 at its step 4"),
        ({"reward": 1e300}, "reward of environment 0 is 1e.300 at its step 4"),
    ],
)
@pytest.mark.parametrize("algorithm", [PPO, functools.partial(DQN, learning_starts=8)])
def test_what_float32_cannot_hold_is_named_with_its_step(fit, algorithm, ends, sentence):
    with pytest.raises(NonFiniteError, match=sentence):
        fit(ROLLOUTS | {"env_id": lambda: Ends(**ends)}, ppo=algorithm)


BOX, HUGE = spaces.Box, spaces.Discrete(10**8)
TANH = functools.partial(MLPAgent, head="tanh_gaussian")


@pytest.mark.parametrize(
    "ends",
    [
        {"observation_space": HUGE},
        {"observation_space": spaces.Dict(a=HUGE)},
        {"observation_space": spaces.MultiDiscrete([10**6] * 4)},
        {"observation_space": spaces.MultiBinary(10**8)},
        {"action_space": HUGE},
    ],
)
def test_no_encoding_is_wider_than_a_million(fit, ends):
    with pytest.raises(ConfigError, match="with at most 1048576 choices"):
        fit(ROLLOUTS | {"env_id": lambda: Ends(**ends)})


@pytest.mark.parametrize("width", [np.finfo(np.float32).max, 1e30])
@pytest.mark.parametrize("algorithm", [SAC, TD3, PPO])
def test_nothing_is_squashed_into_bounds_without_a_width(fit, algorithm, width):
    space = BOX(-width, width, (1,), np.float32)
    settings = {"agent": TANH} if algorithm is PPO else {"learning_starts": 8}
    with pytest.raises(ConfigError, match="actions without finite bounds"):
        fit(ROLLOUTS | {"env_id": lambda: Ends(action_space=space)}, settings, ppo=algorithm)


@pytest.mark.parametrize(
    ("low", "high", "dtype"),
    [
        ([0.7, -0.9], [0.9, -0.7], np.float64),
        ([-0.1, -1], [0.7, 1], np.float64),
        ([-1, -1], [1, 1], np.float32),
    ],
)
def test_predicted_actions_are_in_their_box(fit, low, high, dtype):
    space = BOX(np.array(low), np.array(high), dtype=dtype)
    module = fit(ROLLOUTS | {"env_id": lambda: Ends(action_space=space)})
    observations = np.linspace(-9, 9, 99)[:, None]
    assert all(space.contains(action) for action in module.predict(observations, deterministic=False))


def test_a_box_of_uint64_has_its_bounds(fit):
    space = BOX(0, 2**64 - 1, (1,), np.uint64)
    spec = spec_from_space(space)
    assert (spec.space.low, spec.space.high) == (0, 2**63 - 1)
    assert fit(ROLLOUTS | {"env_id": lambda: Ends(space)}).env_steps == 64
