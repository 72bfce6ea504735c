"""Entries of the observation for the actor and for the critic."""

import functools
import json

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torchrl.data import Bounded, Categorical, Unbounded
from torchrl.envs import CatFrames, StepCounter

from ppo_lightning import PPO, CNNAgent, ConfigError, MLPAgent, RecurrentPPO
from ppo_lightning.callbacks import RunSummary
from ppo_lightning.checkpoints.agent import agent_from_plain, agent_to_plain, check_same_agent, trained_agent
from ppo_lightning.checkpoints.file import read_checkpoint
from ppo_lightning.envs import EnvFactory
from ppo_lightning.envs.factory import specs_of
from ppo_lightning.export.onnx import Deployed, largest_difference, random_observations, to_onnx
from ppo_lightning.models.bodies import MLP
from ppo_lightning.models.memory import MEMORIES
from ppo_lightning.offpolicy import SACAgent
from ppo_lightning.spaces.entries import entry_columns, take_columns
from ppo_lightning.spaces.specs import join_vectors, spec_from_plain, spec_from_space, spec_to_plain
from tests.environments import Reach
from tests.helpers import MODEL, REACH, Recorder, SaveAfter, weights
from tests.spaces.test_spaces import Any

# Reach-v0 joins its entries to the vector: action (2), luck (1), time (1).
BLIND = {"actor_keys": ["action", "time"]}
# Environment with all kinds of entries, a mask, and an entry for the critic only.
mixed = functools.partial(
    Any,
    spaces.Dict(
        eye=spaces.Box(0, 255, (36, 36, 3), np.uint8),
        gear=spaces.Discrete(4),
        inner=spaces.Dict(force=spaces.Box(-9, 9, (2,)), mode=spaces.MultiDiscrete([2, 3])),
        privileged_mass=spaces.Box(-9, 9, (2,)),
    ),
    masked=True,
    entry="observation",
)
MIXED = spec_from_space(mixed().observation_space)
TWO_ROLLOUTS = {"env_id": mixed, "num_envs": 2, "num_steps": 16, "total_timesteps": 64}


class Hidden(Reach):
    """Reach with an entry for the critic only."""

    observation_space = spaces.Dict(
        {name.replace("luck", "privileged_luck"): part for name, part in Reach.observation_space.items()}
    )

    def observation(self, action):
        observation = super().observation(action)
        return observation | {"privileged_luck": observation.pop("luck")}


gym.register("Hidden-v0", Hidden)


def vector_spec(**entries):
    """Return the spec of joined float vectors of the given sizes."""
    space = spaces.Dict({name: spaces.Box(-1, 1, (size,)) for name, size in entries.items()})
    return spec_from_space(join_vectors(space))


def agent_of(spec, **options):
    torch.manual_seed(1)
    agent = MLPAgent(spec, Categorical(3, shape=()), **options)
    torch.nn.init.normal_(agent.head.linear.weight)
    return agent


def read_by(output, observation):
    """Return the columns of observations on which an output depends."""
    (gradient,) = torch.autograd.grad(output.sum(), observation, retain_graph=True)
    return set(gradient.flatten(0, -2).abs().sum(0).nonzero().flatten().tolist())


GO1 = vector_spec(privileged_state=7, state=4)


@pytest.mark.parametrize(
    ("options", "actor", "critic"),
    [
        ({}, {7, 8, 9, 10}, set(range(11))),
        ({"critic_keys": ["state"]}, {7, 8, 9, 10}, {7, 8, 9, 10}),
        ({"critic_keys": ["privileged_state"]}, {7, 8, 9, 10}, set(range(7))),
        ({"actor_keys": ["state", "privileged_state"]}, set(range(11)), set(range(11))),
        ({"critic_keys": ["state"], "shared": True}, {7, 8, 9, 10}, {7, 8, 9, 10}),
    ],
)
@pytest.mark.parametrize("memory", [None, "min_gru"])
def test_the_losses_reach_the_columns_of_their_entries_only(options, actor, critic, memory):
    """The gradients of policy and value with respect to the observations are 0 elsewhere."""
    agent = agent_of(GO1, memory=memory, **{"shared": False} | options)
    observation = torch.randn(4, 8, 11, requires_grad=True)
    state = () if memory is None else (torch.zeros(4, 128), torch.rand(4, 8) < 0.2)
    flat = observation if memory else observation.flatten(0, 1)
    action = torch.zeros(flat.shape[:-1], dtype=torch.int64)
    evaluation = agent.evaluate(flat, action, *state)

    read = functools.partial(read_by, observation=observation)
    assert read(evaluation.log_prob) == read(evaluation.entropy) == actor
    assert read(evaluation.value) == critic
    value = evaluation.value.detach()
    log_prob = evaluation.log_prob.detach()
    minibatch = {"action_log_prob": log_prob, "state_value": value, "value_target": value + 1}
    for vf_coef, advantage, expected in ((0, 1, actor), (1, 0, critic)):
        module = PPO(vf_coef=vf_coef, ent_coef=0)
        loss, _ = module.loss(minibatch | {"advantage": torch.full_like(value, advantage)}, evaluation)
        assert read(loss) == expected


@pytest.mark.parametrize("memory", [None, "lstm"])
def test_privileged_entries_change_values_and_no_actions(memory):
    agent = agent_of(GO1, memory=memory, norm_obs=True)
    first = torch.randn(16, 11)
    second = torch.cat([torch.randn(16, 7), first[:, 7:]], dim=1)
    noise, state = agent.noise((16,)), agent.initial_memory(16)
    results = [agent.act(agent.normalize(rows), noise, state) for rows in (first, second)]
    (action, log_prob, value, _), (other_action, other_log_prob, other_value, _) = results
    assert torch.equal(action, other_action)
    assert torch.equal(log_prob, other_log_prob)
    assert (value != other_value).all()
    bars = [agent.explain(rows, state)[1] for rows in (first, second)]
    assert torch.equal(*bars)
    assert torch.equal(agent.value(agent.normalize(first)), value[:, 0]), "and it needs no memory"


@pytest.mark.parametrize("memory", [None, *MEMORIES])
@pytest.mark.parametrize("keys", [["state"], ["a", "state"]])
def test_the_numpy_policy_acts_like_the_agent(keys, memory):
    """Adjacent columns and others are selected without leaving NumPy."""
    spec = vector_spec(a=2, b=3, state=4)
    agent = agent_of(spec, memory=memory, actor_keys=keys)
    rows, noise, state = torch.randn(32, 9), agent.noise((32,)), agent.initial_memory(32)
    expected, _, _, next_state = agent.act(rows, noise, state)
    arrays = None if state is None else state.numpy().copy()
    action, *others = agent.array_policy()(rows.numpy(), noise.numpy(), arrays)
    assert not others, "or this is the slow policy"
    np.testing.assert_array_equal(action, expected.numpy())
    if memory is not None:
        np.testing.assert_allclose(arrays, next_state.detach().numpy(), atol=1e-5)
    with pytest.raises(RuntimeError, match="10 columns, not 9"):
        agent.actor_body(torch.zeros(1, 10))


def test_without_keys_names_change_no_weight():
    spec = vector_spec(a=2, b=3)
    named, plain = agent_of(spec), agent_of(Unbounded((5,)))
    assert isinstance(named.actor_body, MLP) and named.actor_body.columns is None
    for (name, tensor), (other, expected) in zip(
        named.state_dict().items(), plain.state_dict().items(), strict=True
    ):
        assert name == other and torch.equal(tensor, expected)


@pytest.mark.parametrize(
    ("keys", "selected"),
    [
        (["inner"], ["inner.force", "inner.mode"]),
        (["inner.force", "gear"], ["gear", "inner.force"]),
        (None, ["eye", "gear", "inner.force", "inner.mode"]),
    ],
)
def test_names_select_nested_entries_in_the_order_of_the_row(keys, selected):
    agent = agent_of(MIXED, actor_keys=keys)
    assert list(agent.entries.actor) == selected
    assert list(agent.entries.critic) == ["eye", "gear", "inner.force", "inner.mode", "privileged_mass"]


@pytest.mark.parametrize(
    ("spec", "options", "match"),
    [
        (GO1, {"actor_keys": ["stat"]}, r"actor_keys names 'stat', and the entries .* are privileged_state"),
        (GO1, {"critic_keys": []}, r"critic_keys is \[\]: it must be a list of names"),
        (GO1, {"critic_keys": "state"}, "critic_keys is 'state': it must be a list of names"),
        (Unbounded((4,)), {"actor_keys": ["state"]}, "the observation has no entries"),
        (GO1, {"shared": True}, "set model.agent.shared to false"),
        (GO1, {"shared": True, "memory": "lstm"}, "set model.agent.shared to false"),
        (vector_spec(privileged_a=2), {}, "set model.agent.actor_keys"),
        (MIXED, {"actor_keys": ["action_mask"]}, "names 'action_mask'"),
    ],
)
def test_mistakes_are_one_sentence(spec, options, match):
    with pytest.raises(ConfigError, match=match) as raised:
        agent_of(spec, **options)
    assert str(raised.value).count(". ") == 0


@pytest.mark.parametrize("norm_obs", [False, True])
def test_mixed_entries_and_a_mask_train(fit, norm_obs):
    """The head reads the mask, whatever the keys; the environment refuses forbidden actions."""
    for keys in ({}, {"actor_keys": ["gear", "inner.mode"], "critic_keys": ["eye", "privileged_mass"]}):
        agent = functools.partial(MLPAgent, norm_obs=norm_obs, **keys)
        module = fit(TWO_ROLLOUTS, {"agent": agent, "num_minibatches": 2, "update_epochs": 2})
        assert module.env_steps == 64
        state = {name for name, _ in module.agent.named_parameters()}
        assert any("actor_body.encoders" in name for name in state) == (not keys), "the actor has no CNN"


def test_every_entry_has_its_own_statistics(fit):
    """The entry that only the critic reads has statistics, too."""
    agent = functools.partial(MLPAgent, norm_obs=True, **BLIND)
    normalizer = fit(REACH, {"agent": agent} | MODEL).agent.normalizer
    (luck,) = {0, 1, 2, 3} - {0, 1, 3}  # the actor's columns
    assert normalizer.mean[luck].item() == pytest.approx(3, abs=0.6), "luck is drawn from N(3, 2)"
    assert normalizer.std[luck].item() == pytest.approx(2, abs=0.6)
    assert (normalizer.mean[:2].abs() < 0.5).all(), "actions have a mean of 0"


class Recorded(Recorder, RecurrentPPO):
    pass


@pytest.mark.parametrize("kind", MEMORIES)
@pytest.mark.parametrize(("env_id", "keys"), [("Reach-v0", BLIND), ("Reach-v0", {}), (mixed, {})])
def test_a_recurrent_actor_with_a_feed_forward_critic_trains(fit, env_id, keys, kind):
    agent = functools.partial(MLPAgent, memory=kind, memory_size=16, shared=False, norm_obs=True, **keys)
    data = {"env_id": env_id, "num_envs": 4, "num_steps": 32, "total_timesteps": 384}
    module = fit(data, {"agent": agent, **MODEL, "learning_rate": 1e-2}, ppo=Recorded)
    divergences = [float(metrics["approx_kl"]) for metrics in module.metrics]  # 2 epochs, 2 minibatches
    assert max(divergences[::4]) < 1e-6 < max(divergences[3::4])
    assert module.agent.critic.in_features == 64
    assert module.agent.head.linear.in_features == 16


def test_pictures_with_a_recurrent_actor_and_a_feed_forward_critic():
    spec = Unbounded((4, 36, 36), dtype=torch.uint8)
    agent = CNNAgent(spec, Categorical(3, shape=()), shared=False, memory="min_gru", memory_size=8)
    rows = torch.randint(0, 256, (2, 3, 4, 36, 36), dtype=torch.uint8)
    sequences = agent.evaluate(
        rows, torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 8), torch.zeros(2, 3) > 0
    )
    torch.testing.assert_close(sequences.value.flatten(), agent.value(rows.flatten(0, 1)))


@pytest.mark.parametrize("memory", [None, "lstm"])
def test_a_checkpoint_rebuilds_and_resumes_the_agent(fit, tmp_path, memory):
    path, options = tmp_path / "trained.ckpt", {"memory": memory} if memory else {}
    model = MODEL | {"agent": functools.partial(MLPAgent, norm_obs=True, **BLIND, **options)}
    module = fit(REACH, model, ppo=RecurrentPPO if memory else PPO, callbacks=[SaveAfter(path, 3)])
    agent = trained_agent(read_checkpoint(str(path)))
    rows, state = torch.randn(8, 4), agent.initial_memory(8)
    expected = module.agent.play(rows, state)
    for name, output in agent.play(rows, state).items():
        assert torch.equal(output, expected.pop(name))
    assert not expected
    assert (
        agent.entries
        == module.agent.entries
        == ({"action": 2, "time": 1}, {"action": 2, "luck": 1, "time": 1}, {})
    )
    data = REACH | {"total_timesteps": 64 * 5}
    resumed = fit(data, model, ppo=type(module), ckpt_path=path)
    assert resumed.env_steps == 64 * 5
    other = MODEL | {"agent": functools.partial(MLPAgent, norm_obs=True, shared=False, **options)}
    with pytest.raises(ConfigError, match=r"actor_keys was .* in the run and is .* now"):
        fit(data, other, ppo=type(module), ckpt_path=path)
    if not memory:
        assert torch.equal(PPO.load_from_checkpoint(path).predict(rows), module.predict(rows))


def test_specs_keep_the_names_of_entries():
    spec = vector_spec(a=2, privileged_b=3)
    plain = json.loads(json.dumps(spec_to_plain(spec)))
    assert entry_columns(spec_from_plain(plain)) == {"a": slice(0, 2), "privileged_b": slice(2, 5)}
    with pytest.raises(ConfigError, match="damaged or was edited"):
        spec_from_plain(plain | {"entries": {"a": 2, "privileged_b": 4}})
    agent = agent_of(vector_spec(a=2, b=3))
    saved = agent_to_plain(agent, vector_spec(a=2, b=3), Categorical(3, shape=()))
    older = json.loads(json.dumps(saved))
    for key in ("actor_keys", "critic_keys"):
        del older["init_args"][key]
    check_same_agent(saved=older, current=saved)
    assert isinstance(agent_from_plain(older).actor_body, MLP)
    swapped = saved | {"observation_spec": spec_to_plain(vector_spec(a=3, b=2))}
    with pytest.raises(ConfigError, match="was trained on observations"):
        check_same_agent(saved=saved, current=swapped)


def test_entries_of_one_dotted_name_are_two():
    one, two = (spaces.Box(-1, 1, (size,), np.float32) for size in (1, 2))
    spec = spec_from_space(join_vectors(spaces.Dict({"a": spaces.Dict(b=one, c=one), "a.b": two})))
    assert entry_columns(spec_from_plain(spec_to_plain(spec))) == {
        "a.b": slice(0, 1),
        "a.c": slice(1, 2),
        "a.b'": slice(2, 4),
    }


@pytest.mark.parametrize("memory", [None, "lstm"])
@pytest.mark.parametrize(
    ("spec", "keys", "width", "has_value"),
    [
        (GO1, {}, 4, False),
        (GO1, {"critic_keys": ["state"]}, 4, True),
        (GO1, {"actor_keys": ["state", "privileged_state"], "critic_keys": ["state"]}, 11, True),
        (vector_spec(a=2, b=3, c=4), {"actor_keys": ["a", "c"]}, 6, False),
        (vector_spec(a=2, b=3, c=4), {"actor_keys": ["c", "a"], "critic_keys": ["a"]}, 6, True),
        (MIXED, {"actor_keys": ["inner", "gear"]}, 8, False),
    ],
)
def test_the_deployed_actor_takes_its_entries_only(spec, keys, width, has_value, memory):
    agent = agent_of(spec, norm_obs=True, memory=memory, shared=False, **keys).eval()
    rows = torch.from_numpy(random_observations(spec)[:64].astype(np.float32))
    agent.normalizer.count.fill_(9)
    agent.normalizer.mean.copy_(torch.rand_like(agent.normalizer.mean))
    agent.normalizer.m2.copy_(torch.rand_like(agent.normalizer.m2) + 1)
    state = agent.initial_memory(len(rows))
    actor = Deployed(agent, spec)
    inputs = rows if actor.columns is None else take_columns(rows, actor.columns)
    assert inputs.shape[1] == width
    outputs = actor.outputs(inputs, state)
    assert ("state_value" in outputs) == has_value
    assert ("next_memory" in outputs) == (memory is not None)
    expected = agent.play(rows, state)
    for name, output in outputs.items():
        torch.testing.assert_close(output, expected[name], rtol=0, atol=0)
    action = expected["action"]
    if memory is None:
        program = torch.export.export(actor, (inputs,))
        torch.testing.assert_close(program.module()(inputs)[0], action)


def test_the_policy_of_an_off_policy_algorithm_is_deployed():
    agent = SACAgent(GO1, Bounded(-1, 1, (2,)))
    actor, rows = Deployed(agent, GO1), torch.from_numpy(random_observations(GO1)).float()
    (action,) = actor(take_columns(rows, actor.columns))
    assert torch.equal(action, agent.mode(rows))


@pytest.mark.integration
@pytest.mark.parametrize("memory", [None, "lstm"])
def test_onnx_holds_the_actor_alone(tmp_path, memory):
    onnxruntime = pytest.importorskip("onnxruntime")
    specs = EnvFactory("Reach-v0").specs()
    agent, spec = MLPAgent(*specs, norm_obs=True, memory=memory, **BLIND), specs.observation
    file = to_onnx(agent, spec, tmp_path / "agent.onnx")
    held = [
        layer.weight.detach().numpy().tobytes() in file.read_bytes()
        for layer in (agent.head.linear, agent.critic)
    ]
    assert held == [True, False]
    session = onnxruntime.InferenceSession(str(file))
    assert session.get_inputs()[0].shape[1] == 3
    memories = ["next_memory"] if memory else []
    assert [output.name for output in session.get_outputs()] == ["action", *memories]
    columns = Deployed(agent, spec).columns
    assert largest_difference(agent, file, random_observations(spec), columns) < 1e-5


def test_transforms_keep_the_names_and_hide_no_privileged_entry(env):
    kept = EnvFactory("Reach-v0", transforms=[StepCounter(5)]).specs().observation
    assert entry_columns(specs_of(env("Reach-v0", 2)).observation) == entry_columns(kept)
    assert list(entry_columns(kept)) == ["action", "luck", "time"]
    stacked = [CatFrames(2, dim=-1, in_keys=["observation"])]
    assert not entry_columns(EnvFactory("Reach-v0", transforms=stacked).specs().observation)
    with pytest.raises(ConfigError, match=r"without data\.transforms"):
        EnvFactory("Hidden-v0", transforms=stacked).specs()


def test_the_run_says_what_actor_and_critic_read(fit, capsys):
    fit(
        REACH | {"total_timesteps": 64},
        MODEL | {"agent": functools.partial(MLPAgent, **BLIND)},
        callbacks=[RunSummary()],
    )
    line = "The actor reads action (2), time (1), the critic reads action (2), luck (1), time (1).\n"
    assert line in capsys.readouterr().out
    fit(REACH | {"total_timesteps": 64}, MODEL, callbacks=[RunSummary()])
    assert "Actor and critic read action (2), luck (1), time (1).\n" in capsys.readouterr().out
    fit({"num_steps": 16, "total_timesteps": 64}, callbacks=[RunSummary()])
    assert " read" not in capsys.readouterr().out


@pytest.mark.integration
def test_the_compiled_update_gives_the_weights_of_the_eager_one(fit):
    agent = functools.partial(MLPAgent, norm_obs=True, **BLIND)
    eager, compiled = (fit(REACH, MODEL | {"agent": agent, "compile": on}) for on in (False, True))
    torch.testing.assert_close(weights(compiled), weights(eager), atol=1e-5, rtol=1e-4)
