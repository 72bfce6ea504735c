"""Training in forked processes, and checks of how they ended; used by `attack.py`."""

import contextlib
import importlib.util
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.utils.tensorboard  # once, not in every fork
import yaml

from ppo_lightning.callbacks import RunSummary
from ppo_lightning.commands import cli

FORK = multiprocessing.get_context("fork")
# Exit codes that no process has.
LONG = 1001  # ended by SIGTERM after the timeout
DEAF = 1002  # ignored SIGTERM, ended by SIGKILL
CONFIGS = Path(__file__).parent.parent / "configs"
RUNS = {  # recipe and flags; the second run has running statistics of observations and rewards
    "cartpole": ("ppo/classic", []),
    "acrobot": (
        "ppo/classic",
        ["--data.env_id=Acrobot-v1", "--model.norm_reward=true", "--model.agent.init_args.norm_obs=true"],
    ),
    "cartpole_lstm_masked_velocity": ("recurrent_ppo/cartpole_masked_velocity", []),
}
ROLLOUTS = 40  # rollouts per run
COUNTERS = ("global_step", "env_steps", "episode_returns")
STATE = ("state_dict", "optimizer_states", "lr_schedulers", *COUNTERS)
SAVE_EVERY_4 = "--data.rollouts_per_epoch=4"


class Forked:
    """Forked process that runs a function in a folder.

    Args:
        folder: Working directory of the process.
        function: Function to run. An exception gives a traceback and code 1, as in any Python program.
        address_space: Number of bytes that the process may map in addition, None for no limit.
    """

    def __init__(self, folder: Path, function: Callable[[], Any], address_space: int | None = None) -> None:
        logs = Path(tempfile.mkdtemp(prefix="log-", dir=folder.parent))
        self._logs = logs / "out", logs / "err"
        # Pipes, because RLIMIT_FSIZE, which simulates a full disk, would truncate files.
        self._writers = [
            subprocess.Popen(["dd", "status=none", f"of={path}"], stdin=subprocess.PIPE)
            for path in self._logs
        ]
        self.process = FORK.Process(target=self._run, args=(folder, function, address_space))
        self.process.start()
        for writer in self._writers:
            writer.stdin.close()

    def _run(self, folder: Path, function: Callable[[], Any], address_space: int | None) -> None:
        os.setsid()
        os.chdir(folder)
        for writer, stream in zip(self._writers, (1, 2), strict=True):
            os.dup2(writer.stdin.fileno(), stream)
            os.close(writer.stdin.fileno())
        if address_space is not None:
            mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (mapped + address_space,) * 2)
        # Ranks start as `python -m ppo_lightning`, not as the forking script.
        sys.modules["__main__"].__spec__ = importlib.util.find_spec("ppo_lightning.__main__")
        sys.argv = ["ppo-lightning"]
        function()

    def send(self, number: signal.Signals) -> bool:
        """Send a signal and return whether the process was alive."""
        if not self.process.is_alive():
            return False
        os.kill(self.process.pid, number)
        return True

    def end(self, timeout: float) -> tuple[int, str, str]:
        """Wait; return the exit code (LONG or DEAF after the timeout), standard output and standard error."""
        self.process.join(timeout)
        code = self.process.exitcode
        if code is None:
            self.send(signal.SIGTERM)
            self.process.join(20)
            code = DEAF if self.process.exitcode is None else LONG
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # remaining ranks
        self.process.join()
        for writer in self._writers:
            with contextlib.suppress(subprocess.TimeoutExpired):  # a process in another session may survive
                writer.wait(timeout=10)
        out, errors = (path.read_text(errors="replace") for path in self._logs)
        return code, out, errors


def complaint(code: int, errors: str) -> str:
    """Describe what is wrong with the end of a process.

    Success, and one sentence with code 2, are correct ends.

    Args:
        code: Exit code.
        errors: Standard error.

    Returns:
        Description of the fault, empty for a correct end.
    """
    lines = errors.strip().splitlines() or ["nothing on standard error"]
    if "Traceback (most recent call last)" in errors:
        exceptions = [
            line for line in lines if re.match(r"[\w.]+(Error|Exception|Iteration|Interrupt)\b", line)
        ]
        return f"traceback: {(exceptions or lines)[-1][:200]}"
    if code == 0:
        return ""
    if code in (LONG, DEAF):
        return "timeout" if code == LONG else "timeout, and SIGTERM ignored for 20 s"
    if code < 0:
        return f"died of {signal.Signals(-code).name}"
    sentences = [line for line in lines if line.startswith("error: ")]
    if code == 2 and sentences == lines[-1:] and len(sentences[0]) <= 500:
        return ""
    return f"code {code} without one sentence: {lines[-1][:200]}"


class Reference(NamedTuple):
    """Run without an attack: final checkpoint, the state in it, and duration in seconds."""

    path: Path
    state: dict[str, Any]
    seconds: float


def fit(
    folder: Path, name: str, *flags: str, rollouts: int = ROLLOUTS, hook: Callable[[int], None] | None = None
) -> Forked:
    """Start a run of ``RUNS``.

    Args:
        folder: Working directory of the process.
        name: Name of the run.
        *flags: Further flags of ``fit``.
        rollouts: Number of rollouts.
        hook: Called with -1 before ``fit``, and before each rollout with the number of finished ones.
    """
    recipe, own = CONFIGS / f"{RUNS[name][0]}.yaml", RUNS[name][1]
    data = yaml.safe_load(recipe.read_text())["data"]
    steps = data["num_envs"] * data["num_steps"] * rollouts
    args = ["fit", "--config", str(recipe), *own, f"--data.total_timesteps={steps}"]

    def run() -> None:
        if hook is not None:
            hook(-1)
            RunSummary.on_train_batch_start = lambda self, trainer, module, *_: hook(module.rollouts_done - 1)
        cli.main([*args, "--data.eval_episodes=1", SAVE_EVERY_4, *flags])

    return Forked(folder, run)


def difference(a: Any, b: Any, path: str = "") -> str:
    """Return the first place where two nested structures differ, empty if they are equal."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return next(filter(None, (difference(a[key], b[key], f"{path}.{key}") for key in a)), "")
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        pairs = enumerate(zip(a, b, strict=True))
        return next(filter(None, (difference(*pair, f"{path}[{index}]") for index, pair in pairs)), "")
    equal = torch.equal(a, b) if torch.is_tensor(a) and torch.is_tensor(b) else a == b
    return "" if equal else (path or "everything")


def final(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the checkpoint with the most environment steps, None if there is none."""
    checkpoints = [
        (path, torch.load(path, weights_only=True)) for path in folder.glob("runs/*/*/checkpoints/*.ckpt")
    ]
    return max(checkpoints, key=lambda pair: pair[1]["env_steps"], default=None)


def deviation(folder: Path, reference: Reference) -> str:
    """Describe how the results of a run differ from those of a run without an attack, empty if equal."""
    end = final(folder)
    if end is None:
        return "no checkpoint at the end"
    if place := difference({key: end[1][key] for key in STATE}, reference.state):
        return f"{place} differs from the run without an attack"
    return next((f"{path.name} was left behind" for path in folder.rglob("*.part")), "")


def train(name: str, scratch: Path, *flags: str, rollouts: int = ROLLOUTS) -> Reference:
    """Train without an attack."""
    folder = Path(tempfile.mkdtemp(prefix="reference-", dir=scratch))
    started = time.monotonic()
    code, _, errors = fit(folder, name, *flags, rollouts=rollouts).end(600)
    end = final(folder)
    assert code == 0 and end is not None, errors
    return Reference(end[0], {key: end[1][key] for key in STATE}, time.monotonic() - started)
