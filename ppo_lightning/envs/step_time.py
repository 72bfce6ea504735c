"""Choose the number of worker processes from the step time of an environment."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ppo_lightning.envs.factory import EnvFactory, largest_divisor
from ppo_lightning.envs.gymnasium import GymnasiumEnv
from ppo_lightning.envs.recording import random_action
from ppo_lightning.spaces.specs import mask_columns

# Seconds that a step takes more for each worker: two messages and a change of process. Measured on 2 cores as
# the time of `WorkerEnv.step_arrays` with 16 environments whose step does nothing: 0.08 ms for 1 worker, 0.15
# for 2, 0.27 for 4, 0.56 for 8, 1.2 for 16.
EXCHANGE_SECONDS = 7e-5
GAIN = 1.2  # smallest predicted speedup of the steps for which workers are chosen
MEASURE_SECONDS = 0.2
SLOW = 0.5  # share of the time of a run from which on its environments are slow
KEPT = 0.95  # share of the steps that are averaged, without the slowest


class StepTime(NamedTuple):
    """Duration of a step of one environment.

    Attributes:
        seconds: Wall-clock time of a step.
        cores: CPU time of a step per wall-clock time. Near 0: the environment waits, for example for a
            simulator in another process.
    """

    seconds: float
    cores: float


class WorkerChoice(NamedTuple):
    """Number of worker processes and the reason as a phrase."""

    num_workers: int
    reason: str

    def __str__(self) -> str:
        return f"Worker processes pay ({self.reason}): set data.num_workers to {self.num_workers}."


class StepClock:
    """Time that the environments of this process take in the first seconds of a run.

    Two readings of two clocks take 1 microsecond. Therefore the collector drops the clock after some seconds.

    Example:
        >>> clock = StepClock()
        >>> clock.time(sum, [1, 2])
        3
        >>> clock.calls
        1
    """

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.wall = 0.0  # seconds inside of the environments
        self.cpu = 0.0  # CPU time of this thread in these seconds
        self.calls = 0

    def time(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of the environments, and add its time."""
        wall, cpu = time.perf_counter(), time.thread_time()
        value = function(*args)
        self.wall += time.perf_counter() - wall
        self.cpu += time.thread_time() - cpu
        self.calls += 1
        return value

    def advice(self, num_envs: int, cores: int) -> str:
        """Return the setting that helps if the environments took most of the time, otherwise an empty text.

        Args:
            num_envs: Number of environments of this rank.
            cores: Number of CPU cores of this rank.
        """
        share = self.wall / (time.perf_counter() - self.started)
        if share < SLOW:
            return ""
        step = StepTime(self.wall / self.calls / num_envs, self.cpu / self.wall)
        choice = _choose(step, num_envs, cores)
        what = f"The environments take {share:.0%} of the time."
        if choice.num_workers:
            return f"{what} {choice}"
        return f"{what} ppo-lightning check-env compares the backends, such as envpool."


def measure_step(env: GymnasiumEnv, seconds: float = MEASURE_SECONDS) -> StepTime:
    """Measure steps of one environment with random actions.

    Args:
        env: A single environment, [1].
        seconds: Duration of the measurement. At least one step is made.
    """
    observation_spec, action_spec = env.agent_specs
    mask = mask_columns(observation_spec)
    generator = np.random.default_rng(0)
    wall: list[float] = []
    cpu: list[float] = []
    observation = env.reset_arrays()
    deadline = time.perf_counter() + seconds
    while not wall or time.perf_counter() < deadline:
        allowed = None if mask is None else observation[:, mask]
        action = random_action(action_spec, env.num_envs, generator, allowed)
        start = time.perf_counter(), time.process_time()
        observation, _, terminated, truncated = env.step_arrays(action)
        wall.append(time.perf_counter() - start[0])
        cpu.append(time.process_time() - start[1])
        done = terminated | truncated
        if done.any():
            observation = env.reset_arrays(done)
    # The first step may load and compile. Other processes interrupt a few steps.
    times = np.array([wall, cpu])[:, len(wall) > 1 :]
    kept = times[0].argsort()[: max(1, int(KEPT * times.shape[1]))]
    wall_time, cpu_time = times[:, kept].mean(axis=1)
    return StepTime(float(wall_time), float(cpu_time / wall_time))


def best_num_workers(step: StepTime, num_envs: int, cores: int) -> int:
    """Return the number of workers with which a step of all environments is fastest, 0 for none.

    Args:
        step: Duration of a step of one environment.
        num_envs: Number of environments.
        cores: Number of CPU cores.

    Example:
        >>> best_num_workers(StepTime(0.005, 1.0), num_envs=8, cores=4)
        4
        >>> best_num_workers(StepTime(0.005, 0.0), num_envs=8, cores=4)
        8
        >>> best_num_workers(StepTime(0.00001, 1.0), num_envs=8, cores=4)
        0
    """
    limit = num_envs if step.cores * num_envs <= cores else max(1, int(cores / step.cores))
    num_workers = largest_divisor(num_envs, limit)
    with_workers = num_envs / num_workers * step.seconds + num_workers * EXCHANGE_SECONDS
    return num_workers if num_envs * step.seconds > GAIN * with_workers else 0


def choose_workers(factory: EnvFactory, num_envs: int, cores: int) -> WorkerChoice:
    """Choose the number of workers for environments, from a short episode of one of them.

    Args:
        factory: Factory of the environments.
        num_envs: Number of environments of this rank.
        cores: Number of CPU cores of this rank.
    """
    env = dataclasses.replace(factory, num_workers=0, transforms=()).make(stream="eval")
    try:
        if not isinstance(env, GymnasiumEnv):
            return WorkerChoice(0, "workers step Gymnasium environments only")
        step = measure_step(env)
    finally:
        env.close()
    return _choose(step, num_envs, cores)


def _choose(step: StepTime, num_envs: int, cores: int) -> WorkerChoice:
    milliseconds = f"a step of one environment takes {1000 * step.seconds:.3g} ms"
    busy = f"{100 * step.cores:.0f} % of it on the CPU"
    return WorkerChoice(best_num_workers(step, num_envs, cores), f"{milliseconds}, {busy}, {cores} CPU cores")
