"""Speed scripts run every competitor with its best number of threads."""

import json
import os
import subprocess
import sys

import pytest

from tests.helpers import ROOT

pytest.importorskip("stable_baselines3")


@pytest.mark.integration
@pytest.mark.parametrize(("flags", "threads"), [((), 1), (("--threads", "2"), 2)])
def test_others_run_with_their_best_number_of_threads_unless_told_otherwise(flags, threads, tmp_path):
    """PyTorch's default, one thread per core, slows Stable-Baselines3 on small networks."""
    out = tmp_path / "speed.json"
    command = [sys.executable, "-W", "ignore", "benchmarks/speed.py", "--workloads", "cartpole-4x128", *flags]
    command += ["--competitors", "stable-baselines3", "--repeats", "1", "--seconds", "0.01"]
    command += ["--json", str(out)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"}
    options = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True, "timeout": 240}
    done = subprocess.run(command, **options, check=False)
    assert done.returncode == 0, done.stderr
    (run,) = json.loads(out.read_text())["runs"]["cartpole-4x128"]["stable-baselines3"]
    assert run["threads"] == threads and run["sps"] > 0
    assert f"| cartpole-4x128 | stable-baselines3 | {threads} |" in done.stdout
