"""Record weights and metrics of short reference runs of a checkout, and compare two records to the bit.

A refactoring must leave every record equal. Record the checkout before and after the change, on the same
machine:

    git worktree add /tmp/before main
    python benchmarks/reference_runs.py record before.json --checkout /tmp/before
    python benchmarks/reference_runs.py record after.json
    python benchmarks/reference_runs.py compare before.json after.json

The runs need the extras `envpool`, `atari` and `mujoco`. Weights depend on the CPU: records of two machines
differ.
"""

import argparse
import csv
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

TIMES = ("charts/SPS", "time/")  # metrics that differ between any two runs
CLASSIC = "configs/classic/cartpole.yaml"
FAST = "configs/mujoco/halfcheetah_fast.yaml"
ADAPTIVE = ("--model.compile", "false", "--model.anneal_lr", "false", "--model.desired_kl", "0.01")
TWO_RANKS = ("--trainer.devices", "2", "--trainer.strategy", "ddp")
RUNS: dict[str, tuple[str, int, tuple[str, ...]]] = {  # name: recipe, environment steps, flags
    "cartpole": (CLASSIC, 12 * 512, ("--data.rollouts_per_epoch", "5")),
    "cartpole_compiled": (CLASSIC, 12 * 512, ("--model.compile", "true")),
    "halfcheetah": ("configs/mujoco/halfcheetah.yaml", 3 * 2048, ()),
    "halfcheetah_fast": (FAST, 12 * 2048, ("--data.rollouts_per_epoch", "5")),
    "pong": (
        "configs/atari/pong.yaml",
        2 * 1024,
        ("--data.eval_episodes", "1", "--data.rollouts_per_epoch", "1000"),
    ),
    "lstm_masked_velocity": ("configs/classic/cartpole_lstm_masked_velocity.yaml", 12 * 512, ()),
    "locks": ("configs/spaces/locks.yaml", 12 * 512, ()),
    "rpo": ("configs/rpo/halfcheetah.yaml", 2 * 2048, ()),
    "two_ranks": (CLASSIC, 12 * 512, TWO_RANKS),
    "two_ranks_statistics": (FAST, 12 * 2048, (*TWO_RANKS, *ADAPTIVE)),
    "resumed": (CLASSIC, 12 * 512, ()),  # from the middle of the run "cartpole"
}


def fit(checkout: Path, folder: Path, name: str, checkpoint: Path | None = None) -> Path:
    """Run `fit` in a checkout and return the folder of the run."""
    recipe, steps, flags = RUNS[name]
    logger = ("--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", str(folder))
    logger += ("--trainer.logger.name", name)
    command = [sys.executable, "-m", "ppo_lightning", "fit", "--config", recipe]
    command += ["--data.total_timesteps", str(steps)]
    resume = () if checkpoint is None else ("--ckpt_path", str(checkpoint))
    progress = ("--trainer.enable_progress_bar", "false")
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    keep_all = ("--trainer.callbacks+", "ModelCheckpoint", "--trainer.callbacks.save_top_k", "-1")
    full_command = [*command, *logger, *progress, *(keep_all if name == "cartpole" else ()), *flags, *resume]
    subprocess.run(full_command, cwd=checkout, env=environment, check=True, stdout=subprocess.DEVNULL)
    return folder / name / "version_0"


def digest(run: Path) -> dict[str, Any]:
    """Return a hash of each tensor in the last checkpoint of a run, and the logged metrics."""
    newest = max((run / "checkpoints").glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    checkpoint = torch.load(newest, weights_only=True, map_location="cpu")
    checksums = {
        name: hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        for name, tensor in sorted(checkpoint["state_dict"].items())
    }
    weights = {name: checksum.hexdigest()[:16] for name, checksum in checksums.items()}
    with (run / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    metrics = [
        {key: value for key, value in sorted(row.items()) if value and not key.startswith(TIMES)}
        for row in rows
    ]
    return {"weights": weights, "metrics": metrics}


def record(checkout: Path, names: list[str]) -> dict[str, Any]:
    """Return the digests of the reference runs of a checkout."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        digests = {}
        for name in names:
            checkpoint = None
            if name == "resumed":
                checkpoints = sorted(
                    (folder / "cartpole/version_0/checkpoints").glob("*.ckpt"), key=os.path.getmtime
                )
                checkpoint = checkpoints[0]
            digests[name] = digest(fit(checkout, folder, name, checkpoint))
            print(f"{name}: {len(digests[name]['metrics'])} rows of metrics", file=sys.stderr, flush=True)
        return digests


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Describe each weight, and the first row of metrics, that differs between two digests of a run."""
    found = []
    for kind in ("weights", "metrics"):
        old = before[kind]
        new = after[kind]
        keys = sorted({*old, *new}) if kind == "weights" else range(max(len(old), len(new)))
        for key in keys:
            pair = [values.get(key) if kind == "weights" else values[key : key + 1] for values in (old, new)]
            if pair[0] != pair[1]:
                found.append(f"{kind} {key}: {pair[0]} -> {pair[1]}")
                if kind == "metrics":
                    break
    return found


def main() -> None:
    """Record reference runs or compare two records.

    Raises:
        SystemExit: With code 1 if the records differ.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    recorder = commands.add_parser("record")
    recorder.add_argument("output", type=Path)
    recorder.add_argument("--checkout", type=Path, default=Path(__file__).parents[1])
    recorder.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    comparer = commands.add_parser("compare")
    comparer.add_argument("before", type=Path)
    comparer.add_argument("after", type=Path)
    args = parser.parse_args()
    if args.command == "record":
        args.output.write_text(json.dumps(record(args.checkout.resolve(), args.runs), indent=1) + "\n")
        return
    before, after = (json.loads(path.read_text()) for path in (args.before, args.after))
    differ = False
    for name in before:
        found = differences(before[name], after[name]) if name in after else ["was not recorded again"]
        differ |= bool(found)
        print(
            f"{name}: {'equal to the bit' if not found else found[0]}"
            + (f" (and {len(found) - 1} more)" if found[1:] else "")
        )
    if differ:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
