"""Examine an environment: play at random, replay, and run all checks."""

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

from gymnasium.utils.env_checker import check_env
from torchrl.envs import EnvBase, SerialEnv, TransformedEnv
from torchrl.envs.utils import check_env_specs

from ppo_lightning.envs.batched import BatchedEnv
from ppo_lightning.envs.conformance import (
    Finding,
    Findings,
    check_actions_matter,
    check_episode_ends,
    check_finite,
    check_other_seed,
    check_repetition,
    check_rollout,
    check_step_past_end,
)
from ppo_lightning.envs.factory import EnvFactory, specs_of
from ppo_lightning.envs.gymnasium import GymnasiumEnv
from ppo_lightning.envs.recording import Recording, episodes_of, record, step_past_end
from ppo_lightning.envs.witness import Witness, check_buffers, check_observation_space
from ppo_lightning.errors import ConfigError, first_line

WARM_UP_STEPS = 10  # steps that tell how many fit into the time
REPLAYED_STEPS = 100  # steps that are repeated with the same seed, and with other actions
MEMORY = 2**28  # bytes of recorded observations
SEVERITIES = ("error", "warning", "note")


class Examination(NamedTuple):
    """Result of :func:`check_environment`.

    Attributes:
        findings: All findings, errors first.
        recording: Random play, None if it ended with an error.
    """

    findings: list[Finding]
    recording: Recording | None


def check_environment(
    factory: EnvFactory, num_envs: int = 4, num_steps: int = 1200, seconds: float = 10.0
) -> Examination:
    """Step environments as the collectors do, and check them.

    Args:
        factory: Makes the environments.
        num_envs: Number of environments N.
        num_steps: Steps of each environment.
        seconds: Longest time of random play, seconds. Slow environments make fewer steps.

    Raises:
        ConfigError: The environments cannot be made, as in ``fit``.

    Example:
        >>> check_environment(EnvFactory("CartPole-v1"), num_steps=100).findings
        []
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with _open(factory, num_envs) as env:
            try:
                return _examine(factory, env, num_steps, seconds)
            except (Exception, SystemExit) as error:
                what = str(error) if isinstance(error, ConfigError) else _describe(error)
                return Examination([Finding("error", "exception", what, "A run would end there.")], None)


def _examine(factory: EnvFactory, env: EnvBase, num_steps: int, seconds: float) -> Examination:
    num_envs = env.batch_size[0]

    def replay(num_steps: int, seed: int = 1, action_seed: int = 0) -> Recording:
        with _open(factory, num_envs, seed) as twin:  # closed at once: some need a port or a license
            return record(twin, num_steps, action_seed)

    witness = None
    if isinstance(env, GymnasiumEnv):
        witness = env.envs[0] = Witness(env.envs[0])
    budget = seconds / (num_envs * replay(WARM_UP_STEPS).seconds)  # steps
    spec = env.observation_spec_unbatched["observation"]
    row_bytes = num_envs * spec.shape.numel() * spec.dtype.itemsize
    affordable = _at_least_one(num_steps, 0.7 * budget, MEMORY / row_bytes)
    num_replayed = _at_least_one(REPLAYED_STEPS, affordable, 0.1 * budget)
    recording = record(env, affordable)
    findings = [
        *check_finite(recording),
        *check_episode_ends(recording, factory.time_limit(env), num_steps),
        *check_rollout(recording, specs_of(env).action, getattr(env, "flags_time_limits", True)),
    ]
    repeated = [*check_repetition(recording, replay(num_replayed))]
    findings += repeated or check_actions_matter(recording, replay(num_replayed, action_seed=1))
    if not any(finding.check == "seed" for finding in findings):
        findings += check_other_seed(recording, replay(num_replayed, seed=2))
    if witness is not None:
        findings += check_observation_space(witness.observation_space, witness.observations)
        findings += check_buffers(witness.changed)
    with _open(factory, num_envs) as twin:
        base: Any = twin.base_env if isinstance(twin, TransformedEnv) else twin
        if not isinstance(base, BatchedEnv):
            # A SerialEnv converts what single environments return.
            single = base.create_env_fn[0]() if isinstance(base, SerialEnv) else base
            findings += _check_torchrl(single)
            single.close(raise_if_closed=False)
        elif isinstance(twin, GymnasiumEnv):
            if recording.over.any():
                longest = int(episodes_of(recording).length.max())
                with contextlib.suppress(Exception):  # an environment may refuse to step on
                    findings += check_step_past_end(recording, step_past_end(twin, longest))
            findings += _check_gymnasium(twin.envs[0])
    return Examination(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)), recording)


def _at_least_one(*numbers: float) -> int:
    return max(1, int(min(numbers)))


@contextlib.contextmanager
def _open(factory: EnvFactory, num_envs: int, seed: int = 1) -> Iterator[EnvBase]:
    env = factory.make(num_envs, seed)
    try:
        yield env
    finally:
        with contextlib.suppress(Exception):
            env.close(raise_if_closed=False)


def _check_gymnasium(env: Any) -> Findings:
    """Run Gymnasium's own checker, whose complaints matter to other libraries."""
    try:
        check_env(env, skip_render_check=True, skip_close_check=True)
    except (Exception, SystemExit) as error:
        yield Finding(
            "note",
            "gymnasium",
            f"Gymnasium's check_env says: {first_line(error).rstrip('.')}.",
            "This package does not depend on it. Other libraries may.",
        )


def _check_torchrl(env: EnvBase) -> Findings:
    """Run TorchRL's own checker of specs."""
    logger = logging.getLogger("torchrl")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        check_env_specs(env)
    except (Exception, SystemExit) as error:
        yield Finding(
            "warning",
            "specs",
            f"TorchRL's check_env_specs says: {first_line(error).rstrip('.')}.",
            "Make the specs agree with what reset and step return.",
        )
    finally:
        logger.setLevel(level)


def _describe(error: BaseException) -> str:
    notes = " ".join(getattr(error, "__notes__", []))
    return f"{type(error).__name__}: {first_line(error).rstrip('.')}. {notes}".rstrip()
