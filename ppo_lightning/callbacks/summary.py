"""Printed summary at the start and the end of a run."""

import time
from pathlib import Path
from typing import Any

import lightning as L

from ppo_lightning.utils.rounding import decimals


class RunSummary(L.Callback):
    """Callback that prints the size of the agent, and at the end returns, wall-clock time and checkpoint.

    If the observation has several entries, the callback also prints which ones actor and critic read.

    Example:
        >>> trainer = L.Trainer(max_epochs=-1, callbacks=[RunSummary()])
    """

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Print the number of parameters and the entries on rank 0, and start the clock."""
        agent = pl_module.agent
        if trainer.is_global_zero:
            size = sum(weight.numel() for weight in agent.parameters())
            print(f"{type(agent).__name__}: {size} parameters")
            entries = agent.entries
            if entries is not None and len(entries.actor | entries.critic) > 1:
                print(entries)
        self._started = time.perf_counter()
        self._steps_before = pl_module.env_steps

    def on_fit_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Print the summary on rank 0."""
        if not trainer.is_global_zero:
            return
        seconds = time.perf_counter() - self._started
        steps = pl_module.env_steps - self._steps_before
        returns = list(pl_module.episode_returns)
        if returns:
            mean = sum(returns) / len(returns)
            print(f"return over the last {len(returns)} episodes: {mean:{decimals(mean)}}")
        metrics = trainer.callback_metrics
        results = {
            key.removeprefix("eval/"): metrics[key].item() for key in metrics if key.startswith("eval/")
        }
        if results:
            names = ("episodic_return", "episodic_return_std", "episodic_return_min", "episodic_return_max")
            mean, std, lowest, highest = (
                f"{results[name]:{decimals(results['episodic_return'])}}" for name in names
            )
            print(
                f"evaluation, deterministic: return {mean} ± {std} (min {lowest}, max {highest}),"
                f" length {results['episodic_length']:.1f}"
            )
        if not steps:
            print(f"already at {pl_module.env_steps} steps: raise data.total_timesteps to train longer")
        print(
            f"wall time: {seconds:.1f} s for {steps} environment steps,"
            f" {steps / seconds:.0f} steps per second"
        )
        path = getattr(trainer.checkpoint_callback, "best_model_path", "")
        if path and not Path(path).is_file():
            print(f"checkpoint: NOT WRITTEN, look for older ones in {Path(path).resolve().parent}")
        else:
            print(f"checkpoint: {Path(path).resolve()}" if path else "checkpoint: none")
