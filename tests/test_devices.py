"""GPUs: checks on a simulated device, and, where a GPU is present, agreement of training with the CPU."""

import types

import pytest
import torch
from torch.optim.adam import adam as own
from torchrl.data import Bounded, Categorical, Unbounded

from ppo_lightning import CNNAgent, MLPAgent, RolloutCollector
from ppo_lightning.errors import ConfigError
from ppo_lightning.models import Actor
from ppo_lightning.offpolicy.module import adam
from ppo_lightning.rollouts.storage import allocate, check_memory
from tests import fake_gpu
from tests.helpers import CARTPOLE, MODEL, REACH, Forked, weights
from tests.offpolicy.test_module import RUNS

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
simulates_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is present")
ON_GPU = {"accelerator": "gpu", "devices": 1}


@simulates_gpu
@pytest.mark.integration
def test_agents_compute_on_one_device(tmp_path):
    """All agents act, learn and are evaluated, in float32 and under autocast; on MPS without float64."""
    process = Forked(tmp_path, fake_gpu.main, tmp_path)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    devices = [line.split()[0] for line in output.splitlines()]
    assert devices == ["cuda"] * 22 + ["mps"] * 22, "11 agents in two precisions"


@pytest.mark.parametrize("env_id", ["CartPole-v1", "FrozenLake-v1"])
def test_environment_and_agent_are_made_on_the_cpu(fit, monkeypatch, env_id):
    """Lightning configures models on the training device, where the same seed gives other weights."""
    data = CARTPOLE | {"env_id": env_id}
    here = fit(data, MODEL)
    monkeypatch.setattr(
        "lightning.pytorch.strategies.Strategy.tensor_init_context", lambda *_, **__: torch.device("meta")
    )
    assert weights(fit(data, MODEL)).tolist() == weights(here).tolist()


def test_adam_follows_the_precision_of_the_run_not_of_the_checkpoint(fit):
    """A fused step needs the step count on the device of the weights."""
    options = {"enable_checkpointing": True, "max_epochs": -1}
    first = fit(CARTPOLE, MODEL, precision="bf16-mixed", **options)
    path = first.trainer.checkpoint_callback.best_model_path
    longer = CARTPOLE | {"total_timesteps": 64 * 4}
    fused = fit(longer, MODEL, ckpt_path=path, **options).trainer.optimizers[0].param_groups[0]["fused"]
    assert fused and not first.trainer.optimizers[0].param_groups[0]["fused"]


@simulates_gpu
def test_adams_formula_is_compiled_where_its_state_is_on_a_gpu(monkeypatch):
    """PyTorch's own function refuses GPUs; this test makes it refuse the CPU."""
    constants = own.__code__.co_consts
    devices = [frozenset({"cpu"}) if isinstance(value, frozenset) else value for value in constants]
    monkeypatch.setattr(own, "__code__", own.__code__.replace(co_consts=tuple(devices)))

    def step(function):
        weight, *state = torch.ones(3), [torch.zeros(3)], [torch.zeros(3)], [], [torch.zeros(())]
        numbers = {"beta1": 0.9, "beta2": 0.999, "lr": torch.tensor(0.1), "weight_decay": 0.0, "eps": 1e-5}
        function([weight], [torch.ones(3)], *state, foreach=False, amsgrad=False, maximize=False, **numbers)
        return weight

    with pytest.raises(torch._dynamo.exc.Unsupported, match="marked as skipped"):
        torch.compile(lambda: step(own), backend="eager", fullgraph=True)()
    ours = torch.compile(lambda: step(adam), backend="eager", fullgraph=True)()
    torch.testing.assert_close(ours, torch.full((3,), 0.9), atol=1e-4, rtol=0)


@needs_gpu
@pytest.mark.parametrize("options", [{}, {"compile": True}], ids=str)
@pytest.mark.parametrize(
    ("data", "agent"),
    [
        (CARTPOLE, MLPAgent),
        (REACH, MLPAgent),
        (CARTPOLE | {"env_id": "ALE/Breakout-v5", "backend": "envpool"}, CNNAgent),
    ],
    ids=["cartpole", "reach", "breakout"],
)
def test_training_on_a_gpu_agrees_with_the_cpu(fit, data, agent, options, monkeypatch):
    monkeypatch.setattr("torch.backends.cudnn.allow_tf32", False)  # convolutions in float32, as on the CPU
    here, there = (
        fit(data, MODEL | {"agent": agent} | model, **on) for model, on in (({}, {}), (options, ON_GPU))
    )
    assert there.env_steps == here.env_steps
    torch.testing.assert_close(weights(there).cpu(), weights(here), atol=1e-4, rtol=1e-3)


@needs_gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", RUNS)
def test_off_policy_training_on_a_gpu_agrees_with_the_cpu(fit, name, compiled, monkeypatch):
    monkeypatch.setattr("torch.backends.cudnn.allow_tf32", False)
    algorithm, data, model = RUNS[name]
    here = fit(data, model, ppo=algorithm)
    on_device = {"env_kwargs": {"device": "cuda"}} if data.get("backend") == "torch" else {}
    there = fit(data | on_device, model | {"compile": compiled}, ppo=algorithm, **ON_GPU)
    assert there.env_steps == here.env_steps
    assert there.buffer.columns["reward"].is_cuda
    # A weight whose gradient is nearly zero moves by a step of Adam in any direction.
    distance = weights(there).cpu() - weights(here)
    assert distance.norm() < 1e-3 * weights(here).norm()
    assert (distance.abs() < 1e-4).float().mean() > 0.999


@needs_gpu
@pytest.mark.parametrize("name", ["SAC", "DQN, pictures"])
def test_an_off_policy_run_on_a_gpu_resumes_to_the_bit(fit_and_resume, name):
    algorithm, data, model = RUNS[name]
    fit_and_resume(6, data, model | {"save_buffer": True}, ppo=algorithm, **ON_GPU)


def test_a_buffer_must_fit_into_the_memory_of_the_gpu(monkeypatch):
    laptop = types.SimpleNamespace(total_memory=8e9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {torch.device("cuda", 0): laptop}.get)
    gpu = torch.device("cuda", 0)
    check_memory(8_000, 10**6, device=gpu)
    with pytest.raises(ConfigError, match="buffer_size = 9000 steps take 9 GB and the GPU has 8 GB"):
        check_memory(9_000, 10**6, "model.buffer_size", gpu)


def test_a_small_network_acts_on_a_copy_on_the_cpu(monkeypatch):
    """Each step would take the round trip to a GPU and back."""
    agent = MLPAgent(Unbounded((5,)), Categorical(3, shape=()), shared=True, memory="min_gru")
    rows, noise, memory = torch.randn(4, 5).numpy(), agent.noise((4,)).numpy(), torch.zeros(4, 128).numpy()
    expected, *_ = agent.array_policy()(rows, noise, memory.copy())
    monkeypatch.setattr(Actor, "array_policy", lambda self: lambda *arrays: "on the device")
    monkeypatch.setattr(Actor, "device", torch.device("cuda"))
    policy = agent.array_policy()
    for parameter in agent.parameters():
        parameter.data.fill_(torch.nan)
    action, *others = policy(rows, noise, memory)
    assert action.tolist() == expected.tolist() and not others
    monkeypatch.setattr("ppo_lightning.models.mlp.LARGEST_COPY", 1000)
    assert agent.array_policy()(rows, noise, memory) == "on the device"


@needs_gpu
@pytest.mark.parametrize("rows", [1, 10_000])
def test_agents_on_a_gpu_choose_the_actions_of_the_cpu(rows):
    agent = MLPAgent(Unbounded((5,)), Bounded(-1.0, 1.0, shape=(2,)))
    inputs = torch.randn(rows, 5).numpy(), agent.noise((rows,)).numpy(), None
    expected, *_ = agent.array_policy()(*inputs)
    action, *others = agent.to("cuda").array_policy()(*inputs)
    torch.testing.assert_close(action, expected, atol=1e-5, rtol=1e-4)
    assert bool(others) == (rows > 1)


@needs_gpu
def test_rollouts_are_collected_into_pinned_memory(env):
    made = env("CartPole-v1", 2)
    agent = MLPAgent(*made.agent_specs).to("cuda")
    specs = RolloutCollector(made, agent, 8).rollout_keys()
    storage = allocate(specs, agent, made.num_envs, 8)
    assert all(tensor.is_pinned() for tensor in storage.values(True, leaves_only=True))
