"""Environments of tensors that behave as simulators do, without a simulator."""

from types import SimpleNamespace

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from ppo_lightning.envs.tensor_env import TensorEnv, TensorStep


class FakeIsaacEnv(gymnasium.Env):
    """N points, each of which counts its steps and falls at an action below -5.

    As in Isaac Lab's ``ManagerBasedRLEnv``, a step returns tensors, resets finished environments before it
    computes the observations, and returns the same buffers again and again. The last observations are in
    ``extras["final_obs"]`` from the first reset on, if the configuration asks for them.
    """

    def __init__(self, cfg):
        self.cfg = cfg
        self.num_envs, self.device = cfg.scene.num_envs, cfg.sim.device
        infinite = [spaces.Box(-np.inf, np.inf, (size,)) for size in (2, 3, 1)]
        self.single_observation_space = spaces.Dict()  # in the order of the groups, as Isaac Lab does
        self.single_observation_space["policy"] = infinite[0]
        if cfg.critic:
            self.single_observation_space["critic"] = infinite[1]
        self.single_observation_space["debug"] = infinite[2]
        self.single_action_space = spaces.Box(-np.inf, np.inf, (1,))
        self.reset_calls = 0
        self.actions = []
        self.extras = {}
        with torch.device(self.device):
            self.episode_length = torch.zeros(self.num_envs)
            self.number = torch.arange(self.num_envs).float()  # plus 10 with each episode
            self.limit = cfg.limit + torch.arange(self.num_envs)
            self.rewards = torch.zeros(self.num_envs)
            self.flags = torch.zeros(2, self.num_envs, dtype=torch.bool)
            self.observations = {key: torch.zeros(self.num_envs, n) for key, n in self.sizes().items()}
        self.is_closed = False

    def sizes(self):
        return {key: space.shape[0] for key, space in self.single_observation_space.items()}

    def observe(self):
        columns = torch.stack([self.episode_length, self.number, -self.number], dim=1)
        for key, size in self.sizes().items():
            self.observations[key][:] = columns[:, :size]
        return self.observations

    def seed(self, seed):
        self.seeded = seed
        return seed

    def reset(self, seed=None, options=None):
        self.reset_calls += 1
        self.episode_length.zero_()
        return self.observe(), self.extras

    def step(self, action):
        assert action.shape == (self.num_envs, 1)
        self.actions.append(action.clone())
        self.episode_length += 1
        self.flags[0] = action[:, 0] < -5
        self.flags[1] = self.episode_length >= self.limit
        self.rewards[:] = self.episode_length
        done = self.flags.any(0)
        if done.any():
            if self.cfg.compute_final_obs:
                self.extras["final_obs"] = {key: x.clone() for key, x in self.observe().items()}
            self.episode_length[done] = 0
            self.number[done] += 10
        return self.observe(), self.rewards, *self.flags, self.extras

    def close(self):
        self.is_closed = True


class StandIn(TensorEnv):
    """N tensors, for recipes of simulators that are not installed. Episodes have 5 steps."""

    def __init__(self, num_envs, task="", **_):
        box = spaces.Box(-np.inf, np.inf, (3,))
        has_critic = "Go1" in task
        space = spaces.Dict(state=box, privileged_state=box) if has_critic else box
        super().__init__(space, spaces.Box(-1, 1, (2,)), num_envs)
        self.names = ("state", "privileged_state") if has_critic else None
        self.time = torch.zeros(num_envs)

    def see(self):
        values = self.time[:, None].repeat(1, 3)
        return values if self.names is None else dict.fromkeys(self.names, values)

    def reset_tensors(self, mask):
        self.time = torch.zeros_like(self.time) if mask is None else self.time.masked_fill(mask, 0)
        return self.see()

    def step_tensors(self, action):
        self.time = self.time + 1
        return TensorStep(self.see(), action[:, 0], self.time < 0, self.time >= 5)


def configuration(num_envs=2, critic=True, compute_final_obs=True, is_finite_horizon=False, limit=3):
    return SimpleNamespace(
        scene=SimpleNamespace(num_envs=num_envs),
        sim=SimpleNamespace(device="cpu"),
        critic=critic,
        compute_final_obs=compute_final_obs,
        is_finite_horizon=is_finite_horizon,
        limit=limit,
    )
