"""Small environments whose right answer is known."""

import gymnasium as gym
import numpy as np


class Counter(gym.Env):
    """The observation is the time step, the reward 1; terminates at step ``terminate_at`` if given."""

    observation_space = gym.spaces.Box(0, 1000, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, terminate_at=None):
        self.terminate_at = terminate_at

    def observation(self):
        return np.array([self.time], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.observation(), {}

    def step(self, action):
        self.time += 1
        return self.observation(), 1.0, self.time == self.terminate_at, False, {}


class Forever(Counter):
    """Never ends and always looks the same: with reward 1 a step its value is 1 / (1 - gamma)."""

    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)

    def observation(self):
        return np.zeros(1, np.float32)


class Probe(gym.Env):
    """The five probes of Andy Jones, "Debugging RL, Without the Agonizing Pain" (2021), each finding one kind of bug.

    - ``constant``: one step, observation 0, reward 1: can the value learn a constant?
    - ``observation``: one step, observation -1 or 1, reward equal to it: does the value see the observation?
    - ``delayed``: two steps, observations 0 then 1, reward 1 at the end: is it discounted and propagated?
    - ``action``: one step, reward 1 for action 1 and -1 for action 0: does the policy gradient work?
    - ``both``: one step, observation -1 or 1, reward 1 if the action matches it and -1 if not.
    """

    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, kind):
        self.kind = kind

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        self.value = float(self.np_random.integers(2) * 2 - 1) if self.kind in ("observation", "both") else 0.0
        return np.array([self.value], np.float32), {}

    def step(self, action):
        self.time += 1
        if self.kind == "delayed":
            last = self.time == 2
            return np.array([1.0], np.float32), float(last), last, False, {}
        reward = {
            "constant": 1.0,
            "observation": self.value,
            "action": 2.0 * action - 1,
            "both": 1.0 if (action == 1) == (self.value > 0) else -1.0,
        }[self.kind]
        return np.array([self.value], np.float32), reward, True, False, {}


class Script(gym.Env):
    """Ends after as many steps as the reset seed's draw says; the observation names environment, episode and step."""

    observation_space = gym.spaces.Box(-1e6, 1e6, (3,), np.float32)
    action_space = gym.spaces.Discrete(3)

    def __init__(self):
        self.episode = -1
        self.name = 0.0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.name = float(seed % 1000)
        self.episode, self.time, self.length = self.episode + 1, 0, int(self.np_random.integers(1, 7))
        return np.array([self.name, self.episode, self.time], np.float32), {}

    def step(self, action):
        self.time += 1
        observation = np.array([self.name, self.episode, self.time], np.float32)
        return observation, float(action) + 0.5, self.time == self.length, False, {}


for name, entry in (("Counter", Counter), ("Forever", Forever), ("Probe", Probe), ("Script", Script)):
    gym.register(f"{name}-v0", entry)
