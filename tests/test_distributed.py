"""Data parallel training in real processes (gloo)."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent / "distributed_run.py"


def run(folder, devices, model=None, kl_of_ranks=None):
    """Trains in `devices` processes; returns what each rank ended with."""
    options = {"folder": str(folder), "devices": devices, "model": model or {}, "kl_of_ranks": kl_of_ranks}
    folder.mkdir()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parent.parent)}
    process = subprocess.Popen([sys.executable, str(SCRIPT), json.dumps(options)], env=env, start_new_session=True)
    try:
        assert process.wait(timeout=120) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the other ranks too, if one of them hangs
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(devices)]


@pytest.mark.detail("A2")
@pytest.mark.parametrize("compiled", [False, True])
def test_two_ranks_do_what_one_rank_with_all_environments_does(tmp_path, compiled):
    """Each rank has its own environments and noise; averaging the gradients gives the whole batch's."""
    model = {"norm_adv": False}  # its statistics are still each rank's own
    (one,), two = run(tmp_path / "one", 1, model), run(tmp_path / "two", 2, model | {"compile": compiled})
    assert torch.equal(two[0]["weights"], two[1]["weights"])
    assert not torch.equal(two[0]["observation"], two[1]["observation"])
    torch.testing.assert_close(torch.cat([rank["observation"] for rank in two]), one["observation"])
    torch.testing.assert_close(two[0]["weights"], one["weights"], atol=2e-5, rtol=1e-4)
    assert (one["weights"] - one["initial"]).abs().max() > 1e-3
    assert two[0]["env_steps"] == one["env_steps"] == 4 * 16 * 3


@pytest.mark.detail("A3")
@pytest.mark.parametrize(("target_kl", "epochs"), [(0.4, 1), (0.6, 4)])
def test_ranks_agree_on_the_early_stop(tmp_path, target_kl, epochs):
    """Only rank 1 is far from its old policy: the mean, 0.5, decides for both, and neither waits for the other."""
    ranks = run(tmp_path / "run", 2, {"target_kl": target_kl}, kl_of_ranks=[0.0, 1.0])
    assert [rank["global_step"] for rank in ranks] == [3 * epochs * 4] * 2
    assert torch.equal(ranks[0]["weights"], ranks[1]["weights"])
