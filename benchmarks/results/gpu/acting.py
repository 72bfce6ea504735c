"""Throughput of PPO on CartPole-v1 (EnvPool, 4 x 128, eager) on a GPU, for two ways to act.

`python benchmarks/results/gpu/acting.py WAY`, where WAY is `gpu` (each step goes to the GPU and back) or
`cpu` (NumPy, on a copy of the weights). The first four iterations are not measured. An H200 with 16 cores and
torch 2.11 printed 2509 and 4762, on 2026-11-28.
"""

import sys
import time
import warnings
from typing import Any

import lightning as L
import torch

from ppo_lightning import PPO, MLPAgent, RolloutDataModule
from ppo_lightning.models import Actor


class Clock(L.Callback):
    """Callback that ends the run after thirty iterations."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: object) -> None:
        torch.cuda.synchronize()
        self.ends.append(time.perf_counter())
        trainer.should_stop = len(self.ends) > 33


def main() -> None:
    """Train and print the environment steps per second."""
    warnings.simplefilter("ignore")
    if sys.argv[1] == "gpu":
        MLPAgent.array_policy = Actor.array_policy  # type: ignore[method-assign]
    clock = Clock()
    quiet: Any = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(
        accelerator="gpu",
        devices=1,
        max_epochs=-1,
        enable_checkpointing=False,
        limit_val_batches=0,
        callbacks=[clock],
        **quiet,
    )
    data = RolloutDataModule("CartPole-v1", "envpool", 4, 128, 10**9, rollouts_per_epoch=10**6)
    trainer.fit(PPO(num_minibatches=4, update_epochs=4), data)
    print(round(4 * 128 * (len(clock.ends) - 4) / (clock.ends[-1] - clock.ends[3])))


if __name__ == "__main__":
    main()
