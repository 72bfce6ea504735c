"""Where the time of a recipe goes: `python benchmarks/stages.py [--config RECIPE] [--steps N] [--repeats R]`.

Trains with the recipe's own settings, timing each stage from outside; prints the median over the repeats as a table.
"""

import argparse
import contextlib
import io
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from ppo_lightning import PPO, MLPAgent, RolloutCollector, cli
from ppo_lightning.envs.gymnasium import GymnasiumEnv

seconds: Counter[str] = Counter()


def timed(owner: type, name: str, stage: str) -> None:
    """Adds the time that every call of a method takes to a stage."""
    original: Callable[..., Any] = getattr(owner, name)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            seconds[stage] += time.perf_counter() - start

    setattr(owner, name, wrapper)


def timed_policy(self: MLPAgent) -> Callable[..., Any]:
    """Wraps what acts in a rollout."""
    policy = array_policy(self)

    def wrapper(*args: Any) -> Any:
        start = time.perf_counter()
        result = policy(*args)
        seconds["acting"] += time.perf_counter() - start
        return result

    return wrapper


array_policy = MLPAgent.array_policy
MLPAgent.array_policy = timed_policy  # type: ignore[method-assign]


def run(config: str, steps: int) -> tuple[dict[str, float], float]:
    """Trains once; returns the share of time of each stage and the environment steps per second."""
    seconds.clear()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        flags = f"--data.total_timesteps {steps} --trainer.limit_val_batches 0 --trainer.enable_progress_bar false"
        cli.main(["fit", "--config", config, *flags.split()])
    wall = float(printed.getvalue().split("wall time: ")[1].split(" ")[0])
    done = int(printed.getvalue().split(" s for ")[1].split(" ")[0])
    stages = {
        "environment": seconds["environment"],
        "acting": seconds["acting"],
        "storing, noise, episode statistics": seconds["collection"] - seconds["environment"] - seconds["acting"],
        "advantages (GAE)": seconds["advantages"],
        "minibatch updates": seconds["update"],
        "logging": seconds["logging"],
    }
    stages["the rest (shuffling, Lightning)"] = wall - sum(stages.values())
    return {stage: value / wall for stage, value in stages.items()}, done / wall


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default="configs/classic/cartpole.yaml")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for method in ("step_arrays", "reset_arrays"):
        timed(GymnasiumEnv, method, "environment")
    for owner, method, stage in (
        (RolloutCollector, "rollout", "collection"),
        (PPO, "advantages", "advantages"),
        (PPO, "update", "update"),
        (PPO, "log_rollout", "logging"),
    ):
        timed(owner, method, stage)
    results = [run(args.config, args.steps) for _ in range(args.repeats)]
    speed = statistics.median(sps for _, sps in results)
    print(f"{args.config}: {speed:.0f} environment steps per second (median of {args.repeats}, one thread)\n")
    print("| stage | share | µs per environment step |\n|---|---|---|")
    for stage in results[0][0]:
        share = statistics.median(shares[stage] for shares, _ in results)
        print(f"| {stage} | {100 * share:.1f} % | {1e6 * share / speed:.1f} |")


if __name__ == "__main__":
    main()
