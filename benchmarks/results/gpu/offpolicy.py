"""Throughput of SAC on HalfCheetah-v4 (EnvPool, one environment): the program of offpolicy.jsonl.

`python benchmarks/results/gpu/offpolicy.py DEVICE COMPILE BATCH_SIZE THREADS SECONDS`, where COMPILE is 0 or
1, prints a line of JSON. The first 300 updates are not measured. Programs that are started together measure
one after the other, when all of them have compiled.
"""

import fcntl
import json
import statistics
import sys
import time
import warnings

import lightning as L
import torch

from ppo_lightning import SAC, RolloutDataModule

LEARNING_STARTS, WARM_UP, NUM_STEPS = 5000, 300, 10


class Clock(L.Callback):
    """Callback that measures batches and updates, and then ends the run."""

    def __init__(self, device: str, seconds: float) -> None:
        self.device = device
        self.seconds = seconds
        self.turn = open(__file__)  # noqa: SIM115  (until the end of the program)
        fcntl.flock(self.turn, fcntl.LOCK_SH)
        self.start = time.perf_counter()
        self.begun = 0.0
        self.ends: list[float] = []
        self.updates: list[float] = []

    def now(self) -> float:
        """Return the time when the device has finished its work, s."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def on_train_batch_start(self, *args: object) -> None:
        if self.ends:
            self.begun = self.now()

    def on_train_batch_end(self, trainer: L.Trainer, module: SAC, *args: object) -> None:
        if module.env_steps < LEARNING_STARTS + WARM_UP:
            return
        self.ends.append(self.now())
        if len(self.ends) == 1:
            self.start_s = self.ends[0] - self.start
            fcntl.flock(self.turn, fcntl.LOCK_EX)
            self.ends[0] = self.now()
            return
        self.updates.append(self.ends[-1] - self.begun)
        trainer.should_stop = self.ends[-1] - self.ends[0] > self.seconds


def main() -> None:
    """Train and print the figures."""
    warnings.simplefilter("ignore")
    device, compiled, batch_size, threads, seconds = sys.argv[1:]
    torch.set_num_threads(int(threads))
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
    data = RolloutDataModule("HalfCheetah-v4", "envpool", 1, NUM_STEPS, 10**8, rollouts_per_epoch=10**7)
    sac = SAC(learning_starts=LEARNING_STARTS, batch_size=int(batch_size), compile=compiled == "1")
    trainer.fit(sac, data)
    steps = NUM_STEPS * (len(clock.ends) - 1)
    figures = {
        "device": device,
        "compile": compiled == "1",
        "batch_size": int(batch_size),
        "threads": int(threads),
        "sps": round(steps / (clock.ends[-1] - clock.ends[0]), 1),
        "update_ms": round(1e3 * statistics.median(clock.updates) / NUM_STEPS, 3),
        "start_s": round(clock.start_s, 1),
        "peak_MiB": round(torch.cuda.max_memory_allocated() / 2**20) if device == "cuda" else None,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
