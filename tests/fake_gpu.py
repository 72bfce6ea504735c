"""Run agents on a simulated GPU: PyTorch computes shapes, types and devices, and refuses what a GPU refuses.

test_devices.py forks a process for it, because the device guards stay registered.
"""

import subprocess
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from tensordict import TensorDict
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ppo_lightning import PPO, SAC, CNNAgent, MLPAgent, RecurrentPPO
from ppo_lightning.envs.specs import Specs
from ppo_lightning.export.onnx import random_observations
from ppo_lightning.models.normalizers import CollectorMoments
from ppo_lightning.offpolicy.buffer import ReplayBuffer
from ppo_lightning.rollouts.evaluation import episode_statistics
from ppo_lightning.spaces.specs import spec_from_space
from ppo_lightning.utils import collectives
from tests.spaces.test_spaces import ACTIONS, EVERYTHING, VECTOR, spaces

PICTURE = spaces.Box(0, 255, (4, 84, 84), "uint8")
BOX, DISCRETE = ACTIONS["box"], ACTIONS["discrete"]
AGENTS = [
    *((MLPAgent, EVERYTHING, space, {"norm_obs": True}) for space in ACTIONS.values()),
    (MLPAgent, VECTOR, BOX, {"head": "tanh_gaussian"}),
    (MLPAgent, VECTOR, DISCRETE, {"shared": True, "memory": "lstm"}),
    (MLPAgent, VECTOR, DISCRETE, {"shared": True, "memory": "min_gru"}),
    (CNNAgent, PICTURE, DISCRETE, {}),
    (CNNAgent, PICTURE, BOX, {"body": "impala"}),
]
ENVS, STEPS = 4, 8


def register_guards(folder: Path) -> None:
    """Compile and load device guards: PyTorch needs one to index tensors of an absent device."""
    source, library, torch_folder = folder / "guard.cpp", folder / "guard.so", Path(torch.__file__).parent
    guard = "C10_REGISTER_GUARD_IMPL({0}, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::{0}>)\n"
    guards = guard.format("CUDA") + guard.format("MPS")
    source.write_text(f"#include <c10/core/impl/DeviceGuardImplInterface.h>\n{guards}")
    include = [f"-I{torch_folder / 'include'}", f"-I{sysconfig.get_paths()['include']}"]
    libraries = [f"-L{torch_folder / 'lib'}", "-lc10"]
    subprocess.run(
        ["g++", "-std=c++20", "-shared", "-fPIC", *include, source, "-o", library, *libraries], check=True
    )
    torch.ops.load_library(library)


class WithoutFloat64(TorchDispatchMode):
    """Mode that refuses float64 on a device, as Apple's GPUs do."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        for leaf in tree_leaves((args, kwargs, out)):
            if torch.is_tensor(leaf) and leaf.device.type == self.device and leaf.dtype == torch.float64:
                raise TypeError(f"{func} has float64 on {self.device}")
        return out


class WholeSequences(TorchDispatchMode):
    """Mode that answers operations that need the values of tensors: no episode begins within a sequence.

    Simulated tensors have no values.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aten, (first, *rest) = torch.ops.aten, args or (None,)
        if func is aten._local_scalar_dense.default:
            return STEPS
        if func is aten.nonzero.default:
            return first.new_zeros((ENVS, first.ndim), dtype=torch.int64)
        if func is aten._unique2.default:  # of the players of episodes
            return first.new_zeros(0), *(first.new_zeros(0, dtype=torch.int64) for _ in range(2))
        mask = rest[0][0] if func is aten.index.Tensor else None
        if mask is not None and mask.dtype == torch.bool:
            same_device(first.device, mask)
            return first.new_zeros((ENVS * STEPS, *first.shape[mask.ndim :]))
        return func(*args, **kwargs or {})


def same_device(device: str | torch.device, *tensors: torch.Tensor | None) -> None:
    """Raise an error if a tensor is on another device."""
    for tensor in tensors:
        if tensor is not None and tensor.device != torch.device(device):
            raise RuntimeError(f"a result is on {tensor.device}")


def make(agent_class, observations, actions, options):
    """Return a module and raw observations [N, ...] on the CPU."""
    specs = spec_from_space(observations), spec_from_space(actions)
    module = (RecurrentPPO if "memory" in options else PPO)(norm_reward=True)
    module.agent = agent_class(*specs, **options)
    return module, torch.from_numpy(random_observations(specs[0])[:ENVS])


def look_at_statistics(device: str, module: PPO, raw: torch.Tensor) -> None:
    """Update the statistics as the collector for TorchRL environments does, without the values of tensors."""
    scaler = module.reward_scaler
    flags = torch.zeros(STEPS, ENVS, dtype=torch.bool, device=device)
    discounted = torch.zeros(ENVS, dtype=torch.float64, device=scaler.mean.device)
    scaled = scaler.scale(torch.zeros(STEPS, ENVS, device=device), flags, discounted)
    same_device(scaler.mean.device, scaled)
    if module.agent.normalizer is not None:
        with WholeSequences():
            moments = CollectorMoments(module.agent.normalizer, arrays=False)  # once per rollout
        same_device(device, *moments.normalize([raw, raw[:1]]))
        moments.store()


def look_at(device: str, module: PPO, raw: torch.Tensor) -> None:
    """Act, play and explain; compute advantages, losses and the statistics of an evaluation."""
    agent = module.to(device).agent
    recurrent = agent.memory is not None
    raw, memory = raw.to(device), agent.initial_memory(ENVS)
    noise = agent.noise((ENVS,)).to(device)
    observation = agent.normalize(raw)
    look_at_statistics(device, module, raw)
    same_device(device, observation, *agent.play(raw, memory).values(), *agent.explain(raw, memory))
    action, log_prob, value, after = agent.act(observation, noise, memory)
    same_device(device, action, log_prob, value, after, agent.value(observation, memory))

    def sequence(tensor):
        return tensor.unsqueeze(1).expand(ENVS, STEPS, *tensor.shape[1:])

    flag = torch.zeros(ENVS, STEPS, 1, dtype=torch.bool, device=device)
    seen, values = sequence(observation), sequence(value)
    following = {"observation": seen, "reward": values, "done": flag, "terminated": flag}
    rollout = {"observation": seen, "action": sequence(action), "action_log_prob": sequence(log_prob)}
    if recurrent:
        rollout["memory"] = following["memory"] = sequence(memory)
    rollout |= {"state_value": values, "next": following}
    rollout = TensorDict(rollout, batch_size=(ENVS, STEPS))
    with WholeSequences():
        rollout = module.advantages(rollout)
        same_device(device, rollout["advantage"], rollout["value_target"])
        keys = ("observation", "action", "action_log_prob", "state_value", "advantage", "value_target")
        minibatch = {key: rollout[key] if recurrent else rollout[key].flatten(0, 1) for key in keys}
        if recurrent:
            minibatch |= {"memory": memory, "is_init": flag[..., 0]}
        loss, parts = module.total_loss(minibatch)
    same_device(device, loss, *parts.values())
    lengths, rewards = torch.zeros(3, dtype=torch.int64, device=device), torch.zeros(3, device=device)
    episode_statistics("eval", TensorDict(episode_reward=rewards, step_count=lengths, batch_size=[3]))


def make_sac():
    """Return SAC with its networks, and transitions [N, ...] on the CPU."""
    specs = Specs(spec_from_space(VECTOR), spec_from_space(BOX))
    module = SAC(batch_size=STEPS)
    module.agent = module.make_agent(*specs)
    module.add_networks(specs)
    observation = module.agent.normalize(specs.observation.zero((ENVS,)))
    rows = {"observation": observation, "next_observation": observation, "action": specs.action.zero((ENVS,))}
    return module, rows | {key: torch.zeros(ENVS) for key in ("reward", "terminated")}


def look_at_replay(device: str, module: SAC, rows: dict[str, torch.Tensor]) -> None:
    """Store transitions on the device, and compute the parts of SAC's losses for a minibatch of them.

    The simulated device has no backward pass.
    """
    module.to(device)
    buffer = ReplayBuffer(2 * ENVS)
    for _ in range(3):
        buffer.add({key: column.to(device) for key, column in rows.items()})
    minibatch = buffer.gather(torch.zeros(STEPS, dtype=torch.int64, device=device))
    noise = torch.zeros(STEPS, *module.noise_shape[1:], device=device)
    value, log_prob, _ = module.evaluate(minibatch["observation"], noise, module.critics)
    same_device(device, value, log_prob, module.next_value(minibatch, noise), *minibatch.values())
    module.move_target(module.critics, module.target_critics)


@contextmanager
def autocast(device: str, precision: torch.dtype) -> Iterator[None]:
    """Enable autocast; ``torch.autocast`` itself refuses an absent device."""
    torch.set_autocast_dtype(device, torch.bfloat16)
    torch.set_autocast_enabled(device, precision == torch.bfloat16)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, False)
        torch.clear_autocast_cache()


def look_at_agents(device: str) -> None:
    """Let every agent compute on a simulated device, in two precisions."""
    for case in AGENTS:
        for precision in (torch.float32, torch.bfloat16):
            fake = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
            refusing = WithoutFloat64(device) if device == "mps" else nullcontext()
            module, raw = make(*case)
            with fake, autocast(device, precision), refusing:
                ones = torch.ones(2, 2, device=f"{device}:0")
                assert (ones @ ones).dtype == precision
                look_at(f"{device}:0", module, raw)
            print(device, case[0].__name__, case[3], precision)
    sac = make_sac()
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        look_at_replay(f"{device}:0", *sac)


def look_at_an_exchange() -> None:
    """Gather a tensor of a simulated GPU, whose own process group exchanges it without a copy."""
    collectives.world_size, collectives.cpu_group = lambda: 2, lambda: "gloo"
    collectives.dist.all_gather = lambda rows, own, group: same_device("cuda:0", own, *rows)
    with FakeTensorMode():
        same_device("cuda:0", collectives.gather(torch.ones(3, device="cuda:0")))


def main(folder: Path) -> None:
    register_guards(folder)
    torch.backends.cudnn.enabled = False  # an LSTM would ask the driver, which a CUDA build may lack
    look_at_agents("cuda")
    look_at_agents("mps")
    look_at_an_exchange()
