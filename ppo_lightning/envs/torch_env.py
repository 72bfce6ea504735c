"""The backend ``torch``: CartPole and Pendulum as tensors, with Gymnasium's episodes.

The equations and constants are those of ``gymnasium.envs.classic_control``. States are float64 as there, so
that the episodes are Gymnasium's for the same initial states and actions.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium
import torch
from torch import Tensor
from torchrl.envs import EnvBase

from ppo_lightning.envs.batched import Copies
from ppo_lightning.envs.gymnasium import make as make_for_gymnasium
from ppo_lightning.envs.tensor_env import FunctionalEnv, State, TensorStep
from ppo_lightning.errors import ConfigError
from ppo_lightning.utils.arguments import require_options


class Task(NamedTuple):
    """Dynamics of N copies of a task.

    ``step`` returns next states [N, S], rewards [N] and terminations [N] bool for states [N, S] float64 and
    actions, [N] int64 or [N, 1] floats inside their bounds.
    """

    high: tuple[float, ...]  # upper bounds of the initial state; the lower bounds are their negatives
    step: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    observe: Callable[[Tensor], Tensor]  # returns observations [N, ...] of states


def step_cartpole(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Push the cart with 10 N to the left (0) or right (1) for 0.02 s.

    The state is the cart's position (m) and velocity, and the pole's angle (rad) and angular velocity.
    """
    x, x_dot, theta, theta_dot = state.unbind(-1)
    pole_mass, total_mass, half_length = 0.1, 1.1, 0.5
    force = 20.0 * action - 10.0
    sin, cos = theta.sin(), theta.cos()
    push = (force + pole_mass * half_length * theta_dot**2 * sin) / total_mass
    inertia = half_length * (4 / 3 - pole_mass * cos**2 / total_mass)
    theta_acc = (9.8 * sin - cos * push) / inertia
    x_acc = push - pole_mass * half_length * theta_acc * cos / total_mass
    change = torch.stack([x_dot, x_acc, theta_dot, theta_acc], dim=-1)
    following = state + 0.02 * change
    out = (following[:, 0].abs() > 2.4) | (following[:, 2].abs() > 12 * math.pi / 180)
    return following, torch.ones_like(x), out


def step_pendulum(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Apply a torque for 0.05 s. The state is the angle from upright (rad) and the angular velocity."""
    theta, theta_dot = state.unbind(-1)
    torque = action[:, 0]  # float32: Gymnasium rounds the products of the torque, too
    angle = torch.remainder(theta + math.pi, 2 * math.pi) - math.pi
    reward = -(angle**2 + 0.1 * theta_dot**2 + 0.001 * torque**2)
    theta_dot = (theta_dot + (15.0 * theta.sin() + (3.0 * torque).to(state.dtype)) * 0.05).clamp(-8, 8)
    theta = theta + theta_dot * 0.05
    return torch.stack([theta, theta_dot], dim=-1), reward, torch.zeros_like(theta, dtype=torch.bool)


def observe_pendulum(state: Tensor) -> Tensor:
    """Return cosine, sine and angular velocity, [N, 3]."""
    theta, theta_dot = state.unbind(-1)
    return torch.stack([theta.cos(), theta.sin(), theta_dot], dim=-1)


TASKS = {
    "CartPole-v1": Task((0.05,) * 4, step_cartpole, lambda state: state),
    "Pendulum-v1": Task((math.pi, 1.0), step_pendulum, observe_pendulum),
}


class TorchEnv(FunctionalEnv):
    """N copies of a task of classic control.

    An episode's initial state depends on the seed of the environment and on the number of the episode, and on
    nothing else: not on the other environments, the device or the number of ranks.

    Select this class with ``data.backend: torch``.

    Args:
        env_id: A key of ``TASKS``.
        seeds: One seed per environment.
        device: Device of the states.
        max_episode_steps: Time limit. None: Gymnasium's.

    Example:
        >>> env = TorchEnv("CartPole-v1", [1, 2, 3])
        >>> env.reset()["observation"].shape
        torch.Size([3, 4])
    """

    def __init__(
        self,
        env_id: str,
        seeds: list[int],
        /,
        *,
        device: torch.device | str = "cpu",
        max_episode_steps: int | None = None,
    ) -> None:
        if env_id not in TASKS:
            raise ConfigError(f"backend torch has {', '.join(TASKS)}, not {env_id!r}: set it to 'gymnasium'.")
        with gymnasium.make(env_id) as single:
            super().__init__(single.observation_space, single.action_space, len(seeds), device)
            default: Any = single.spec
        self.task = TASKS[env_id]
        self.max_episode_steps: int = max_episode_steps or default.max_episode_steps
        self.high = torch.tensor(self.task.high, dtype=torch.float64, device=self.device)
        self.low = -self.high
        self.reseed(seeds)

    def reseed(self, seeds: list[int]) -> None:
        """Set the seeds from which the episodes after the next full reset are drawn, N in total."""
        self.seeds = torch.tensor(seeds, dtype=torch.int64, device=self.device)
        zeros = torch.zeros_like(self.seeds)
        # Physical states, steps of the episodes, and how many episodes began.
        self.state: State = (self.low.repeat(self.num_envs, 1), zeros, zeros)

    def reset_tensors(self, mask: Tensor | None) -> Tensor:
        """Draw initial states."""
        if mask is None:
            mask = torch.ones_like(self.seeds, dtype=torch.bool)
        self.state = self._begun_where(mask, self.state)
        return self._observe(self.state)

    def step_tensors(self, action: Tensor) -> TensorStep:
        """Step all copies."""
        self.state, step = self._moved(self.state, action)
        return step

    def transition(self, state: State, action: Tensor) -> tuple[State, TensorStep, Tensor]:
        """Step and reset all copies."""
        state, step = self._moved(state, action)
        state = self._begun_where(step.terminated | step.truncated, state)
        return state, step, self._observe(state)

    def _moved(self, state: State, action: Tensor) -> tuple[State, TensorStep]:
        physical, steps, episodes = state
        physical, reward, terminated = self.task.step(physical, action)
        steps = steps + 1
        state = physical, steps, episodes
        return state, TensorStep(
            self._observe(state), reward.float(), terminated, steps >= self.max_episode_steps
        )

    def _begun_where(self, mask: Tensor, state: State) -> State:
        physical, steps, episodes = state
        drawn = uniform(self.seeds, episodes, len(self.low))
        initial = self.low + (self.high - self.low) * drawn
        return torch.where(mask[:, None], initial, physical), steps.masked_fill(mask, 0), episodes + mask

    def _observe(self, state: State) -> Tensor:
        return self.task.observe(state[0]).float()


def make(env_id: str, copies: Copies, /, **env_kwargs: Any) -> EnvBase:
    """Make copies of a task for the backend ``torch``. Those that must render are Gymnasium's."""
    require_options(TorchEnv, f"{env_id} with data.backend 'torch'", env_kwargs)
    if copies.render:
        env_kwargs.pop("device", None)
        return make_for_gymnasium(env_id, copies, **env_kwargs)
    return TorchEnv(env_id, copies.seeds, **env_kwargs)


def uniform(seeds: Tensor, counts: Tensor, size: int) -> Tensor:
    """Return numbers of U[0, 1) that depend on a seed and a count alone, [N, size] float64.

    The numbers are outputs of SplitMix64 (Steele et al., 2014, doi:10.1145/2660193.2660195).

    Args:
        seeds: [N] int64.
        counts: Which draw of each seed, [N] int64.
        size: Numbers per draw.
    """
    index = counts[:, None] * size + torch.arange(1, size + 1, device=seeds.device)
    bits = _mix(seeds)[:, None] + index * -7046029254386353131  # 0x9E3779B97F4A7C15, modulo 2**64
    return _shift(_mix(bits), 11).double() * 2.0**-53


def _mix(bits: Tensor) -> Tensor:
    bits = (bits ^ _shift(bits, 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    bits = (bits ^ _shift(bits, 27)) * -7723592293110705685  # 0x94D049BB133111EB
    return bits ^ _shift(bits, 31)


def _shift(bits: Tensor, count: int) -> Tensor:
    """Shift to the right and fill with zeros: PyTorch's operator copies the sign."""
    return (bits >> count) & ((1 << (64 - count)) - 1)
