"""Checks of the doctor: each looks at a run before an update and returns a diagnosis or None."""

import math
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from ppo_lightning.callbacks.guards import log_probs_again
from ppo_lightning.rollouts.learner import Learner
from ppo_lightning.spaces.specs import mask_columns, not_measured

ROWS = 512  # rows of a rollout that the checks use
SATURATED = 3.8  # input whose tanh is 0.999
ITERATIONS = 10  # iterations over which metrics are averaged
SPEEDS = 5  # number of earlier speed measurements needed to detect a slowdown


class RunSnapshot(NamedTuple):
    """State of a run before an update."""

    module: Learner
    rollout: TensorDictBase  # [N, T], of the coming update
    metrics: dict[str, float]  # mean of each loss metric over the last iterations
    iterations: int  # since the start of ``fit``
    first_entropy: float  # of the first iteration
    speeds: list[float]  # environment steps per second, the newest last


Diagnosis = tuple[str, str, str]  # observation, likely cause, remedy
Check = Callable[[RunSnapshot], Diagnosis | None]


def sample_rows(rollout: TensorDictBase, key: str) -> Tensor:
    """Return rows [B, ...] of an entry of a rollout, evenly spread over environments and steps."""
    rows = rollout[key].flatten(0, 1)
    return rows[:: max(1, len(rows) // ROWS)]


def ratio(run: RunSnapshot) -> Diagnosis | None:
    """Check that the ratio of the first minibatch is 1: the update must start from the acting policy."""
    if "action_log_prob" not in run.rollout.keys():  # noqa: SIM118  (no ratio is computed)
        return None
    recomputed, stored = log_probs_again(run.module.agent, run.rollout)
    deviation = (recomputed - stored).exp().sub(1).abs().max().item()
    if deviation <= 10 * run.module.tolerance:
        return None
    observation = (
        f"the ratio of new to old probabilities deviates from 1 by {deviation:.2g} before the update"
    )
    cause = "the agent computes different outputs when it acts and when it learns"
    return observation, cause, "an agent without dropout and batch normalization"


def large_kl(run: RunSnapshot) -> Diagnosis | None:
    """Check the KL divergence: above 0.02, updates usually are too large (Huang et al., 2022)."""
    kl = run.metrics.get("approx_kl", 0.0)
    if kl <= 0.02:
        return None
    observation = f"the approximate KL divergence is {kl:.3f}"
    cause = "the policy changes too much in one iteration"
    return observation, cause, "a lower model.learning_rate, fewer model.update_epochs, or model.target_kl"


def no_clipping(run: RunSnapshot) -> Diagnosis | None:
    """Check whether any ratio is clipped: if none ever is, the policy hardly changes."""
    kl = run.metrics.get("approx_kl", 1.0)
    if run.metrics.get("clipfrac", 1.0) > 0 or kl > 1e-5 or _in_second_half(run):
        return None
    observation = f"no ratio is ever clipped, and the KL divergence is {kl:.1g}"
    remedy = "a higher model.learning_rate, and check whether all rewards are equal"
    return observation, "the policy does not change", remedy


def much_clipping(run: RunSnapshot) -> Diagnosis | None:
    """Check the clip fraction: clipped samples have no gradient."""
    clip_fraction = run.metrics.get("clipfrac", 0.0)
    if clip_fraction <= 0.4:
        return None
    observation = f"{100 * clip_fraction:.0f} % of the ratios are clipped"
    remedy = "a lower model.learning_rate, fewer model.update_epochs, or larger minibatches"
    return observation, "the updates are too large", remedy


def entropy_collapse(run: RunSnapshot) -> Diagnosis | None:
    """Check the entropy: a policy that is deterministic early in the run stops exploring."""
    head = run.module.agent.head
    entropy = run.metrics.get("entropy", math.nan)
    if _in_second_half(run) or not math.isfinite(run.first_entropy + entropy):
        return None
    if head.largest_entropy is not None:
        # A mask may allow few actions, which lowers the entropy from the start.
        masked = mask_columns(run.module.data.specs.observation) is not None
        collapsed = entropy < 0.05 * (run.first_entropy if masked else head.largest_entropy)
    else:  # each standard deviation fell to 1/20 on average: log(20) = 3
        collapsed = entropy < run.first_entropy - 3 * run.rollout["action"].shape[-1]
    if not collapsed:
        return None
    observation = (
        f"the entropy fell from {run.first_entropy:.2f} to {entropy:.2g} in the first half of the run"
    )
    cause = "the policy became nearly deterministic before it explored enough"
    return observation, cause, "a higher model.ent_coef, or a lower model.learning_rate"


def unexplained_variance(run: RunSnapshot) -> Diagnosis | None:
    """Check the explained variance: below 0, the values are worse than a constant."""
    explained = run.metrics.get("explained_variance", 0.0)
    if run.iterations < 3 * ITERATIONS or explained > -0.05:  # slightly negative at the start is normal
        return None
    cause = "the value function does not fit the returns, which may be large or change fast"
    remedy = "model.norm_reward, model.clip_vloss false, or separate networks (shared: false)"
    return f"the explained variance is {explained:.2f}", cause, remedy


def unscaled_observations(run: RunSnapshot) -> Diagnosis | None:
    """Check the scale of observations: networks need inputs of magnitude about 1."""
    observation = sample_rows(run.rollout, "observation")
    if not observation.is_floating_point() or run.module.agent.normalizer is not None:
        return None
    magnitudes = observation.abs().flatten(1).mean(dim=0)
    for columns in not_measured(run.module.data.specs.observation):
        magnitudes[columns] = 0
    largest = magnitudes.max().item()
    if largest <= 20:
        return None
    text = f"a component of the observations has a mean magnitude of {largest:.3g}"
    return text, "the inputs of the networks are far from 1", "model.agent.norm_obs true"


def saturated_actions(run: RunSnapshot) -> Diagnosis | None:
    """Check how many actions exceed their bounds, to which the environment clips them."""
    action = sample_rows(run.rollout, "action")
    space: Any = getattr(run.module.data.specs.action, "space", None)
    if not action.is_floating_point() or not hasattr(space, "low"):
        return None
    share_beyond = ((action < space.low.to(action)) | (action > space.high.to(action))).float().mean().item()
    if share_beyond <= 0.5:
        return None
    observation = f"{100 * share_beyond:.0f} % of the action components are beyond their bounds"
    cause = "the bounds are much narrower than the policy's standard deviation"
    remedy = "an environment whose actions are scaled to [-1, 1], or model.agent.head tanh_gaussian"
    return observation, cause, remedy


def lost_truncations(run: RunSnapshot) -> Diagnosis | None:
    """Check whether truncations are treated as terminations."""
    outcome = run.rollout["next"]
    ended = outcome["done"].sum().item()
    truncated = (outcome["truncated"] & ~outcome["terminated"]).sum().item()
    if run.module.hparams.get("bootstrap_truncated", True) or not ended or truncated < 0.1 * ended:
        return None
    share = f"{100 * truncated / ended:.0f} % of the episodes"
    observation = f"{share} are truncated by a time limit, which counts as a termination"
    return observation, "model.bootstrap_truncated is off", "model.bootstrap_truncated true"


def dead_units(run: RunSnapshot) -> Diagnosis | None:
    """Check for units that are 0 or saturated for every observation: their gradient is 0."""
    observation = sample_rows(run.rollout, "observation")
    agent = run.module.agent
    shares: dict[str, float] = {}
    for name, body in (("policy", agent.actor_body), ("value function", agent.critic_body)):
        if body is not None:
            for layer, share in enumerate(_dead_shares(body, observation), start=1):
                shares[f"layer {layer} of the {name}"] = share
    worst = max(shares, key=lambda name: shares[name], default=None)
    if worst is None or shares[worst] <= 0.5:
        return None
    text = f"{100 * shares[worst]:.0f} % of the units in {worst} are constant over all observations"
    cause = "large inputs or large steps drove them out of their active range"
    return text, cause, "a lower model.learning_rate, or scaled observations"


def sinking_speed(run: RunSnapshot) -> Diagnosis | None:
    """Check for a slowdown: PyTorch's threads wait for each other if other processes use the CPU."""
    threads = torch.get_num_threads()
    if len(run.speeds) <= SPEEDS or threads == 1:
        return None
    *earlier, latest = run.speeds
    if latest >= statistics.median(earlier) / 2:
        return None
    observation = f"{latest:.0f} environment steps per second, {statistics.median(earlier):.0f} before"
    cause = f"the {threads} PyTorch threads wait for one that has no CPU core"
    return observation, cause, "--num_threads 1"


def _dead_shares(body: nn.Module, observation: Tensor) -> list[float]:
    """Return the share of dead units of each ReLU, or, without ReLUs, of each linear layer (before tanh)."""
    kinds: list[type[nn.Module]] = [nn.ReLU, nn.Linear]
    kind = next(kind for kind in kinds if any(isinstance(layer, kind) for layer in body.modules()))
    shares: list[float] = []

    def measure(layer: nn.Module, _: Any, output: Tensor) -> None:
        units = output.transpose(1, -1).flatten(0, -2)  # [rows, units or channels]
        dead = units <= 0 if kind is nn.ReLU else units.abs() > SATURATED
        shares.append(dead.all(dim=0).float().mean().item())

    hooks = [layer.register_forward_hook(measure) for layer in body.modules() if isinstance(layer, kind)]
    body(observation)
    for hook in hooks:
        hook.remove()
    return shares


def _in_second_half(run: RunSnapshot) -> bool:
    """Return whether half of the run is over: then low entropy and small updates are expected."""
    return run.module.rollouts_done - 1 > run.module.data.num_rollouts / 2


CHECKS: dict[str, Check] = {
    "ratio": ratio,
    "large KL": large_kl,
    "no clipping": no_clipping,
    "much clipping": much_clipping,
    "entropy collapse": entropy_collapse,
    "explained variance": unexplained_variance,
    "unscaled observations": unscaled_observations,
    "saturated actions": saturated_actions,
    "time limits": lost_truncations,
    "dead units": dead_units,
    "sinking speed": sinking_speed,
}
