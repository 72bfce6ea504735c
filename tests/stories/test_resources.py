"""Long runs do not leak memory or files."""

import gc
import os
from pathlib import Path

import lightning as L
import pytest

MEGABYTE = 2**20


class Watch(L.Callback):
    """Recorder of resident memory and open files every hundred iterations."""

    def __init__(self):
        self.memory, self.files = [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx % 100 == 99:
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.memory.append(pages * os.sysconf("SC_PAGE_SIZE") / MEGABYTE)
            self.files.append(len(os.listdir("/proc/self/fd")))


@pytest.mark.integration
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("data", [{}, {"num_envs": 16}, {"env_id": "Pendulum-v1", "backend": "envpool"}])
def test_five_hundred_iterations_grow_by_less_than_a_megabyte_per_hundred(fit, data):
    watch = Watch()
    rollouts = {"num_envs": 4, "num_steps": 16, "rollouts_per_epoch": 700} | data
    steps = rollouts["num_envs"] * rollouts["num_steps"] * 700
    fit(
        rollouts | {"total_timesteps": steps},
        {"update_epochs": 1, "num_minibatches": 1},
        callbacks=[watch],
        max_epochs=-1,
    )
    assert len(watch.memory) == 7
    assert watch.memory[-1] - watch.memory[1] < 5, watch.memory  # MB, over 500 iterations after the first 200
    assert len(set(watch.files)) == 1, watch.files
