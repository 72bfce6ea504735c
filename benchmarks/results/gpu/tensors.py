"""Throughput of PPO with CartPole as tensors, on one device: the program of tensors.jsonl.

`python benchmarks/results/gpu/tensors.py DEVICE COMPILE NUM_ENVS NUM_STEPS SECONDS NUM_MINIBATCHES`, where
COMPILE is 0 or 1, prints a line of JSON. The first four iterations are not measured. An update ends with a
synchronization of the device.
"""

import json
import statistics
import sys
import time
import warnings

import lightning as L
import torch

from ppo_lightning import PPO, RolloutDataModule


class Clock(L.Callback):
    """Callback that measures iterations and updates, and then ends the run."""

    def __init__(self, device: str, seconds: float) -> None:
        self.device = device
        self.seconds = seconds
        self.start = time.perf_counter()
        self.ends: list[float] = []
        self.updates: list[float] = []

    def now(self) -> float:
        """Return the time when the device has finished its work, s."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def on_train_batch_start(self, *args: object) -> None:
        self.begun = self.now()

    def on_train_batch_end(self, trainer: L.Trainer, *args: object) -> None:
        self.ends.append(self.now())
        self.updates.append(self.ends[-1] - self.begun)
        trainer.should_stop = len(self.ends) > 4 and self.ends[-1] - self.ends[3] > self.seconds


def main() -> None:
    """Train and print the figures."""
    warnings.simplefilter("ignore")
    device, compiled, num_envs, num_steps, seconds, num_minibatches = sys.argv[1:]
    clock = Clock(device, float(seconds))
    trainer = L.Trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        callbacks=[clock],
    )
    data = RolloutDataModule(
        "CartPole-v1", "torch", int(num_envs), int(num_steps), 10**10, env_kwargs={"device": device}
    )
    ppo = PPO(
        learning_rate=2.5e-4,
        num_minibatches=int(num_minibatches),
        update_epochs=4,
        ent_coef=0.01,
        compile=compiled == "1",
    )
    trainer.fit(ppo, data)
    iteration = (clock.ends[-1] - clock.ends[3]) / (len(clock.ends) - 4)
    figures = {
        "device": device,
        "compile": compiled == "1",
        "envs": int(num_envs),
        "steps": int(num_steps),
        "minibatches": int(num_minibatches),
        "sps": round(int(num_envs) * int(num_steps) / iteration),
        "iteration_ms": round(1e3 * iteration, 2),
        "update_ms": round(1e3 * statistics.median(clock.updates[4:]), 2),
        "start_s": round(clock.ends[3] - clock.start, 1),
        "peak_MiB": round(torch.cuda.max_memory_allocated() / 2**20) if device == "cuda" else None,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
