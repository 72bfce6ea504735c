"""``benchmarks/attack.py`` counts attempts and losses, and detects every loss."""

import os
import re
import subprocess
import sys

import pytest
import torch

from tests.helpers import ROOT

SABOTAGE = """
import os, runpy
from ppo_lightning import PPO

load, start = PPO.on_load_checkpoint, PPO.on_train_start

def on_load_checkpoint(self, checkpoint):
    load(self, checkpoint)
    checkpoint["state_dict"]["agent.critic.bias"] += 1

def on_train_start(self):
    if os.path.exists("recipe.yaml"):
        raise KeyError("sabotage")
    start(self)

PPO.on_load_checkpoint, PPO.on_train_start = on_load_checkpoint, on_train_start
runpy.run_path("benchmarks/attack.py", run_name="__main__")
"""


@pytest.fixture
def script(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which the script would set for good
    from benchmarks import attack

    return attack


def attack(folder, *command, **tries):
    """Run the attack; return the process, and attempts, losses and outcomes of each kind of attack."""
    output = folder / "attack.md"
    args = [part for name, count in tries.items() for part in (f"--{name}", str(count))]
    env = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    done = subprocess.run(
        [sys.executable, *command, *args, "--output", str(output)],
        cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=500,
    )  # fmt: skip
    assert output.exists(), done.stderr[-2000:]
    names = {"SIGKILL": "kills", "flipped": "files", "full": "disks", "random": "settings"}
    rows = re.findall(r"^\| (\w+).* \| (\d+) \| (\d+) \| (.*) \|$", output.read_text(), re.MULTILINE)
    return done, {names[first]: (int(count), int(lost), what) for first, count, lost, what in rows}


@pytest.mark.integration
def test_a_small_attack(tmp_path):
    done, table = attack(tmp_path, "benchmarks/attack.py", kills=2, files=2, disks=2, settings=16)
    counts = {name: count for name, (count, _, _) in table.items()}
    assert counts == {"kills": 2, "files": 2, "disks": 2, "settings": 16}
    assert not any(lost for _, lost, _ in table.values()), done.stdout
    assert "trained" in table["settings"][2] and "refused" in table["settings"][2], "both ends are tried"
    assert "before training" in table["disks"][2]
    assert done.returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["attack.md"], "nothing else is left"


@pytest.mark.integration
def test_planted_losses_are_found(tmp_path):
    """The sabotage changes the weights of resumed runs, and lets valid settings fail."""
    done, table = attack(tmp_path, "-c", SABOTAGE, kills=6, files=2, disks=0, settings=16)
    assert done.returncode == 1
    assert table["kills"][0] == 6
    assert table["kills"][1] > 0, "a run that is killed before its first checkpoint loses nothing"
    assert table["settings"][1] > 0 and "16 refused" not in table["settings"][2]
    text = (tmp_path / "attack.md").read_text()
    assert "differs from the run without an attack" in text
    assert "traceback: KeyError: 'sabotage' | `--seed 1 --only settings:" in text


@pytest.mark.parametrize(
    ("code", "errors", "complaint"),
    [
        (0, "a warning", ""),
        (2, "a warning\nerror: data.num_envs is 0: it must be at least 1.", ""),
        (2, "error: one\nerror: two", "code 2 without one sentence: error: two"),
        (2, "error: one\nand more", "code 2 without one sentence: and more"),
        (2, "", "code 2 without one sentence"),
        (1, "gone", "code 1 without one sentence: gone"),
        (-11, "", "died of SIGSEGV"),
        (0, "Traceback (most recent call last):\nOSError: full\nmore", "traceback: OSError: full"),
    ],
)
def test_the_end_of_a_process_is_judged(script, code, errors, complaint):
    assert script.complaint(code, errors).startswith(complaint)
    assert bool(script.complaint(code, errors)) == bool(complaint)


def test_states_are_compared_to_the_bit(script):
    one = {"a": [torch.ones(2), 1.0], "b": (3, "x")}
    assert script.difference(one, {"a": [torch.ones(2), 1.0], "b": (3, "x")}) == ""
    assert script.difference(one, {"a": [torch.ones(2) + 1e-7, 1.0], "b": (3, "x")}) == ".a[0]"
    assert script.difference(one, {"a": [torch.ones(2), 1.0], "b": (3, "y")}) == ".b[1]"
    assert script.difference(one, {"a": [torch.ones(2), 1.0]}) == "everything"
