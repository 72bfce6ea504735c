"""Environments of users: they train, or one sentence explains why not."""

import contextlib
import functools
import gc
import io
import itertools
import re
import sys
import time
import traceback
from typing import ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.vector import AsyncVectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from torchrl.envs import (
    CatTensors,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    UnsqueezeTransform,
    VecNorm,
    VecNormV2,
)
from torchrl.envs.custom import PendulumEnv
from torchrl.envs.libs.gym import GymWrapper

from ppo_lightning import PPO, ConfigError, MLPAgent, RolloutDataModule, make_env
from ppo_lightning.commands import cli
from ppo_lightning.envs import EnvFactory, check_environment
from ppo_lightning.envs.specs import specs_of
from ppo_lightning.envs.torchrl import as_torchrl, set_everywhere
from ppo_lightning.rollouts.make_collector import make_collector
from ppo_lightning.spaces.entries import entry_columns
from ppo_lightning.video.record import frame_rate
from tests.helpers import SaveAfter

FORKS = pytest.mark.skipif(sys.platform != "linux", reason="the tests' classes need fork")
QUIET = ("--trainer.logger", "false", "--trainer.enable_progress_bar", "false")
SMALL = {"num_envs": 2, "num_steps": 16, "total_timesteps": 2 * 16 * 3}
ZEROS = np.zeros(3, np.float32)


class Plain(gym.Env):
    """Valid environment."""

    observation_space = spaces.Box(-1, 1, (3,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.see(), {}

    def see(self):
        return ZEROS

    def step(self, action):
        self.time += 1
        return self.see(), 1.0, self.time % 50 == 0, False, {}


def changed(space=None, late=False, **attributes):
    """Return a subclass of Plain with other attributes; with ``late``, ``step`` differs from step 20 on."""
    wrong = attributes.get("step")
    if late:
        attributes["step"] = lambda self, action: (
            Plain.step(self, action) if self.time < 19 else wrong(self, action)
        )
    if space is not None:
        attributes["observation_space"] = space
    return type("Changed", (Plain,), attributes)


def steps(*answer, **options):
    return changed(step=lambda self, action: answer, **options)


def resets(answer, **options):
    return changed(reset=lambda self, *, seed=None, options=None: answer, **options)


def sees(observation, space):
    return changed(space, see=lambda self: observation)


def stop(env, action):
    return next(iter(()))


def leave(env, action):
    sys.exit(0)


OK = (1.0, False, False, {})
PAIR = spaces.Tuple((spaces.Discrete(2),) * 2)
PARTS = spaces.Dict(place=spaces.Discrete(3), speed=spaces.Box(-1, 1, (2,), np.float32))
FINE = {"place": 1, "speed": np.zeros(2, np.float32)}
PICTURE = spaces.Dict(it=spaces.Box(0, 1, (3, 8, 4)))
WHOLE = spaces.Box(-9, 9, (3,), np.int64)
BYTES = spaces.Box(0, 255, (3,), np.uint8)
SEEN = spaces.Dict(it=spaces.Box(0, 255, (3, 8, 4), np.uint8), place=spaces.Discrete(5))
STEP = r"step\(\) must take an action and return \(observation, reward, terminated, truncated, info\), and "
RESET = r"reset\(\) must take seed and options and return \(observation, info\), and "
# Defect of a step -> what it returns, the sentence after the step, and a space with an observation.
WRONG_STEPS = {
    "shape": ((np.zeros(4), *OK), r"the observation is an array of shape \(4,\) and must .* of shape \(3,\)"),
    "scalar": ((0.5, *OK), r"the observation is 0.5 and must be .* of shape \(3,\)"),
    "one number": (
        (np.zeros(1, np.float32), *OK),
        r"the observation is an array of shape \(1,\)",
    ),  # NumPy broadcasts
    "no observation": ((None, *OK), "the observation is None and must be an array of numbers"),
    "text": ((np.array(["1", "2", "3"]), *OK), "the observation is .* numbers"),
    "fractions": ((np.full(3, 0.5), *OK), "the observation has fractions", WHOLE, np.zeros(3, np.int64)),
    "too large": ((np.array([1, 300, 0]), *OK), "the observation has the value 300", BYTES, np.zeros(3, int)),
    "too small": ((np.array([1, -1, 0]), *OK), "the observation has the value -1", BYTES, np.zeros(3, int)),
    "choice beyond a byte": (
        ({"it": np.zeros((3, 8, 4), np.uint8), "place": 260}, *OK),
        "the observation has the value 260",
        SEEN,
        {"it": np.zeros((3, 8, 4), np.uint8), "place": 0},
    ),
    "4-tuple": ((ZEROS, 1.0, False, {}), STEP + "returned 4 values"),
    "nothing": (None, STEP + "returned NoneType"),
    "array reward": ((ZEROS, np.array([1.0]), *OK[1:]), r"the reward is an array of shape \(1,\): "),
    "two rewards": ((ZEROS, np.ones(2), *OK[1:]), r"the reward is an array of shape \(2,\): .* LinearReward"),
    "named rewards": ((ZEROS, {"speed": 1.0}, *OK[1:]), "the reward is .* LinearReward"),
    "nested reward": ((ZEROS, [1, [2, 3]], *OK[1:]), r"the reward is \[1, \[2, 3\]\]: .* a number"),
    "text reward": ((ZEROS, "1.0", *OK[1:]), "the reward is '1.0': .* a number"),
    "no reward": ((ZEROS, None, *OK[1:]), "the reward is None: .* a number"),
    "text flag": ((ZEROS, 1.0, "no", False, {}), "terminated is 'no': .* a number or flag"),
    "no flag": ((ZEROS, 1.0, False, None, {}), "truncated is None: .* a number or flag"),
    "array flag": ((ZEROS, 1.0, np.array([True]), False, {}), r"terminated is an array of shape \(1,\): "),
    "no info": ((ZEROS, 1.0, True, False, None), "the info is None: .* a dictionary"),
    "no dictionary": ((ZEROS, *OK), "the observation is an array.* a dictionary", PARTS, FINE),
    "entry missing": (
        ({"place": 1}, *OK),
        "the observation is .* and must be a dictionary with .*speed",
        PARTS,
        FINE,
    ),
    "entry's shape": (
        (FINE | {"speed": ZEROS}, *OK),
        r"the observation\['speed'\] is an array of shape",
        PARTS,
        FINE,
    ),
    "no tuple": ((None, *OK), "the observation is None and must be a tuple", PAIR, (1, 1)),
}
# Defect of a reset -> environment, and the sentence after the environment's id and number.
WRONG_RESETS = {
    "shape": (resets((np.zeros(4), {})), r"the observation is an array of shape \(4,\)"),
    "4 values": (resets(ZEROS), RESET + "returned ndarray"),
    "2 values": (resets(np.zeros(2), space=spaces.Box(-1, 1, (2,))), RESET + "returned ndarray"),
    "picture's axes": (
        sees({"it": np.zeros((8, 4, 3))}, PICTURE),
        r"the observation\['it'\] is an array of shape \(8, 4, 3\)",
    ),
    "length of a tuple": (sees((1,), PAIR), r"the observation is \(1,\) and must be a tuple of 2"),
}
RIGHT = {
    "lists": changed(see=lambda self: [0.0, 0.0, 0.0]),
    "(1, 3) for (3,)": changed(see=lambda self: np.zeros((1, 3))),
    "integers": changed(see=lambda self: np.zeros(3, np.int64)),
    "NumPy's numbers": steps(ZEROS, np.float64(1), np.bool_(False), np.bool_(False), {}),
    "an array without axes": steps(ZEROS, np.array(1.0), *OK[1:]),
    "wide integers": sees(np.arange(3), BYTES),
    "tensors": steps(torch.zeros(3), torch.tensor(1.0), torch.tensor(False), False, {}),
    "parts": sees(FINE | {"place": np.array([1])}, PARTS),
    "integers for a late float": steps([0, 0, 0], 1, False, False, {}, late=True),
}


def collect(env, num_steps=32):
    """Collect a rollout with the collector for this kind of environment."""
    return make_collector(env, MLPAgent(*specs_of(env)), num_steps, 1).rollout()


def registered(cls, **options):
    gym.register("Brought-v0", cls, disable_env_checker=True, **options)
    return "Brought-v0"


def make_and_collect(cls, **options):
    return collect(make_env(registered(cls, **options), 2, first_env=5))


@pytest.fixture(autouse=True)
def registry():
    before = dict(gym.registry)
    yield
    gym.registry.clear()
    gym.registry.update(before)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", WRONG_STEPS)
def test_a_wrong_step_ends_in_one_sentence_that_names_environment_and_step(name, late):
    answer, said, *rest = WRONG_STEPS[name]
    space, good = rest or (None, ZEROS)
    methods = {"see": lambda self: good, "step": lambda self, action: answer}
    where = f"^Brought-v0, environment 5, step {20 if late else 1}: "
    with pytest.raises(ConfigError, match=where + said) as raised:
        make_and_collect(changed(space, late, **methods))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", WRONG_RESETS)
def test_a_wrong_reset_ends_in_one_sentence_that_names_the_environment(name):
    cls, said = WRONG_RESETS[name]
    with pytest.raises(ConfigError, match=f"^Brought-v0, environment 5: {said}") as raised:
        make_and_collect(cls)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("cls", "note"),
    [
        (changed(step=lambda self: (ZEROS, *OK)), r"step\(\) raised this. It must take an"),
        (
            changed(reset=lambda self: (ZEROS, {})),
            r"reset\(\) raised this. It must take seed .* without options: a wrapper can add them",
        ),
    ],
)
def test_a_wrong_signature_is_an_error_whose_note_names_the_environment(cls, note):
    with pytest.raises(TypeError) as raised:
        make_and_collect(cls)
    assert re.match(f"Brought-v0, environment 5: {note}", raised.value.__notes__[-1])


@pytest.mark.parametrize("through", ["a time limit", "TorchRL's collector", "Gymnasium's checker"])
def test_the_sentence_is_the_same_through_wrappers_and_transforms(through):
    answer, said = WRONG_STEPS["two rewards"]
    cls = steps(*answer)
    with pytest.raises(ConfigError, match=f"environment 0, step 1: {said}"):
        if through == "Gymnasium's checker":
            registered(cls)
            env = make_env(lambda: gym.make("Brought-v0", disable_env_checker=False), 2)
        else:
            env = make_env(registered(cls, max_episode_steps=90), 2)
        if through == "TorchRL's collector":
            env = TransformedEnv(env, StepCounter())
        collect(env)


@pytest.mark.parametrize("name", RIGHT)
def test_equivalent_answers_train(name):
    make_and_collect(RIGHT[name])


ATTRIBUTES = [
    {"metadata": None},
    {"metadata": {"name": 3}},
    {"dt": property(lambda self: 1 / 0)},
    *({"spec": value} for value in ("Plain-v0", {}, np.zeros(2))),
    *({"action_masks": value} for value in (None, "01", np.ones(2))),
    {"render_mode": 3},
]


@pytest.mark.parametrize("attributes", ATTRIBUTES)
def test_attributes_of_any_kind_do_not_matter_for_training(fit, attributes):
    fit(SMALL | {"env_id": changed(**attributes), "eval_episodes": 1}, limit_val_batches=1)


@pytest.mark.parametrize(
    ("attributes", "fps"),
    [
        ({"metadata": {}}, 30),
        ({"metadata": {"render_fps": np.float32(20)}}, 20),
        ({"metadata": {"render_fps": 200}}, 60),
        ({"metadata": {"render_fps": 30}, "dt": np.float64(0.05)}, 20),
    ],
)
def test_a_video_has_the_frame_rate_of_the_environment(attributes, fps):
    assert frame_rate(make_env(changed(**attributes))) == pytest.approx(fps)


BOX = spaces.Box(-1, 1, (2,))
SEQUENCE = spaces.Tuple([spaces.Discrete(2), spaces.Sequence(spaces.Discrete(2))])
# Unusual observations or actions -> the sentence, or None if they train; test_spaces.py has more.
ODD_OBSERVATIONS = [
    (spaces.Box(-1, 1, (2,), np.float16), None),
    (spaces.Dict({"a.b": BOX, "c": spaces.Discrete(2)}), None),
    (spaces.Text(3), "not supported"),
    (spaces.Discrete(3, start=1), "does not start at 0"),
    (None, "not supported"),
]
ODD_ACTIONS = [
    (spaces.Box(-1, 1, ()), None),
    (spaces.Discrete(1), None),
    (spaces.MultiDiscrete([3], start=[1]), "does not start at 0"),
    (spaces.Dict({0: BOX, 1: spaces.Discrete(2)}), None),
    (spaces.Text(3), "not supported"),
    (SEQUENCE, "not supported"),
    (spaces.Graph(BOX, spaces.Discrete(2)), "not supported"),
    (None, "not supported"),
]


class Recorder(Plain):
    """Environment of random observations that checks and records its actions."""

    actions: ClassVar = []

    def __init__(self, observation_space=BOX, action_space=BOX):
        self.observation_space, self.action_space = observation_space, action_space

    def see(self):
        return self.observation_space.sample()

    def step(self, action):
        self.actions.append(action)
        assert self.action_space.contains(action), action
        return super().step(action)


@pytest.mark.parametrize(
    ("part", "space", "said"),
    [
        *(("observation_space", *case) for case in ODD_OBSERVATIONS),
        *(("action_space", *case) for case in ODD_ACTIONS),
    ],
    ids=str,
)
def test_unusual_spaces_train_or_end_in_one_sentence(fit, part, space, said):
    make = functools.partial(Recorder, **{part: space})
    with contextlib.nullcontext() if said is None else pytest.raises(ConfigError, match=said):
        fit(SMALL | {"env_id": make, "eval_episodes": 1}, limit_val_batches=1)


def leaves(value):
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else None
    return [value] if parts is None else [leaf for part in parts for leaf in leaves(part)]


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(2),
        spaces.Discrete(2, dtype=np.int32),
        BOX,
        spaces.Box(-1, 1, (2,), np.float64),
        spaces.Box(-1, 1, (), np.float64),
        spaces.MultiDiscrete([2, 3]),
        spaces.MultiBinary(2),
        spaces.Dict(a=spaces.Discrete(2), b=spaces.Tuple([BOX, spaces.MultiBinary(2)])),
    ],
    ids=str,
)
@pytest.mark.parametrize("vectorized", [False, True])
def test_actions_have_the_type_of_their_space(space, vectorized):
    """As Gymnasium's vectorized environments pass them."""
    make = functools.partial(Recorder, action_space=space)
    Recorder.actions.clear()
    collect(
        make_env((lambda num_envs: gym.vector.SyncVectorEnv([make] * num_envs)) if vectorized else make, 2)
    )
    for action in Recorder.actions:
        for leaf, sample in zip(leaves(action), leaves(space.sample()), strict=True):
            assert (leaf.dtype, leaf.shape) == (sample.dtype, sample.shape)
    assert len(Recorder.actions) == 64


def by_torchrl(env):
    return GymWrapper(env, categorical_action_encoding=True)


NormalizeObservation = gym.wrappers.NormalizeObservation
OwnReward = type("OwnReward", (gym.wrappers.NormalizeReward,), {})
VectorReward = gym.wrappers.vector.NormalizeReward
IN = {"in_keys": ["observation"]}
NORMALIZING = [
    ("NormalizeObservation", lambda: gym.wrappers.TimeLimit(NormalizeObservation(Plain()), 20), {}),
    ("NormalizeObservation", lambda: NormalizeObservation(Plain()), {"num_workers": 2}),
    ("NormalizeObservation", lambda: by_torchrl(NormalizeObservation(Plain())), {}),
    ("NormalizeReward", lambda: OwnReward(Plain()), {}),
    ("NormalizeReward", lambda num_envs: VectorReward(gym.vector.SyncVectorEnv([Plain] * num_envs)), {}),
    ("VecNorm", Plain, {"transforms": (VecNorm(**IN),)}),
    ("VecNormV2", lambda: TransformedEnv(by_torchrl(Plain()), VecNormV2(**IN)), {}),
]


@pytest.mark.parametrize(("name", "make", "options"), NORMALIZING)
def test_normalization_in_the_environment_is_named_with_the_setting(fit, recwarn, name, make, options):
    setting = "model.norm_reward" if "Reward" in name else "model.agent.norm_obs"
    said = f"{name} normalizes in the environment: .*set {setting} to true"
    fit(SMALL | {"env_id": make} | options)
    assert len([warned for warned in recwarn if re.search(said, str(warned.message))]) == 1
    findings = check_environment(EnvFactory(make, **options), 2, 60, seconds=1).findings
    assert len([finding for finding in findings if re.match(said, finding.what + finding.remedy)]) == 1


def test_the_checks_leave_the_attributes_of_an_environment_fast(fit):
    # A class of its own: ten CartPoles made before the first reset end this for all later ones (Python 3.11).
    env = gym.wrappers.TimeLimit(type("Fresh", (CartPoleEnv,), {})(), 20)
    fit(SMALL | {"env_id": lambda: env, "num_envs": 1, "eval_episodes": None})
    # Python 3.11 and 3.12 keep attributes without a dictionary, until something asks for it.
    parts = gc.get_referents(env.unwrapped)
    assert not [part for part in parts if isinstance(part, dict) and "gravity" in part]


@pytest.mark.parametrize(("step", "what"), [(stop, r"StopIteration\(\)"), (leave, r"SystemExit\(0\)")])
@pytest.mark.parametrize("late", [False, True])
def test_an_environment_cannot_end_the_run_with_success(step, what, late):
    with pytest.raises(RuntimeError, match=rf"^Brought-v0, environment 5: step\(\) raised {what}") as raised:
        make_and_collect(changed(late=late, step=step))
    assert isinstance(raised.value.__cause__, StopIteration | SystemExit), "the traceback leads to its line"


def not_made():
    sys.exit(0)


@pytest.mark.parametrize(
    "env_id", [lambda: by_torchrl(changed(late=True, step=leave)()), not_made, "Brought-v0"]
)
def test_sys_exit_in_torchrls_environments_and_while_they_are_made_is_an_error(fit, env_id):
    registered(not_made)
    with pytest.raises(RuntimeError, match=r"environment.* SystemExit\(0\)"):
        fit(SMALL | {"env_id": env_id})


# Made by a function


def test_a_function_trains_as_the_id_does_to_the_bit(fit):
    by_id = fit(SMALL)
    by_function = fit(SMALL | {"env_id": lambda: gym.make("CartPole-v1")}, limit_val_batches=1)
    for a, b in zip(by_id.agent.parameters(), by_function.agent.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_function_gets_env_kwargs_and_the_environments_can_restart(fit):
    made = []

    def make(limit):
        made.append(gym.wrappers.TimeLimit(changed(late=True, step=lambda self, action: 1 / 0)(), limit))
        return made[-1]

    with pytest.warns(UserWarning, match="Environment 0 raised ZeroDivisionError"):
        fit(SMALL | {"env_id": make, "env_kwargs": {"limit": 30, "max_restarts": 9}})
    assert len(made) > 2
    assert len({id(env.unwrapped) for env in made}) == len(made)


def varied(**spaces):
    """Return a function that makes environments with other spaces each time."""

    def make():
        env = Plain()
        for name, choices in spaces.items():
            setattr(env, name, choices[next(count) % 2])
        return env

    count = itertools.count()
    return make


@pytest.mark.parametrize(
    ("env_id", "said"),
    [
        (gym.make("CartPole-v1"), r"data.env_id is an environment .TimeLimit.*function.*lambda: "),
        (gym.make_vec("CartPole-v1", 2), r"data.env_id is an environment .CartPoleVectorEnv.*function"),
        (PendulumEnv(), r"data.env_id is an environment .PendulumEnv.*function"),
        (None, "data.env_id is None"),
        (lambda: gym.make_vec("CartPole-v1", 3), r"batch size \[3\], and \[2\] is needed .*num_envs"),
        (lambda: "CartPole-v1", "makes a str: .*Gymnasium environment, .* or a TorchRL"),
        (lambda number: Plain(), "env_id.*missing a required argument: 'number'"),
        (io.StringIO, r"makes a StringIO: .* Wrap another one in a gymnasium.Env .*shimmy"),
        (functools.partial(lambda env: env, Plain()), "makes the same Plain at each call"),
        (
            varied(action_space=[gym.spaces.Discrete(2), gym.spaces.Discrete(3)]),
            "action_space Disc.* and Disc",
        ),
        (
            varied(observation_space=[gym.spaces.Box(0, 1, (n,)) for n in (1, 2)]),
            "observation_space Box.* and",
        ),
    ],
)
def test_what_is_no_function_of_an_environment_ends_in_one_sentence(make_trainer, env_id, said):
    with pytest.raises(ConfigError, match=said):
        make_trainer().fit(PPO(), RolloutDataModule(**SMALL | {"env_id": env_id}))


def test_a_function_needs_the_backend_that_steps_its_environments():
    with pytest.raises(ConfigError, match=r"data.backend .*'envpool'.*gymnasium"):
        make_env(Plain, 2, "envpool")


@pytest.mark.parametrize(
    "make",
    [
        lambda: gym.make("CartPole-v1"),
        functools.partial(gym.make, "CartPole-v1"),
        type("Maker", (), {"__call__": lambda self: gym.make("CartPole-v1")})(),
    ],
)
def test_a_run_of_a_function_resumes_from_python_and_not_from_the_command_line(
    fit_and_resume, tmp_path, capsys, monkeypatch, make
):
    fit_and_resume(1, SMALL | {"env_id": make})
    assert "to the bit" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    command = ["validate", "--ckpt_path", "middle.ckpt", *QUIET, "--data.eval_episodes", "1"]
    with pytest.raises(SystemExit):
        cli.main(command)
    assert "The checkpoint names code, data.env_id" in capsys.readouterr().err
    cli.main([*command, "--data.env_id", "CartPole-v1"])
    assert "eval/episodic_return" in capsys.readouterr().out


def test_wrappers_whose_state_is_unknown_are_not_resumed_in_the_middle(fit, tmp_path, capsys):
    data = SMALL | {"env_id": lambda: gym.wrappers.FrameStackObservation(gym.make("CartPole-v1"), 4)}
    fit(data, callbacks=[SaveAfter(tmp_path / "middle.ckpt", 1)])
    fit(data, ckpt_path=tmp_path / "middle.ckpt")
    assert "fresh episodes" in capsys.readouterr().out


def made_for_yaml(**options) -> gym.Env:
    return gym.make("CartPole-v1", **options)


def test_a_checkpoint_has_the_arguments_of_a_partial_function(fit, tmp_path, capsys, monkeypatch):
    make = functools.partial(made_for_yaml, max_episode_steps=3)
    fit(SMALL | {"env_id": make}, callbacks=[SaveAfter(tmp_path / "middle.ckpt", 1)])
    monkeypatch.chdir(tmp_path)
    path = f"{made_for_yaml.__module__}.{made_for_yaml.__qualname__}"
    cli.main(["validate", "--ckpt_path", "middle.ckpt", *QUIET, "--data.env_id", path])
    assert re.search(r"eval/episodic_length\W+3\.0\W", capsys.readouterr().out)


@pytest.mark.parametrize(
    "env_id", ["tests.stories.test_foreign_envs.made_for_yaml", "tests.environments.Counter"]
)
def test_a_function_and_a_class_can_be_named_in_yaml(env_id, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(f"data:\n  env_id: {env_id}\n  total_timesteps: 1024\n")
    flags = ["--trainer.enable_checkpointing", "false", "--trainer.limit_val_batches", "0"]
    cli.main(["fit", "--config", "recipe.yaml", *QUIET, *flags])
    assert "1024 environment steps" in capsys.readouterr().out


# Masks in info


def test_looking_for_a_mask_costs_no_episode_and_no_environment():
    class Counting(Plain):
        made = resets = 0

        def __init__(self):
            Counting.made += 1

        def reset(self, *, seed=None, options=None):
            Counting.resets += 1
            return super().reset(seed=seed)

    env = make_env(registered(Counting), 3)
    env.reset_arrays()
    assert (Counting.made, Counting.resets) == (3, 3)
    env.reseed([1, 2, 3])
    env.reset_arrays()
    assert Counting.resets == 6


class Masked(Plain):
    """Environment whose info has a mask of two of three actions, except where ``without`` says."""

    action_space = spaces.Discrete(3)

    def __init__(self, without=()):
        self.without = without

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0], {"action_mask": np.array([1, 0, 1], np.int8)}

    def step(self, action):
        assert action != 1
        *answer, _ = super().step(action)
        return *answer, {} if self.time in self.without else {"action_mask": [1, 0, 1]}


def test_a_mask_may_be_missing_only_where_an_episode_ends():
    collect(make_env(registered(Masked), 2, env_kwargs={"without": [50, 100]}), 128)
    with pytest.raises(ConfigError, match=r"Brought-v0, environment 0, step 7: .*action_mask is None"):
        collect(make_env("Brought-v0", 2, env_kwargs={"without": [7]}))


class Forbids(Plain):
    """Environment whose last mask of an episode allows no action."""

    observation_space = spaces.Dict(action_mask=spaces.MultiBinary(3), place=Plain.observation_space)
    action_space = spaces.Discrete(3)

    def see(self):
        return {"action_mask": np.full(3, self.time < 50, np.int8), "place": ZEROS}


@pytest.mark.parametrize("vectorized", [False, True])
def test_a_final_observation_allows_all_actions_where_it_allows_none(vectorized):
    """DQN bootstraps from the best allowed action, and would take the logit of a forbidden one as a value."""

    def make():
        disabled = gym.vector.AutoresetMode.DISABLED
        return gym.vector.SyncVectorEnv([Forbids] * 2, autoreset_mode=disabled) if vectorized else Forbids()

    following = collect(make_env(make, 2), 64)["next"]
    assert following["done"].sum() == 2
    assert (following["observation"][following["done"].squeeze(-1)][:, :3] == 1).all()


class Levels(Plain):
    level = 0.0

    def see(self):
        return np.full(3, self.level, np.float32)


def synchronous(num_envs):
    return gym.vector.SyncVectorEnv([Levels] * num_envs)


def wrapped():
    return GymWrapper(gym.wrappers.TimeLimit(Levels(), 9), categorical_action_encoding=True)


def transformed():
    inner = TransformedEnv(wrapped(), StepCounter())
    return TransformedEnv(inner, StepCounter(step_count_key="steps"), auto_unwrap=False)


@pytest.mark.parametrize(
    "make",
    [
        Levels,
        lambda num_envs: RecordEpisodeStatistics(synchronous(num_envs)),
        lambda num_envs: AsyncVectorEnv([Levels] * num_envs, context="fork"),
        wrapped,
        transformed,
        lambda num_envs: TransformedEnv(SerialEnv(num_envs, transformed), RewardSum()),
    ],
)
def test_an_attribute_holds_from_the_first_observation_on(make):
    env = EnvFactory(make).make(3)
    with contextlib.closing(env):
        set_everywhere(env, "level", 0.5)
        assert (as_torchrl(env).reset()["observation"] == 0.5).all()
        with pytest.raises(ConfigError, match="has no attribute 'height'"):
            set_everywhere(env, "height", 0.5)


class Pit(Plain):
    """Environment whose episode ends where it began."""

    def see(self):
        return np.full(3, self.time % 4 / 4, np.float32)

    def step(self, action):
        observation, reward, *_ = super().step(action)
        return observation, reward, self.time == 4, False, {}


def test_restarts_that_never_happen_change_no_statistics():
    counts = []
    for options in ({}, {"max_restarts": 3}):
        env = make_env(Pit, 2, env_kwargs=options)
        agent = MLPAgent(*env.agent_specs, norm_obs=True)
        make_collector(env, agent, 16).rollout()
        counts.append(agent.normalizer.count.item())
    assert counts == [2 * (1 + 16 + 4)] * 2, "the first observations, those of the steps and of the resets"


def test_an_environment_with_masks_in_its_info_restarts():
    class Fails(Masked):
        def step(self, action):
            if self.time == 9:
                raise RuntimeError
            return super().step(action)

    env = make_env(registered(Fails), 2, env_kwargs={"max_restarts": 100})
    with pytest.warns(UserWarning, match="Environment 1 raised RuntimeError"):
        rollout = collect(env, 64)
    assert rollout["next", "truncated"].sum() == 2 * 6, "the last steps of 6 failed episodes, in both"


def test_a_mask_of_another_size_in_the_info_ends_in_one_sentence():
    with pytest.raises(
        ConfigError, match=r"environment 0: the observation\['action_mask'\] is .* \(3,\).* \(4,\)"
    ):
        make_env(registered(type("Four", (Masked,), {"action_space": spaces.Discrete(4)})), 2).reset_arrays()


# EnvPool


@pytest.mark.parametrize(("env_id", "size"), [("Go1JoystickFlatTerrain-v1", 48), ("LeapCubeReorient-v1", 57)])
def test_the_actor_of_playgrounds_tasks_sees_no_privileged_state(env, env_id, size):
    batch = env(env_id, 2, "envpool")
    agent = MLPAgent(*batch.agent_specs)
    assert next(agent.actor_body.parameters()).shape == (64, size)
    rows = batch.reset_arrays()
    parts, info = batch.envs.reset()
    assert rows.shape == (2, size + parts["privileged_state"].shape[1])
    place = entry_columns(batch.agent_specs[0])["state"]
    np.testing.assert_array_equal(batch.arrays._rows(parts, info)[:, place], parts["state"])
    assert agent.entries.actor == {"state": size}
    assert next(agent.critic_body.parameters()).shape == (64, rows.shape[1])


# TorchRL


def test_the_transforms_of_the_message_train_torchrls_pendulum(fit):
    data = SMALL | {"env_id": PendulumEnv, "num_steps": 256, "total_timesteps": 1024}
    with pytest.raises(ConfigError, match=r"it needs 'observation', .*CatTensors\(keys, 'observation'"):
        fit(data)
    transforms = [
        UnsqueezeTransform(-1, in_keys=["th", "thdot"], out_keys=["th_1", "thdot_1"]),
        CatTensors(["th_1", "thdot_1"], "observation", del_keys=False),
        StepCounter(200),
    ]
    module = fit(data | {"transforms": transforms})
    assert len(module.episode_returns) == 4, "an episode ends after 200 steps"


class Breaks(Plain):
    def __init__(self, last=9):
        self.last = last
        if not last:
            raise KeyError("the simulator is broken")

    def step(self, action):
        if self.time == self.last:
            raise KeyError("the simulator is broken")
        return super().step(action)


@pytest.mark.parametrize(
    ("env_id", "workers", "function", "note"),
    [
        (Breaks, 0, "step", "Breaks, environment 0: step() raised this."),
        pytest.param(Breaks, 2, "step", "Breaks, environment 0: step() raised this.", marks=FORKS),
        (
            functools.partial(Breaks, last=0),
            0,
            "__init__",
            "env_id, which makes the environment, raised this.",
        ),
        ("Brought-v0", 0, "__init__", "Brought-v0: the constructor raised this."),
        (lambda: by_torchrl(Breaks()), 0, "step", "step() or reset() raised this."),
    ],
)
def test_a_plain_fit_ends_with_the_frames_of_the_environment(fit, env_id, workers, function, note):
    registered(lambda: Breaks(0))
    with pytest.raises(KeyError, match="the simulator is broken") as raised:
        fit(SMALL | {"env_id": env_id, "num_workers": workers})
    report = "".join(traceback.format_exception(raised.value)).splitlines()
    assert report[-1].endswith(note)
    frame = next(line for line in reversed(report) if line.startswith("  File "))
    assert frame.startswith(f'  File "{__file__}"') and frame.endswith(f"in {function}")


class Jobs(Plain):
    """A list of jobs, of which none is left at the end; then a mask raises."""

    def reset(self, *, seed=None, options=None):
        self.left = [[1, 0]] * 5
        return super().reset(seed=seed)

    def action_masks(self):
        return self.left[0]

    def step(self, action):
        assert action == 0
        self.left = self.left[1:]
        return self.see(), 1.0, not self.left, False, {}


def test_a_mask_that_raises_at_the_end_of_an_episode_is_not_used(fit):
    assert fit(SMALL | {"env_id": Jobs}).mean_return == 5


class LateMask(Plain):
    def step(self, action):
        return *super().step(action)[:4], {"action_mask": np.array([1, 0])}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_mask_that_reset_lacks_is_refused(fit, num_workers):
    with pytest.raises(ConfigError, match=r"step\(\) has an action_mask, and that of reset\(\) lacks it"):
        fit(SMALL | {"env_id": LateMask, "num_workers": num_workers})


class Unclosable(Plain):
    def close(self):
        time.sleep(30) if self.error is None else self.fail()

    def fail(self):
        raise self.error


class UnclosableVector(gym.vector.SyncVectorEnv):
    def close(self, **options):
        Unclosable.close(self)

    fail = Unclosable.fail


@pytest.mark.parametrize("kind", ["single", "vector", "late vector"])
@pytest.mark.parametrize(
    ("error", "said"),
    [(OSError("gone"), r"OSError\('gone'\)"), (SystemExit(3), r"SystemExit\(3\)"), (None, "TimeoutError")],
)
def test_an_environment_that_cannot_be_closed_ends_no_run(fit, monkeypatch, kind, error, said):
    monkeypatch.setattr("ppo_lightning.envs.batched.CLOSE_SECONDS", 0.1)
    for unclosable in (Unclosable, UnclosableVector):
        monkeypatch.setattr(unclosable, "error", error, raising=False)
    mode = gym.vector.AutoresetMode.NEXT_STEP if kind == "late vector" else gym.vector.AutoresetMode.DISABLED

    def make(num_envs):
        return UnclosableVector([Plain] * num_envs, autoreset_mode=mode)

    env = {"env_id": Unclosable if kind == "single" else make}
    with pytest.warns(UserWarning, match=rf"close\(\) raised {said}"):
        module = fit(SMALL | env | {"eval_episodes": 1}, limit_val_batches=1)
    assert module.env_steps == 96


def test_environments_that_only_training_may_have_are_explained(fit):
    class Licensed(Plain):
        alive = 0

        def __init__(self):
            super().__init__()
            Licensed.alive += 1
            if Licensed.alive > 4:
                raise RuntimeError("no licence left")

    with pytest.raises(RuntimeError, match="no licence left") as raised:
        fit(SMALL | {"env_id": Licensed, "eval_episodes": 3}, limit_val_batches=1)
    assert any("data.eval_episodes" in note for note in raised.value.__notes__)
