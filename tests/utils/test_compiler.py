"""Compiled scans are stored on disk."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys, torch
from torch._dynamo.utils import counters
from torch._higher_order_ops.scan import scan
from ppo_lightning.utils.compiler import compile_scan

class Sums:
    def __init__(self, factor, weight):
        self.factor = factor
        self.weight = torch.full((3,), weight)

    def sums(self, start, rows):
        def step(carry, row):
            carry = carry * self.factor + row * self.weight
            return carry, carry.clone()
        return scan(step, start, rows)[1]

compiled = compile_scan(Sums(float(sys.argv[1]), float(sys.argv[2])).sums, True)
print(compiled(torch.ones(3), torch.ones(2, 3))[:, 0].tolist(), counters["inductor"]["fxgraph_cache_hit"])
"""


@pytest.mark.integration
def test_a_compiled_scan_is_stored_on_disk_and_its_key_includes_the_step(tmp_path):
    def run(factor, weight):
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(factor), str(weight)]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, env=environment
        ).stdout.strip()

    assert run(2, 1) == "[3.0, 7.0] 0"
    assert run(2, 1) == "[3.0, 7.0] 1"
    assert run(3, 1) == "[4.0, 13.0] 0", "another step of the scan"
    assert run(2, 5) == "[7.0, 19.0] 1", "other weights are inputs of the same graph"
