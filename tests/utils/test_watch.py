"""The watchdog of steps, in processes of its own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ppo_lightning.utils import watch

pytestmark = pytest.mark.integration
# Without the package, whose import takes seconds.
PROGRAM = f"""
import ctypes, runpy, sys, threading, time
watch = runpy.run_path({watch.__file__!r})["StepWatch"](float(sys.argv[1]))
print("ready", flush=True)

def steps(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        watch.step_begins()
        sum(range(500_000))  # 10 ms, without a system call

"""


def start(program, timeout):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM + program, str(timeout)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    return process


def finish(process):
    """Return the exit code, standard error and the seconds until the end."""
    began = time.monotonic()
    try:
        errors = process.communicate(timeout=30)[1]
    finally:
        process.kill()
    return process.returncode, errors, time.monotonic() - began


def test_a_step_that_hangs_ends_the_process_with_its_traceback():
    program = "def hang(): time.sleep(60)\nsteps(1); watch.stop(); steps(1); hang()"
    code, errors, seconds = finish(start(program, 0.5))
    assert code == 1
    assert errors.startswith("Timeout (0:00:00.500000)!\n")
    assert "in hang" in errors
    assert 2.4 < seconds < 10


def test_a_step_that_holds_the_interpreter_is_found_after_ten_times_the_timeout():
    code, errors, seconds = finish(start("steps(0.1); ctypes.PyDLL(None).sleep(60)", 0.2))
    assert code == 1
    assert "Timeout (0:00:02)!" in errors
    assert 1.9 < seconds < 10


def test_nothing_is_watched_between_rollouts_and_the_thread_ends():
    program = "for _ in range(2): steps(0.1); watch.stop(); time.sleep(1)\nprint(threading.active_count())"
    process = start(program, 0.6)
    assert process.stdout.readline() == "1\n"
    code, errors, _ = finish(process)
    assert (code, errors) == (0, "")


def test_the_thread_does_not_keep_the_process_alive():
    code, errors, seconds = finish(start("steps(0.1)", 1000))
    assert (code, errors) == (0, "")
    assert seconds < 10


@pytest.mark.parametrize(("program", "expected"), [("steps(4)", 0), ("steps(2); time.sleep(60)", 1)])
def test_the_time_in_which_the_process_is_stopped_does_not_count(program, expected):
    process = start(program, 0.5)
    for _ in range(3):
        time.sleep(0.3)
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(0.8)
        os.kill(process.pid, signal.SIGCONT)
    code, errors, _ = finish(process)
    assert code == expected, errors


def test_daemons_of_a_process_that_hangs_end_with_it():
    """As those of a user's AsyncVectorEnv."""
    program = "from multiprocessing import get_context\n"
    program += "child = get_context('fork').Process(target=time.sleep, args=(60,), daemon=True)\n"
    program += "child.start(); print(child.pid, flush=True); steps(0.1); time.sleep(60)"
    process = start(program, 0.5)
    child = int(process.stdout.readline())
    assert finish(process)[0] == 1
    time.sleep(0.2)
    assert not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text()
