"""Pictures have one reading: alone and in dictionaries, for every body and every backend."""

import functools

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torchrl.data import Categorical, Unbounded

from ppo_lightning import CNNAgent, ConfigError, MLPAgent, RecurrentPPO
from ppo_lightning.algorithms.rnd import Curiosity
from ppo_lightning.callbacks import RunSummary
from ppo_lightning.commands import cli
from ppo_lightning.envs.tensor_env import TensorEnv, TensorStep
from ppo_lightning.models.cnn import ImpalaCNN, NatureCNN, scaled
from ppo_lightning.models.default import DefaultAgent
from ppo_lightning.models.encoders import Encoders
from ppo_lightning.models.memory import LSTM
from ppo_lightning.spaces.pictures import read_picture
from ppo_lightning.spaces.specs import spec_from_space
from tests.spaces.test_spaces import Any, reads

ACTIONS = Categorical(2, shape=(), dtype=torch.int64)
SHORT = {"num_envs": 2, "num_steps": 16, "total_timesteps": 32}


def box(*shape, high=255, dtype=np.uint8):
    return spaces.Box(0, high, shape, dtype)


@pytest.mark.parametrize(
    ("shape", "moved"),
    [
        ((84, 84, 4), lambda x: np.moveaxis(x, -1, 1)),
        ((40, 48, 6), lambda x: np.moveaxis(x, -1, 1)),
        ((48, 40, 16), lambda x: np.moveaxis(x, -1, 1)),
        ((4, 84, 84), lambda x: x),
        ((1, 40, 48), lambda x: x),
        ((4, 40, 48, 3), lambda x: np.concatenate([np.moveaxis(x[:, i], -1, 1) for i in range(4)], axis=1)),
        ((2, 3, 40, 48), lambda x: np.concatenate([x[:, 0], x[:, 1]], axis=1)),
        ((40, 48), lambda x: x[:, None]),
    ],
)
def test_the_axes_of_pictures_and_of_rows(shape, moved):
    picture = read_picture(Unbounded(shape, dtype=torch.uint8))
    pictures = np.random.default_rng(0).integers(0, 256, (3, *shape), np.uint8)
    expected = torch.from_numpy(np.ascontiguousarray(moved(pictures)))
    assert picture.size == expected.shape[1:]
    assert torch.equal(picture(torch.from_numpy(pictures)), expected)
    assert torch.equal(picture(torch.from_numpy(pictures.reshape(3, -1))), expected)
    assert torch.equal(scaled(picture(torch.from_numpy(pictures))), expected.float() / 255)


@pytest.mark.parametrize(
    ("shape", "fits"),
    [
        *[(shape, "none") for shape in ((40, 3, 40), (96, 96, 32), (40, 40, 3, 4), (2, 2, 40, 40, 3))],
        *[(shape, "both") for shape in ((16, 16, 16), (3, 64, 3))],
    ],
)
@pytest.mark.parametrize("body", ["nature", "impala"])
def test_other_shapes_are_refused_with_the_readings(shape, fits, body):
    with pytest.raises(ConfigError, match=rf"{fits} of the readings \[channels, height, width\]"):
        CNNAgent(Unbounded(shape, dtype=torch.uint8), ACTIONS, body=body)
    space = spaces.Dict(eye=box(40, 3, 40), speed=box(2, high=1, dtype=np.float32))
    with pytest.raises(ConfigError, match="none of the readings"):
        MLPAgent(spec_from_space(space), ACTIONS)


@pytest.mark.detail("22")
@pytest.mark.parametrize(
    ("space", "values", "largest"),
    [
        (box(40, 40, 3), 255, 255),
        (box(40, 40, 3, dtype=np.float32), 255.0, 255),
        (box(40, 40, 3, high=1, dtype=np.float32), 1.0, 1),
        (box(40, 40, 3, high=10, dtype=np.float32), 10.0, 10),
        (spaces.Box(-np.inf, np.inf, (40, 40, 3), np.float64), 1.0, 1),
        (spaces.Box(-3e38, 3e38, (40, 40, 3), np.float32), 1.0, 1),
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_networks_see_values_up_to_1(space, values, largest, inside):
    """Alone and in a dictionary, beside an entry that makes the row one of floats."""
    if inside:
        space = spaces.Dict(eye=space, speed=spaces.Box(-1, 1, (2,)))
    spec, seen = spec_from_space(space), []
    agent = DefaultAgent(spec, ACTIONS)
    (network, *_) = [module for module in agent.modules() if isinstance(module, NatureCNN)]
    assert network.picture.largest == largest
    network.convolutions.register_forward_hook(lambda _module, inputs, _out: seen.append(inputs[0]))
    rows = torch.full((2, 40 * 40 * 3 + 2), values) if inside else torch.full((2, 40, 40, 3), values)
    agent.mode(rows)
    assert (seen[0] == 1).all() and seen[0].shape == (2, 3, 40, 40)
    assert seen[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("space", [box(128), box(8, 8, 3), spaces.Dict(ram=box(128), speed=box(2, high=255))])
def test_bytes_that_are_no_picture_are_scaled_unless_they_are_normalized(space):
    spec = spec_from_space(space)
    for norm_obs, scale in ((False, 255), (True, 1)):
        body = MLPAgent(spec, ACTIONS, norm_obs=norm_obs).actor_body
        assert isinstance(body, Encoders)
        assert {encoder.largest for encoder in body.encoders} == {scale}


def test_the_small_picture_is_refused_with_a_body_that_trains(fit):
    env_id = reads(box(16, 20, 3))
    with pytest.raises(ConfigError, match=r"pictures of 16 x 20, .* set model.agent.body to impala"):
        fit(SHORT | {"env_id": env_id}, {"agent": CNNAgent})
    module = fit(SHORT | {"env_id": env_id}, {"agent": functools.partial(CNNAgent, body="impala")})
    assert isinstance(module.agent.actor_body, ImpalaCNN)


@pytest.mark.parametrize(
    ("space", "kind", "line"),
    [
        (box(40, 48, 3), CNNAgent, "parameters, 40 x 48 x 3 picture, Nature network\n"),
        (box(4, 40, 48), CNNAgent, "parameters, 4 x 40 x 48 picture, Nature network\n"),
        (box(2, 40, 48, 3, high=1, dtype=np.float32), CNNAgent, "2 x 40 x 48 x 3 picture, Nature network\n"),
        (box(40, 48), CNNAgent, "40 x 48 picture, Nature network\n"),
        (spaces.Box(-1, 1, (3,)), MLPAgent, "PPO, MLPAgent: 9027 parameters\n"),
        (spaces.Dict(eye=box(40, 48, 3), v=box(2)), MLPAgent, "eye (40 x 48 x 3 picture, Nature network)"),
    ],
)
def test_the_default_agent_fits_the_observations_and_the_start_line_says_how(fit, capsys, space, kind, line):
    module = fit(SHORT | {"env_id": reads(space)}, callbacks=[RunSummary()])
    assert type(module.agent) is kind
    assert line in capsys.readouterr().out


def test_the_default_agent_passes_its_arguments_on(fit):
    spec = spec_from_space(box(40, 48, 3))
    agent = functools.partial(DefaultAgent, memory="lstm", shared=True, hidden_sizes=[64, 64])
    module = fit(
        SHORT | {"env_id": reads(box(40, 48, 3))}, {"agent": agent, "num_minibatches": 2}, ppo=RecurrentPPO
    )
    assert isinstance(module.agent, CNNAgent) and isinstance(module.agent.memory, LSTM)
    with pytest.raises(ConfigError, match=r"model\.agent\.norm_obs is not for pictures"):
        DefaultAgent(spec, ACTIONS, norm_obs=True)
    with pytest.raises(ConfigError, match=r"set model.agent to .*CNNAgent"):
        MLPAgent(spec, ACTIONS)
    with pytest.raises(ConfigError, match=r"set model.agent to .*MLPAgent"):
        CNNAgent(Unbounded((4,)), ACTIONS)


class Pictures(TensorEnv):
    def __init__(self, num_envs):
        super().__init__(box(40, 48, 3), spaces.Discrete(2), num_envs)

    def reset_tensors(self, mask):
        return torch.randint(0, 256, (self.num_envs, 40, 48, 3), dtype=torch.uint8)

    def step_tensors(self, action):
        over = torch.rand(self.num_envs) < 0.1
        return TensorStep(self.reset_tensors(None), action.float(), over, ~over & False)


@pytest.mark.parametrize(
    "data",
    [
        {"env_id": lambda num_envs: gym.vector.SyncVectorEnv([reads(box(40, 48, 3))] * num_envs)},
        {"env_id": Pictures},
        pytest.param({"env_id": reads(box(40, 48, 3)), "num_workers": 2}, marks=pytest.mark.integration),
        pytest.param({"env_id": "CarRacing-v3", "backend": "envpool"}, marks=pytest.mark.integration),
    ],
    ids=["vector", "tensor", "workers", "envpool"],
)
def test_every_backend_reads_pictures(fit, data):
    agent = fit(SHORT | data).agent
    assert isinstance(agent, CNNAgent) and agent.actor_body.convolutions[0].in_channels == 3


def test_check_env_says_how_pictures_are_read(capsys):
    gym.register("Sees-v0", Any, kwargs={"see": box(40, 48, 3)}, disable_env_checker=True)
    gym.register("Sees-v1", Any, kwargs={"see": box(40, 3, 40)}, disable_env_checker=True)
    cli.main(["check-env", "Sees-v0", "--steps", "20"])
    assert "default agent: CNNAgent, 40 x 48 x 3 picture, Nature network" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["check-env", "Sees-v1", "--steps", "20"])
    assert "none of the readings" in capsys.readouterr().out


def test_curiosity_sees_the_last_frame_of_either_reading():
    frames = torch.randint(0, 256, (2, 5, 4, 40, 48), dtype=torch.uint8)
    first, last = (Unbounded(shape, dtype=torch.uint8) for shape in ((4, 40, 48), (40, 48, 4)))
    assert torch.equal(Curiosity(first, 4).view(frames), frames[:, :, -1:])
    assert torch.equal(Curiosity(last, 4).view(frames.movedim(2, -1)), frames[:, :, -1:])
