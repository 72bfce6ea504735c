"""Compare CartPole on the backend `torch` with PureJaxRL, in alternation.

`python benchmarks/purejaxrl.py --peer DIRECTORY --python PYTHON [--repeats 5]`

DIRECTORY holds `ppo.py` and `wrappers.py` from the folder `purejaxrl` of
https://github.com/luchris429/purejaxrl (measured: 31756b1). PYTHON is the interpreter of an environment with
`pip install gymnax==0.0.9 jax flax optax distrax` (measured: jax 0.10.2).
Both programs use the settings of `configs/ppo/classic.yaml`, a fresh process for each run, and their
best number of threads: JAX all cores, ours `--threads`.

Throughput leaves out compilation. The duration until a return of 475 (mean of the last 100 episodes) counts
imports and compilation. PureJaxRL cannot stop there. Its duration is that of imports, compilation and the
share of the run until then.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

SIZES = {"4x128": (4, 1000), "64x128": (64, 120), "2048x128": (2048, 8)}  # environments, iterations
STEPS = 128
GOAL = 475.0


def peer(num_envs: int, iterations: int, seed: int) -> dict[str, float]:
    """Train PureJaxRL in this process."""
    import jax
    import numpy as np

    for name in ("brax", "brax.envs", "brax.envs.wrappers", "brax.envs.wrappers.training", "navix"):
        sys.modules[name] = MagicMock()  # for other environments than CartPole
    from ppo import make_train  # type: ignore[import-not-found]

    begun = time.perf_counter()
    settings = {"LR": 2.5e-4, "ANNEAL_LR": True, "UPDATE_EPOCHS": 4, "NUM_MINIBATCHES": 4, "GAMMA": 0.99}
    settings |= {"GAE_LAMBDA": 0.95, "CLIP_EPS": 0.2, "ENT_COEF": 0.01, "VF_COEF": 0.5, "MAX_GRAD_NORM": 0.5}
    settings |= {"ACTIVATION": "tanh", "ENV_NAME": "CartPole-v1", "DEBUG": False}
    settings |= {"NUM_ENVS": num_envs, "NUM_STEPS": STEPS, "TOTAL_TIMESTEPS": num_envs * STEPS * iterations}
    train = jax.jit(make_train(settings)).lower(jax.random.PRNGKey(seed)).compile()
    compiled = time.perf_counter()
    result = jax.block_until_ready(train(jax.random.PRNGKey(seed)))
    seconds = time.perf_counter() - compiled
    metrics = result["metrics"]
    ended = np.asarray(metrics["returned_episode"]).reshape(-1)  # in the order of the steps
    returns = np.asarray(metrics["returned_episode_returns"]).reshape(-1)[ended]
    means = np.convolve(returns, np.ones(100) / 100, "valid")
    reached = np.flatnonzero(means >= GOAL)
    share = (np.flatnonzero(ended)[reached[0] + 99] + 1) / len(ended) if len(reached) else float("nan")
    sps = num_envs * STEPS * iterations / seconds
    return {"sps": sps, "compiling": compiled - begun, "running_to_goal": share * seconds}


def ours(num_envs: int, iterations: int, seed: int, threads: int) -> dict[str, float]:
    """Train with the recipe of CartPole in this process."""
    import lightning as L
    import torch

    from ppo_lightning import PPO, RolloutDataModule

    class Clock(L.Callback):
        def __init__(self) -> None:
            self.ends: list[float] = []
            self.goal = float("nan")

        def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
            self.ends.append(time.perf_counter())
            returns = pl_module.episode_returns
            if self.goal != self.goal and len(returns) == 100 and sum(returns) / 100 >= GOAL:
                self.goal = self.ends[-1]

    torch.set_num_threads(threads)
    L.seed_everything(seed, verbose=False)
    clock = Clock()
    total = num_envs * STEPS * iterations
    data = RolloutDataModule("CartPole-v1", "torch", num_envs, STEPS, total)
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = L.Trainer(max_epochs=-1, accelerator="cpu", callbacks=[clock], limit_val_batches=0, **quiet)
    begun = time.perf_counter()
    trainer.fit(PPO(compile=True), data)
    warm = 3  # iterations, of which the first two compile
    sps = num_envs * STEPS * (iterations - warm) / (clock.ends[-1] - clock.ends[warm - 1])
    compiling = clock.ends[warm - 1] - begun
    return {"sps": sps, "compiling": compiling, "running_to_goal": clock.goal - clock.ends[warm - 1]}


def run(kind: str, size: str, seed: int, options: argparse.Namespace) -> dict[str, float]:
    """Train in a fresh process."""
    python = options.python if kind == "peer" else sys.executable
    command = [python, str(Path(__file__).resolve()), "--one", kind, "--sizes", size, "--seed", str(seed)]
    command += ["--threads", str(options.threads)]
    folder = options.peer if kind == "peer" else None
    environment = {"PYTHONPATH": str(folder.resolve())} if folder is not None else {}
    begun = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | environment)
    if done.returncode:
        raise RuntimeError(f"{kind} failed:\n{done.stderr}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    result["process"] = time.perf_counter() - begun
    return result


def main() -> None:
    """Print a table and write all measurements as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--peer", type=Path)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seed", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--one", choices=["peer", "ours"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        arguments = (*SIZES[options.sizes[0]], options.seed)
        result = peer(*arguments) if options.one == "peer" else ours(*arguments, options.threads)
        print(json.dumps(result))
        return
    results: dict[str, Any] = {"command": sys.argv[1:]}
    for size in options.sizes:
        rows: dict[str, list[dict[str, float]]] = {"ours": [], "peer": []}
        for seed in range(1, options.repeats + 1):
            for kind, measured in rows.items():
                measured.append(run(kind, size, seed, options))
        results[size] = rows
        speeds = {kind: [row["sps"] for row in measured] for kind, measured in rows.items()}
        ratios = [one / other for one, other in zip(speeds["ours"], speeds["peer"], strict=True)]
        medians = {kind: statistics.median(values) for kind, values in speeds.items()}
        print(
            f"| {size} | {medians['ours']:,.0f} | {medians['peer']:,.0f} | {statistics.median(ratios):.2f} |",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
