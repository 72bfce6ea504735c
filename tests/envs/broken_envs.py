"""A correct environment, and copies of it that are broken in one way each."""

import random

import gymnasium as gym
import numpy as np


class Walk(gym.Env):
    """A point with friction that an action pushes to the left or right, from a random place.

    An episode terminates at a distance of 10, and a time limit truncates it after 60 steps.
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)
    limit = 60

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        self.state = np.array([self.draw(), 0.0])
        return self.observation(), {}

    def draw(self):
        return self.np_random.uniform(-1, 1)

    def step(self, action):
        self.time += 1
        self.state[1] = 0.9 * self.state[1] + 0.2 * (2 * action - 1)
        self.state[0] += self.state[1]
        terminated = bool(abs(self.state[0]) > 10)
        return self.observation(), self.reward(), terminated, self.time >= self.limit, {}

    def observation(self):
        return self.state.astype(np.float32)

    def reward(self):
        return 1 - 0.1 * abs(float(self.state[0]))


class Missing(Walk):
    """A sensor fails now and then."""

    def observation(self):
        return np.where(self.time == 7, np.nan, self.state).astype(np.float32)


class Endless(Walk):
    """The time limit is missing, and the walls stop the point."""

    limit = np.inf

    def step(self, action):
        observation, reward, _, truncated, info = super().step(action)
        self.state[0] = np.clip(self.state[0], -5, 5)
        return observation, reward, False, truncated, info


class Terminating(Walk):
    """The time limit is flagged as a termination."""

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated or truncated, False, info


class Unseeded(Walk):
    """The start comes from a generator that no seed reaches."""

    def draw(self):
        return random.uniform(-1, 1)


class Reseeded(Walk):
    """Each reset seeds the generator again."""

    first = None

    def reset(self, *, seed=None, options=None):
        self.first = self.first if seed is None else seed
        return super().reset(seed=self.first)


class Frozen(Walk):
    """Each step returns the first observation."""

    def reset(self, *, seed=None, options=None):
        self.first = None
        return super().reset(seed=seed)

    def observation(self):
        if self.first is None:
            self.first = super().observation()
        return self.first


class SameSeed(Walk):
    """All environments have the same episodes."""

    def __init__(self):
        self.generator = np.random.default_rng(0)

    def draw(self):
        return self.generator.uniform(-1, 1)


class LargeRewards(Walk):
    """Rewards are in thousandths of a cent."""

    def reward(self):
        return 1e5 * super().reward()


class Ignored(Walk):
    """The same push at each step, with noise."""

    def step(self, action):
        return super().step(self.np_random.integers(2))


class Whole(Walk):
    """The space has integers, the observations have fractions."""

    observation_space = gym.spaces.Box(-20, 20, (2,), np.int64)

    def observation(self):
        return self.state.copy()


class Raises(Walk):
    """A rare state is not covered."""

    def step(self, action):
        if self.time == 20:
            raise KeyError("no such cell")
        return super().step(action)


class Torque(Walk):
    """The bounds of the actions are in other units than the policy."""

    action_space = gym.spaces.Box(-500, 500, (1,), np.float32)

    def step(self, action):
        return super().step(float(action[0] + 500) / 1000)


class Missed(Walk):
    """The observation is a category beyond the space."""

    observation_space = gym.spaces.Discrete(4)

    def observation(self):
        return int(np.clip(self.state[0] + 3, 0, 6))


# Environment -> severity and name of its finding.
BROKEN = {
    Missing: ("error", "non-finite"),
    Endless: ("warning", "endless"),
    Terminating: ("warning", "time limit"),
    Unseeded: ("warning", "seed"),
    SameSeed: ("warning", "seed"),
    Reseeded: ("warning", "seed"),
    Frozen: ("warning", "observation"),
    LargeRewards: ("warning", "reward"),
    Ignored: ("warning", "action"),
    Whole: ("error", "exception"),
    Raises: ("error", "exception"),
    Torque: ("warning", "action bounds"),
    Missed: ("error", "space"),
}
