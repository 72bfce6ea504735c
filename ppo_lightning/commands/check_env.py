"""``ppo-lightning check-env``: report what in an environment would break or bias training."""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from jsonargparse import ArgumentParser

from ppo_lightning.callbacks.speed import GAIN
from ppo_lightning.envs.examination import SEVERITIES, check_environment
from ppo_lightning.envs.factory import BACKENDS, Backend, EnvFactory
from ppo_lightning.envs.recording import Recording, episodes_of, record
from ppo_lightning.rollouts.datamodule import RolloutDataModule

TIMED_STEPS = 200  # to compare backends
TIMED_SECONDS = 1.0


def main(args: Sequence[str]) -> None:
    """Run ``ppo-lightning check-env``.

    Args:
        args: Arguments of the command.

    Raises:
        ConfigError: The environment cannot be made.
        SystemExit: With code 1 if the environment would break training.
    """
    parser = ArgumentParser(
        prog="ppo-lightning check-env",
        description="Report what in an environment would break or bias training.",
    )
    parser.add_argument("env_id", help="environment's id, or import path of a function that makes one")
    parser.add_argument("--backend", default="gymnasium", choices=[*BACKENDS], help="as data.backend")
    parser.add_argument(
        "--env_kwargs",
        type=dict[str, Any],
        default={},
        help="arguments of the environment, as in --env_kwargs.max_episode_steps 500",
    )
    parser.add_argument("--num_envs", type=int, default=4, help="number of environments")
    parser.add_argument("--steps", type=int, default=1200, help="steps of each environment")
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="longest random play, for slow environments"
    )
    options = parser.parse_args(list(args))
    data = RolloutDataModule(
        options.env_id, options.backend, options.num_envs, 1, env_kwargs=dict(options.env_kwargs)
    )
    factory = data.factory
    findings, recording = check_environment(factory, options.num_envs, options.steps, options.seconds)
    print(f"{options.env_id}, backend {options.backend}: {_played(recording)}")
    for finding in findings:
        print(f"\n{finding.severity}: {finding.what}\n    {finding.remedy} [{finding.check}]")
    if recording is not None:
        times = step_times(factory, options.num_envs, recording.seconds)
        described = ", ".join(f"{1e6 * seconds:.0f} µs with {name}" for name, seconds in times.items())
        print(f"\nA step of one environment takes {described}.")
        print(fastest_setting(times, options.backend, options.num_envs))
    counts = {severity: sum(finding.severity == severity for finding in findings) for severity in SEVERITIES}
    print(", ".join(f"{count} {name}{'s' * (count != 1)}" for name, count in counts.items()) + ".")
    if counts["error"]:
        raise SystemExit(1)


def _played(recording: Recording | None) -> str:
    if recording is None:
        return "random play ended with an error."
    num_steps, num_envs = recording.over.shape
    text = f"{num_envs} environments played {num_steps} steps each at random"
    episodes = episodes_of(recording)
    if not len(episodes.length):
        return f"{text}, no whole episode."
    low, high = (f"{value:.4g}" for value in (episodes.total.min(), episodes.total.max()))
    lengths = f"{episodes.length.min()} to {episodes.length.max()}"
    return f"{text}, {len(episodes.length)} episodes, length {lengths}, return {low} to {high}."


def step_times(factory: EnvFactory, num_envs: int, seconds: float) -> dict[str, float]:
    """Measure a step with each backend that has the environment.

    Args:
        factory: Makes the environments.
        num_envs: Number of environments.
        seconds: Estimated duration of a step of one environment, seconds.

    Returns:
        Seconds per step of one environment by backend, the factory's own first.
    """
    num_steps = max(1, min(TIMED_STEPS, int(TIMED_SECONDS / (seconds * num_envs))))
    others = [name for name in get_args(Backend) if name != factory.backend]
    backends = [factory.backend, *others]
    times: dict[str, float] = {}
    for backend in backends if isinstance(factory.env_id, str) else backends[:1]:
        with contextlib.suppress(Exception):  # most backends lack most environments
            env = dataclasses.replace(factory, backend=backend).make(num_envs)
            try:
                record(env, max(1, num_steps // 10))  # the first steps are slower
                times[backend] = record(env, num_steps).seconds
            finally:
                env.close(raise_if_closed=False)
    return times


def fastest_setting(times: Mapping[str, float], backend: str, num_envs: int) -> str:
    """Return a sentence that names the fastest setting.

    Args:
        times: Seconds per step of one environment by backend.
        backend: Backend in use.
        num_envs: Number of environments.
    """
    if not times:
        return "No setting could be timed."
    fastest = min(times, key=lambda name: times[name])
    if fastest != backend and GAIN * times[fastest] < times.get(backend, float("inf")):
        return f"With {num_envs} environments, data.backend {fastest!r} is the fastest."
    return "No other setting is faster by more than 10 %."
