"""A callback that knows the illnesses of PPO runs, and says nothing while a run is well."""

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import lightning as L
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from ppo_lightning.callbacks.speed import RunSpeed, SpeedLog
from ppo_lightning.spaces.specs import mask_columns, not_measured

ROWS = 512  # of a rollout, that are looked at
SATURATED = 3.8  # whose tanh is 0.999
ITERATIONS = 10  # over which metrics are averaged
SPEEDS = 5  # stretches of iterations before the one whose speed may have sunk


class Finding(NamedTuple):
    """What the doctor saw in a run, the likely cause and what to try."""

    illness: str
    saw: str
    cause: str
    attempt: str

    def __str__(self) -> str:
        return f"{self.illness}: {self.saw}. Likely cause: {self.cause}. Try: {self.attempt}."


class Patient(NamedTuple):
    """What is looked at.

    Attributes:
        module: In training.
        rollout: [N, T], before its update.
        metrics: Means over the last iterations.
        iterations: Done in this fit.
        first_entropy: Of the first iteration.
        speeds: Of stretches of iterations, the newest last.
    """

    module: Any
    rollout: TensorDictBase
    metrics: dict[str, float]
    iterations: int
    first_entropy: float
    speeds: list[RunSpeed]


Check = Callable[[Patient], tuple[str, str, str] | None]  # to what was seen, the cause, what to try


class Doctor(L.Callback):
    """Looks at a run now and then, on rank 0, and prints each illness that it finds, once.

    The illnesses: a ratio other than 1 before the update; a large KL divergence; a clip fraction of 0, or a large one; a
    collapsed entropy; an explained variance below 0; observations that are not scaled; actions beyond their bounds; time
    limits taken for failures; dead units; a sinking speed. ``findings`` has them by name.

    Args:
        every: Looks in each so many iterations, and in none before them.
    """

    def __init__(self, every: int = 10) -> None:
        self.every = every
        self.findings: dict[str, Finding] = {}
        self._recent: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=ITERATIONS))
        self._first_entropy, self._iterations, self._speed = math.nan, 0, SpeedLog(ITERATIONS)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begins with a new patient."""
        self.findings.clear()
        self._recent.clear()
        self._first_entropy, self._iterations, self._speed = math.nan, 0, SpeedLog(ITERATIONS)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: Any, batch: TensorDictBase, batch_idx: int
    ) -> None:
        """Looks, before the update."""
        if not trainer.is_global_zero or not self._iterations or self._iterations % self.every:
            return
        metrics = {name: sum(values) / len(values) for name, values in self._recent.items()}
        self._speed.end_stretch(pl_module.data.frames_per_rollout)
        counts = self._iterations, self._first_entropy, self._speed.speeds
        patient = Patient(pl_module, batch, metrics, *counts)
        with torch.no_grad():
            for illness, check in CHECKS.items():
                if illness not in self.findings and (seen := check(patient)):
                    self.findings[illness] = Finding(illness, *seen)
                    print(
                        f"\ndoctor, after {pl_module.env_steps} environment steps: {self.findings[illness]}",
                        flush=True,
                    )

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Takes down the metrics and the time of the iteration, collection included."""
        self._iterations += 1
        self._speed.end_iteration()
        for name, value in trainer.callback_metrics.items():
            if name.startswith("losses/") and math.isfinite(value):
                self._recent[name.removeprefix("losses/")].append(float(value))
        if math.isnan(self._first_entropy):
            self._first_entropy = float(trainer.callback_metrics.get("losses/entropy", math.nan))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Leaves the time of an evaluation out."""
        self._speed.restart()


def rows_of(rollout: TensorDictBase, *keys: Any) -> list[Tensor]:
    """Returns some rows [B, ...] of a rollout, spread over environments and steps."""
    flat = [rollout[key].flatten(0, 1) for key in keys]
    return [rows[:: max(1, len(rows) // ROWS)] for rows in flat]


def ratio(patient: Patient) -> tuple[str, str, str] | None:
    """The ratio of the first minibatch is 1, or the update starts from another policy than the one that acted."""
    again, stored = patient.module.log_probs_again(patient.rollout)
    off = (again - stored).exp().sub(1).abs().max().item()
    if off <= 10 * patient.module.tolerance:
        return None
    saw = f"the ratio of new to old probabilities is off 1 by {off:.2g} before the update"
    return (
        saw,
        "the agent computes something else when it acts",
        "an agent without dropout and batch normalisation",
    )


def large_kl(patient: Patient) -> tuple[str, str, str] | None:
    """Above 0.02 the updates usually are too large (Huang et al., 2022)."""
    kl = patient.metrics.get("approx_kl", 0.0)
    if kl <= 0.02:
        return None
    cause = "the policy changes too much in one iteration"
    return (
        f"the approximate KL divergence is {kl:.3f}",
        cause,
        "a lower model.learning_rate, fewer model.update_epochs, or model.target_kl",
    )


def no_clipping(patient: Patient) -> tuple[str, str, str] | None:
    """Where nothing is ever clipped, the policy hardly moves."""
    kl = patient.metrics.get("approx_kl", 1.0)
    if patient.metrics.get("clipfrac", 1.0) > 0 or kl > 1e-5 or _late(patient):
        return None
    saw = f"no ratio is ever clipped, and the KL divergence is {kl:.1g}"
    return (
        saw,
        "the policy does not move",
        "a higher model.learning_rate, or a look at the rewards: are they all the same?",
    )


def much_clipping(patient: Patient) -> tuple[str, str, str] | None:
    """Where most is clipped, most samples teach nothing."""
    share = patient.metrics.get("clipfrac", 0.0)
    if share <= 0.4:
        return None
    attempt = "a lower model.learning_rate, fewer model.update_epochs, or larger minibatches"
    return f"{100 * share:.0f} % of the ratios are clipped", "the updates go too far", attempt


def entropy_collapse(patient: Patient) -> tuple[str, str, str] | None:
    """A policy that is certain early in the run explores no more."""
    head, entropy = patient.module.agent.head, patient.metrics.get("entropy", math.nan)
    if _late(patient) or not math.isfinite(patient.first_entropy + entropy):
        return None
    if head.largest_entropy is not None:
        masked = mask_columns(patient.module.data.specs.observation) is not None  # few actions may be allowed
        gone = entropy < 0.05 * (patient.first_entropy if masked else head.largest_entropy)
    else:  # of the standard deviation of each component, on average: log(20) = 3
        gone = entropy < patient.first_entropy - 3 * patient.rollout["action"].shape[-1]
    if not gone:
        return None
    saw = f"the entropy fell from {patient.first_entropy:.2f} to {entropy:.2g} in the first half of the run"
    return (
        saw,
        "the policy is certain before it has explored",
        "a higher model.ent_coef, or a lower model.learning_rate",
    )


def unexplained_variance(patient: Patient) -> tuple[str, str, str] | None:
    """Below 0 the values are worse than a constant; at the start, a little below is nothing."""
    explained = patient.metrics.get("explained_variance", 0.0)
    if patient.iterations < 3 * ITERATIONS or explained > -0.05:
        return None
    cause = "the value function does not follow the returns, which may be large or change fast"
    return (
        f"the explained variance is {explained:.2f}",
        cause,
        "model.norm_reward, model.clip_vloss false, or separate networks (shared: false)",
    )


def unscaled_observations(patient: Patient) -> tuple[str, str, str] | None:
    """Networks of tanh or ReLU want inputs of size 1."""
    (observation,) = rows_of(patient.rollout, "observation")
    if not observation.is_floating_point() or patient.module.agent.normalizer is not None:
        return None
    sizes = observation.abs().flatten(1).mean(dim=0)
    for its in not_measured(patient.module.data.specs.observation):
        sizes[its] = 0
    size = sizes.max().item()
    if size <= 20:
        return None
    saw = f"an observation's component has a mean size of {size:.3g}"
    return saw, "the networks see numbers far from 1", "model.agent.norm_obs true"


def saturated_actions(patient: Patient) -> tuple[str, str, str] | None:
    """Actions are clipped to their bounds: beyond them all are the same."""
    (action,) = rows_of(patient.rollout, "action")
    space: Any = getattr(patient.module.data.specs.action, "space", None)
    if not action.is_floating_point() or not hasattr(space, "low"):
        return None
    beyond = ((action < space.low.to(action)) | (action > space.high.to(action))).float().mean().item()
    if beyond <= 0.5:
        return None
    saw = f"{100 * beyond:.0f} % of the actions' components are beyond their bounds"
    cause = "the bounds are much narrower than the policy's standard deviation"
    return saw, cause, "an environment whose actions are scaled to [-1, 1], or model.agent.head tanh_gaussian"


def lost_truncations(patient: Patient) -> tuple[str, str, str] | None:
    """A time limit is no failure."""
    following = patient.rollout["next"]
    ended, cut = (
        following["done"].sum().item(),
        (following["truncated"] & ~following["terminated"]).sum().item(),
    )
    if patient.module.hparams.bootstrap_truncated or not ended or cut < 0.1 * ended:
        return None
    saw = f"{100 * cut / ended:.0f} % of the episodes are cut by a time limit, which counts as a failure"
    return saw, "model.bootstrap_truncated is off", "model.bootstrap_truncated true"


def dead_units(patient: Patient) -> tuple[str, str, str] | None:
    """Units that are 0, or fully saturated, for every observation pass on nothing and learn nothing."""
    (observation,) = rows_of(patient.rollout, "observation")
    agent, shares = patient.module.agent, {}
    for name, body in (("policy", agent.actor_body), ("value function", agent.critic_body)):
        if body is None:
            continue
        with _outputs(body) as outputs:
            body(observation)
        for layer, (kind, output) in enumerate(outputs, start=1):
            units = output.transpose(1, -1).flatten(0, -2)  # [rows, units or channels]
            dead = units <= 0 if kind is nn.ReLU else units.abs() > SATURATED
            shares[f"layer {layer} of the {name}"] = dead.all(dim=0).float().mean().item()
    worst = max(shares, key=lambda name: shares[name], default=None)
    if worst is None or shares[worst] <= 0.5:
        return None
    saw = f"{100 * shares[worst]:.0f} % of the units in {worst} give the same for every observation"
    return (
        saw,
        "large inputs or steps drove them out of their range",
        "a lower model.learning_rate, or observations that are scaled",
    )


def sinking_speed(patient: Patient) -> tuple[str, str, str] | None:
    """PyTorch's threads wait for each other where other processes take the processors."""
    if len(patient.speeds) <= SPEEDS:
        return None
    *earlier, now = patient.speeds
    before, used = (statistics.median(values) for values in list(zip(*earlier, strict=True))[:2])
    if now.sps >= before / 2 or (now.threads == 1 and not (now.crowded and now.used < 0.7 * used)):
        return None
    load = "" if now.load is None else f", load average {now.load:.1f}"
    share = f"{now.used:.1f} of {now.available} processors{load}"
    saw = f"{now.sps:.0f} environment steps a second, {before:.0f} before ({share})"
    if now.threads == 1:
        return saw, "other processes take the processors", "fewer processes at a time on this machine"
    cause = f"each of {now.threads} PyTorch threads waits for one without a processor"
    return saw, cause, "--num_threads 1"


@contextmanager
def _outputs(body: nn.Module) -> Iterator[list[tuple[type[nn.Module], Tensor]]]:
    """Collects what the ReLUs of a body give; where there are none, its linear layers, for the tanh that follows them."""
    found: list[tuple[type[nn.Module], Tensor]] = []
    kinds: list[type[nn.Module]] = [nn.ReLU, nn.Linear]
    kind = next(kind for kind in kinds if any(isinstance(layer, kind) for layer in body.modules()))
    layers = [layer for layer in body.modules() if isinstance(layer, kind)]
    hooks = [
        layer.register_forward_hook(lambda it, _, output: found.append((type(it), output)))
        for layer in layers
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _late(patient: Patient) -> bool:
    """Returns whether half of the run is over, when the learning rate is low and a policy may be certain."""
    return patient.module.rollouts_done > patient.module.data.num_rollouts / 2


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
