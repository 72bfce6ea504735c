"""First and last lines of a run, and why it ended early."""

import os
import time
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.utilities import rank_zero_warn

from ppo_lightning import private
from ppo_lightning.callbacks.guards import QuietCallback
from ppo_lightning.checkpoints.resume import folders_of_runs
from ppo_lightning.envs.contract import SUCCESS
from ppo_lightning.errors import ConfigError
from ppo_lightning.rollouts.learner import Learner
from ppo_lightning.utils.output import say
from ppo_lightning.utils.rounding import decimals


class RunSummary(QuietCallback):
    """Callback that prints agent and evaluation, and at the end returns, wall-clock time and checkpoint.

    Every fit has this callback, unless the Trainer has one already.
    If the observation has several entries, the callback also prints which ones actor and critic read.

    Example:
        >>> trainer = L.Trainer(callbacks=[RunSummary()])
    """

    def on_fit_start(self, trainer: L.Trainer, pl_module: Learner) -> None:
        """Print the agent, its entries and the interval of evaluation on rank 0, and start the clock."""
        agent = pl_module.agent
        plan = pl_module.data.plan
        if trainer.is_global_zero:
            size = sum(weight.numel() for weight in agent.parameters())
            names = f"{type(pl_module).__name__}, {type(agent).__name__}"
            print(f"{names}: {size} parameters{agent.reads and f', {agent.reads}'}")
            if (entries := agent.entries) is not None and len(entries.actor | entries.critic) > 1:
                print(entries)
            data = pl_module.data
            chosen = {name: pl_module.hparams[name] for name in getattr(pl_module, "left_out", ())}
            sizes = [name for name in ("num_envs", "num_steps") if data.hparams[name] is None]
            chosen |= {f"data.{name}": getattr(data, name) for name in sizes}
            if chosen:
                print("chosen:", ", ".join(f"{name} {value}" for name, value in chosen.items()))
            if (start := getattr(pl_module, "learning_starts", 0)) > pl_module.env_steps:
                print(f"learning starts after {start} environment steps")
            shares = [getattr(trainer, x, 0) for x in ("val_check_interval", "limit_train_batches")]
            if trainer.enable_validation and all(type(x) is float and x == 1 for x in shares):
                rollouts = plan.rollouts_per_epoch * (trainer.check_val_every_n_epoch or 1)
                steps = rollouts * plan.frames_per_rollout
                print(f"evaluation every {steps} environment steps, episodes: {plan.eval_episodes}")
        self._started = time.perf_counter()
        self._steps_before = pl_module.env_steps

    def on_fit_end(self, trainer: L.Trainer, pl_module: Learner) -> None:
        """Print the summary on rank 0."""
        if not trainer.is_global_zero:
            return
        seconds = time.perf_counter() - self._started
        steps = pl_module.env_steps - self._steps_before
        progress = pl_module.progress
        if (mean := progress.mean_return) is not None:
            print(f"return over the last {len(progress.episode_returns)} episodes: {mean:{decimals(mean)}}")
        metrics = trainer.callback_metrics
        if progress.evaluated_at == progress.env_steps and "eval/episodic_return" in metrics:
            digits = decimals(float(metrics["eval/episodic_return"]))
            average, std, lowest, highest = (
                f"{metrics[f'eval/episodic_return{name}']:{digits}}" for name in ("", "_std", "_min", "_max")
            )
            length = f"length {metrics['eval/episodic_length']:.1f}"
            print(
                f"evaluation, deterministic: return {average} ± {std} (min {lowest}, max {highest}), {length}"
            )
        if not steps and pl_module.rollouts_done >= pl_module.data.num_rollouts:
            print(f"already at {pl_module.env_steps} steps: raise data.total_timesteps to train longer")
        rate = f"{steps / seconds:.0f} steps per second"
        print(f"wall time: {seconds:.1f} s for {steps} environment steps, {rate}")
        saved = trainer.checkpoint_callback
        path = getattr(saved, "best_model_path", "") or getattr(saved, "last_model_path", "")
        if path and not Path(path).is_file():
            print(f"checkpoint: NOT WRITTEN, look for older ones in {Path(path).resolve().parent}")
        else:
            print(f"checkpoint: {Path(path).resolve()}" if path else "checkpoint: none")
        if path:
            folders = ", ".join(repr(os.path.relpath(folder)) for folder in folders_of_runs(trainer))
            print(f"newest checkpoint of all runs: ppo_lightning.last_checkpoint({folders})")


class RunEnd(QuietCallback):
    """Callback that ends a complete run before an empty epoch, and explains an early end."""

    def on_train_start(self, trainer: L.Trainer, pl_module: Learner) -> None:
        """Stop a resumed run that is already complete, with its last evaluation."""
        if not private.begins_with_evaluation(trainer):
            self.on_train_epoch_end(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Learner) -> None:
        """Stop a complete run."""
        if pl_module.rollouts_done >= pl_module.data.num_rollouts:
            trainer.should_stop = True

    def on_fit_end(self, trainer: L.Trainer, pl_module: Learner) -> None:
        """Explain why a run ended early, and name infos that never had a number."""
        progress, plan = pl_module.progress, pl_module.data.plan
        left = plan.num_frames - progress.rollout_steps
        if progress.env_steps == progress.steps_before and left > 0:
            counts = {"max_epochs": trainer.current_epoch, "max_steps": trainer.global_step}
            ended = (name for name, count in counts.items() if 0 <= getattr(trainer, name) <= count)
            limit = next(ended, "max_time, of all attempts together,")
            raise ConfigError(f"trainer.{limit} ended the run with {left} steps left: raise it to continue.")
        if left > 0 and 0 <= trainer.max_steps <= trainer.global_step:
            counted = "batches" if pl_module.steps_per_rollout == 1 else "optimizer steps"
            steps = f"{progress.env_steps} of {progress.env_steps + left} environment steps"
            limit = f"trainer.max_steps ({trainer.max_steps})"
            rank_zero_warn(f"{limit} counts {counted}: it ended the run after {steps}.")
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            reason = getattr(callback, "stopping_reason_message", None)  # of an EarlyStopping
            if isinstance(callback, Timer) and (callback.time_remaining() or 1) < 0:
                reason = f"no time left after {progress.env_steps} environment steps"
            if left > 0 and reason:
                say(f"{type(callback).__name__} ended the run: {reason}")
            monitor = str(getattr(callback, "monitor", None))
            if monitor.startswith("charts/") and monitor not in trainer.callback_metrics:
                rank_zero_warn(f"{type(callback).__name__} monitors {monitor}, which this run never had.")
        metrics = trainer.callback_metrics
        infos = [x for x in pl_module.data.factory.log_info if f"charts/{x}" not in metrics and x != SUCCESS]
        if infos and "charts/episodic_return" in metrics:
            rank_zero_warn(f"data.log_info: no episode ended with a number called {' or '.join(infos)}.")
