"""``module.predict`` in the loop of an environment: the episodes of ``evaluate``, for every kind of space."""

import itertools

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from ppo_lightning import PPO, CNNAgent, ConfigError, MLPAgent, RecurrentPPO, evaluate, make_env
from ppo_lightning.algorithms.prediction import Predictor
from ppo_lightning.checkpoints.agent import agent_to_plain
from ppo_lightning.spaces.rows import to_row
from ppo_lightning.spaces.specs import (
    is_picture,
    join_vectors,
    spec_from_space,
    spec_to_plain,
)
from ppo_lightning.utils.seeding import derive_seed
from tests.environments import Reach
from tests.spaces.test_spaces import ACTIONS, OBSERVATIONS, build


def with_picture():
    """Return Gymnasium's CartPole that shows its picture beside its state."""
    env = gym.wrappers.AddRenderObservation(
        gym.make("CartPole-v1", render_mode="rgb_array"), render_only=False
    )
    space = spaces.Dict(
        state=env.observation_space["state"], pixels=spaces.Box(0, 255, (50, 75, 3), np.uint8)
    )
    return gym.wrappers.TransformObservation(env, lambda o: o | {"pixels": o["pixels"][::8, ::8]}, space)


def recipe_of(observations, actions=ACTIONS["discrete"]):
    return {
        "observation_spec": spec_to_plain(spec_from_space(observations)),
        "action_spec": spec_to_plain(spec_from_space(actions)),
    }


def module_of(env, memory=None):
    module = RecurrentPPO() if memory else PPO()
    module.agent = build(env, memory)
    module.recipe = agent_to_plain(module.agent, *env.agent_specs)
    return module


def module_of_spaces(observations, actions=ACTIONS["discrete"]):
    module, observations = PPO(), join_vectors(observations)
    agent = CNNAgent if is_picture(spec_from_space(observations)) else MLPAgent
    module.agent = agent(spec_from_space(observations), spec_from_space(actions))
    module.recipe = recipe_of(observations, actions)
    return module


def any_env(see, do, entry=None):
    return "Any-v0", {"see": see, "do": do, "masked": entry is not None, "entry": entry}


GAMES = {
    "box, discrete": ("CartPole-v1", {}),
    "box, box": ("Pendulum-v1", {}),
    "discrete, discrete": ("FrozenLake-v1", {"is_slippery": False}),
    "discrete with a mask in info": ("Taxi-v4", {"max_episode_steps": 30}),
    "tuple": ("Blackjack-v1", {}),
    "dict with a picture": (with_picture, {}),
    "dict of vectors": ("Reach-v0", {}),
    "everything, dict": any_env("everything", "dict", "observation"),
    "text, tuple": any_env("text", "tuple"),
    "multidiscrete, multidiscrete": any_env("multidiscrete", "multidiscrete", "info"),
    "binary, binary": any_env("binary", "binary", "observation"),
    "text, number": any_env("text", spaces.Box(-1, 1, ())),
}


@pytest.mark.parametrize("memory", [None, "lstm"])
@pytest.mark.parametrize("name", GAMES)
def test_a_loop_of_predict_plays_the_episode_of_evaluate(name, memory):
    env_id, kwargs = GAMES[name]
    evaluated = make_env(env_id, 1, seed=3, stream="eval", env_kwargs=kwargs)
    module, seed = module_of(evaluated, memory), derive_seed(3, "eval", 0)
    expected = evaluate(module.agent, evaluated)
    env = env_id() if callable(env_id) else gym.make(env_id, **kwargs)
    (observation, info), total = env.reset(seed=seed), 0.0
    state, first = None, True
    for length in itertools.count(1):  # noqa: B007
        if "action_mask" in info:
            observation = {"observation": observation, "action_mask": info["action_mask"]}
        result = module.predict(observation, memory=state, first=first)
        action, state = result if memory else (result, None)
        assert env.action_space.contains(action), action
        observation, reward, terminated, truncated, info = env.step(action)
        total, first = total + reward, False
        if terminated or truncated:
            break
    assert length == expected["step_count"]
    assert total == pytest.approx(expected["episode_reward"].item(), rel=1e-5)
    evaluated.close()
    env.close()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("see", [*OBSERVATIONS, "reach"])
@pytest.mark.parametrize("do", ACTIONS)
def test_a_batch_gives_the_actions_of_its_observations(do, see, count):
    """Observations and actions are batched as in Gymnasium's vector environments."""
    space = Reach.observation_space if see == "reach" else OBSERVATIONS[see]
    module = module_of_spaces(space, ACTIONS[do])
    batch_space = gym.vector.utils.batch_space(space, count)
    batch_space.seed(1)
    observation = batch_space.sample()
    actions = module.predict(observation)
    assert gym.vector.utils.batch_space(ACTIONS[do], count).contains(actions)
    singles = [module.predict(single) for single in gym.vector.utils.iterate(batch_space, observation)]
    assert all(ACTIONS[do].contains(action) for action in singles)
    expected = np.stack([to_row(ACTIONS[do], action) for action in singles])
    np.testing.assert_allclose(to_row(ACTIONS[do], actions, (count,)), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("see", OBSERVATIONS)
def test_an_observation_is_read_as_by_the_environments(see):
    """Also with its entries in another order, or with further ones."""
    space = OBSERVATIONS[see]
    space.seed(2)
    observation, rows = space.sample(), Predictor(recipe_of(space)).read
    expected = to_row(space, observation).astype(np.float32)

    def backwards(value):
        if not isinstance(value, dict):
            return value
        return {"more": "text"} | {key: backwards(value[key]) for key in reversed(value)}

    for value in (observation, backwards(observation)):
        row, is_batch = rows(value)
        assert not is_batch and len(row) == 1
        np.testing.assert_array_equal(row[0].float().flatten(), expected)


def test_the_types_of_actions():
    discrete, box = (module_of(make_env(name, 1)) for name in ("CartPole-v1", "Pendulum-v1"))
    assert isinstance(discrete.predict(np.zeros(4)), np.integer)
    assert discrete.predict([0, 0, 0, 0]) == discrete.predict(np.zeros(4))
    assert discrete.predict(np.zeros((1, 4))).shape == (1,), "a batch of one"
    assert discrete.predict(np.zeros((0, 4))).shape == (0,)
    action = box.predict(np.array([1, 0, 80.0]))
    assert action.shape == (1,) and action.dtype == np.float32
    rows = torch.randn(5, 3)
    assert torch.equal(box.predict(rows), box.agent.mode(rows)), "tensors give tensors"
    assert torch.equal(box.predict(rows), box.predict_step(rows, 0))
    assert torch.equal(box.predict(rows[0]), box.agent.mode(rows[:1])[0])
    with torch.no_grad():
        box.agent.head.linear.bias += 9
    assert box.predict(np.array([1, 0, 0])) == 2, "within the bounds"


def test_sampled_actions_have_the_probabilities_of_the_policy():
    module = module_of(make_env("CartPole-v1", 1))
    observation = np.full(4, 0.1, np.float32)
    batch = np.tile(observation, (4000, 1))
    probability = module.agent.explain(torch.from_numpy(observation)[None])[0][0, 1].item()
    torch.manual_seed(1)
    actions = module.predict(batch, deterministic=False)
    assert 0.02 < probability < 0.98
    assert actions.mean() == pytest.approx(probability, abs=0.03)
    torch.manual_seed(1)
    assert (module.predict(batch, deterministic=False) == actions).all(), "PyTorch's seed decides"
    assert len({int(module.predict(observation, deterministic=False)) for _ in range(200)}) == 2


def test_first_restarts_the_memory():
    module = module_of(make_env("Pendulum-v1", 1), "lstm")
    observation = np.random.default_rng(1).normal(size=(3, 2, 3))
    fresh, _ = module.predict(observation[0])
    _, memory = module.predict(observation[0])
    assert memory.shape == (2, 16) and memory.abs().sum() > 0
    action, later = module.predict(observation[1], memory=memory, first=[False, True])
    both, _ = module.predict(observation[1], memory=memory)
    alone, _ = module.predict(observation[1])
    np.testing.assert_array_equal(action, [both[0], alone[1]])
    np.testing.assert_array_equal(module.predict(observation[1], memory=memory, first=True)[0], alone)
    assert torch.equal(
        module.predict(observation[2], memory=later)[1], module.predict(observation[2], True, later)[1]
    )
    for wrong in ({"memory": memory[:1]}, {"memory": memory, "first": [True, True, False]}):
        with pytest.raises(ConfigError, match=r"the memory is the one of the last call, \[2, 16\], or None"):
            module.predict(observation[0], **wrong)
    with pytest.raises(ConfigError, match=r"call module\.predict in a loop"):
        module.predict_step(torch.zeros(2, 3), 0)
    assert fresh.shape == (2, 1)


FOUR = spaces.Box(-1, 1, (4,))
PLACE = spaces.Dict(
    goal=spaces.Box(-1, 1, (2,)), picture=spaces.Box(0, 255, (40, 40, 3), np.uint8), way=spaces.Discrete(3)
)
BYTES = spaces.Box(0, 255, (3, 40, 40), np.uint8)


def place(**changed):
    return {"goal": np.zeros(2), "picture": np.zeros((40, 40, 3), np.uint8), "way": 1} | changed


@pytest.mark.parametrize(
    ("space", "observation", "message"),
    [
        (FOUR, np.zeros((3, 5)), r"observations of shape \[4\] or \[B, 4\], not \[3, 5\]\."),
        (FOUR, {"a": 1}, "observations of numbers, not dict"),
        (FOUR, (np.zeros(4), {}), "observations of numbers, not tuple"),
        (FOUR, ["a"] * 4, "observations of numbers, not list"),
        (FOUR, np.array([0, 0, np.nan, 0]), "finite observations"),
        (FOUR, np.array([0, 0, 1e300, 0]), "finite observations"),
        (FOUR, torch.tensor([0, 0, np.inf, 0]), "finite observations"),
        (BYTES, np.zeros((3, 40, 40)), "observations of bytes, .*, not float64"),
        (spaces.Discrete(3), np.zeros((2, 2)), r"observations of shape \[\] or \[B\], not \[2, 2\]"),
        (PLACE, np.zeros(5), r"the entries goal, picture, way, as .*, and goal, picture, way is missing\."),
        (PLACE, {"goal": np.zeros(2), "way": 1}, "and picture is missing"),
        (PLACE, place(picture=np.zeros((40, 40, 3))), "the entry 'picture' of bytes, .* not float64"),
        (PLACE, place(goal=np.zeros(3)), r"the entry 'goal' of shape \[2\] or \[B, 2\], not \[3\]"),
        (PLACE, place(way=[1, 1]), r"not entries of both: goal \[2\], picture"),
        (PLACE, place(goal=[np.nan, 0]), "finite observations"),
        (OBSERVATIONS["text"], {"speed": np.zeros(3), "said": {}}, "and said.loud is missing"),
    ],
)
def test_a_wrong_observation_ends_in_one_sentence(space, observation, message):
    module = module_of_spaces(space)
    with pytest.raises(ConfigError, match=message) as error:
        module.predict(observation)
    assert "\n" not in str(error.value)


def test_entries_of_the_critic_may_be_missing():
    space = spaces.Dict(near=spaces.Box(-1, 1, (2,)), far=spaces.Box(-1, 1, (3,)))
    module = module_of_spaces(space)
    specs = spec_from_space(space), spec_from_space(ACTIONS["box"])
    module.agent, module.recipe = MLPAgent(*specs, actor_keys=["near"]), recipe_of(space, ACTIONS["box"])
    near, far = np.random.default_rng(1).normal(size=(5, 2)), np.ones((5, 3))
    expected = module.predict({"near": near, "far": far})
    np.testing.assert_array_equal(module.predict({"near": near}), expected)
    np.testing.assert_array_equal(module.predict(near), expected)
    np.testing.assert_allclose(module.predict(near[3]), expected[3], rtol=1e-5)
    with pytest.raises(ConfigError, match=r"takes the entries near, as .*, and near is missing"):
        module.predict({"far": far})


def test_predict_needs_an_agent():
    with pytest.raises(ConfigError, match="There is no trained agent"):
        PPO().predict(np.zeros(4))
