"""Compare defaults of PPO on small tasks with short runs, next to the defaults of Stable-Baselines3.

`python benchmarks/defaults.py --stage select --output select.csv` trains the candidates with the seeds that
select on half of the tasks, `--stage report` the reported arms with five other seeds on all tasks.
`--stage offpolicy` compares SAC, TD3 and DQN with those of Stable-Baselines3.
`--arms`, `--tasks`, `--budgets` and `--seeds` select runs. A stopped series continues: runs that are in the
file are not repeated. `--table` prints the file in Markdown. It needs the extras `benchmark` and `mujoco`.

One run at a time, each in a process of its own with one thread; arms alternate. The learning rate depends
on the length of a run, so that each budget is a run of its own. That of Stable-Baselines3 is constant: its
run of the longest budget has the others as its beginning, except DQN's, whose exploration depends on it.
A row has the mean return of the last 100 training episodes, the mean return of the deterministic policy over
20 episodes of fresh seeds, and the seconds of the whole `fit` or `learn`, with the construction and the
evaluations during training but without imports: wall-clock time, and CPU time, which depends less on a busy
machine.

Protocol, fixed before the first run:

- Seeds 11 to 13 on the tasks marked `selects` choose, first with a budget of 50 000 steps, then 25 000, then
  100 000. The report has seeds 1 to 5 on all tasks and runs once.
- The score of a run is (return - low) / (high - low) with `low` and `high` of its task, the mean over the
  training and the deterministic return. That of an arm is the mean over tasks, then over budgets.
- Each candidate changes one thing in the guess. At most two more, named after the first round, combine
  changes that gained by themselves. The highest score wins. Of candidates within 0.01 of it, the fastest
  does.
- Report: for each task and budget, mean at least that of the reference; a permutation test for a lower mean,
  with Holm's correction over all tasks and budgets. Five seeds have 252 permutations, too few for p < 0.05
  after that correction. So each task has another test, stratified by budget, corrected over the tasks.
"""

import argparse
import csv
import functools
import itertools
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import gymnasium
import lightning as L
import numpy as np
import torch
from gymnasium import spaces

import ppo_lightning
from ppo_lightning import PPO, MLPAgent, RolloutDataModule

FORK = multiprocessing.get_context("fork")  # imports once, not in every run
BUDGETS = (50_000, 25_000, 100_000)  # environment steps, in the order of the runs
SEEDS = {"select": (11, 12, 13), "report": (1, 2, 3, 4, 5)}
EPISODES = 20  # of the deterministic policy
FRESH = 10_000  # first seed of these episodes
COLUMNS = (
    "arm", "task", "budget", "seed", "env_steps", "train_episodes", "train_return", "eval_return", "seconds",
    "cpu_seconds", "command",
)  # fmt: skip


# Environments of kinds that no installed one has. All are cheap.


class Goal(gymnasium.Env):
    """Push a point to a goal in a square. The observation is a dictionary, reward minus the distance."""

    observation_space = spaces.Dict(
        {
            "point": spaces.Box(-np.inf, np.inf, (4,), np.float32),  # position and velocity
            "goal": spaces.Box(-1, 1, (2,), np.float32),
        }
    )
    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        self.goal, self.position = self.np_random.uniform(-1, 1, (2, 2))
        self.velocity = np.zeros(2)
        return self.observe(), {}

    def observe(self) -> dict[str, np.ndarray]:
        point = np.concatenate([self.position, self.velocity]).astype(np.float32)
        return {"point": point, "goal": self.goal.astype(np.float32)}

    def step(self, action: np.ndarray) -> tuple[dict, float, bool, bool, dict]:
        self.velocity = 0.9 * self.velocity + 0.1 * np.clip(action, -1, 1)
        self.position = self.position + 0.2 * self.velocity
        return self.observe(), -float(np.linalg.norm(self.position - self.goal)), False, False, {}


class Dock(gymnasium.Env):
    """Bring a ship to rest at the dock with three thrusts, and flag the success. Each step costs 0.01."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)  # position and velocity
    action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.position, self.velocity = self.np_random.uniform(-1, 1), 0.0
        return self.observe(), {}

    def observe(self) -> np.ndarray:
        return np.array([self.position, self.velocity], dtype=np.float32)

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.velocity += 0.02 * (int(action) - 1)
        self.position += self.velocity
        if abs(self.position) > 2:  # a wall
            self.position, self.velocity = float(np.sign(self.position)) * 2, 0.0
        success = abs(self.position) < 0.1 and abs(self.velocity) < 0.01
        return self.observe(), float(success) - 0.01, success, False, {"is_success": success}


class Lidar(gymnasium.Env):
    """Walk along a line to a goal. 2000 sensors see the walker and the goal."""

    centers = np.linspace(-1.2, 1.2, 1000)
    observation_space = spaces.Box(0, 1, (2000,), np.float32)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.position, self.goal = self.np_random.uniform(-1, 1, 2)
        return self.observe(), {}

    def observe(self) -> np.ndarray:
        distances = [self.centers - x for x in (self.position, self.goal)]
        return np.exp(-np.square(np.concatenate(distances) / 0.1) / 2).astype(np.float32)

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.position = float(np.clip(self.position + 0.1 * (int(action) - 1), -1, 1))
        return self.observe(), -abs(self.position - self.goal), False, False, {}


class Thermostat(gymnasium.Env):
    """Keep a room at its temperature for 20 days, one episode of 2000 steps that no state ends."""

    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.error, self.phase = self.np_random.uniform(-3, 3), self.np_random.uniform(0, 2 * np.pi)
        return self.observe(), {}

    @property
    def outside(self) -> float:
        return 5 * np.sin(self.phase) - 5

    def observe(self) -> np.ndarray:
        seen = [self.error, self.outside, np.sin(self.phase), np.cos(self.phase)]
        return np.array(seen, dtype=np.float32)

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        power = 2 * float(np.clip(action[0], -1, 1))
        self.error += power + 0.1 * (self.outside - self.error) + 0.1 * self.np_random.standard_normal()
        self.phase += 2 * np.pi / 100
        return self.observe(), -min(abs(self.error), 10.0), False, False, {}


class Bandit(gymnasium.Env):
    """Choose one of four arms by a context of six numbers. An episode has one step."""

    observation_space = spaces.Box(-np.inf, np.inf, (6,), np.float32)
    action_space = spaces.Discrete(4)
    weights = np.random.default_rng(0).standard_normal((4, 6))

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.context = self.np_random.standard_normal(6)
        return self.context.astype(np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        best = int((self.weights @ self.context).argmax())
        return np.zeros(6, dtype=np.float32), float(best == int(action)), True, False, {}


class Coded(gymnasium.ObservationWrapper):
    """Each number of an observation in 51 or 101 numbers between 0 and 1."""

    def __init__(self, env_id: str, code: str, high: Sequence[float], size: int) -> None:
        super().__init__(gymnasium.make(env_id).unwrapped)
        self.code, self.high = code, np.array(high)
        self.centers = np.linspace(0, 1, size)
        self.observation_space = spaces.Box(0, 1, (size * len(high),), np.float32)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        share = np.clip((observation / self.high + 1) / 2, 0, 1)
        distance = (share[:, None] - self.centers) * (len(self.centers) - 1)
        codes = {
            "one_hot": np.abs(distance) <= 0.5,
            "thermometer": distance >= 0,
            "bumps": np.exp(-np.square(distance / 3) / 2),
        }
        return codes[self.code].astype(np.float32).ravel()


class Catch(gymnasium.Env):
    """Catch ten balls that fall in a field of 20 x 20 pixels."""

    observation_space = spaces.Box(0, 1, (400,), np.float32)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.row, self.ball, self.paddle, self.balls = 0, int(self.np_random.integers(20)), 10, 0
        return self.observe(), {}

    def observe(self) -> np.ndarray:
        field = np.zeros((20, 20), np.float32)
        field[self.row, self.ball] = field[19, self.paddle] = 1
        return field.ravel()

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.paddle = int(np.clip(self.paddle + int(action) - 1, 0, 19))
        self.row += 1
        reward = 0.0
        if self.row == 19:
            reward = 1.0 if self.ball == self.paddle else -1.0
            self.row, self.ball, self.balls = 0, int(self.np_random.integers(20)), self.balls + 1
        return self.observe(), reward, self.balls == 10, False, {}


class Thousands(gymnasium.ObservationWrapper):
    """CartPole in millimeters and milliradians: observations in the thousands."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1").unwrapped)
        self.observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return 1000 * observation


class Task(NamedTuple):
    """Task: its kind, the returns of the scores 0 and 1, and whether it is of the half that selects.

    `low` is about the return of random actions, `high` that of a good policy.
    """

    kind: str
    low: float
    high: float
    selects: bool = False
    reports: bool = True


TASKS = {
    "CartPole-v1": Task("classic control, discrete actions", 20, 500, True),
    "Pendulum-v1": Task("classic control, continuous actions", -1200, -150, True),
    "Hopper-v5": Task("MuJoCo, ends by a fall", 17, 1000, True),
    "FrozenLakeDry-v0": Task("discrete observations", 0, 1, True),
    "Goal-v0": Task("dictionary", -50, -7, True),
    "Dock-v0": Task("success flag", -1.4, 0.85, True),
    "Acrobot-v1": Task("classic control, discrete actions", -500, -80),
    "InvertedPendulum-v5": Task("MuJoCo, ends by a fall", 6, 1000),
    "HalfCheetah-v5": Task("MuJoCo, a time limit", -280, 2000),
    "Thousands-v0": Task("observations in the thousands", 20, 500),
    "Lidar-v0": Task("observations of 2000 numbers", -34, -4),
    "Thermostat-v0": Task("one long episode", -10000, -300),
    "Bandit-v0": Task("one step", 0.25, 1),
    # Many numbers between 0 and 1: with --stage select --arms normalized not_normalized --tasks ...
    "CartPoleOneHot-v0": Task("51 numbers for one", 20, 500, reports=False),
    "CartPoleThermometer-v0": Task("51 numbers for one", 20, 500, reports=False),
    "PendulumBumps-v0": Task("101 numbers for one", -1200, -150, reports=False),
    "AcrobotBumps-v0": Task("101 numbers for one", -500, -80, reports=False),
    "Catch-v0": Task("400 pixels in a row", -10, 10, reports=False),
}
CART, ACROBOT = (2.4, 3, 0.21, 3), (1, 1, 1, 1, 12.6, 28.3)  # usual size of the observations
OWN: dict[str, tuple[Any, int, dict]] = {  # entry point, time limit, arguments
    "FrozenLakeDry-v0": ("gymnasium.envs.toy_text:FrozenLakeEnv", 100, {"is_slippery": False}),
    "Goal-v0": (Goal, 50, {}),
    "Thousands-v0": (Thousands, 500, {}),
    "Dock-v0": (Dock, 200, {}),
    "Lidar-v0": (Lidar, 50, {}),
    "Thermostat-v0": (Thermostat, 2000, {}),
    "Bandit-v0": (Bandit, 10, {}),
    "CartPoleOneHot-v0": (functools.partial(Coded, "CartPole-v1", "one_hot", CART, 51), 500, {}),
    "CartPoleThermometer-v0": (functools.partial(Coded, "CartPole-v1", "thermometer", CART, 51), 500, {}),
    "PendulumBumps-v0": (functools.partial(Coded, "Pendulum-v1", "bumps", (1, 1, 8), 101), 200, {}),
    "AcrobotBumps-v0": (functools.partial(Coded, "Acrobot-v1", "bumps", ACROBOT, 101), 500, {}),
    "Catch-v0": (Catch, 1000, {}),
}


class Arm(NamedTuple):
    """Settings of this package that differ from its defaults, and the reason to try them."""

    reason: str
    ppo: Mapping[str, Any] = MappingProxyType({})
    data: Mapping[str, Any] = MappingProxyType({})
    agent: Mapping[str, Any] = MappingProxyType({})


GUESS = Arm(
    "short runs need more and larger steps of the optimizer, and inputs and targets of unit scale",
    {
        "learning_rate": 1e-3,
        "num_minibatches": 8,
        "update_epochs": 10,
        "adv_eps": 1e-8,
        "clip_vloss": False,
        "ent_coef": 0.0,
        "norm_reward": True,
    },
    {"num_envs": 8, "num_steps": 128},
    {"norm_obs": True},
)


def changed(reason: str, **changes: Any) -> Arm:
    """Return the guess with changes, each an argument of PPO, RolloutDataModule or MLPAgent."""
    groups = [group | {name: x for name, x in changes.items() if name in group} for group in GUESS[1:]]
    names = set().union(*groups)
    return Arm(reason, groups[0] | {name: x for name, x in changes.items() if name not in names}, *groups[1:])


# Not tried: gamma, gae_lambda (they change what is optimized), clip_coef, vf_coef, the network's size.
CANDIDATES = {
    "guess": GUESS,
    "lr_3e-4": changed("Stable-Baselines3's learning rate", learning_rate=3e-4),
    "lr_5e-4": changed("between both: a run of 100 000 steps has four times the updates", learning_rate=5e-4),
    "target_kl": changed("ends the epochs that move the policy too far", target_kl=0.03),
    "lr_2e-3": changed("a run of 25 000 steps has few updates", learning_rate=2e-3),
    "lr_constant": changed("annealing spends steps at a rate near 0", learning_rate=5e-4, anneal_lr=False),
    "entropy": changed("keeps exploring; today's weight", ent_coef=0.01),
    "envs_4": changed("rollouts of 512 steps: twice as many iterations", num_envs=4, num_minibatches=4),
    "envs_16": changed("rollouts of 2048 steps, Stable-Baselines3's", num_envs=16, num_minibatches=16),
    "epochs_4": changed("today's number: less time", update_epochs=4),
    "epochs_20": changed("more updates from each step", update_epochs=20),
    "minibatch_64": changed("Stable-Baselines3's size: twice as many updates", num_minibatches=16),
    "minibatch_256": changed("half as many updates: less time", num_minibatches=4),
    "value_clipping": changed("today's setting", clip_vloss=True),
    "raw_observations": changed("what the normalization of observations is for", norm_obs=False),
    "raw_advantages": changed("what the normalization of advantages is for", norm_adv=False),
    "adv_eps": changed("keeps a policy whose returns no longer vary", adv_eps=0.03),
    "raw_rewards": changed("what the scaling of rewards is for", norm_reward=False),
}
TODAY = Arm(
    "the defaults of 03b7cb3, those of CleanRL's ppo.py",
    {
        "learning_rate": 2.5e-4,
        "num_minibatches": 4,
        "update_epochs": 4,
        "clip_vloss": True,
        "ent_coef": 0.01,
        "norm_reward": False,
    },
    {"num_envs": 4, "num_steps": 128},
    {"norm_obs": False},
)
ARMS = {
    "today": TODAY,
    **CANDIDATES,
    "defaults": Arm("what a user gets who sets nothing"),
    "std_0.6": Arm("less noise at the start", agent={"norm_obs": True, "log_std_init": -0.5}),
    "std_0.37": Arm("less noise at the start", agent={"norm_obs": True, "log_std_init": -1.0}),
    "normalized": Arm("statistics, of whatever observations", agent={"norm_obs": True}),
    "not_normalized": Arm("no statistics", agent={"norm_obs": False}),
}
PEER = "stable-baselines3"
# The off-policy algorithms with their defaults, on tasks with actions of their kind.
OFF_POLICY = {
    "SAC": ("Pendulum-v1", "Reacher-v5", "HalfCheetah-v5"),
    "TD3": ("Pendulum-v1", "Reacher-v5", "HalfCheetah-v5"),
    "DDPG": ("Pendulum-v1", "Reacher-v5", "HalfCheetah-v5"),
    "DQN": ("CartPole-v1", "Acrobot-v1"),
    "C51": ("CartPole-v1", "Acrobot-v1"),
}
PEERS = ("SAC", "TD3", "DQN")
OFF_POLICY_BUDGETS = (5000, 20_000)
# Those before, and others, with seeds 11 to 13: --stage offpolicy --arms TD3 'TD3 lr_3e-4' --seeds 11 12 13
OFF_POLICY_ARMS: dict[str, dict[str, Any]] = {
    "TD3 lr_3e-4": {"learning_rate": 3e-4},
    "DDPG lr_3e-4": {"learning_rate": 3e-4},
    "DQN train_10": {"train_frequency": 10},
    "DQN train_10, explore_0.1": {"train_frequency": 10, "exploration_fraction": 0.1},
    "DQN train_10, double": {"train_frequency": 10, "double": True},
    "DQN explore_0.1": {"exploration_fraction": 0.1},
    "C51 train_10": {"train_frequency": 10},
}


class Run(NamedTuple):
    """One run."""

    arm: str
    task: str
    budget: int
    seed: int


def register() -> None:
    """Register the environments of this script."""
    for name, (entry, limit, arguments) in OWN.items():
        gymnasium.register(name, entry, max_episode_steps=limit, kwargs=arguments)


def deterministic_return(task: str, seed: int, act: Callable[[Any], np.ndarray]) -> float:
    """Return the mean return of the first episode of environments with fresh seeds.

    Args:
        task: Name of the task.
        seed: Seed of the run, which gives those of the episodes.
        act: Actions for a batch of observations.
    """
    envs = gymnasium.vector.SyncVectorEnv([functools.partial(gymnasium.make, task)] * EPISODES)
    observation, _ = envs.reset(seed=[FRESH + EPISODES * seed + index for index in range(EPISODES)])
    returns, running = np.zeros(EPISODES), np.ones(EPISODES, dtype=bool)
    while running.any():
        observation, reward, terminated, truncated, _ = envs.step(act(observation))
        returns += reward * running
        running &= ~(terminated | truncated)
    envs.close()
    return float(returns.mean())


class Clock:
    """Wall-clock and CPU time of this process since the construction."""

    def __init__(self) -> None:
        self._began = time.perf_counter(), time.process_time()

    def read(self) -> list[float]:
        """Return the seconds of both."""
        now = time.perf_counter(), time.process_time()
        return [round(after - before, 2) for after, before in zip(now, self._began, strict=True)]

    def restart(self, seconds: Sequence[float]) -> None:
        """Continue from seconds that were read before."""
        now = time.perf_counter(), time.process_time()
        self._began = now[0] - seconds[0], now[1] - seconds[1]


def train_ours(run: Run) -> dict[str, Any]:
    """Train with this package as README does."""
    _, changes, data, agent = ARMS.get(run.arm, Arm("", OFF_POLICY_ARMS.get(run.arm, {})))
    name = run.arm.split()[0]
    algorithm = getattr(ppo_lightning, name) if name in OFF_POLICY else PPO
    clock = Clock()
    L.seed_everything(run.seed)
    rollouts = RolloutDataModule(run.task, total_timesteps=run.budget, **data)
    trainer = L.Trainer(accelerator="cpu")
    module = algorithm(**changes, **({"agent": functools.partial(MLPAgent, **agent)} if agent else {}))
    trainer.fit(module, rollouts)
    seconds = clock.read()
    return row_of(run, module.env_steps, module.episode_returns, module.predict, seconds)


def train_peer(runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    """Train with Stable-Baselines3 as its README does, and yield the row of each budget, ascending."""
    import stable_baselines3

    clock = Clock()
    run = runs[0]
    env = gymnasium.make(run.task)
    policy = "MultiInputPolicy" if isinstance(env.observation_space, spaces.Dict) else "MlpPolicy"
    algorithm = getattr(stable_baselines3, run.arm.removeprefix(PEER).lstrip() or "PPO")
    model = algorithm(policy, env, seed=run.seed, device="cpu")  # it adds a Monitor

    def act(observation: Any) -> np.ndarray:
        return model.predict(observation, deterministic=True)[0]

    for run in runs:
        model.learn(run.budget - model.num_timesteps, reset_num_timesteps=False)  # continues the last one
        seconds = clock.read()
        returns = [episode["r"] for episode in model.ep_info_buffer or ()]
        yield row_of(run, model.num_timesteps, returns, act, seconds)
        clock.restart(seconds)


def row_of(
    run: Run, steps: int, returns: Iterable[float], act: Callable, seconds: Sequence[float]
) -> dict[str, Any]:
    """Return the row of a run after its training."""
    returns = list(returns)
    train = round(statistics.fmean(returns), 4) if returns else ""
    evaluation = round(deterministic_return(run.task, run.seed, act), 4)
    arguments = f"--arms '{run.arm}' --tasks {run.task} --budgets {run.budget} --seeds {run.seed}"
    figures = (steps, len(returns), train, evaluation, *seconds)
    return dict(zip(COLUMNS, (*run, *figures, f"python benchmarks/defaults.py {arguments}"), strict=True))


def in_process(runs: Sequence[Run], connection: Connection, log: Path) -> None:
    """Train in this forked process, and send the rows."""
    with log.open("w") as file, tempfile.TemporaryDirectory() as folder:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
        os.chdir(folder)
        torch.set_num_threads(1)
        connection.send(list(train_peer(runs)) if runs[0].arm.startswith(PEER) else [train_ours(*runs)])
        os.chdir("/")


def train(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Train in a process of its own and return the rows.

    Raises:
        RuntimeError: A run failed. The message ends with its output.
    """
    receiver, sender = FORK.Pipe(duplex=False)
    with tempfile.NamedTemporaryFile() as file:
        log = Path(file.name)
        process = FORK.Process(target=in_process, args=(runs, sender, log))
        process.start()
        sender.close()
        try:
            return receiver.recv()
        except EOFError:
            raise RuntimeError(f"{runs} failed:\n{log.read_text()[-3000:]}") from None
        finally:
            process.join()


def key_of(row: dict[str, str]) -> Run:
    """Return the run of a row."""
    return Run(row["arm"], row["task"], int(row["budget"]), int(row["seed"]))


def read(path: Path) -> dict[Run, dict[str, str]]:
    """Return the rows of a file by run."""
    if not path.exists():
        return {}
    with path.open() as file:
        return {key_of(row): row for row in csv.DictReader(file)}


def train_all(runs: Sequence[Run], path: Path) -> None:
    """Train the runs that the file lacks, and append their rows."""
    done = read(path)
    groups: dict[Run, list[Run]] = {}  # the runs of a process
    for run in (run for run in runs if run not in done):
        one_for_all = run.arm.startswith(PEER) and not run.arm.endswith("DQN")
        groups.setdefault(run._replace(budget=0) if one_for_all else run, []).append(run)
    if any(run.arm.startswith(PEER) for run in groups):
        import stable_baselines3  # noqa: F401  once, not in every fork
    for number, group in enumerate(groups.values(), 1):
        rows = train(sorted(group, key=lambda run: run.budget))
        new = not path.exists()
        with path.open("a", newline="") as file:
            table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            if new:
                table.writeheader()
            table.writerows(rows)
        for row in rows:
            figures = " ".join(str(row[name]) for name in COLUMNS if name != "command")
            print(f"{number}/{len(groups)} {figures}", flush=True)


def score(row: dict[str, str]) -> float:
    """Return the score of a run: the mean of its returns between those of the scores 0 and 1."""
    task = TASKS[row["task"]]
    returns = [float(row[name]) for name in ("train_return", "eval_return") if row[name]]
    return statistics.fmean((value - task.low) / (task.high - task.low) for value in returns)


def mean_of(rows: Iterable[dict[str, str]], column: str) -> str:
    """Return the mean of a column in four digits, a dash without values."""
    values = [float(row[column]) for row in rows if row[column]]
    return f"{statistics.fmean(values):.4g}" if values else "-"


def print_selection(rows: dict[Run, dict[str, str]]) -> None:
    """Print, for each budget, the returns and scores of all arms, next to the guess.

    The gain over the guess is a mean over the runs of the same task and seed, with its standard error.
    CPU seconds are medians over these runs, their ratio too.
    """
    tasks = [task for task in TASKS if any(run.task == task for run in rows)]
    for budget in dict.fromkeys(run.budget for run in rows):
        print(f"\n{budget} steps: return in training / of the deterministic policy (runs)\n")
        print(f"| arm | {' | '.join(tasks)} | score | gain over the guess (runs) | CPU seconds | ratio |")
        print("|---|" + "---|" * (len(tasks) + 4))
        for arm in dict.fromkeys(run.arm for run in rows if run.budget == budget):
            print(f"| {arm} | {' | '.join(selection_figures(rows, arm, budget, tasks))} |")


def selection_figures(
    rows: dict[Run, dict[str, str]], arm: str, budget: int, tasks: Sequence[str]
) -> Iterator[str]:
    """Yield the figures of an arm in the table of a budget."""
    scores = []
    for task in tasks:
        here = rows_of(rows, arm, task, budget)
        yield f"{mean_of(here, 'train_return')} / {mean_of(here, 'eval_return')} ({len(here)})"
        scores += [statistics.fmean(map(score, here))] if here else []
    yield f"{statistics.fmean(scores):.3f}" if len(scores) == len(tasks) else "-"
    runs = [run for run in rows if (run.arm, run.budget) == (arm, budget)]
    pairs = [(rows[run], rows[guess]) for run in runs if (guess := run._replace(arm="guess")) in rows]
    gains = [score(row) - score(guess) for row, guess in pairs]
    error = statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else math.nan
    yield f"{statistics.fmean(gains):+.3f} ± {error:.3f} ({len(gains)})" if gains else "-"
    seconds = [(float(row["cpu_seconds"]), float(guess["cpu_seconds"])) for row, guess in pairs]
    yield f"{statistics.median(mine for mine, _ in seconds):.1f}" if seconds else "-"
    yield f"{statistics.median(mine / other for mine, other in seconds):.2f}" if seconds else "-"


def print_report(rows: dict[Run, dict[str, str]], arm: str) -> None:
    """Print the table of an arm next to each reference, and the tests for lower means."""
    for reference in (name for name in (PEER, "today") if name != arm):
        cells = [
            (task, budget)
            for task in TASKS
            for budget in sorted({run.budget for run in rows})
            if all(len(rows_of(rows, name, task, budget)) > 1 for name in (arm, reference))
        ]
        if cells:
            print(
                f"\n`{arm}` and `{reference}`: return in training ± deviation / of the deterministic policy\n"
            )
            print_comparison(rows, arm, reference, cells)


def print_off_policy(rows: dict[Run, dict[str, str]], arms: Sequence[str]) -> None:
    """Print the returns and seconds of the off-policy arms: here / of Stable-Baselines3, or as given."""
    columns = ("train_return", "eval_return", "seconds", "cpu_seconds")
    print("| algorithm | task | steps | seeds | in training | deterministic | seconds | CPU seconds |")
    print("|---|---|---|---|---|---|---|---|")
    for name, budget in itertools.product(OFF_POLICY, sorted({run.budget for run in rows})):
        for task in OFF_POLICY[name]:
            sides = [rows_of(rows, arm, task, budget) for arm in arms if name in arm.split()]
            if any(sides):
                counts = " / ".join(str(len(side)) for side in sides)
                figures = [" / ".join(mean_of(side, column) for side in sides) for column in columns]
                print(f"| {name} | {task} | {budget} | {counts} | {' | '.join(figures)} |")


def rows_of(rows: dict[Run, dict[str, str]], arm: str, task: str, budget: int) -> list[dict[str, str]]:
    """Return the rows of an arm on a task with a budget."""
    return [row for run, row in rows.items() if run[:3] == (arm, task, budget)]


def returns_of(mine: Sequence[dict[str, str]], other: Sequence[dict[str, str]]) -> list[np.ndarray]:
    """Return the training returns of two arms, of the deterministic policies if a run ended no episode."""
    trained = all(row["train_return"] for row in (*mine, *other))
    column = "train_return" if trained else "eval_return"
    return [np.array([float(row[column]) for row in side]) for side in (mine, other)]


def print_comparison(
    rows: dict[Run, dict[str, str]], arm: str, reference: str, cells: Sequence[tuple[str, int]]
) -> None:
    """Print the table of two arms, a row for each task and budget."""
    from tables import holm, stratified_p

    sides = {cell: [rows_of(rows, name, *cell) for name in (arm, reference)] for cell in cells}
    returns = {cell: returns_of(*pair) for cell, pair in sides.items()}

    def p_of_lower(chosen: Iterable[tuple[str, int]]) -> float:
        chosen = list(chosen)
        # Divided by the range of the task, which does not change the test of one cell.
        ranges = {cell: TASKS[cell[0]].high - TASKS[cell[0]].low for cell in chosen}
        mine, other = ({str(x): returns[x][side] / ranges[x] for x in chosen} for side in (0, 1))
        return stratified_p(mine, other)

    tasks = list(dict.fromkeys(task for task, _ in cells))
    of_cell = dict(zip(cells, holm([p_of_lower([cell]) for cell in cells]), strict=True))
    of_task = [p_of_lower(cell for cell in cells if cell[0] == task) for task in tasks]
    of_task = dict(zip(tasks, holm(of_task), strict=True))
    print(
        f"| task | steps | {arm} | {reference} | at least as high | p of lower, Holm | all budgets, Holm"
        " | seconds | ratio |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    higher: dict[int, list[bool]] = {}
    for task, budget in cells:
        pair, here = returns[task, budget], sides[task, budget]
        figures = [
            f"{values.mean():.4g} ± {values.std(ddof=1):.2g} / {mean_of(side, 'eval_return')}"
            for values, side in zip(pair, here, strict=True)
        ]
        seconds = [statistics.fmean(float(row["seconds"]) for row in side) for side in here]
        higher.setdefault(budget, []).append(pair[0].mean() >= pair[1].mean())
        mark = "yes" if higher[budget][-1] else "no"
        p = f"{of_cell[task, budget]:.3f} | {of_task[task]:.3f}"
        times = f"{seconds[0]:.1f}, {seconds[1]:.1f} | {seconds[0] / seconds[1]:.2f}"
        print(f"| {task} | {budget} | {' | '.join(figures)} | {mark} | {p} | {times} |")
    for budget, marks in higher.items():
        print(f"\n{budget} steps: at least as high on {sum(marks)} of {len(marks)} tasks")


def main(args: Sequence[str] | None = None) -> None:
    """Train, or print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stage", choices=[*SEEDS, "offpolicy"], default="select")
    known = [*ARMS, PEER, *OFF_POLICY, *OFF_POLICY_ARMS, *(f"{PEER} {name}" for name in PEERS)]
    parser.add_argument("--arms", nargs="+", choices=known, help="select: all; report: needed")
    parser.add_argument(
        "--tasks", nargs="+", choices=[*TASKS, "Reacher-v5"], help="select: half of them; report: all"
    )
    parser.add_argument("--budgets", nargs="+", type=int, help="environment steps")
    parser.add_argument("--seeds", nargs="+", type=int, help="select: 11 to 13; report: 1 to 5")
    parser.add_argument("--output", type=Path, default=Path("defaults.csv"), help="CSV file, one row per run")
    parser.add_argument("--table", action="store_true", help="print the table of the file, train nothing")
    options = parser.parse_args(args)
    register()
    if options.stage == "report" and not options.arms:
        parser.error("--stage report needs --arms: the chosen one, then the references")
    arms = options.arms or ["today", *CANDIDATES, "defaults", PEER]
    if options.stage == "offpolicy":
        budgets = options.budgets or OFF_POLICY_BUDGETS
        arms = options.arms or [arm for name in PEERS for arm in (name, f"{PEER} {name}")]
        runs = [
            Run(arm, task, budget, seed)
            for seed, name, budget in itertools.product(options.seeds or (1, 2, 3), OFF_POLICY, budgets)
            for task in OFF_POLICY[name]
            for arm in arms
            if name in arm.split() and task in (options.tasks or OFF_POLICY[name])
        ]
        if not options.table:
            train_all(runs, options.output.resolve())
        print_off_policy(read(options.output), arms)
        return
    if not options.table:
        tasks = options.tasks or [
            x for x, task in TASKS.items() if task.selects or (options.stage == "report" and task.reports)
        ]
        seeds = options.seeds or SEEDS[options.stage]
        order = itertools.product(seeds, tasks, options.budgets or BUDGETS, arms)
        runs = [Run(arm, task, budget, seed) for seed, task, budget, arm in order]
        train_all(runs, options.output.resolve())
    rows = read(options.output)
    if not rows:
        sys.exit(f"{options.output} has no runs")
    if options.stage == "select":
        print_selection(rows)
    else:
        print_report(rows, arms[0])


if __name__ == "__main__":
    main()
