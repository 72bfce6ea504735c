"""Adam, its steps, plain and compiled, and the schedule of its learning rate."""

import warnings
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ppo_lightning.algorithms.agent_module import AgentModule
from ppo_lightning.algorithms.compiled import CompiledUpdate, Loss, compile_anew
from ppo_lightning.algorithms.graphs import GraphedAct
from ppo_lightning.algorithms.minibatches import Minibatch, equal_parts, mean_of
from ppo_lightning.utils import collectives

KL_STEP, SLOWEST, FASTEST = 1.5, 1e-5, 1e-2  # of the learning rate that follows the KL divergence


class OptimizerModule(AgentModule):
    """Optimises its agent; the schedule counts iterations.

    A subclass has the hyperparameters ``learning_rate``, ``anneal_lr``, ``desired_kl`` and ``adam_eps``.
    """

    whole_graph: bool
    clip_coef: float | Tensor
    loss: Loss
    _loss: Loss  # compiled, on several ranks
    _compiled: CompiledUpdate | None = None
    kl_factor = 1.0  # of the learning rate, with ``desired_kl``

    def setup(self, stage: str) -> None:
        """See :meth:`AgentModule.setup`."""
        super().setup(stage)
        if stage == "fit":
            self.kl_factor = 1.0  # a checkpoint's is loaded after this

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """See :meth:`AgentModule.on_save_checkpoint`."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["kl_factor"] = self.kl_factor

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """See :meth:`AgentModule.on_load_checkpoint`."""
        super().on_load_checkpoint(checkpoint)
        self.kl_factor = checkpoint.get("kl_factor", 1.0)

    def configure_optimizers(self) -> Any:
        """Returns Adam and the schedule of the learning rate, which ``training_step`` steps once an iteration."""
        fused = self.trainer.precision == "32-true"  # Lightning does not clip for a fused one in mixed precision
        # detail 3
        optimizer = torch.optim.Adam(
            self.agent.parameters(), lr=self.hparams.learning_rate, eps=self.hparams.adam_eps, fused=fused
        )
        # detail 4
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.learning_rate_factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def learning_rate_factor(self, rollouts_done: int) -> float:
        """Returns what the learning rate is multiplied with in an iteration."""
        if self.hparams.desired_kl is not None:
            return self.kl_factor
        return self.remaining(rollouts_done) if self.hparams.anneal_lr else 1.0

    def adapt_learning_rate(self, approx_kl: Tensor) -> None:
        """Moves the learning rate where the policy of an iteration has moved too far, or hardly; the same on all ranks."""
        desired, lr = self.hparams.desired_kl, self.hparams.learning_rate
        if desired is None:
            return
        kl = float(collectives.gather(approx_kl).mean())
        factor = KL_STEP if kl < desired / 2 else 1 / KL_STEP if kl > 2 * desired else 1.0
        self.kl_factor = min(max(self.kl_factor * factor, SLOWEST / lr), FASTEST / lr)

    def keep_settings(self) -> None:
        """Override the optimizer settings of a checkpoint with those of this run."""
        if getattr(self.schedule, "lr_lambdas", None) != [self.learning_rate_factor]:
            return  # a subclass configures its own
        lr = self.hparams.learning_rate
        self.schedule.base_lrs = [lr]
        optimizer = self.trainer.optimizers[0]
        fused = optimizer.defaults.get("fused")
        eps = optimizer.defaults.get("eps")  # as configure_optimizers chose it
        for group in optimizer.param_groups:
            factor = self.learning_rate_factor(self.rollouts_done)
            group.update(initial_lr=lr, lr=lr * factor, eps=eps, fused=fused)
        for parameter, state in optimizer.state.items():
            if fused and "step" in state:  # on the CPU, if the checkpoint is of another precision
                state["step"] = state["step"].to(parameter.device)
        self.schedule._last_lr = [group["lr"] for group in optimizer.param_groups]

    def remaining(self, rollouts_done: int) -> float:
        """Returns the share of the run that is left: 1 in the first iteration, 1 / num_rollouts in the last."""
        return max(0.0, 1 - rollouts_done / self.data.num_rollouts)

    def update(self, minibatch: Minibatch) -> dict[str, Tensor]:
        """Takes one optimizer step on a minibatch and returns the parts of its loss."""
        optimizer: Any = self.optimizers()
        weight = minibatch.pop("weight", None)  # where ranks have unequal numbers of valid steps
        # Their gradients are added: the same result, while the activations of many rows would not fit into a cache.
        parts = [minibatch] if "valid" in minibatch else equal_parts(minibatch, self.rows_at_once)
        usual = len(minibatch["action"]) == self._minibatch_rows  # what the graph is made for
        if self._compiled is not None and self._compiled.ready and usual:
            optimizer._on_before_step()  # Lightning's count of steps, which optimizer.step() keeps otherwise
            metrics = self._compiled(parts)
            optimizer._on_after_step()
            if self._compiled.drift > self.tolerance:
                warnings.warn(f"The compiled loss is off by {self._compiled.drift:.2g}: going on without it.", stacklevel=2)
                self._compiled = None
            return metrics
        optimizer.zero_grad()
        every = []
        without_exchange = getattr(self.trainer.model, "no_sync", nullcontext)
        for number, part in enumerate(parts, start=1):
            with nullcontext() if number == len(parts) else without_exchange():
                loss, metrics = self._loss(part)
                if weight is not None:
                    loss, metrics = loss * weight, {key: value * weight for key, value in metrics.items()}
                # detail A2
                self.manual_backward(loss / len(parts))  # the last one averages the gradients of all ranks
            every.append(metrics)
        # detail 11
        self.clip_gradients(optimizer, self.hparams.max_grad_norm, "norm")
        optimizer.step()
        if self._compiled is not None:
            optimizer.zero_grad()
        return every[0] if len(every) == 1 else mean_of(every)

    def on_train_start(self) -> None:
        """Keeps this run's settings where a checkpoint has others; compiles."""
        if self.rollouts_done >= self.data.num_rollouts:  # of a checkpoint: Lightning's own count may be behind
            self.trainer.should_stop = True
        self.keep_settings()
        if self.hparams.compile:
            self.clip_coef = torch.zeros((), device=self.device)
            if self.trainer.world_size == 1 and self.whole_graph:
                options = self.hparams.max_grad_norm, self.hparams.cuda_graphs
                self._compiled = CompiledUpdate(self, self.trainer.optimizers[0], *options)
            else:
                self._loss = compile_anew(self.loss, self.whole_graph)
        if self.hparams.cuda_graphs:
            self.agent.act = GraphedAct(self.agent)  # type: ignore[method-assign]

    def on_train_end(self) -> None:
        """Drops what was compiled."""
        self._drop_compiled()

    def on_exception(self, exception: BaseException) -> None:
        """Drops what was compiled, and gives the threads back, when a run is interrupted."""
        super().on_exception(exception)
        self._drop_compiled()

    def _drop_compiled(self) -> None:
        self._compiled, self._loss, self.clip_coef = None, self.loss, float(self.clip_coef)
        if self.agent is not None:
            self.agent.__dict__.pop("act", None)

    @property
    def schedule(self) -> Any:
        """The learning rate's schedule, which Lightning holds; None if ``configure_optimizers`` returns none."""
        return self.lr_schedulers()
