"""Attack training with kills, damaged checkpoints, full disks and random settings, and count losses.

`make attack`, or `python benchmarks/attack.py [--kills 60] [--files 100] [--disks 9] [--settings 300]`.
A number of 0 skips an attack. `--only settings:17` repeats one job, prints its output and keeps its folder.
Every attempt runs in a process that is forked after the imports. The exit code is 1 after a loss. Linux only.
"""

import argparse
import contextlib
import ctypes
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

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from forked import FORK, LONG, ROLLOUTS, RUNS, Forked, complaint, deviation, difference, fit, train
from mutations import draw

import ppo_lightning.algorithms  # noqa: F401  (load_from_checkpoint needs imported classes)
from ppo_lightning import PPO
from ppo_lightning.commands import cli
from ppo_lightning.errors import ConfigError

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
