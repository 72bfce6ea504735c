"""Train Stable-Baselines3 on LunarLander-v3 with the settings of configs/classic/cartpole.yaml.

`python benchmarks/lunarlander_sb3.py --seeds 1 2 3 4 5 --output FILE.csv` trains for 500 000 steps a seed and
writes one row per run, with the columns of `compare`. It needs the extra `benchmark` and box2d 2.3.10.
"""

import argparse
import csv
import time
from pathlib import Path

import numpy as np
import peers
import torch
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

ENV_ID = "LunarLander-v3"
COLUMNS = ["recipe", "env_id", "seed", "env_steps", "episodic_return", "eval_return", "wall_seconds"]
STEPS = 500_000


def run(seed: int) -> list[str | int | float]:
    """Train one seed and return its row."""
    model = peers.stable_baselines3_like_cartpole(ENV_ID, seed)
    begin = time.perf_counter()
    model.learn(STEPS)
    seconds = time.perf_counter() - begin
    returns = [episode["r"] for episode in model.ep_info_buffer or ()]
    evaluated, _ = evaluate_policy(model, make_vec_env(ENV_ID, n_envs=1, seed=1000 + seed), 10)
    means = [round(float(np.mean(values)), 2) for values in (returns, [evaluated])]
    return ["stable-baselines3", ENV_ID, seed, model.num_timesteps, *means, round(seconds, 1)]


def main() -> None:
    """Train all seeds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--output", type=Path, required=True, help="CSV file, one row per run")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with arguments.output.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(COLUMNS)
        for seed in arguments.seeds:
            table.writerow(run(seed))
            file.flush()


if __name__ == "__main__":
    main()
