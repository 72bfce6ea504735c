"""The first and the last lines of a run."""

import time
from pathlib import Path
from typing import Any

import lightning as L

from ppo_lightning.utils.rounding import decimals


class RunSummary(L.Callback):
    """Prints the agent's size at the start of ``fit``; at its end the returns, the time and the checkpoint."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Print the number of parameters, on rank 0, and start the clock."""
        agent = pl_module.agent
        if trainer.is_global_zero:
            size = sum(weight.numel() for weight in agent.parameters())
            print(f"{type(agent).__name__}: {size} parameters")
        self._started, self._steps_before = time.perf_counter(), pl_module.env_steps

    def on_fit_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Prints the summary, on rank 0."""
        if not trainer.is_global_zero:
            return
        seconds, steps = time.perf_counter() - self._started, pl_module.env_steps - self._steps_before
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
            mean, std, least, most = (
                f"{results[name]:{decimals(results['episodic_return'])}}" for name in names
            )
            print(
                f"evaluation, deterministic: return {mean} ± {std} (min {least}, max {most}),"
                f" length {results['episodic_length']:.1f}"
            )
        if not steps:
            print(f"already at {pl_module.env_steps} steps: raise data.total_timesteps to train longer")
        print(
            f"wall time: {seconds:.1f} s for {steps} environment steps, {steps / seconds:.0f} steps per second"
        )
        path = getattr(trainer.checkpoint_callback, "best_model_path", "")
        if path and not Path(path).is_file():
            print(f"checkpoint: NOT WRITTEN; {Path(path).resolve().parent} may have older ones")
        else:
            print(f"checkpoint: {Path(path).resolve()}" if path else "checkpoint: none was written")
