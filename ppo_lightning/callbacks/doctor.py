"""Doctor: a callback that diagnoses common failures of training."""

import math
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import lightning as L
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn import functional

from ppo_lightning.models import ActorCritic
from ppo_lightning.rollouts.learner import Learner
from ppo_lightning.spaces.specs import mask_columns, not_measured
from ppo_lightning.utils.arguments import Range, check_arguments
from ppo_lightning.utils.output import accessory, say

ROWS = 512  # rows of a rollout that the checks use
SATURATED = 3.8  # input whose tanh is 0.999
ITERATIONS = 10  # iterations over which metrics are averaged


class RunSnapshot(NamedTuple):
    """State of a run before an update."""

    module: Learner
    rollout: TensorDictBase  # [N, T], of the coming update
    metrics: dict[str, float]  # mean of each loss metric over the last iterations
    iterations: int  # since the start of ``fit``
    first_entropy: float  # of the first iteration


class Doctor(L.Callback):
    """Callback that diagnoses a run at regular intervals, on rank 0, and prints each symptom once.

    Symptoms: a large KL divergence, no clipped ratio, an entropy collapse, a negative explained variance,
    unscaled observations and dead units. ``findings`` maps each symptom to a sentence with what was observed,
    the likely cause and a remedy. Training is not changed.

    Args:
        every: Iterations between two checks.

    Example:
        >>> doctor = Doctor(every=10)
        >>> trainer = L.Trainer(callbacks=[doctor])
        >>> doctor.findings
        {}
    """

    def __init__(self, every: Annotated[int, Range(1)] = 10) -> None:
        check_arguments(Doctor.__init__, locals(), "Doctor")
        self.every = every
        self.findings: dict[str, str] = {}

    def on_fit_start(self, *args: Any) -> None:
        """Forget the previous run."""
        self.findings.clear()
        self._recent: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=ITERATIONS))
        self._first_entropy = math.nan
        self._iterations = 0

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Learner, batch: Any, *args: Any) -> None:
        """Check the run before the update and print new findings."""
        if not trainer.is_global_zero or not self._iterations or self._iterations % self.every:
            return
        metrics = {name: sum(values) / len(values) for name, values in self._recent.items()}
        snapshot = RunSnapshot(pl_module, batch, metrics, self._iterations, self._first_entropy)
        with torch.no_grad():
            for symptom, (check, cause, remedy) in CHECKS.items():
                if symptom in self.findings:
                    continue
                with accessory(f"The doctor's check for {symptom}"):
                    if observed := check(snapshot):
                        finding = f"{observed}. Likely cause: {cause}. Try: {remedy}."
                        self.findings[symptom] = finding
                        say(f"doctor, after {pl_module.env_steps} environment steps: {symptom}: {finding}")

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Learner, *args: Any) -> None:
        """Record the metrics of the iteration."""
        self._iterations += 1
        for name, value in trainer.callback_metrics.items():
            if name.startswith("losses/") and math.isfinite(value):
                self._recent[name.removeprefix("losses/")].append(float(value))
        if math.isnan(self._first_entropy):
            self._first_entropy = float(trainer.callback_metrics.get("losses/entropy", math.nan))


def sample_observations(run: RunSnapshot) -> Tensor:
    """Return observations [B, ...] of the rollout, evenly spread over environments and steps."""
    rows = run.rollout["observation"].flatten(0, 1)
    return rows[torch.linspace(0, len(rows) - 1, min(ROWS, len(rows))).long()]


def large_kl(run: RunSnapshot) -> str | None:
    """Check the KL divergence: above 0.02, updates usually are too large (Huang et al., 2022)."""
    kl = run.metrics.get("approx_kl", 0.0)
    return f"the approximate KL divergence is {kl:.3f}" if kl > 0.02 else None


def no_clipping(run: RunSnapshot) -> str | None:
    """Check whether any ratio is clipped: if none ever is, the policy hardly changes."""
    kl = run.metrics.get("approx_kl", 1.0)
    if run.metrics.get("clipfrac", 1.0) > 0 or kl > 1e-5 or _in_second_half(run):
        return None
    return f"no ratio is ever clipped, and the KL divergence is {kl:.1g}"


def entropy_collapse(run: RunSnapshot) -> str | None:
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
    fall = f"the entropy fell from {run.first_entropy:.2f} to {entropy:.2g} in the first half of the run"
    return fall if collapsed else None


def unexplained_variance(run: RunSnapshot) -> str | None:
    """Check the explained variance: below 0, the values are worse than a constant."""
    explained = run.metrics.get("explained_variance", 0.0)
    if run.iterations < 3 * ITERATIONS or explained > -0.05:  # slightly negative at the start is normal
        return None
    # The returns of a solved task hardly vary, so that small errors explain none of it.
    if run.metrics.get("value_loss", math.inf) < 1e-3 * run.rollout["state_value"].square().mean():
        return None
    return f"the explained variance is {explained:.2f}"


def unscaled_observations(run: RunSnapshot) -> str | None:
    """Check the scale of observations: networks need inputs of magnitude about 1."""
    observation = sample_observations(run)
    is_scaled = observation.dtype == torch.uint8  # networks divide bytes by 255
    if is_scaled or run.module.agent.normalizer is not None:
        return None
    magnitudes = observation.float().abs().flatten(1).mean(dim=0)
    for columns in not_measured(run.module.data.specs.observation):
        magnitudes[columns] = 0
    largest = magnitudes.max().item()
    return f"a component of the observations has a mean magnitude of {largest:.3g}" if largest > 20 else None


def dead_units(run: RunSnapshot) -> str | None:
    """Check for units that are 0 or saturated for every observation: their gradient is 0."""
    observation = sample_observations(run)
    agent = run.module.agent
    shares: dict[str, float] = {}
    bodies = {"policy": agent.actor_body}
    if isinstance(agent, ActorCritic):
        bodies["value function"] = agent.critic_body
    for name, body in bodies.items():
        if body is not None:
            for layer, share in enumerate(dead_shares(body, observation), start=1):
                shares[f"layer {layer} of the {name}"] = share
    worst = max(shares, key=lambda name: shares[name], default=None)
    if worst is None or shares[worst] <= 0.5:
        return None
    return f"{100 * shares[worst]:.0f} % of the units in {worst} are constant over all observations"


def dead_shares(body: nn.Module, observation: Tensor) -> list[float]:
    """Return the share of dead units of each ReLU, or, without ReLUs, of each linear layer (its inputs)."""
    has_relu = any(isinstance(layer, nn.ReLU) for layer in body.modules())
    kind: type[nn.Module] = nn.ReLU if has_relu else nn.Linear
    named = (part.activation for part in body.modules() if hasattr(part, "activation"))
    activation = torch.relu if has_relu else next(named, None)  # None: as tanh
    shares: list[float] = []

    def measure(layer: nn.Module, _: Any, output: Tensor) -> None:
        units = output.transpose(1, -1).flatten(0, -2)  # [rows, units or channels]
        dead = (units <= 0 if activation is torch.relu else units < -SATURATED).all(dim=0)
        if activation not in (torch.relu, functional.elu):
            dead |= (units > SATURATED).all(dim=0)
        shares.append(dead.float().mean().item())

    hooks = [layer.register_forward_hook(measure) for layer in body.modules() if isinstance(layer, kind)]
    body(observation)
    for hook in hooks:
        hook.remove()
    return shares


def _in_second_half(run: RunSnapshot) -> bool:
    """Return whether half of the run is over: then low entropy and small updates are expected."""
    return run.module.rollouts_done - 1 > run.module.data.num_rollouts / 2


# Symptom -> check that returns what it observed, likely cause, remedy
CHECKS: dict[str, tuple[Callable[[RunSnapshot], str | None], str, str]] = {
    "large KL": (
        large_kl,
        "the policy changes too much in one iteration",
        "a lower model.learning_rate, fewer model.update_epochs, or model.target_kl",
    ),
    "no clipping": (
        no_clipping,
        "the policy does not change",
        "a higher model.learning_rate, and check whether all rewards are equal",
    ),
    "entropy collapse": (
        entropy_collapse,
        "the policy became nearly deterministic before it explored enough",
        "a higher model.ent_coef, or a lower model.learning_rate",
    ),
    "explained variance": (
        unexplained_variance,
        "the value function does not fit the returns, which may be large or change fast",
        "model.norm_reward, model.clip_vloss false, or separate networks (shared: false)",
    ),
    "unscaled observations": (
        unscaled_observations,
        "the inputs of the networks are far from 1",
        "model.agent.norm_obs true",
    ),
    "dead units": (
        dead_units,
        "large inputs or large steps drove them out of their active range",
        "a lower model.learning_rate, or scaled observations",
    ),
}
