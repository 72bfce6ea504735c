"""Record weights and metrics of short reference runs of a checkout, and compare two records to the bit.

A refactoring must leave every record equal. Record the checkout before and after the change, on the same
machine:

    git worktree add /tmp/before main
    python benchmarks/reference_runs.py record before.json --checkout /tmp/before
    python benchmarks/reference_runs.py record after.json
    python benchmarks/reference_runs.py compare before.json after.json

`settings before.json` writes the settings of every bundled recipe as `fit --print_config` prints them,
defaults included, which a change of a default must leave equal, too.

The runs need the extras `envpool`, `atari`, `mujoco` and `selfplay`. Weights depend on the CPU:
records of two machines differ.
"""

import argparse
import csv
import hashlib
import inspect
import json
import os
import pkgutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

TIMES = ("charts/SPS", "time/")  # metrics that differ between any two runs
CLASSIC = "configs/classic/cartpole.yaml"
LSTM = "configs/classic/cartpole_lstm_masked_velocity.yaml"
MOUNTAINCAR = "configs/rnd/mountaincar.yaml"
PPG = "configs/ppg/cartpole.yaml"
TICTACTOE = "configs/selfplay/tictactoe.yaml"
FAST = "configs/mujoco/halfcheetah_fast.yaml"
# Off-policy: learning from step 100 on, in a run of 400.
EARLY = "--model.learning_starts 100 --model.buffer_size 1000 --data.eval_episodes 1 --model.compile "
BUFFER = " --model.save_buffer true"
STATISTICS = "--model.agent.norm_obs true --model.norm_reward true "
TWO_RANKS = "--trainer.devices 2 --trainer.strategy ddp "
LIMIT = '[{"class_path":"torchrl.envs.StepCounter","init_args":{"max_steps":50}}]'


class Run(NamedTuple):
    """A short run.

    Attributes:
        recipe: Path of the recipe.
        rollouts: Length of the run.
        size: Environments and steps of a rollout.
        flags: Further settings.
        resume_at: Rollout after which the run is also resumed, as the run NAME_resumed. 0: it is not resumed.
    """

    recipe: str
    rollouts: int
    size: tuple[int, int]
    flags: str = ""
    resume_at: int = 0


RUNS = {
    "cartpole": Run(CLASSIC, 12, (4, 128), resume_at=5),
    "cartpole_compiled": Run(CLASSIC, 12, (4, 128), "--model.compile true"),
    "halfcheetah": Run("configs/mujoco/halfcheetah.yaml", 3, (1, 2048)),
    "halfcheetah_fast": Run(FAST, 12, (16, 128), "--data.rollouts_per_epoch 5"),
    "pong": Run(
        "configs/atari/pong.yaml", 2, (8, 128), "--data.eval_episodes 1 --data.rollouts_per_epoch 1000"
    ),
    "lstm_masked_velocity": Run(LSTM, 6, (8, 128)),
    "min_gru": Run(LSTM, 6, (8, 128), "--model.agent.memory min_gru --model.compile true", resume_at=3),
    "locks": Run("configs/spaces/locks.yaml", 12, (4, 128)),
    "rpo": Run("configs/rpo/halfcheetah.yaml", 2, (1, 2048)),
    # Three auxiliary phases; the resumed run begins in the middle of the second.
    "ppg": Run(PPG, 12, (4, 128), "--model.n_iteration 4", resume_at=6),
    "ppg_shared_compiled": Run(
        PPG, 8, (4, 128), "--model.n_iteration 4 --model.agent.shared true --model.compile true"
    ),
    "rnd": Run(MOUNTAINCAR, 6, (16, 128)),
    "selfplay": Run(
        TICTACTOE,
        6,
        (64, 32),
        '--data.env_id ConnectFour-v1 --model.rating_games 4 --model.rating_opponents ["minimax:2"]',
        resume_at=3,
    ),
    "selfplay_openings": Run(
        TICTACTOE,
        6,
        (8, 32),
        "--data.env_id pettingzoo/classic/tictactoe_v3 --data.backend pettingzoo --model.rating_games 4"
        " --data.env_kwargs.opening_moves 3",
    ),
    "pettingzoo": Run("configs/multiagent/simple_spread_mappo.yaml", 4, (6, 50)),
    "tensors_compiled": Run(
        CLASSIC, 12, (8, 64), STATISTICS + "--data.backend torch --model.compile true", resume_at=6
    ),
    "transforms": Run(CLASSIC, 6, (4, 128), STATISTICS + f"--data.transforms {LIMIT}", resume_at=3),
    "workers": Run(CLASSIC, 12, (4, 128), STATISTICS + "--data.num_workers 2", resume_at=6),
    "overlap": Run(CLASSIC, 12, (4, 128), STATISTICS + "--data.overlap true", resume_at=6),
    "dqn": Run("configs/dqn/cartpole.yaml", 40, (1, 10), EARLY + "false" + BUFFER, resume_at=25),
    "dqn_compiled": Run("configs/dqn/cartpole.yaml", 40, (1, 10), EARLY + "true"),
    "c51": Run("configs/c51/cartpole.yaml", 40, (1, 10), EARLY + "false"),
    "ddpg": Run("configs/ddpg/pendulum.yaml", 40, (1, 10), EARLY + "false"),
    "td3": Run("configs/td3/pendulum.yaml", 40, (2, 5), EARLY + "false" + BUFFER, resume_at=25),
    "sac": Run("configs/sac/pendulum.yaml", 40, (1, 10), EARLY + "false" + BUFFER, resume_at=25),
    "sac_compiled": Run("configs/sac/pendulum.yaml", 40, (1, 10), EARLY + "true"),
    "sac_discrete": Run(
        "configs/sac/pong.yaml", 40, (1, 10), "--data.env_id CartPole-v1 " + EARLY + "false", resume_at=25
    ),
    "sac_two_ranks": Run("configs/sac/pendulum.yaml", 40, (2, 5), TWO_RANKS + EARLY + "false"),
    "two_ranks": Run(CLASSIC, 12, (4, 128), TWO_RANKS),
    "two_ranks_statistics": Run(
        FAST,
        12,
        (16, 128),
        TWO_RANKS + "--model.compile false --model.anneal_lr false --model.desired_kl 0.01",
    ),
    "two_ranks_rnd": Run(MOUNTAINCAR, 6, (16, 128), TWO_RANKS, resume_at=3),
}


def fit(checkout: Path, folder: Path, name: str, checkpoint: Path | None = None) -> Path:
    """Run `fit` in a checkout, from a checkpoint if there is one, and return the folder of the run."""
    run = RUNS[name]
    num_envs, num_steps = run.size
    flags = f"--config {run.recipe} --data.num_envs {num_envs} --data.num_steps {num_steps}"
    flags += f" --data.total_timesteps {run.rollouts * num_envs * num_steps} {run.flags}"
    if run.resume_at:
        flags += f" --data.rollouts_per_epoch {run.resume_at}"
        flags += " --trainer.callbacks+ ModelCheckpoint --trainer.callbacks.save_top_k -1"
    if checkpoint is not None:
        name += "_resumed"
    flags += f" --trainer.enable_progress_bar false --trainer.logger CSVLogger --trainer.logger.name {name}"
    command = [sys.executable, "-m", "ppo_lightning", "fit", *flags.split()]
    command += ["--trainer.logger.save_dir", str(folder)]
    command += [] if checkpoint is None else ["--ckpt_path", str(checkpoint)]
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=checkout, env=environment, check=True, stdout=subprocess.DEVNULL)
    return folder / name / "version_0"


def checkpoints_of(run: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first."""
    return sorted((run / "checkpoints").glob("*.ckpt"), key=os.path.getmtime)


def digest(run: Path) -> dict[str, Any]:
    """Return a hash of each tensor in the last checkpoint of a run, and the logged metrics."""
    checkpoint = torch.load(checkpoints_of(run)[-1], weights_only=True, map_location="cpu")
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
    digests = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name in names:
            started = time.perf_counter()
            run = fit(checkout, Path(temporary), name)
            digests[name] = digest(run)
            if RUNS[name].resume_at:
                resumed = fit(checkout, Path(temporary), name, checkpoints_of(run)[0])
                digests[f"{name}_resumed"] = digest(resumed)
            print(f"{name}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
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


def settings_of(name: str) -> dict[str, Any]:
    """Return the settings of a recipe, with the defaults of all classes, also of an agent that it names."""
    from ppo_lightning.experiments.tune import resolved

    settings = yaml.safe_load(resolved(Path(name), []))
    settings["name"] = settings["name"] or name.rpartition("/")[2]
    agent = settings["model"]["init_args"]["agent"]
    if isinstance(agent, str):
        parameters = inspect.signature(pkgutil.resolve_name(agent)).parameters.values()
        defaults = {it.name: it.default for it in parameters if it.default is not it.empty}
        settings["model"]["init_args"]["agent"] = {"class_path": agent, "init_args": defaults}
    return settings


def all_settings() -> dict[str, Any]:
    """Return the settings of the recipes by name, also by their former names."""
    from ppo_lightning.commands.recipes import bundled_recipes, bundled_tasks

    sys.argv = sys.argv[:1]  # of which Lightning would warn for each recipe
    return {name: settings_of(name) for name in (*bundled_recipes(), *bundled_tasks())}


def main() -> None:
    """Record reference runs or settings, or compare two records.

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
    commands.add_parser("settings").add_argument("output", type=Path)
    comparer = commands.add_parser("compare")
    comparer.add_argument("before", type=Path)
    comparer.add_argument("after", type=Path)
    args = parser.parse_args()
    if args.command == "record":
        args.output.write_text(json.dumps(record(args.checkout.resolve(), args.runs), indent=1) + "\n")
        return
    if args.command == "settings":
        args.output.write_text(json.dumps(all_settings(), indent=1, sort_keys=True, default=str) + "\n")
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
