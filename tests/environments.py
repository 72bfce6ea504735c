"""Small environments with known correct answers."""

import sys
import time
from typing import ClassVar

import gymnasium as gym
import numpy as np
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate


class Counter(gym.Env):
    """Environment that observes the time step.

    The reward is 1 by default. The episode terminates at step ``terminate_at`` if given.
    """

    observation_space = gym.spaces.Box(0, 1000, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, terminate_at=None, reward=1.0):
        self.terminate_at = terminate_at
        self.reward = reward

    def observation(self):
        return np.array([self.time], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.observation(), {}

    def step(self, action):
        self.time += 1
        return self.observation(), self.reward, self.time == self.terminate_at, False, {}


class Drawn(Counter):
    """Counter that observes numbers of NumPy's global generator."""

    def observation(self):
        return np.random.random(1).astype(np.float32)  # noqa: NPY002


class Rising(gym.Env):
    """Episodes of five steps, whose returns are 1, 2, 3 and so on."""

    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Discrete(2)
    episode = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.time = self.episode + 1, 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.time += 1
        return np.zeros(2, np.float32), self.episode / 5, self.time == 5, False, {}


class Probe(gym.Env):
    """The five probe environments of Andy Jones, "Debugging RL, Without the Agonizing Pain" (2021).

    Each probe finds one kind of bug.

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
        random = self.kind in ("observation", "both")
        self.value = float(self.np_random.integers(2) * 2 - 1) if random else 0.0
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


class Match(gym.Env):
    """One step, observations -1 or 1 and, if ``pictures``, a dark or a bright picture beside it.

    Action 1 gets the reward 1 if the number is 1 (in a dark picture: -1), and action 0 otherwise; the wrong
    one gets -1. A continuous action gets 1 minus its distance to half the sign.
    """

    def __init__(self, pictures=False, continuous=False):
        vector = gym.spaces.Box(-1, 1, (1,))
        picture = gym.spaces.Box(0, 255, (12, 12, 1), np.uint8)
        self.pictures, self.continuous = pictures, continuous
        self.observation_space = gym.spaces.Dict(pixels=picture, vector=vector) if pictures else vector
        self.action_space = gym.spaces.Box(-1, 1, (1,)) if continuous else gym.spaces.Discrete(2)

    def observation(self):
        vector = np.array([self.sign], np.float32)
        if not self.pictures:
            return vector
        return {"pixels": np.full((12, 12, 1), 255 * self.bright, np.uint8), "vector": vector}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.sign, self.bright = (int(self.np_random.integers(2)) for _ in range(2))
        self.sign = 2 * self.sign - 1
        return self.observation(), {}

    def step(self, action):
        right = self.sign * (2 * self.bright - 1) if self.pictures else self.sign
        if self.continuous:
            reward = 1.0 - abs(float(action[0]) - right / 2)
        else:
            reward = 1.0 if (action == 1) == (right == 1) else -1.0
        return self.observation(), reward, True, False, {}


class Script(gym.Env):
    """Environment with random episode lengths; the observation names environment, episode and step."""

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


class Reach(gym.Env):
    """Environment with continuous actions.

    The observation is a random number, the time and the two components of the received action.
    The reward is the negative distance of the action to (0.25, -0.25). An episode ends after 3 to 9 steps.
    ``broken`` (``observation`` or ``reward``) is not finite at step ``break_at`` of the environment's life.
    """

    observation_space = gym.spaces.Dict(
        {
            "time": gym.spaces.Box(-np.inf, np.inf, ()),
            "action": gym.spaces.Box(-1, 1, (2,)),
            "luck": gym.spaces.Box(-9, 9, (1,)),
        }
    )
    action_space = gym.spaces.Box(-0.5, 0.5, (2,), np.float32)

    def __init__(self, broken=None, break_at=0, low=-0.5, high=0.5):
        self.broken, self.break_at, self.life = broken, break_at, 0
        self.action_space = gym.spaces.Box(
            np.float32(low), np.float32(high), (2,) if np.isscalar(low) else None
        )

    def observation(self, action):
        luck = self.np_random.normal(3, 2, 1).astype(np.float32)
        if self.broken == "observation" and self.life == self.break_at:
            luck[0] = np.nan
        return {"time": np.float32(self.time), "action": action.astype(np.float32), "luck": luck}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time, self.length = 0, int(self.np_random.integers(3, 10))
        return self.observation(np.zeros(2)), {}

    def step(self, action):
        self.time += 1
        self.life += 1
        reward = -float(np.abs(action - np.array([0.25, -0.25])).sum())
        if self.broken == "reward" and self.life == self.break_at:
            reward = np.inf
        return self.observation(action), reward, self.time == self.length, False, {}


class Trouble(Counter):
    """Counter that fails at step ``at``: it raises, exits, hangs or returns NaN.

    Only environment ``env``, in order of creation, fails.
    """

    made = 0

    def __init__(self, kind, at, env=0):
        super().__init__(None)
        self.kind, self.at, self.mine = kind, at, Trouble.made == env
        Trouble.made += 1

    def step(self, action):
        observation, reward, *rest = super().step(action)
        if self.mine and self.time == self.at:
            if self.kind == "raises":
                raise RuntimeError("the simulator is broken")
            if self.kind == "exits":
                sys.exit(0)  # reports success
            while self.kind == "hangs":
                time.sleep(1)
            if self.kind == "nan":
                reward = float("nan")
            if self.kind == "nan observation":
                observation = observation * np.nan
        return observation, reward, *rest


class Parts(gym.Env):
    """Environment with a mask, and observations and actions of several parts, independent of the actions.

    An episode has 2 to 5 steps. Every second one is truncated. The mask of the final observation is 0.
    """

    observation_space = gym.spaces.Dict(
        {
            "kind": gym.spaces.Discrete(3),
            "place": gym.spaces.Tuple([gym.spaces.Box(-9, 9, (2,)), gym.spaces.MultiBinary(2)]),
            "action_mask": gym.spaces.MultiBinary(5),
            "mission": gym.spaces.Text(9),
        }
    )
    action_space = gym.spaces.Dict({"a": gym.spaces.Discrete(2), "b": gym.spaces.Discrete(3)})

    def __init__(self):
        self.episode = 0

    def observation(self, over=False):
        mask = np.zeros(5, np.int8) if over else np.array([1, self.time % 2, 1, 0, 1], np.int8)
        place = (self.np_random.normal(size=2).astype(np.float32), np.array([self.time % 2, 1], np.int8))
        return {"kind": self.time % 3, "place": place, "action_mask": mask, "mission": "find"}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode += 1
        self.time, self.length = 0, int(self.np_random.integers(2, 6))
        return self.observation(), {}

    def step(self, action):
        assert self.action_space.contains({name: int(part) for name, part in action.items()})
        self.time += 1
        over = self.time == self.length
        flags = (over, False) if self.episode % 2 else (False, over)
        return self.observation(over), float(self.time), *flags, {}


class NextStepVector(gym.vector.VectorEnv):
    """Vectorized environment that resets at the next step, as a user may write one.

    The rewards of these steps are not finite, and the observations are written into one array.
    """

    metadata: ClassVar = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}

    def __init__(self, env_id, num_envs):
        self.envs = [gym.make(env_id) for _ in range(num_envs)]
        self.num_envs = num_envs
        self.single_observation_space = self.envs[0].observation_space
        self.single_action_space = self.envs[0].action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.buffer = create_empty_array(self.single_observation_space, num_envs)
        self.over = [False] * num_envs

    def observation(self, rows):
        self.buffer = concatenate(self.single_observation_space, rows, self.buffer)
        return self.buffer

    def reset(self, *, seed=None, options=None):
        assert not options
        self.over = [False] * self.num_envs
        seeds = seed or [None] * self.num_envs
        rows = [env.reset(seed=seed)[0] for env, seed in zip(self.envs, seeds, strict=True)]
        return self.observation(rows), {}

    def step(self, actions):
        steps = []
        for env, over, action in zip(self.envs, self.over, iterate(self.action_space, actions), strict=True):
            steps.append((env.reset()[0], np.nan, False, False) if over else env.step(action)[:4])
        rows, rewards, terminated, truncated = (list(parts) for parts in zip(*steps, strict=True))
        self.over = [a or b for a, b in zip(terminated, truncated, strict=True)]
        return self.observation(rows), np.array(rewards), np.array(terminated), np.array(truncated), {}


for entry in (Counter, Drawn, Match, Probe, Script, Reach, Trouble, Parts):
    gym.register(f"{entry.__name__}-v0", entry)
