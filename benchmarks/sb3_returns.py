"""Train Stable-Baselines3 with the settings of a recipe.

`python benchmarks/sb3_returns.py sac HalfCheetah-v4 --steps 200000 --seeds 1 2 --output FILE.csv` writes one
row per run, with the columns of `compare`. TD3 has the settings of `configs/td3`, SAC those of `configs/sac`
with the exceptions in `peers.py`, PPO those of `configs/ppo/classic.yaml`. It needs the extra
`benchmark`, and LunarLander box2d 2.3.10.
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

COLUMNS = ["recipe", "env_id", "seed", "env_steps", "episodic_return", "eval_return", "wall_seconds"]
LEARNING_STARTS = {"sac": 5_000, "td3": 25_000}


def run(algorithm: str, env_id: str, steps: int, seed: int) -> list[str | int | float]:
    """Train one seed and return its row."""
    if algorithm == "ppo":
        model = peers.stable_baselines3_like_cartpole(env_id, seed)
    else:
        starts = LEARNING_STARTS[algorithm]
        model = peers.stable_baselines3_off_policy(algorithm.upper(), env_id, starts, seed)
    begin = time.perf_counter()
    model.learn(steps)
    seconds = time.perf_counter() - begin
    returns = [episode["r"] for episode in model.ep_info_buffer or ()]
    evaluated, _ = evaluate_policy(model, make_vec_env(env_id, n_envs=1, seed=1000 + seed), 10)
    means = [round(float(np.mean(values)), 2) for values in (returns, [evaluated])]
    return [f"stable-baselines3/{algorithm}", env_id, seed, model.num_timesteps, *means, round(seconds, 1)]


def main() -> None:
    """Train all seeds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("algorithm", choices=["ppo", *LEARNING_STARTS])
    parser.add_argument("env_id")
    parser.add_argument("--steps", type=int, default=500_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--output", type=Path, required=True, help="CSV file, one row per run")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with arguments.output.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(COLUMNS)
        for seed in arguments.seeds:
            table.writerow(run(arguments.algorithm, arguments.env_id, arguments.steps, seed))
            file.flush()


if __name__ == "__main__":
    main()
