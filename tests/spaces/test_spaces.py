"""All spaces of actions and observations, and masks of invalid actions, of Gymnasium environments."""

import functools
import re

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space
from torchrl.envs import StepCounter

from ppo_lightning import ConfigError, MLPAgent, RecurrentPPO, evaluate, make_env
from ppo_lightning.callbacks import Doctor
from ppo_lightning.checkpoints.agent import agent_to_plain, check_same_agent, check_same_spaces
from ppo_lightning.commands import cli
from ppo_lightning.export.onnx import largest_difference, random_observations, to_onnx
from ppo_lightning.models.encoders import make_encoder
from ppo_lightning.models.memory import MEMORIES
from ppo_lightning.rollouts.make_collector import make_collector
from ppo_lightning.spaces.rows import from_row, to_row
from ppo_lightning.spaces.specs import (
    cells_as_choices,
    choice_counts,
    columns,
    mask_columns,
    row_spec,
    spec_from_plain,
    spec_from_space,
    spec_to_plain,
)
from tests.helpers import RecordedPPO, Recorder

VECTOR = spaces.Box(-np.inf, np.inf, (3,), np.float32)


class MissionSpace(spaces.Space):
    """Text space of a custom class, as in the package ``minigrid``."""

    def sample(self, *args, **kwargs):
        return "go to the red ball"


EVERYTHING = spaces.Dict(
    picture=spaces.Box(0, 255, (36, 40, 3), np.uint8),
    cells=spaces.Box(0, 10, (2, 2, 3), np.uint8),
    place=spaces.Discrete(5),
    inside=spaces.Dict(flags=spaces.MultiBinary(3), kinds=spaces.MultiDiscrete([2, 4])),
    speed=spaces.Box(-9, 9, (2,), np.float64),
)
OBSERVATIONS = {
    "vector": VECTOR,
    "discrete": spaces.Discrete(4),
    "multidiscrete": spaces.MultiDiscrete([3, 2]),
    "binary": spaces.MultiBinary(3),
    "cells": spaces.Box(0, 10, (3, 3, 2), np.uint8),
    "tuple": spaces.Tuple((VECTOR, spaces.Discrete(3))),
    "everything": EVERYTHING,
    "text": spaces.Dict(
        speed=VECTOR, said=spaces.Dict(word=spaces.Text(9), mission=MissionSpace(), loud=spaces.Discrete(2))
    ),
}
ACTIONS = {
    "discrete": spaces.Discrete(3),
    "multidiscrete": spaces.MultiDiscrete([3, 2, 4]),
    "binary": spaces.MultiBinary(3),
    "box": spaces.Box(-1, 1, (2,), np.float32),
    "dict": spaces.Dict(
        steer=spaces.Box(np.float32(-0.5), np.float32(3), (2,)),
        gear=spaces.Discrete(3),
        lights=spaces.MultiBinary(2),
    ),
    "tuple": spaces.Tuple((spaces.MultiDiscrete([2, 3]), spaces.Dict(push=spaces.Box(-1, 1, (1,))))),
}
DISCRETE = ("discrete", "multidiscrete", "binary", "dict", "tuple")  # with actions that a mask can forbid


class Any(gym.Env):
    """Environment with random observations that requires actions of the space and of the mask.

    ``see`` and ``do`` are spaces, or names of them.
    With ``masked``, a random mask allows at least one action of each component.
    The mask is ``action_masks()``, or an entry of the ``observation`` or the ``info``, as ``entry`` says.
    From step ``forbid`` on it allows no action.
    """

    def __init__(self, see="vector", do="discrete", masked=False, entry=None, forbid=None):
        self.observation_space = OBSERVATIONS[see] if isinstance(see, str) else see
        self.action_space = ACTIONS[do] if isinstance(do, str) else do
        self.inner, self.entry, self.forbid = self.observation_space, entry, forbid
        self.numbers = choice_counts(spec_from_space(self.action_space))
        if masked and entry == "observation":
            entries = self.inner if isinstance(self.inner, spaces.Dict) else {"it": self.inner}
            self.observation_space = spaces.Dict(
                {**entries, "action_mask": spaces.MultiBinary(sum(self.numbers))}
            )
        if masked and entry is None:
            self.action_masks = lambda: self.mask
        self.masked = masked

    def observation(self):
        self.mask = np.concatenate([np.zeros(0, np.int8), *map(self.component, self.numbers)])
        if self.forbid is not None and self.time >= self.forbid:
            self.mask[:] = 0
        value = self.inner.sample()
        if not (self.masked and self.entry == "observation"):
            return value
        return (value if isinstance(value, dict) else {"it": value}) | {"action_mask": self.mask}

    def component(self, number):
        mask = self.np_random.integers(0, 2, number).astype(np.int8)
        mask[self.np_random.integers(number)] = 1
        return mask

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.inner.seed(seed)
        self.time = 0
        return self.observation(), self.info()

    def info(self):
        return {"action_mask": self.mask} if self.masked and self.entry == "info" else {}

    def step(self, action):
        assert self.action_space.contains(action), action
        if self.masked:
            first = np.cumsum([0, *self.numbers[:-1]])
            assert self.mask[first + choices_of(self.action_space, action)].all(), "not allowed"
        self.time += 1
        reward = float(np.sum(to_row(self.action_space, action)))
        return self.observation(), reward, self.time == 7, False, self.info()


def choices_of(space, action):
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        return [index for key, part in parts for index in choices_of(part, action[key])]
    return [] if isinstance(space, spaces.Box) else np.ravel(action).astype(int).tolist()


gym.register("Any-v0", Any, disable_env_checker=True)


def build(env, memory=None, **options):
    torch.manual_seed(1)
    agent = MLPAgent(*env.agent_specs, shared=True, memory=memory, memory_size=8, **options)
    for name, parameter in agent.head.named_parameters():
        if "weight" in name:
            torch.nn.init.normal_(parameter)
    return agent


class RecordedRecurrent(Recorder, RecurrentPPO):
    pass


@pytest.fixture
def train(fit):
    """Return a function that trains, and returns the module and the first divergence of each rollout."""

    def run(agent=MLPAgent, ppo=RecordedPPO, callbacks=(), compile=False, **data):
        model = {"agent": agent, "num_minibatches": 2, "update_epochs": 2, "compile": compile}
        data = {"num_envs": 2, "num_steps": 16, "total_timesteps": 96} | data
        module = fit(data, model, ppo=ppo, callbacks=[*callbacks])
        return module, [float(metrics["approx_kl"]) for metrics in module.metrics[::4]]

    return run


@pytest.mark.parametrize("memory", [None, *MEMORIES])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("do", ACTIONS)
def test_the_first_ratio_is_1_for_every_head_mask_and_memory(train, do, masked, memory):
    """The environment requires that every action is in its space and allowed."""
    if masked and do not in DISCRETE:
        pytest.skip("nothing to mask")
    agent = functools.partial(MLPAgent, shared=True, memory=memory, memory_size=8)
    kwargs = {"do": do, "masked": masked, "see": "tuple"}
    _, kl = train(agent, RecordedRecurrent if memory else RecordedPPO, env_id="Any-v0", env_kwargs=kwargs)
    assert len(kl) == 3
    assert max(kl) < 1e-6


@pytest.mark.integration
def test_all_parts_and_masks_in_one_compiled_graph(train):
    kwargs = {"do": "dict", "masked": True, "see": "everything"}
    _, kl = train(compile=True, env_id="Any-v0", env_kwargs=kwargs)
    assert max(kl) < 1e-6


@pytest.mark.parametrize("norm_obs", [False, True])
@pytest.mark.parametrize("see", OBSERVATIONS)
def test_every_observation_trains(train, see, norm_obs):
    _, kl = train(functools.partial(MLPAgent, norm_obs=norm_obs), env_id="Any-v0", env_kwargs={"see": see})
    assert max(kl) < 1e-6


@pytest.mark.parametrize(
    "space",
    [
        *(space for name, space in OBSERVATIONS.items() if name != "text"),
        *ACTIONS.values(),
        spaces.Box(np.float32([-1, -2]), np.float32([1, 3])),
    ],
)
def test_rows_hold_the_values_and_specs_survive_a_checkpoint(space):
    space.seed(1)
    for _ in range(5):
        value = space.sample()
        again = from_row(space, to_row(space, value))
        assert space.contains(again)
        np.testing.assert_array_equal(to_row(space, again), to_row(space, value))
    spec = spec_from_space(space)
    plain = spec_to_plain(spec)
    assert len(str(plain)) < 1000, "a bound that is equal everywhere is one number"
    assert spec_from_plain(plain) == spec


@pytest.mark.parametrize("see", OBSERVATIONS)
@pytest.mark.parametrize("do", ACTIONS)
def test_every_agent_is_built_on_the_device_meta(see, do):
    """Checkpoints are compared with an agent there before they take memory."""
    env = make_env("Any-v0", env_kwargs={"see": see, "do": do, "masked": do in DISCRETE})
    specs = env.agent_specs
    shapes = []
    for device in ("meta", "cpu"):
        with torch.device(device):
            agent = MLPAgent(*specs, norm_obs=True)
        shapes.append({name: tensor.shape for name, tensor in agent.state_dict().items()})
    assert shapes[0] == shapes[1]


def test_pictures_and_choices_alone_are_kept_as_bytes():
    spec = spec_from_space(spaces.Dict(it=spaces.Box(0, 255, (36, 36, 3), np.uint8), at=spaces.Discrete(4)))
    assert row_spec(spec).dtype == torch.uint8
    assert row_spec(spec_from_space(EVERYTHING)).dtype == torch.float32


def test_minigrids_cells_are_choices():
    env, random = make_env("MiniGrid-ObstructedMaze-1Dlhb-v0", 4, "envpool"), np.random.default_rng(0)
    places = {name: place for name, _, place in columns(env.agent_specs[0])}
    encode, limits = make_encoder(env.agent_specs[0]["image"]), np.tile([11, 6, 3], 49)
    first = np.concatenate([[0], limits.cumsum()[:-1]])
    observation, met = env.reset_arrays(), set()
    for _ in range(100):
        cells = observation[:, places["image"]]
        assert (cells < limits).all()
        rows = encode(torch.from_numpy(cells.astype(np.int64)))
        assert rows.shape == (4, limits.sum())
        np.testing.assert_array_equal(rows.nonzero()[:, 1].view(4, -1).numpy(), first + cells)
        met |= set(np.unique(cells))
        observation, _, terminated, truncated, _ = env.step_arrays(random.integers(0, 7, 4))
        if (done := terminated | truncated).any():
            observation = env.reset_arrays(done)
    assert len(met) > 4  # walls, doors, balls, boxes
    env.close()


def test_a_view_with_which_envpool_would_abort_is_refused():
    with pytest.raises(ConfigError, match="package minigrid"):
        make_env("MiniGrid-MemoryS7-v0", 1, "envpool", env_kwargs={"agent_view_size": 5})


@pytest.mark.parametrize("shape", [(56, 56, 3), (7, 7, 21), (7, 7)])
def test_minigrids_pictures_that_are_no_cells_stay_as_they_are(shape):
    space = spaces.Dict(
        direction=spaces.Discrete(4), image=spaces.Box(0, 255, shape, np.uint8), mission=MissionSpace()
    )
    assert cells_as_choices(space) is space
    assert cells_as_choices(EVERYTHING) is EVERYTHING


def test_only_measurements_are_normalized():
    env = make_env("Any-v0", 4, env_kwargs={"see": "everything"})
    agent = build(env, norm_obs=True)
    rollout = make_collector(env, agent, 32, 1).rollout()
    rows = rollout["observation"].flatten(0, 1)
    parts = {name: rows[:, place] for name, _, place in columns(env.agent_specs[0])}
    assert parts["picture"].max() > 200
    assert parts["place"].unique().tolist() == [0, 1, 2, 3, 4]
    assert set(parts["inside.flags"].unique().tolist()) == {0, 1}
    assert parts["cells"].min() < -1
    assert parts["speed"].std() == pytest.approx(1, abs=0.2)


@pytest.mark.detail("37")
def test_components_are_drawn_with_their_probabilities():
    agent = build(make_env("Any-v0", 1, env_kwargs={"do": "multidiscrete"}))
    observation = torch.randn(1, 3)
    drawn, *_ = agent.act(observation.expand(20_000, 3), agent.noise((20_000,)))
    logits = agent.head.linear(agent.actor_body(observation))[0].split([3, 2, 4])
    for k, component in enumerate(logits):
        frequencies = torch.bincount(drawn[:, k], minlength=len(component)) / 20_000
        torch.testing.assert_close(frequencies, component.softmax(0).detach(), atol=0.02, rtol=0)


@pytest.mark.detail("A4")
@pytest.mark.parametrize("entry", [None, "observation", "info"])
@pytest.mark.parametrize("do", DISCRETE)
def test_invalid_actions_have_no_probability_and_no_gradient(do, entry):
    env = make_env("Any-v0", 8, env_kwargs={"do": do, "masked": True, "entry": entry})
    agent = build(env)
    rollout = make_collector(env, agent, 16, 1).rollout()
    observation, action = rollout["observation"].flatten(0, 1), rollout["action"].flatten(0, 1)
    numbers, _ = agent.explain(observation)
    logits = [part.linear for part in agent.head.modules() if hasattr(part, "linear") and part.num_choices]
    outputs = []
    for linear in logits:
        linear.register_forward_hook(lambda _module, _inputs, out: outputs.append(out.retain_grad() or out))
    log_prob, entropy, *_ = agent.evaluate(observation, action)
    (log_prob.sum() + entropy.sum()).backward()
    grad = torch.cat([out.grad for out in outputs], dim=-1)
    allowed = observation[:, mask_columns(env.agent_specs[0])] > 0
    assert not grad[~allowed].any(), "exactly 0"
    assert grad[allowed].any()
    assert all(parameter.grad.any() for parameter in agent.head.parameters())
    assert log_prob.isfinite().all()
    assert entropy.isfinite().all()
    if do != "tuple":  # whose numbers are clipped to others than its choices
        received = action.reshape(len(action), -1).clamp(-0.5, 3)
        torch.testing.assert_close(rollout["next", "reward"].flatten(), received.sum(-1).float())
    if do == "discrete":
        assert not numbers[~allowed].any()
        torch.testing.assert_close(numbers.sum(-1), torch.ones(len(numbers)))


def test_a_mask_that_allows_nothing_is_an_error_that_names_the_environment(train):
    with pytest.raises(ConfigError, match=r"Any-v0, environment 0, step 3: its action_mask allows no action"):
        train(env_id="Any-v0", env_kwargs={"masked": True, "forbid": 3})
    # At episode ends, a mask may forbid everything.
    train(env_id="Any-v0", env_kwargs={"masked": True, "forbid": 7})


@pytest.mark.parametrize("see", ["everything", "vector"])
def test_the_doctor_says_nothing_of_choices_pictures_and_composite_actions(train, see):
    """Neither pictures nor choices count as unscaled observations."""
    doctor = Doctor()
    train(callbacks=[doctor], env_id="Any-v0", env_kwargs={"see": see, "do": "dict"}, total_timesteps=960)
    assert not {"unscaled observations", "entropy collapse"} & doctor.findings.keys()


def test_a_mask_of_another_size_is_refused():
    space = spaces.Dict(it=VECTOR, action_mask=spaces.MultiBinary(2))
    with pytest.raises(ConfigError, match=r"action_mask of 2 entries, and 3 discrete actions"):
        MLPAgent(spec_from_space(space), spec_from_space(spaces.Discrete(3)))


@pytest.mark.parametrize(
    "kwargs", [{"masked": True}, {"masked": True, "entry": "info"}, {"do": "dict"}, {"see": "discrete"}]
)
def test_what_torchrls_collector_would_take_wrongly_is_refused(train, kwargs):
    with pytest.raises(ConfigError, match="which would ignore them"):
        train(env_id="Any-v0", env_kwargs=kwargs, transforms=[StepCounter()])


def test_a_mask_may_have_the_parts_of_the_action():
    parts = spaces.Dict(gear=spaces.MultiBinary(3), steer=VECTOR)
    space = spaces.Dict(action_mask=spaces.Tuple((parts["gear"], spaces.MultiBinary(2))), it=VECTOR)
    agent = MLPAgent(spec_from_space(space), spec_from_space(spaces.MultiDiscrete([3, 2])))
    row = torch.tensor([[0.0, 1, 0, 1, 0, 5, 5, 5]])
    action, *_ = agent.act(row.expand(50, 8), agent.noise((50,)))
    assert action.unique(dim=0).tolist() == [[1, 0]]


@pytest.mark.parametrize(
    ("was", "now"),
    [
        (
            spaces.Dict(a=spaces.Discrete(3), b=spaces.Discrete(5)),
            spaces.Dict(a=spaces.Discrete(5), b=spaces.Discrete(3)),
        ),
        (spaces.Dict(a=spaces.MultiDiscrete([2, 4])), spaces.Dict(a=spaces.MultiDiscrete([4, 2]))),
        (spaces.Dict(a=spaces.Box(-1, 1, (1,))), spaces.Dict(a=spaces.Box(-2, 2, (1,)))),
        (spaces.Dict(a=spaces.Discrete(3)), spaces.Dict(b=spaces.Discrete(3))),
        (spaces.MultiDiscrete([2, 2]), spaces.MultiBinary(2)),
    ],
)
def test_an_agent_of_other_actions_is_refused(was, now):
    vector = spec_from_space(VECTOR)
    specs = map(spec_from_space, (was, now))
    plain = [agent_to_plain(MLPAgent(vector, spec), vector, spec) for spec in specs]
    with pytest.raises(ConfigError, match="was trained on actions"):
        check_same_agent(*plain)


def test_an_agent_does_not_play_with_other_parts():
    for do in ("multidiscrete", "dict"):
        trained, other, cells = (
            make_env("Any-v0", 1, env_kwargs={"do": actions, "see": see})
            for actions, see in ((do, "binary"), ("discrete", "binary"), (do, "cells"))
        )
        agent = build(trained)
        check_same_spaces(agent, trained)
        with pytest.raises(ConfigError, match="choose that of its training"):
            check_same_spaces(agent, other)
        with pytest.raises(ConfigError, match="does not take observations"):
            check_same_spaces(agent, cells)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("do", "memory"), [("dict", "lstm"), ("tuple", None), ("multidiscrete", None), ("box", "min_gru")]
)
def test_evaluation_and_onnx(do, memory, tmp_path):
    kwargs = {"do": do, "see": "everything", "masked": do in DISCRETE}
    env = make_env("Any-v0", 2, env_kwargs=kwargs)
    agent = build(env, memory)
    assert (evaluate(agent, make_env("Any-v0", 2, env_kwargs=kwargs))["step_count"] == 7).all()
    path = to_onnx(agent, env.agent_specs[0], tmp_path / "agent.onnx")
    assert largest_difference(agent, path, random_observations(env.agent_specs[0])) < 1e-4


class Corridor(gym.Env):
    """A user's environment with dictionaries: the lamp tells the right gear, the place the right push."""

    observation_space = spaces.Dict(lamp=spaces.Discrete(3), place=spaces.Box(-1, 1, (1,), np.float32))
    action_space = spaces.Dict(gear=spaces.Discrete(3), push=spaces.Box(-1, 1, (1,), np.float32))

    def observation(self):
        self.lamp, self.place = int(self.np_random.integers(3)), float(self.np_random.uniform(-1, 1))
        return {"lamp": self.lamp, "place": np.array([self.place], np.float32)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.observation(), {}

    def step(self, action):
        right = float(action["gear"] == self.lamp) - abs(float(action["push"][0]) - self.place)
        self.time += 1
        return self.observation(), right, self.time == 8, False, {}


gym.register("Corridor-v0", Corridor)


@pytest.mark.integration
def test_three_lines_of_yaml_train_a_new_environment(tmp_path, monkeypatch, capsys):
    """The agent learns: a random policy gets about 8 * (1/3 - 0.9)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corridor.yaml").write_text("data:\n  env_id: Corridor-v0\n  total_timesteps: 40960\n")
    quiet = [f"--trainer.{name}=false" for name in ("logger", "enable_progress_bar", "enable_checkpointing")]
    cli.main(["fit", "--config", "corridor.yaml", *quiet, "--model.learning_rate", "0.003"])
    shown = capsys.readouterr().out
    assert float(re.search(r"last 100 episodes: (\S+)", shown)[1]) > 0, shown


def reads(space, actions=spaces.Discrete(2)):  # noqa: B008
    """Return a function that makes an environment with random observations of a space."""
    return functools.partial(Any, space, actions)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1, 1, (), np.float32),
        spaces.Box(0, 9, (), np.int64),
        spaces.Box(0, 255, (), np.uint8),
        spaces.Box(0, np.inf, (2,)),
        spaces.Box(0, 1, (2,), np.bool_),
        spaces.Box(0, 9, (2,), np.uint16),
        spaces.Dict({1: spaces.Box(-1, 1, (2,)), 0: spaces.Discrete(3)}),
        spaces.Dict({0: spaces.Box(-1, 1, ()), 1: spaces.Box(-1, 1, (0,))}),
        spaces.Tuple((spaces.Box(-1, 1, ()), spaces.Box(-1, 1, (0,)), spaces.Discrete(1))),
    ],
    ids=str,
)
def test_unusual_observations_train_and_predict(train, space):
    module, kl = train(env_id=reads(space))
    assert max(kl) < 1e-6
    assert module.predict(space.sample()) in (0, 1)
    assert module.predict(batch_space(space, 3).sample()).shape == (3,)
    assert (evaluate(module.agent, make_env(reads(space), 2))["step_count"] == 7).all()
    vector = gym.vector.SyncVectorEnv([reads(space)] * 2)
    train(env_id=lambda num_envs: vector)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1, 1, (0,)),
        spaces.Box(-1, 1, (3, 0)),
        spaces.Dict(),
        spaces.Dict(it=spaces.Box(-1, 1, (0,)), action_mask=spaces.MultiBinary(2)),
        spaces.Dict(word=spaces.Text(9)),
    ],
    ids=str,
)
def test_observations_without_numbers_are_refused_with_a_remedy(train, space):
    with pytest.raises(ConfigError, match=r"observations without numbers.* add a constant one by gymnasium"):
        train(env_id=reads(space))
    constant = spaces.Box(1, 1, (1,))
    wrapped = gym.wrappers.TransformObservation(reads(space)(), lambda _: np.ones(1, np.float32), constant)
    train(env_id=lambda: wrapped, num_envs=1)


def boxed(low, high, shape, dtype=np.float32):
    return reads(VECTOR, spaces.Box(low, high, shape, dtype))


@pytest.mark.parametrize(
    ("env_id", "words"),
    [
        (boxed(-np.inf, np.inf, (2,)), "without finite bounds"),
        (boxed(-5, np.inf, (2,)), "without finite bounds"),
        (boxed(-1, 1, (2, 2)), r"actions of shape \(2, 2\)"),
        (boxed(-1, 1, (0,)), r"actions of shape \(0,\)"),
        (boxed(0, 9, (2,), np.int64), "dtype int64"),
        (boxed(np.float32([-1, -50]), np.float32([1, 50]), (2,)), "unequal widths"),
        (boxed(np.float32([0, 1]), np.float32([1, 1]), (2,)), r"bounds \[1, 1\] in component 1"),
    ],
)
def test_the_wrapper_in_the_message_about_actions_trains(train, env_id, words):
    with pytest.raises(ConfigError, match=words) as raised:
        train(env_id=env_id)
    wrapper = re.search(r"gymnasium\.wrappers\.\w+\(env.*\)", str(raised.value))[0].split(", without")[0]
    train(env_id=lambda: eval(wrapper, {"gymnasium": gym, "numpy": np, "env": env_id()}))


def clipped(low=-0.5, high=2):
    return gym.wrappers.RecordEpisodeStatistics(gym.wrappers.ClipAction(boxed(low, high, (2,))()))


@pytest.mark.parametrize(
    "env_id",
    [
        clipped,
        lambda num_envs: gym.vector.SyncVectorEnv([clipped] * num_envs),
        lambda num_envs: gym.wrappers.vector.ClipAction(
            gym.vector.SyncVectorEnv([boxed(-0.5, 2, (2,))] * num_envs)
        ),
    ],
)
def test_clip_action_does_not_hide_the_bounds(train, env_id):
    module, _ = train(env_id=env_id)
    assert module.agent.head.low.tolist() == [-0.5] * 2 and module.agent.head.high.tolist() == [2] * 2
    with pytest.raises(ConfigError, match="without a ClipAction around it"):
        train(env_id=lambda: clipped(-np.inf, np.inf))


def test_the_body_does_not_read_the_mask():
    """Whatever the order of the entries, and whether the body needs encoders."""
    for name in ("a", "it"):
        space = spaces.Dict({name: VECTOR, "action_mask": spaces.MultiBinary(2)})
        spec = spec_from_space(space)
        agent = MLPAgent(spec, spec_from_space(spaces.Discrete(2)))
        assert agent.actor_body.layers[0].in_features == 3
        rows = torch.randn(5, 5)
        other = rows.clone()
        other[:, mask_columns(spec)] = 1
        assert torch.equal(agent.value(rows), agent.value(other))


def test_actions_with_text_are_refused_which_observations_may_have():
    space = spaces.Dict(a=spaces.Discrete(2), note=spaces.Text(3))
    assert set(spec_from_space(space).keys()) == {"a"}
    with pytest.raises(ConfigError, match=r"Text.*not supported"):
        make_env(lambda: Any(spaces.Box(-1, 1, (2,)), space))
