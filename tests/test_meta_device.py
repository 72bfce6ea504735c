"""Whole runs on a device without values: rollouts, advantages, minibatches and updates stay on one device."""

from contextlib import nullcontext

import pytest
import torch
from torchrl.envs import StepCounter

from ppo_lightning import PPG, PPO, RPO, MLPAgent, RecurrentPPO
from ppo_lightning.algorithms import losses
from ppo_lightning.envs.isaac_lab import IsaacLabEnv
from ppo_lightning.envs.torch_env import TorchEnv
from ppo_lightning.models import heads
from ppo_lightning.rollouts.scan_collector import ScanCollector
from ppo_lightning.rollouts.tensor_collector import TensorCollector
from tests.envs.simulators import FakeIsaacEnv, configuration
from tests.fake_gpu import ENVS, STEPS
from tests.meta_device import on_meta


def tolerant(env):
    """Return an environment whose reset TorchRL does not check: a test without values is always true."""
    env._allow_done_after_reset = True
    return env


def cartpole(seeds):
    return tolerant(TorchEnv("CartPole-v1", seeds, device="meta"))


def pendulum(seeds):
    return tolerant(TorchEnv("Pendulum-v1", seeds, device="meta"))


def isaac(num_envs):
    config = configuration(num_envs)
    config.sim.device = "meta"
    return tolerant(IsaacLabEnv(FakeIsaacEnv(config)))


def agent(**options):
    return lambda *specs: MLPAgent(*specs, **options)


CASES = {
    "discrete": (cartpole, {}, PPO, ScanCollector),
    "continuous": (pendulum, {}, PPO, ScanCollector),
    "compiled": (pendulum, {"compile": True}, PPO, ScanCollector),
    "statistics": (pendulum, {"norm_reward": True, "agent": agent(norm_obs=True)}, PPO, ScanCollector),
    "tanh": (pendulum, {"agent": agent(head="tanh_gaussian", norm_obs=True)}, PPO, ScanCollector),
    "target_kl": (cartpole, {"target_kl": 1.0, "microbatch_size": 4}, PPO, ScanCollector),
    "compiled parts": (cartpole, {"compile": True, "microbatch_size": 4}, PPO, ScanCollector),
    "simulator": (isaac, {"norm_reward": True, "agent": agent(norm_obs=True)}, PPO, TensorCollector),
    "memory": (cartpole, {"agent": agent(memory="min_gru", shared=True)}, RecurrentPPO, ScanCollector),
    "rpo": (pendulum, {}, RPO, ScanCollector),
    "ppg": (cartpole, {"n_iteration": 2}, PPG, ScanCollector),
}


@pytest.fixture
def run(fit, monkeypatch):
    """Return a function that trains two rollouts on ``meta`` and returns the collectors and the module."""
    collectors = []
    start = TensorCollector.__init__

    def init(self, *args, **kwargs):
        collectors.append(self)
        start(self, *args, **kwargs)

    monkeypatch.setattr(TensorCollector, "__init__", init)

    def train(make, options, algorithm=PPO, transforms=None):
        sizes = {"num_envs": ENVS, "num_steps": STEPS, "total_timesteps": 2 * ENVS * STEPS}
        with on_meta(monkeypatch) as trainer:
            module = fit(
                sizes | {"env_id": make, "transforms": transforms},
                {"num_minibatches": 2, "update_epochs": 2} | options,
                ppo=algorithm,
                **trainer,
            )
        return collectors, module

    return train


@pytest.mark.parametrize("case", CASES)
def test_a_run_stays_on_one_device(run, case):
    make, options, algorithm, collector_class = CASES[case]
    # Numbers without values differ, so that the first compiled iteration is also the last one.
    warned = pytest.warns(UserWarning, match="compiled loss is off")
    with warned if "compile" in options else nullcontext():
        (collector,), module = run(make, options, algorithm)
    assert type(collector) is collector_class
    assert collector.env.device == torch.device("meta")
    assert module.env_steps == 2 * ENVS * STEPS
    assert module.trainer.global_step >= (4 if case == "target_kl" else 8)


def test_transforms_stay_on_one_device(run):
    (collector,), _ = run(cartpole, {}, transforms=[StepCounter(5)])
    assert type(collector) is TensorCollector


def with_zeros(function, at=0):
    """Return a function to whose argument zeros on the CPU are added."""

    def wrong(*args, **kwargs):
        changed = list(args)
        changed[at] = args[at] + torch.zeros(args[at].shape, device="cpu")
        return function(*changed, **kwargs)

    return wrong


@pytest.mark.parametrize(("owner", "name", "at"), [(losses, "gae", 0), (heads.GaussianHead, "sample", 1)])
def test_a_tensor_on_the_wrong_device_is_found(run, monkeypatch, owner, name, at):
    monkeypatch.setattr(owner, name, with_zeros(getattr(owner, name), at))
    with pytest.raises(RuntimeError, match=r"has tensors on \['cpu', 'meta'\]"):
        run(pendulum, {})
