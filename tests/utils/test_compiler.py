"""Compiled scans are stored on disk, and not compiled without end."""

import signal
import time

import pytest
import torch

from ppo_lightning.errors import ConfigError
from ppo_lightning.private import CompileContext
from ppo_lightning.utils.compiler import compile_per_instance, replay
from ppo_lightning.utils.watch import end_request
from tests.helpers import Forked

PROGRAM = """
import torch
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

compiled = compile_scan(Sums(factor, weight).sums, True)
print(compiled(torch.ones(3), torch.ones(2, 3))[:, 0].tolist(), counters["inductor"]["fxgraph_cache_hit"])
"""


@pytest.mark.integration
def test_a_compiled_scan_is_stored_on_disk_and_its_key_includes_the_step(tmp_path):
    def run(factor, weight):
        names = {"factor": float(factor), "weight": float(weight)}
        process = Forked(tmp_path, exec, PROGRAM, names, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
        out, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        return out.strip()

    assert run(2, 1) == "[3.0, 7.0] 0"
    assert run(2, 1) == "[3.0, 7.0] 1"
    assert run(3, 1) == "[4.0, 13.0] 0", "another step of the scan"
    assert run(2, 5) == "[7.0, 19.0] 1", "other weights are inputs of the same graph"


@pytest.mark.integration
def test_results_of_a_replayed_method_outlast_the_next_call():
    class Sums:
        total = torch.zeros(3)

        def add(self, rows):
            self.total += rows
            return {"total": self.total, "largest": self.total.max()}

    sums = Sums()
    add = replay(sums.add, [sums.total], {})
    first, second = add(torch.ones(3)), add(torch.arange(3.0))
    assert first["total"].tolist() == [1, 1, 1] and first["largest"] == 1
    assert second["total"].tolist() == sums.total.tolist() == [1, 2, 3]


class Changing:
    worth = 1

    def method(self, values):
        return values.view(self.worth, -1)  # needs no kernel


def test_an_attribute_of_many_values_ends_in_one_sentence():
    changing = Changing()
    compiled = compile_per_instance(changing.method)
    with torch._dynamo.config.patch(recompile_limit=1), pytest.raises(ConfigError, match="leave model"):
        for changing.worth in (1, 2):
            compiled(torch.ones(2))


class Stepping:
    def __init__(self):
        self.total = torch.zeros(3)
        self.factor = time.time()  # that no stored graph has

    def step(self, rows):
        self.total += (rows * self.factor).sin().exp()
        return self.total.clone()


@pytest.mark.integration
def test_a_signal_gives_a_compilation_up_and_the_call_goes_on_without():
    def interrupt(graph):  # at one place: a callback of the garbage collector would lose the exception
        passes.append(CompileContext.try_get() is not None)
        if passes == [True]:
            signal.raise_signal(signal.SIGALRM)

    passes, rows, plain = [], torch.arange(3.0), Stepping()
    expected = [plain.step(rows) for _ in range(3)]
    stepping = Stepping()
    stepping.factor = plain.factor
    compiled = compile_per_instance(stepping.step, options={"post_grad_custom_pre_pass": interrupt})
    previous = signal.signal(signal.SIGALRM, lambda number, frame: end_request.receive(number))
    try:
        torch.testing.assert_close([compiled(rows), compiled(rows)], expected[:2])
        assert passes == [True]  # neither call has compiled
    finally:
        signal.signal(signal.SIGALRM, previous)
        end_request.number = 0
    torch.testing.assert_close(compiled(rows), expected[2])
    assert passes == [True, True]  # this one has
