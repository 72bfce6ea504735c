"""Checks of the first rollout of a run: what in an environment would break or bias training."""

import gc
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import gymnasium
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.data import Bounded, Categorical, TensorSpec

from ppo_lightning.envs.batched import BatchedEnv
from ppo_lightning.envs.specs import specs_of
from ppo_lightning.envs.torchrl import AnyEnv
from ppo_lightning.spaces.specs import columns, row_spec

LARGE_REWARD = 100.0  # root mean square; the value function would dominate the loss
REACHED = 10.0  # largest bound that a policy with standard deviation 1 may reach
NARROW_ACTION = 0.1  # width of a range that a policy with standard deviation 1 nearly always leaves
SHORT_EPISODE = 10  # steps; shorter tasks often have a fixed length
AT_LIMIT = 4  # episodes that end at a time limit, at least, and their ratio to those of any other length
DENSE = 10  # number of lengths from which on the lengths of natural ends are dense
NORMALIZERS = {"NormalizeObservation", "NormalizeReward", "VecNorm", "VecNormV2"}  # with running statistics
LAYERS = BatchedEnv | gymnasium.Env | gymnasium.vector.VectorEnv | nn.Module  # as those of TorchRL are


class Finding(NamedTuple):
    """Something in an environment that a user should know.

    An ``error`` would break training. A ``warning`` would bias or waste it. A ``note`` is normal for some
    environments.

    Example:
        >>> print(Finding("note", "reward", "All rewards are 0.", "Play longer."))
        reward: All rewards are 0. Play longer.
    """

    severity: Literal["error", "warning", "note"]
    check: str
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.check}: {self.what} {self.remedy}"


Findings = Iterator[Finding]


def episodes_of(rollout: TensorDictBase) -> tuple[Tensor, Tensor, Tensor]:
    """Return the environments, first steps and last steps of the E whole episodes of a rollout, [E] each.

    The rollout [N, T] of a collector, of :func:`random_play` or of TorchRL begins with a reset.
    """
    done = rollout["next", "done"].reshape(rollout.shape)
    over = rollout["next"].get("episode_done", done).reshape(rollout.shape)
    # Between two episodes, an environment may fail or only reset, and a player may be dead.
    skipped = (rollout.get("weight", torch.ones(done.shape, device=done.device)) == 0) & ~over
    env, end = (over | skipped).nonzero(as_tuple=True)
    start = torch.where(env == env.roll(1), end.roll(1) + 1, 0)
    start[:1] = 0
    whole = over[env, end]
    return env[whole], start[whole], end[whole]


def check_rollout(rollout: TensorDictBase, env: AnyEnv) -> Findings:
    """Run the checks that need no more than the first rollout [N, T] of a run, which begins with a reset."""
    yield from check_space(rollout, env)
    yield from check_action_bounds(specs_of(env).action)
    yield from check_rewards(rollout)
    yield from check_normalizers(env)
    if getattr(env, "flags_time_limits", True):
        yield from check_time_limits(rollout)


def check_space(rollout: TensorDictBase, env: AnyEnv) -> Findings:
    """Check that discrete observations are elements of their space."""
    for _, part, place in columns(specs_of(env).observation):
        if isinstance(part, Categorical):
            space = row_spec(part).space
            values = rollout["observation"].flatten(2)[..., place]
            outside = values[(values < space.low) | (values > space.high)]
            if len(outside):
                what = f"A discrete observation leaves its space, for example with {outside[0]:g}."
                yield Finding("error", "space", what, "It would select a missing weight: correct the space.")


def check_action_bounds(spec: TensorSpec) -> Findings:
    """Check that the continuous actions of a spec have a range near [-1, 1], where the policy starts."""
    for name, part, _ in columns(spec):
        if not (isinstance(part, Bounded) and part.dtype.is_floating_point):
            continue
        low, high = part.space.low, part.space.high
        is_far = max(-low.min(), high.max()) > REACHED or max(low.max(), -high.min()) >= 1
        if is_far or (high - low).min() < NARROW_ACTION:
            entry = f" of {name}" if name else ""
            what = f"The bounds of the actions{entry} reach from {low.min():g} to {high.max():g}."
            remedy = "A policy starts with the standard deviation 1: use RescaleAction(env, -1, 1)."
            yield Finding("warning", "action bounds", what, remedy)


def check_normalizers(env: Any) -> Findings:
    """Check whether running statistics are outside of the agent, in wrappers and transforms."""
    layers, seen, found = [env], set(), set()
    while layers:
        layer = layers.pop()
        if id(layer) not in seen and isinstance(layer, LAYERS | list | dict):
            seen.add(id(layer))
            found |= {kind.__name__ for kind in type(layer).__mro__}
            # `vars` would make a dictionary of the attributes, and every later step of CartPole would take an
            # eighth longer (Python 3.11).
            layers += gc.get_referents(layer)
    for name in NORMALIZERS & found:
        setting, of_ppo = "model.agent.norm_obs", ""
        if "Reward" in name:
            setting, of_ppo = "model.norm_reward", " (PPO and its family)"
        what = f"{name} normalizes in the environment: evaluation and exports lack its statistics."
        yield Finding("warning", "normalization", what, f"Remove it, and set {setting} to true{of_ppo}.")


def check_rewards(rollout: TensorDictBase) -> Findings:
    """Check the scale of the rewards."""
    rewards = rollout["next", "reward"].double()
    if not rewards.any():
        what = f"All {rewards.numel()} rewards of random play are 0."
        remedy = "An agent learns nothing before it finds a reward. A sparse task may need many steps."
        yield Finding("note", "reward", what, remedy)
    scale = rewards[rewards != 0].square().mean().sqrt().item()
    if scale > LARGE_REWARD:
        what = f"The rewards are large: their root mean square is {scale:.2g}."
        remedy = "Scale them to about 1, or set model.norm_reward to true (PPO and its family)."
        yield Finding("warning", "reward", what, remedy)


def check_time_limits(rollout: TensorDictBase) -> Findings:
    """Check whether a time limit is flagged as a termination.

    Most episodes that last as long as any other end together at a time limit, while random ends have lengths
    that are nearly as frequent. The finding is omitted if the observation has a clock, from which the agent
    can predict the end.
    """
    env, start, end = episodes_of(rollout)
    # The players of a game end together: such an end counts once.
    players = 1 + int(rollout.get("player", env.new_zeros(())).amax())
    once = env % players == 0
    env, start, end = env[once], start[once], end[once]
    length = end - start + 1
    if not len(length) or (limit := int(length.max())) < SHORT_EPISODE:
        return
    last_end = env.new_full((len(rollout),), -1).scatter_reduce(0, env, end, "amax")
    if rollout.shape[1] - 1 - last_end[::players].min() > limit:  # a longer episode goes on
        return
    counts = length.bincount()
    # Early ends may be frequent. If ends are possible at a few steps only, all of them count.
    others = counts[limit // 2 if counts.count_nonzero() > DENSE else 0 : limit].max()
    at_limit = length == limit
    env, end = env[at_limit], end[at_limit]
    terminated = rollout["next"].get("terminated", rollout["next", "done"])[env, end]
    is_one_game = len((env // players).unique()) < min(2, len(rollout) // players)
    if is_one_game or len(env) < AT_LIMIT * max(1, int(others)) or not terminated.all():
        return
    last, final = rollout["observation"][env, end], rollout["next", "observation"][env, end]
    same = (last == last[0]).all(dim=0) & (final == final[0]).all(dim=0)
    if (same & (last[0] != final[0])).any():
        return
    what = f"{len(env)} of {len(length)} episodes terminate at exactly step {limit}, and none is longer."
    remedy = (
        "If this is a time limit, return truncated=True: otherwise the update takes the value of the final"
        " state as 0. If the task ends there, let observations show the time."
    )
    yield Finding("warning", "time limit", what, remedy)
