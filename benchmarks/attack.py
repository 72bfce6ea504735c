"""Attack training with kills, damaged checkpoints, full disks and random settings, and count losses.

`make attack`, or `python benchmarks/attack.py [--kills 60] [--files 100] [--disks 9] [--settings 300]`.
A number of 0 skips an attack. `--only settings:17` repeats one job, prints its output and keeps its folder.
Every attempt runs in a process that is forked after the imports. The exit code is 1 after a loss. Linux only.
"""

import argparse
import contextlib
import ctypes
import functools
import importlib.util
import inspect
import multiprocessing
import operator
import os
import platform
import random
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import lightning as L
import torch
import torch.utils.tensorboard  # once, not in every fork
import yaml

import ppo_lightning.algorithms  # noqa: F401  (load_from_checkpoint needs imported classes)
from ppo_lightning import PPO, MLPAgent, RolloutDataModule
from ppo_lightning.callbacks import RunSummary
from ppo_lightning.commands import cli
from ppo_lightning.errors import ConfigError

FORK = multiprocessing.get_context("fork")
# Exit codes that no process has.
LONG = 1001  # ended by SIGTERM after the timeout
DEAF = 1002  # ignored SIGTERM, ended by SIGKILL
CONFIGS = Path(__file__).resolve().parents[1] / "configs"
RUNS = {  # the second run has running statistics of observations and rewards
    "cartpole": ["--config=ppo/classic"],
    "acrobot": [
        "--config=ppo/classic",
        "--data.env_id=Acrobot-v1",
        "--model.norm_reward=true",
        "--model.agent.init_args.norm_obs=true",
    ],
    "cartpole_lstm": ["--config=recurrent_ppo/cartpole_masked_velocity", "--data.num_envs=4"],
}
ROLLOUTS = 40  # rollouts per run
FRAMES = 512  # steps of a rollout, 4 environments x 128
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
    args = ["fit", *RUNS[name], f"--data.total_timesteps={FRAMES * rollouts}"]

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


NAMES = ["classic", "pendulum", "cartpole_masked_velocity", "minigrid", "mujoco", "halfcheetah_fast", "locks"]
RECIPES = [CONFIGS / f"ppo/{name}.yaml" for name in NAMES]
RECIPES += [CONFIGS / f"recurrent_ppo/{name}.yaml" for name in NAMES[2:4]]
# Class, prefix of its flags, path in YAML.
OWNERS: list[tuple[Any, str, list[str]]] = [
    (PPO, "--model.", ["model", "init_args"]),
    (MLPAgent, "--model.agent.init_args.", ["model", "init_args", "agent", "init_args"]),
    (RolloutDataModule, "--data.", ["data"]),
    (L.Trainer, "--trainer.", ["trainer"]),
]
WAITS = "num_nodes"  # waits for other machines
EXCLUDED = ("self", "kwargs", "args", "observation_spec", "action_spec", "compile", WAITS)
SMALL = ("update_epochs", "devices", "max_time")  # a large value takes long, but is valid
ADVERSARIAL: list[Any] = [
    None, True, False, 0, -1, 1, 2, 3, 7, 1000, 10**6, 2**31, 2**63, 10**30, 0.0, -0.5, 0.5, 1e-300,
    1e300, float("inf"), float("nan"), "", " ", "null", "x", "é☃", "%s%n", "../x", "/proc/nowhere",
    "os.getcwd", "nowhere:X-v0", "a" * 200, "1e999", "0x10", "{}", "[", "CartPole-v1", "Pendulum-v1",
    [], {}, [0], [-1], [1e300], ["x"], [[]], {"a": {"b": 1}}, {"class_path": "nowhere.Class"},
    {"class_path": "os.getcwd"},
]  # fmt: skip


def near(value: Any, rng: random.Random) -> Any:
    """Return another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice([0, -value, value + 1, 2 * value, 4 * value, value // 2, value * 1000])
    if isinstance(value, float):
        return rng.choice([0.0, -value, value / 2, 2 * value, 1 - value, value * 1e6, value / 1e6])
    if isinstance(value, str):
        return rng.choice([value.upper(), value[:-1], value * 2])
    return rng.choice(ADVERSARIAL)


def changed(value: Any, small: bool, rng: random.Random) -> Any:
    """Return an adversarial value or one near the present value; if ``small``, no number above 3."""
    new = near(value, rng) if rng.random() < 0.7 else rng.choice(ADVERSARIAL)
    return min(new, 3) if small and isinstance(new, int | float) else new


def damaged(text: str, rng: random.Random) -> str:
    """Return a YAML text with one defect: truncation, a duplicate line, wrong indentation, odd characters."""
    lines = text.splitlines(keepends=True)
    index = rng.randrange(len(lines))
    return rng.choice([
        text[: rng.randrange(len(text))],
        "".join([*lines[: index + 1], *lines[index:]]),
        "".join([*lines[:index], " " + lines[index], *lines[index + 1 :]]),
        "".join([*lines[:index], "\t" + lines[index], *lines[index + 1 :]]),
        "".join([*lines[:index], lines[index].replace(":", ""), *lines[index + 1 :]]),
        "".join([*lines[:index], "\x00é: [", *lines[index:]]),
        "a: &a [x]\nb: &b [*a, *a]\n" + text,
    ])  # fmt: skip


def draw(rng: random.Random) -> tuple[str, list[str], str]:
    """Draw a recipe with one to three random changes, shortened to two rollouts.

    Returns:
        Text of the YAML file, flags of ``fit``, and a description of the changes.
    """
    recipe = rng.choice(RECIPES)
    config: dict[str, Any] = yaml.safe_load(recipe.read_text())
    data = config["data"]
    flags = list[str]()
    changes = [recipe.stem]
    data |= {"total_timesteps": 2 * data["num_envs"] * data["num_steps"], "eval_episodes": 1}
    config["model"]["init_args"]["compile"] = False  # compilation takes 20 s per attempt
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        owner, flag, place = rng.choices(OWNERS, weights=[4, 3, 3, 2])[0]
        defaults = {name: argument.default for name, argument in inspect.signature(owner).parameters.items()}
        try:
            inside = functools.reduce(operator.getitem, place, config)
            present = defaults | inside
        except (KeyError, TypeError):  # removed by an earlier change
            continue
        names = [name for name in present if name not in EXCLUDED]
        name = rng.choice(
            [name for name in names if rng.random() < 0.3 or present[name] is not None] or names
        )
        kind = rng.random()
        if kind < 0.47:
            flags.append(f"{flag}{name}={changed(present[name], name in SMALL, rng)}")
        elif kind < 0.94:
            inside[name] = changed(present[name], name in SMALL, rng)
            changes.append(f"{name}: {inside[name]!r}")
        elif kind < 0.98:
            key = rng.choice(list(inside))
            renamed = key + rng.choice(["s", " "])
            inside[renamed] = inside.pop(key)
            changes.append(f"{renamed!r} for {key}")
        else:
            flags.append(
                rng.choice(["--seed_everything=-1", "--seed_everything=x", "--ckpt_path=no", "--no", "x"])
            )
    text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
    if rng.random() < 0.05:
        text = damaged(text, rng)
        changes.append("a damaged text")
    return text, flags, ", ".join([*changes, *flags])


SIGNALS = 3  # signals per run
MOMENTS = {"before training": -1, "between checkpoints": ROLLOUTS // 2 + 1, "at the end": ROLLOUTS - 1}
ATTACKS = {  # title, number of attempts
    "kills": ("SIGKILL or SIGTERM at a random moment of `fit`, then `--auto_resume`", 60),
    "files": ("flipped bits in a checkpoint, or a truncated one: resume, validate, load", 100),
    "disks": ("full disk, then `--auto_resume` with free space", 9),
    "settings": ("random settings, by flags and YAML", 300),
}


@dataclass
class Job:
    """One job of an attack.

    Attributes:
        attack: Name of a method of ``Attacks``.
        number: Number of the job within the attack.
        tries: Number of attempts: the number of signals for ``kills``, otherwise 1.
        outcomes: Number of attempts by outcome.
        lost: Description of the loss, empty if nothing was lost.
    """

    attack: str
    number: int
    tries: int = 1
    outcomes: Counter[str] = field(default_factory=Counter)
    lost: str = ""


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[tuple[str, Callable[[], None], Callable[[], None]]]:
    """Turn a folder into a disk of 8 MiB; yield the kind of disk and functions that fill and free it.

    With permission to mount, the disk is a tmpfs. Otherwise RLIMIT_FSIZE simulates a full disk: files of
    the process that calls the first function cannot exceed 500 bytes (the error is EFBIG, not ENOSPC).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", bytes(folder), b"tmpfs", 0, b"size=8m") != 0:
        limit = (500, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
        yield "RLIMIT_FSIZE", lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit), lambda: None
        return

    def fill() -> None:
        with contextlib.suppress(OSError), open(folder / "filler", "ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    try:
        yield "tmpfs", fill, lambda: (folder / "filler").unlink(missing_ok=True)
    finally:
        libc.umount2(bytes(folder), 2)  # MNT_DETACH


class Attacks:
    """Attacks: methods with a job, a random generator and an empty folder, which return the loss.

    Args:
        scratch: Parent folder of the folders of all jobs.
        timeout: Timeout of a process in seconds.
        show: Whether to print the output of the processes and to keep the folders.
        seed: Seed of the random generators.
    """

    def __init__(self, scratch: Path, timeout: float, show: bool, seed: int) -> None:
        self.scratch = scratch
        self.timeout = timeout
        self.show = show
        self.seed = seed
        self.whole = {name: train(name, scratch) for name in RUNS}
        self.longer = {
            name: train(name, scratch, f"--ckpt_path={whole.path}", rollouts=ROLLOUTS + 2)
            for name, whole in self.whole.items()
        }  # fmt: skip

    def run(self, job: Job) -> Job:
        """Run a job and record its outcomes."""
        rng = random.Random(f"{self.seed} {job.attack} {job.number}")
        top = self.scratch / f"{job.attack}-{job.number}"
        folder = top / "a" / "b"  # keeps the adversarial value "../x" inside
        folder.mkdir(parents=True)
        job.lost = getattr(self, job.attack)(job, rng, folder)
        if not self.show:
            shutil.rmtree(top, ignore_errors=True)
        return job

    def end(self, process: Forked, part: float = 1) -> tuple[int, str, str]:
        """Wait for a part of the timeout; return exit code, standard output and standard error."""
        code, out, errors = process.end(part * self.timeout)
        if self.show:
            print(out, errors, f"exit code {code}", sep="\n", flush=True)
        return code, out, errors

    def kills(self, job: Job, rng: random.Random, folder: Path) -> str:
        """Send signals at random moments, and resume with ``--auto_resume`` after each."""
        name = list(RUNS)[job.number % len(RUNS)]
        run = 0
        while True:
            run_folder = folder / f"run{run}"
            run_folder.mkdir(exist_ok=True)
            process = fit(run_folder, name, "--auto_resume")
            if job.outcomes.total() < job.tries:
                process.process.join(rng.uniform(0, self.whole[name].seconds))
                kind = rng.choice([signal.SIGKILL, signal.SIGTERM])
                job.outcomes[kind.name] += process.send(kind)
            code, _, errors = self.end(process)
            if code not in (0, 143, -signal.SIGKILL, -signal.SIGTERM) or "Traceback" in errors:
                return f"{name}: {complaint(code, errors) or errors.strip()[-200:]}"
            if code == 0:
                lost = deviation(run_folder, self.whole[name])
                if lost or job.outcomes.total() == job.tries:
                    return lost and f"{name}: {lost}"
                run += 1

    def files(self, job: Job, rng: random.Random, folder: Path) -> str:
        """Damage a checkpoint, then resume from it, validate it and load it."""
        name = list(RUNS)[job.number % len(RUNS)]
        bits = rng.choice([0, 1, 1, 4, 4, 30])
        whole = self.whole[name].path.read_bytes()
        path = folder / "damaged.ckpt"
        damaged = bytearray(whole if bits else whole[: rng.randrange(len(whole))])
        for bit in rng.sample(range(8 * len(whole)), bits):
            damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)

        def load() -> None:
            try:
                state = PPO.load_from_checkpoint(path).state_dict()
            except ConfigError as error:
                print(f"error: {error}", file=sys.stderr)
                raise SystemExit(2) from None
            print(difference(dict(state), dict(self.whole[name].state["state_dict"])))

        resumed = self.end(fit(folder, name, f"--ckpt_path={path}", rollouts=ROLLOUTS + 2))
        validated = self.end(Forked(folder, lambda: cli.main(["validate", f"--ckpt_path={path}"])))
        loaded = self.end(Forked(folder, load))
        job.outcomes["refused" if resumed[0] else "loaded"] += 1
        losses = [complaint(code, errors) for code, _, errors in (resumed, validated, loaded)]
        if resumed[0] == 0:
            losses[0] = losses[0] or deviation(folder, self.longer[name])
        if loaded[0] == 0 and (place := loaded[1].strip()):
            losses[2] = losses[2] or f"{place} differs from the file"
        commands = ("fit --ckpt_path", "validate", "load_from_checkpoint")
        summary = "; ".join(
            f"{command}: {lost}" for command, lost in zip(commands, losses, strict=True) if lost
        )
        return summary and f"{name}, {f'{bits} bits' if bits else 'truncated'}: {summary}"

    def disks(self, job: Job, rng: random.Random, folder: Path) -> str:
        """Fill the disk before training, between checkpoints or in the last rollout; free it and resume."""
        moment, fill_after = list(MOMENTS.items())[job.number % len(MOMENTS)]
        name = list(RUNS)[job.number // len(MOMENTS) % len(RUNS)]
        with small_disk(folder) as (kind, fill, free):
            job.outcomes[f"{moment} ({kind})"] += 1
            hook = lambda rollouts: fill() if rollouts == fill_after else None  # noqa: E731
            code, _, errors = self.end(fit(folder, name, hook=hook))
            lost = complaint(code, errors)
            if not lost and code == 2 and fill_after >= 0:
                lost = f"training ended: {errors.strip().splitlines()[-1]}"
            if not lost and not re.search("No space left|File too large", errors):
                lost = "no message about the disk on standard error"
            free()
            code, _, errors = self.end(fit(folder, name, "--auto_resume"))
            resume_loss = (
                complaint(code, errors) or errors[-200:] if code else deviation(folder, self.whole[name])
            )
        summary = "; ".join(filter(None, [lost, resume_loss and f"resumed with free space: {resume_loss}"]))
        return summary and f"{name}, full {moment}: {summary}"

    def settings(self, job: Job, rng: random.Random, folder: Path) -> str:
        """Train with random settings: the process must train, or end with code 2 and one sentence."""
        text, flags, changes = draw(rng)
        (folder / "recipe.yaml").write_text(text)
        args = ["fit", "--config", "recipe.yaml", *flags]
        process = Forked(folder, lambda: cli.main(args), address_space=8 * 2**30)
        code, out, errors = self.end(process, part=0.5)  # some settings take long
        lost = "" if code == LONG else complaint(code, errors)
        if code == 0 and "wall time" not in out:
            lost = lost or "ended with code 0 without training"
        ends = {0: "trained", 2: "refused", LONG: "trained until the timeout"}
        job.outcomes["lost" if lost else ends[code]] += 1
        return lost and f"{changes}: {lost}"


def report(args: argparse.Namespace, jobs: list[Job], seconds: float) -> str:
    """Return the results in Markdown."""
    describe = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    versions = f"{os.cpu_count()} processors, Python {platform.python_version()}, torch {torch.__version__}"
    command = shlex.join(["python", "benchmarks/attack.py", *sys.argv[1:]])
    lines = ["# Attack", "", f"`{command}` at commit {commit}, {versions}: {seconds / 60:.0f} minutes.", ""]
    lines += ["| attack | attempts | lost | outcomes |", "|---|---|---|---|"]
    for attack, (title, _) in ATTACKS.items():
        chosen = [job for job in jobs if job.attack == attack]
        outcomes = sum((job.outcomes for job in chosen), Counter[str]())
        if chosen:
            counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
            lost = sum(bool(job.lost) for job in chosen)
            lines.append(f"| {title} | {sum(job.tries for job in chosen)} | {lost} | {counts} |")
    if any(job.lost for job in jobs):
        lines += ["", "| loss | to reproduce: `python benchmarks/attack.py ...` |", "|---|---|"]
    for job in jobs:
        if job.lost:
            loss = " ".join(job.lost.split()).replace("|", "\\|").replace(str(args.scratch), "...")
            lines.append(f"| {loss} | `--seed {args.seed} --only {job.attack}:{job.number}` |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the attacks, and print and write the table.

    Raises:
        SystemExit: With code 1 if anything was lost.
    """
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    for attack, (title, tries) in ATTACKS.items():
        parser.add_argument(
            f"--{attack}", type=int, default=tries, help=f"attempts (default: {tries}): {title}"
        )
    parser.add_argument("--only", help="run one job, ATTACK:NUMBER, and keep its folder")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random choices (default: 1)")
    parser.add_argument("--workers", type=int, default=2, help="number of parallel jobs (default: 2)")
    parser.add_argument(
        "--timeout", type=float, default=90, help="timeout of a process in seconds (default: 90)"
    )
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/attack.md"))
    args = parser.parse_args()
    firsts = range(0, args.kills, SIGNALS)
    jobs = [Job("kills", number, min(SIGNALS, args.kills - first)) for number, first in enumerate(firsts)]
    jobs += [Job(attack, number) for attack in list(ATTACKS)[1:] for number in range(getattr(args, attack))]
    if args.only:
        attack, number = args.only.split(":")
        jobs = [Job(attack, int(number), SIGNALS if attack == "kills" else 1)]
    started = time.monotonic()
    args.scratch = Path(tempfile.mkdtemp(prefix="attack-"))
    done = list[Job]()
    attacks = Attacks(args.scratch, args.timeout, bool(args.only), args.seed)
    with ProcessPoolExecutor(args.workers, FORK) as pool:
        for future in as_completed([pool.submit(attacks.run, job) for job in jobs]):
            job = future.result()
            done.append(job)
            outcome = f"LOST: {job.lost}" if job.lost else ", ".join(job.outcomes)
            print(f"[{len(done)} of {len(jobs)}] {job.attack} {job.number}: {outcome}", flush=True)
    done.sort(key=lambda job: (list(ATTACKS).index(job.attack), job.number))
    text = report(args, done, time.monotonic() - started)
    print(f"\n{text}")
    if args.only:
        print(f"The folder is {args.scratch}")
    else:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(text)
        shutil.rmtree(args.scratch, ignore_errors=True)
    raise SystemExit(any(job.lost for job in done))


if __name__ == "__main__":
    main()
