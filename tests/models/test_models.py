"""Agents and their heads."""

import functools
import math

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Bounded, Categorical, Unbounded
from torchrl.envs.utils import ExplorationType, set_exploration_type

from ppo_lightning import Actor, CNNAgent, MLPAgent, make_env
from ppo_lightning.checkpoints.agent import agent_from_plain, agent_to_plain
from ppo_lightning.models.bodies import MLP
from ppo_lightning.models.heads import GaussianHead

VECTOR, ACTIONS = Unbounded(shape=(5,)), Categorical(3, shape=(), dtype=torch.int64)
PICTURE = Bounded(0, 255, (3, 64, 64), dtype=torch.uint8)


@pytest.fixture(params=[False, True], ids=["separate", "shared"])
def agent(request):
    torch.manual_seed(0)
    agent = MLPAgent(VECTOR, ACTIONS, shared=request.param)
    torch.nn.init.normal_(agent.head.linear.weight)
    return agent


GAINS = {"actor_body": math.sqrt(2), "critic_body": math.sqrt(2), "head": 0.01, "critic": 1.0}


def layers_of(agent):
    """Yield name, weight [out, in] and bias of each linear layer and convolution."""
    for name, layer in agent.named_modules():
        if isinstance(layer, torch.nn.Linear | torch.nn.Conv2d):
            yield name, layer.weight.detach().flatten(1), layer.bias.detach()


def require_orthogonal(name, weight, bias):
    weight = weight / GAINS[name.split(".")[0]]
    gram = weight @ weight.T if weight.shape[0] <= weight.shape[1] else weight.T @ weight
    torch.testing.assert_close(gram, torch.eye(len(gram)), atol=1e-5, rtol=0)
    assert not bias.any()


@pytest.mark.detail("2")
@pytest.mark.detail("21")
@pytest.mark.parametrize(
    ("make", "count"),
    [
        (lambda: MLPAgent(VECTOR, ACTIONS), 6),
        (lambda: CNNAgent(PICTURE, ACTIONS, body="nature"), 6),
        (lambda: CNNAgent(PICTURE, ACTIONS, body="nature", shared=False), 10),
    ],
    ids=["mlp", "nature", "nature-separate"],
)
def test_layers_start_orthogonal_with_their_gains_and_zero_bias(make, count):
    """Gains: sqrt(2) for hidden layers and convolutions, 0.01 for the policy's head, 1 for the value."""
    layers = list(layers_of(make()))
    for layer in layers:
        require_orthogonal(*layer)
    assert len(layers) == count


@pytest.mark.detail("P1")
def test_the_impala_body_starts_as_pytorch_initializes_it_and_its_heads_orthogonal():
    """Weights and biases are uniform within 1 / sqrt(fan in), as in the published Procgen agent."""
    torch.manual_seed(0)
    layers = list(layers_of(CNNAgent(PICTURE, ACTIONS, body="impala")))
    for name, weight, bias in layers:
        if not name.startswith("actor_body"):
            require_orthogonal(name, weight, bias)
            continue
        scaled, shift = weight * weight.shape[1] ** 0.5, bias * weight.shape[1] ** 0.5
        assert scaled.abs().max() <= 1 + 1e-5 and shift.abs().max() <= 1 + 1e-5
        assert scaled.std().item() == pytest.approx(3**-0.5, rel=0.1)
        assert bias.any()
    assert len(layers) == 15 + 1 + 2


@pytest.mark.detail("13")
@pytest.mark.detail("26")
@pytest.mark.parametrize(
    ("actions", "sizes"), [(ACTIONS, (9348, 4804)), (Bounded(-1, 1, (2,)), (9285, 4741))]
)
def test_policy_and_value_have_separate_bodies_unless_shared(actions, sizes):
    observation = torch.randn(7, 5)
    for shared in (False, True):
        agent = MLPAgent(VECTOR, actions, shared=shared)
        agent.value(observation).sum().backward()
        reached = any(p.grad is not None for p in agent.actor_body.parameters())
        assert reached == shared, "the value's gradient reaches the policy's body only if they share it"
        assert sum(p.numel() for p in agent.parameters()) == sizes[shared]


VECTOR_ACTIONS = Bounded(-1, 1, shape=(3,), dtype=torch.float32)


@pytest.mark.parametrize(
    ("actions", "options"),
    [
        (ACTIONS, {}),
        (ACTIONS, {"shared": True}),
        (VECTOR_ACTIONS, {}),
        (VECTOR_ACTIONS, {"head": "tanh_gaussian"}),
        (VECTOR_ACTIONS, {"activation": "relu"}),
        (VECTOR_ACTIONS, {"activation": "elu"}),
    ],
)
def test_acting_on_arrays_gives_what_act_gives_and_follows_the_weights(actions, options):
    agent = MLPAgent(VECTOR, actions, **options)
    policies = agent.array_policy(), Actor.array_policy(agent)
    observation, noise = torch.randn(300, 5), agent.noise((300,))
    with torch.inference_mode():
        for name, parameter in agent.named_parameters():  # other than those of a new layer normalization
            if name != "head.log_std":  # which is read once, for a rollout
                torch.nn.init.normal_(parameter, std=0.5)
        for drawn in (noise, None):
            *expected, _ = agent.act(observation, drawn)
            arrays = observation.numpy(), None if drawn is None else drawn.numpy(), None
            action, *others = policies[0](*arrays)
            assert not others, "left to evaluate"
            torch.testing.assert_close(torch.from_numpy(action), expected[0], atol=1e-5, rtol=1e-5)
            for array, tensor in zip(policies[1](*arrays), expected, strict=True):
                torch.testing.assert_close(torch.from_numpy(array), tensor.clone(), atol=1e-6, rtol=1e-5)


class Halved(MLPAgent):
    def act(self, observation, noise=None, memory=None):
        return super().act(observation, None if noise is None else noise / 2, memory)


class Doubling(MLP):
    def forward(self, observation):
        return 2 * super().forward(observation)


class Wide(MLPAgent):
    network = Doubling


class Hot(GaussianHead):
    def sample(self, features, noise, mask=None):
        return super().sample(features + 1, noise, mask)


class Hotter(MLPAgent):
    default_head = Hot


class Capped(torch.nn.Linear):
    def forward(self, features):
        return super().forward(features).clamp(-0.01, 0.01)


class Changed(MLPAgent):
    """Agent with layers and an activation of its own."""

    def __init__(self, part, *specs):
        super().__init__(*specs)
        if part == "activation":
            self.actor_body.activation = torch.neg
        elif part == "head":
            self.head.linear = Capped(64, 3)
        else:
            self.actor_body.layers.append(torch.nn.LayerNorm(64))


PARTS = [functools.partial(Changed, part) for part in ("activation", "head", "layers")]


@pytest.mark.parametrize("kind", [Halved, Wide, Hotter, *PARTS])
def test_a_subclass_acts_on_arrays_as_it_acts_on_tensors(kind):
    agent = kind(VECTOR, VECTOR_ACTIONS)
    torch.nn.init.normal_(agent.head.linear.weight)
    observation, noise = torch.randn(30, 5), agent.noise((30,))
    with torch.inference_mode():
        expected, *_ = agent.act(observation, noise)
        action, log_prob, value = agent.array_policy()(observation.numpy(), noise.numpy(), None)
    torch.testing.assert_close(torch.from_numpy(action), expected.clone(), atol=1e-5, rtol=1e-5)
    assert log_prob.shape == (30,) and value.shape == (30, 1)


def test_without_noise_the_most_probable_action_is_taken(agent):
    observation = torch.randn(64, 5)
    action, log_prob, *_ = agent.act(observation)
    others = torch.stack([agent.evaluate(observation, torch.full((64,), a))[0] for a in range(3)])
    assert torch.equal(log_prob, others.max(0).values)
    assert torch.equal(action, others.argmax(0))


@pytest.mark.parametrize("kind", ["DETERMINISTIC", "MODE", "MEAN"])
@pytest.mark.parametrize("shape", [(), (4,), (2, 3)])
def test_the_agent_is_a_tensordict_module(agent, shape, kind):
    td = TensorDict({"observation": torch.randn(*shape, 5)}, batch_size=shape)
    with set_exploration_type(ExplorationType[kind]):
        out = agent(td)
    assert out["action"].shape == out["action_log_prob"].shape == shape
    assert out["state_value"].shape == (*shape, 1)
    flat = td["observation"].reshape(-1, 5)
    torch.testing.assert_close(out["action"].reshape(-1), agent.act(flat)[0])


def test_env_rollout_takes_the_agent_as_its_policy():
    """With gradients. Outside of deterministic mode, it explores."""
    for env_id in ("CartPole-v1", "Pendulum-v1"):
        env = make_env(env_id, 3)
        rollout = env.rollout(20, MLPAgent(*env.agent_specs), break_when_any_done=False)
        assert rollout.batch_size == (3, 20) and len(rollout["action"].unique()) >= 2


class Wide(MLPAgent):
    def __init__(self, observation_spec, action_spec, width=32):
        super().__init__(observation_spec, action_spec, hidden_sizes=(width, width))


def test_an_agents_subclass_with_arguments_of_its_own_is_rebuilt():
    plain = agent_to_plain(Wide(VECTOR, ACTIONS, width=8), VECTOR, ACTIONS)
    assert plain["init_args"] == {"width": 8}
    assert agent_from_plain(plain).actor_body.out_features == 8
