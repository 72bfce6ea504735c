"""The end of a run: at once if nothing is left, and explained if it is early."""

import lightning as L
from lightning.pytorch.utilities import rank_zero_warn

from ppo_lightning.callbacks.guards import QuietCallback
from ppo_lightning.envs.contract import SUCCESS
from ppo_lightning.errors import ConfigError
from ppo_lightning.rollouts.learner import Learner
from ppo_lightning.utils.output import say


class RunEnd(QuietCallback):
    """Callback that ends a complete run before an empty epoch, and explains an early end."""

    def on_train_start(self, trainer: L.Trainer, pl_module: Learner) -> None:
        """Stop a resumed run that is already complete."""
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
            if left > 0 and (reason := getattr(callback, "stopping_reason_message", None)):
                say(f"{type(callback).__name__} ended the run: {reason}")
        metrics = trainer.callback_metrics
        infos = [x for x in pl_module.data.factory.log_info if f"charts/{x}" not in metrics and x != SUCCESS]
        if infos and "charts/episodic_return" in metrics:
            rank_zero_warn(f"data.log_info: no episode ended with a number called {' or '.join(infos)}.")
