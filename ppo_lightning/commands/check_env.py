"""``ppo-lightning check-env``: report what in an environment would break or bias training."""

from collections.abc import Sequence
from typing import Any, get_args

from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveFloat, PositiveInt
from tensordict import TensorDictBase

from ppo_lightning.envs.conformance import SEVERITIES, check_environment
from ppo_lightning.envs.factory import Backend
from ppo_lightning.envs.rollout_checks import Finding, episodes_of
from ppo_lightning.errors import ConfigError
from ppo_lightning.models.default import DefaultAgent
from ppo_lightning.rollouts.datamodule import RolloutDataModule


def main(args: Sequence[str]) -> None:
    """Run ``ppo-lightning check-env``, which exits with code 1 if the environment would break training."""
    parser = ArgumentParser(
        prog="ppo-lightning check-env", description="Find what in an environment breaks or biases training."
    )
    parser.add_argument("env_id", help="environment's id, or import path of a function that makes one")
    parser.add_argument("--backend", default="gymnasium", choices=get_args(Backend), help="as data.backend")
    parser.add_argument("--env_kwargs", type=dict[str, Any], default={}, help="as data.env_kwargs")
    parser.add_argument("--num_envs", type=int, default=4, help="number of environments")
    parser.add_argument("--steps", type=PositiveInt, default=1200, help="steps of each environment")
    parser.add_argument("--seconds", type=PositiveFloat, default=10.0, help="longest time of random play")
    options = parser.parse_args(list(args))
    env_kwargs = dict(options.env_kwargs)
    data = RolloutDataModule(options.env_id, options.backend, options.num_envs, 1, env_kwargs=env_kwargs)
    findings, rollout = check_environment(data.factory, options.num_envs, options.steps, options.seconds)
    print(f"{options.env_id}, backend {options.backend}: {_describe(rollout)}")
    if rollout is not None:
        try:
            agent = DefaultAgent(*data.factory.specs())
            words = type(agent).__name__, agent.reads, str(agent.entries or "")
            print(f"default agent: {', '.join(filter(None, words))}")
        except ConfigError as error:
            findings.append(Finding("error", "agent", str(error), "A run needs an agent of your own."))
    for finding in findings:
        print(f"\n{finding.severity}: {finding.what}\n    {finding.remedy} [{finding.check}]")
    counts = {severity: sum(finding.severity == severity for finding in findings) for severity in SEVERITIES}
    print("\n" + ", ".join(f"{count} {name}{'s' * (count != 1)}" for name, count in counts.items()) + ".")
    if counts["error"]:
        raise SystemExit(1)


def _describe(rollout: TensorDictBase | None) -> str:
    if rollout is None:
        return "random play ended with an error."
    env, start, end = episodes_of(rollout)
    num_envs, num_steps = rollout.shape
    text = f"{num_envs} environments played {num_steps} steps each at random, {len(env)} episodes"
    if not len(env):
        return f"{text}."
    lengths = end - start + 1
    rewards = rollout["next", "reward"].reshape(rollout.shape)
    sums = [rewards[e, s : t + 1].sum().item() for e, s, t in zip(env, start, end, strict=True)]
    return f"{text}, length {lengths.min()} to {lengths.max()}, return {min(sums):.4g} to {max(sums):.4g}."
