"""Classic control as tensors: Gymnasium's tasks as pure functions of states, on any device.

The equations and constants are those of ``gymnasium.envs.classic_control``. States are float64 as there, so
that the episodes are Gymnasium's for the same initial states and actions.
"""

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor


class Task(ABC):
    """Dynamics of N copies of a task.

    Attributes:
        low: Lower bounds of the initial state, one per number.
        high: Upper bounds of the initial state.
    """

    low: ClassVar[tuple[float, ...]]
    high: ClassVar[tuple[float, ...]]

    @staticmethod
    @abstractmethod
    def step(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Step each copy once.

        Args:
            state: States, [N, S] float64.
            action: Actions, [N] int64, or [N, 1] floats inside their bounds.

        Returns:
            Next states [N, S], rewards [N] and whether the episode terminated [N] bool.
        """

    @staticmethod
    def observe(state: Tensor) -> Tensor:
        """Return observations [N, ...] float64 of states [N, S]."""
        return state


class CartPole(Task):
    """CartPole: cart position (m), velocity, pole angle (rad), angular velocity."""

    low, high = (-0.05,) * 4, (0.05,) * 4

    @staticmethod
    def step(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Push the cart with 10 N to the left (0) or right (1) for 0.02 s, see :meth:`Task.step`."""
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


class MountainCar(Task):
    """MountainCar: position and velocity of a car that is too weak to climb the hill at once."""

    low, high = (-0.6, 0.0), (-0.4, 0.0)

    @staticmethod
    def step(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Push to the left (0), not at all (1) or to the right (2), see :meth:`Task.step`."""
        position, velocity = state.unbind(-1)
        velocity = velocity + (action - 1) * 0.001 - 0.0025 * (3 * position).cos()
        velocity = velocity.clamp(-0.07, 0.07)
        position = (position + velocity).clamp(-1.2, 0.6)
        velocity = torch.where(position == -1.2, velocity.clamp(min=0), velocity)
        arrived = (position >= 0.5) & (velocity >= 0)
        return torch.stack([position, velocity], dim=-1), -torch.ones_like(position), arrived


class Pendulum(Task):
    """Pendulum: angle from upright (rad) and angular velocity (rad/s)."""

    low, high = (-math.pi, -1.0), (math.pi, 1.0)

    @staticmethod
    def step(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Apply a torque for 0.05 s, see :meth:`Task.step`."""
        theta, theta_dot = state.unbind(-1)
        torque = action[:, 0]  # float32: Gymnasium rounds the products of the torque, too
        angle = torch.remainder(theta + math.pi, 2 * math.pi) - math.pi
        reward = -(angle**2 + 0.1 * theta_dot**2 + 0.001 * torque**2)
        theta_dot = (theta_dot + (15.0 * theta.sin() + (3.0 * torque).to(state.dtype)) * 0.05).clamp(-8, 8)
        theta = theta + theta_dot * 0.05
        return torch.stack([theta, theta_dot], dim=-1), reward, torch.zeros_like(theta, dtype=torch.bool)

    @staticmethod
    def observe(state: Tensor) -> Tensor:
        """Return cosine, sine and angular velocity, [N, 3]."""
        theta, theta_dot = state.unbind(-1)
        return torch.stack([theta.cos(), theta.sin(), theta_dot], dim=-1)


class Acrobot(Task):
    """Acrobot: angles of two links (rad) and their velocities. The book's equations, by Runge-Kutta."""

    low, high = (-0.1,) * 4, (0.1,) * 4

    @staticmethod
    def step(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Apply a torque of -1 (0), 0 (1) or 1 (2) to the joint for 0.2 s, see :meth:`Task.step`."""
        torque = (action - 1).to(state.dtype)
        k1 = _acrobot_change(state, torque)
        k2 = _acrobot_change(state + 0.1 * k1, torque)
        k3 = _acrobot_change(state + 0.1 * k2, torque)
        k4 = _acrobot_change(state + 0.2 * k3, torque)
        theta1, theta2, dtheta1, dtheta2 = (state + 0.2 / 6 * (k1 + 2 * k2 + 2 * k3 + k4)).unbind(-1)
        theta1, theta2 = _wrapped(theta1), _wrapped(theta2)
        dtheta1 = dtheta1.clamp(-4 * math.pi, 4 * math.pi)
        dtheta2 = dtheta2.clamp(-9 * math.pi, 9 * math.pi)
        up = -theta1.cos() - (theta2 + theta1).cos() > 1
        following = torch.stack([theta1, theta2, dtheta1, dtheta2], dim=-1)
        return following, torch.where(up, 0.0, -1.0).to(state.dtype), up

    @staticmethod
    def observe(state: Tensor) -> Tensor:
        """Return cosine and sine of both angles, and both velocities, [N, 6]."""
        theta1, theta2, dtheta1, dtheta2 = state.unbind(-1)
        parts = theta1.cos(), theta1.sin(), theta2.cos(), theta2.sin(), dtheta1, dtheta2
        return torch.stack(parts, dim=-1)


def _acrobot_change(state: Tensor, torque: Tensor) -> Tensor:
    """Return the time derivative of states [N, 4]. Masses and lengths are 1, centers at 0.5, inertias 1."""
    theta1, theta2, dtheta1, dtheta2 = state.unbind(-1)
    sin2, cos2 = theta2.sin(), theta2.cos()
    d1 = 0.25 + (1.25 + cos2) + 2.0
    d2 = 0.25 + 0.5 * cos2 + 1.0
    phi2 = 4.9 * (theta1 + theta2 - math.pi / 2).cos()
    phi1 = -0.5 * dtheta2**2 * sin2 - dtheta2 * dtheta1 * sin2 + 14.7 * (theta1 - math.pi / 2).cos() + phi2
    ddtheta2 = (torque + d2 / d1 * phi1 - 0.5 * dtheta1**2 * sin2 - phi2) / (1.25 - d2**2 / d1)
    ddtheta1 = -(d2 * ddtheta2 + phi1) / d1
    return torch.stack([dtheta1, dtheta2, ddtheta1, ddtheta2], dim=-1)


def _wrapped(angle: Tensor) -> Tensor:
    """Return angles in [-pi, pi]."""
    turns = torch.ceil((angle.abs() - math.pi) / (2 * math.pi)).clamp(min=0)
    return angle - 2 * math.pi * turns * angle.sign()


TASKS: dict[str, type[Task]] = {
    "CartPole-v0": CartPole,
    "CartPole-v1": CartPole,
    "Acrobot-v1": Acrobot,
    "MountainCar-v0": MountainCar,
    "Pendulum-v1": Pendulum,
}
