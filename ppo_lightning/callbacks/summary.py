"""Printed summary at the start and the end of a run."""

import math
import os
import time
from pathlib import Path
from typing import Any

import lightning as L

from ppo_lightning import private
from ppo_lightning.callbacks.guards import Guard
from ppo_lightning.checkpoints.resume import folders_of_runs
from ppo_lightning.rollouts.learner import Learner
from ppo_lightning.utils.rounding import decimals

WARM_UP = 10  # rollouts


class RunSummary(Guard):
    """Callback that prints agent and evaluation, and at the end returns, wall-clock time and checkpoint.

    Every fit has this callback, unless the Trainer has one already.
    If the observation has several entries, the callback also prints which ones actor and critic read.

    Example:
        >>> trainer = L.Trainer(callbacks=[RunSummary()])
    """

    _limits_epochs = False

    def on_fit_start(self, trainer: L.Trainer, pl_module: Learner) -> None:
        """Print the agent, its entries and the interval of evaluation on rank 0, and start the clock."""
        agent = pl_module.agent
        data = pl_module.data
        if trainer.is_global_zero:
            size = sum(weight.numel() for weight in agent.parameters())
            reads = getattr(agent, "reads", "")
            names = f"{type(pl_module).__name__}, {type(agent).__name__}"
            print(f"{names}: {size} parameters{reads and f', {reads}'}")
            entries = getattr(agent, "entries", None)
            if entries is not None and len(entries.actor | entries.critic) > 1:
                print(entries)
            shares = [getattr(trainer, x, 0) for x in ("val_check_interval", "limit_train_batches")]
            if trainer.enable_validation and all(type(x) is float and x == 1 for x in shares):
                rollouts = data.rollouts_per_epoch * (trainer.check_val_every_n_epoch or 1)
                steps = rollouts * data.frames_per_rollout
                print(f"evaluation every {steps} environment steps, episodes: {data.eval_episodes}")
        self._started = time.perf_counter()
        self._steps_before = pl_module.env_steps

    def on_train_start(self, trainer: L.Trainer, pl_module: Learner) -> None:
        """Let progress bars show the number of epochs, which Lightning does not know."""
        self._rollouts = 0
        self._limits_epochs = trainer.max_epochs == -1
        if self._limits_epochs:
            length = max(int(trainer.num_training_batches), 1)
            left = pl_module.data.num_rollouts - pl_module.rollouts_done
            # A resumed epoch may have any length; with `max_steps`, Lightning repeats the last one as empty.
            begun = (1 if trainer.max_steps == -1 else 2) if trainer.ckpt_path else 0
            trainer.fit_loop.max_epochs = trainer.current_epoch + math.ceil(left / length) + begun

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Learner, *args: Any) -> None:
        """Let bars refresh twice a second: with Rich, a refresh delays a rollout of CartPole by a tenth."""
        # Rollouts before the first update of an off-policy algorithm are many times as fast.
        self._rollouts += pl_module.env_steps > pl_module.hparams.get("learning_starts", 0)
        if self._rollouts == WARM_UP:  # a graph is compiled by now
            self._warm = time.perf_counter()
        elif self._rollouts == 2 * WARM_UP:
            seconds = (time.perf_counter() - self._warm) / WARM_UP
            private.limit_refreshes(trainer, max(1, round(0.5 / seconds)))

    def on_train_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Restore the limit, so that the same Trainer can fit again."""
        if self._limits_epochs:
            trainer.fit_loop.max_epochs = -1
        self._limits_epochs = False

    on_exception = on_train_end  # type: ignore[assignment]

    def on_fit_end(self, trainer: L.Trainer, pl_module: Learner) -> None:
        """Print the summary on rank 0."""
        if not trainer.is_global_zero:
            return
        seconds = time.perf_counter() - self._started
        steps = pl_module.env_steps - self._steps_before
        if (mean := pl_module.mean_return) is not None:
            print(f"return over the last {len(pl_module.episode_returns)} episodes: {mean:{decimals(mean)}}")
        metrics = trainer.callback_metrics
        if pl_module.evaluated_at == pl_module.env_steps and "eval/episodic_return" in metrics:
            digits = decimals(float(metrics["eval/episodic_return"]))
            average, std, lowest, highest = (
                f"{metrics[f'eval/episodic_return{name}']:{digits}}" for name in ("", "_std", "_min", "_max")
            )
            print(
                f"evaluation, deterministic: return {average} ± {std} (min {lowest}, max {highest}),"
                f" length {metrics['eval/episodic_length']:.1f}"
            )
        if not steps and pl_module.rollouts_done >= pl_module.data.num_rollouts:
            print(f"already at {pl_module.env_steps} steps: raise data.total_timesteps to train longer")
        print(
            f"wall time: {seconds:.1f} s for {steps} environment steps,"
            f" {steps / seconds:.0f} steps per second"
        )
        saved = trainer.checkpoint_callback
        path = getattr(saved, "best_model_path", "") or getattr(saved, "last_model_path", "")
        if path and not Path(path).is_file():
            print(f"checkpoint: NOT WRITTEN, look for older ones in {Path(path).resolve().parent}")
        else:
            print(f"checkpoint: {Path(path).resolve()}" if path else "checkpoint: none")
        if path:
            folders = ", ".join(repr(os.path.relpath(folder)) for folder in folders_of_runs(trainer))
            print(f"newest checkpoint of all runs: ppo_lightning.last_checkpoint({folders})")
