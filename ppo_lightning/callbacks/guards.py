"""Guards: callbacks that stop a faulty run or warn about it."""

import functools
import math
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from tensordict import TensorDictBase
from torch import Tensor

from ppo_lightning.envs.rollout_checks import check_rollout
from ppo_lightning.errors import ConfigError, NonFiniteError
from ppo_lightning.models import ActorCritic
from ppo_lightning.models.heads import SquashedHead
from ppo_lightning.private import forget_writer
from ppo_lightning.rollouts.learner import Learner
from ppo_lightning.rollouts.storage import add_evaluation
from ppo_lightning.spaces.rows import EXACT
from ppo_lightning.utils import collectives
from ppo_lightning.utils.output import say
from ppo_lightning.utils.rounding import tolerance

GUARDED = ("log_metrics", "log_hyperparams", "save", "after_save_checkpoint", "finalize")
FREE_BYTES = 2**20  # that stay free on the disk


class QuietCallback(L.Callback):
    """Base class of the callbacks of every fit, without the hooks around a batch or a minibatch.

    Lightning takes 3 microseconds to call a hook, even an empty one. In an iteration of CartPole, 64 calls of
    each callback take 0.5 % of the time. Lightning skips a hook that is not callable.
    """

    on_train_batch_start: Any = None
    on_train_batch_end: Any = None
    on_before_zero_grad = None  # type: ignore[assignment]
    on_before_backward = None  # type: ignore[assignment]
    on_after_backward = None  # type: ignore[assignment]
    on_before_optimizer_step = None  # type: ignore[assignment]


class RolloutGuard(QuietCallback):
    """Callback that warns about faulty rollouts. ``ppo-lightning check-env`` sees more."""

    every = 100  # rollouts between two comparisons of the log-probabilities from acting and learning
    _rounding_known = False

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Learner, batch: Any, *args: Any) -> None:
        """Check a rollout [N, T]."""
        rollouts_before = pl_module.rollouts_done - 1
        # A game may start from one position.
        if not rollouts_before and "player" not in batch.keys():  # noqa: SIM118
            scales = isinstance(getattr(pl_module.agent, "head", None), SquashedHead)  # into any bounds
            for finding in check_rollout(batch, pl_module.data.env):
                if finding.severity != "note" and not (scales and finding.check == "action bounds"):
                    rank_zero_warn(f"environment: {finding.what} {finding.remedy}")
        if not self._rounding_known and pl_module.agent.normalizer is None:
            self._rounding_known = _warn_of_rounding(batch["observation"])
        if rollouts_before % self.every == 0 and "action_log_prob" in batch.keys():  # noqa: SIM118
            _compare_log_probs(pl_module, batch)


def _warn_of_rounding(observation: Tensor) -> bool:
    """Warn if float32 rounds raw observations, and return whether it does."""
    if observation.dtype.itemsize < 4:
        return False
    largest = torch.linalg.vector_norm(observation.float(), math.inf)  # copies no float32
    if largest <= EXACT:
        return False
    numbers = f"observations up to {largest.item():.3g}, and float32 rounds numbers beyond {EXACT}"
    rank_zero_warn(f"data.env_id has {numbers}: set model.agent.norm_obs to true.")
    return True


def _compare_log_probs(module: Learner, rollout: TensorDictBase) -> None:
    with module.trainer.precision_plugin.forward_context():
        recomputed, stored = log_probs_again(module.agent, rollout)
    drift = max((recomputed - stored).abs().tolist(), default=0.0)  # maybe no step counts
    if drift > tolerance(str(module.trainer.precision), module.device):
        warnings.warn(
            f"The log-probabilities of actions differ by up to {drift:.2g} between acting and learning:"
            " remove dropout and batch normalization from the agent.",
            stacklevel=2,
        )


def log_probs_again(agent: ActorCritic, rollout: TensorDictBase) -> tuple[Tensor, Tensor]:
    """Return recomputed and stored log-probabilities [K] of the first environments of a rollout [N, T]."""
    stored = rollout[: max(1, agent.microbatch_size // rollout.batch_size[1])]
    recomputed = stored.copy()
    for key in ("action_log_prob", "state_value"):
        recomputed[key] = torch.empty_like(stored[key])
    buffers = [(buffer, buffer.clone()) for buffer in agent.buffers()]
    add_evaluation(agent, recomputed)  # in training mode, as the update
    for buffer, value in buffers:
        buffer.copy_(value)
    # At other steps, an opponent may have acted.
    counted = stored.get("weight", torch.ones(stored.batch_size)) > 0
    return recomputed["action_log_prob"][counted], stored["action_log_prob"][counted]


class NonFiniteGuard(QuietCallback):
    """Callback that ends a run whose losses become non-finite."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Learner, *args: Any) -> None:
        """Raise a NonFiniteError that names the first loss that is NaN or infinite."""
        for name, value in trainer.callback_metrics.items():
            # If all value targets are equal, the explained variance is NaN by definition.
            if not name.startswith("losses/") or name == "losses/explained_variance" or math.isfinite(value):
                continue
            remedy = "lower the learning rate, or scale large rewards (PPO: model.norm_reward)"
            raise NonFiniteError(f"{name} is {value.item()} after {pl_module.env_steps} steps: {remedy}.")


class EqualRanksGuard(QuietCallback):
    """Callback that ends a run whose ranks start at different steps, or differ in weights or statistics."""

    every = 10  # rollouts between two comparisons of weights and statistics

    def on_train_start(self, trainer: L.Trainer, pl_module: Learner) -> None:
        """Compare the environment steps of all ranks: each rank looks for the checkpoint by itself."""
        steps = collectives.gather(torch.tensor(pl_module.env_steps)).tolist()
        if len(set(steps)) > 1:
            raise ConfigError(f"All ranks must see one folder of the run: they resume at steps {steps}.")

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Learner, *args: Any) -> None:
        """Raise a RuntimeError that names the first tensor of a rank that differs from that of rank 0."""
        if pl_module.rollouts_done % self.every or collectives.world_size() == 1:
            return
        tensors = {name: tensor for name, tensor in pl_module.state_dict().items() if tensor.numel()}
        bits = [tensor.reshape(-1).view(torch.uint8).to(torch.int64) for tensor in tensors.values()]
        weights = [torch.arange(1, tensor.numel() + 1, device=tensor.device) for tensor in bits]
        sums = [(a * b).sum() for a, b in zip(bits, weights, strict=True)]
        ranks = collectives.gather(torch.stack(sums).cpu())
        for name, checksums in zip(tensors, ranks.T.tolist(), strict=True):
            for rank, checksum in enumerate(checksums):
                if checksum != checksums[0]:
                    when = f"after {pl_module.env_steps} steps"
                    raise RuntimeError(f"{name} of rank {rank} is not that of rank 0 {when}.")


class LoggerGuard(QuietCallback):
    """Callback that logs all metrics over environment steps and survives failing loggers.

    Lightning's own x axis counts batches, also for ``LearningRateMonitor`` and ``DeviceStatsMonitor``.
    Nothing is written to a nearly full disk: CSVLogger rewrites its file for a new metric, and would lose it.
    """

    def setup(self, trainer: L.Trainer, pl_module: Learner, stage: str) -> None:
        """Wrap the methods of this Trainer's loggers."""
        self._failed: set[tuple[int, str]] = set()  # methods of loggers whose last call failed
        for logger in trainer.loggers:
            for name in GUARDED:
                setattr(logger, name, functools.partial(self._call, pl_module, logger, name))

    def _call(self, module: Learner, logger: Logger, name: str, *args: Any, **kwargs: Any) -> None:
        # The method of the class: that of the instance is wrapped.
        method = getattr(type(logger), name).__get__(logger)
        state = module.trainer.state
        if name == "log_metrics" and state.fn != TrainerFn.PREDICTING and state.stage:  # not after the fit
            args, kwargs = args[:1], kwargs | {"step": module.env_steps}
        try:
            # CSVLogger keeps metrics in memory until it saves.
            if not (isinstance(logger, CSVLogger) and name == "log_metrics"):
                _require_space(logger)
            method(*args, **kwargs)
        except Exception as error:  # a logger may raise anything: files, servers, serialization
            if isinstance(logger, TensorBoardLogger):
                forget_writer(logger)  # a writer that failed once never writes again
            if (id(logger), name) not in self._failed:
                failure = f"METRICS cannot be written by {type(logger).__name__}: {error}."
                say(f"{failure} Training continues.", sys.stderr)
            self._failed.add((id(logger), name))
        else:
            self._failed.discard((id(logger), name))


def _require_space(logger: Logger) -> None:
    """Raise OSError if the disk with the files of a logger is nearly full."""
    folder = Path(getattr(logger, "log_dir", None) or logger.save_dir or "")
    if not folder.is_dir():
        return
    table = folder / "metrics.csv"
    needed = FREE_BYTES + (table.stat().st_size if table.is_file() else 0)
    if shutil.disk_usage(folder).free < needed:
        raise OSError(f"the disk of {folder} has less than {needed / 2**20:.0f} MiB left")
