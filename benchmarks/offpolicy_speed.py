"""Compare the throughput of SAC, TD3 and DQN with that of Stable-Baselines3.

`python benchmarks/offpolicy_speed.py [--workloads NAME ...] [--repeats 3] [--seconds 20] [--json PATH]` needs
the extra `benchmark` and an idle machine.

Every run is a separate process with one PyTorch thread, in alternation, with the same environment, networks
and hyperparameters, those of CleanRL. Throughput is measured over collection and updates, after the start of
learning and compilation. Stable-Baselines3 acts with the newest weights at each step, this package with
those before the batch of `num_steps`.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import peers

# Algorithm, environment, steps of a batch.
WORKLOADS: dict[str, tuple[str, str, int]] = {
    "sac-halfcheetah": ("SAC", "HalfCheetah-v4", 10),
    "td3-halfcheetah": ("TD3", "HalfCheetah-v4", 10),
    "dqn-cartpole": ("DQN", "CartPole-v1", 50),
}
COMPETITORS = ("ours", "ours, compiled", "stable-baselines3")
LEARNING_STARTS, WARM_UP, LAP = 500, 1000, 100  # environment steps; a lap is one reading of the clock


def ours(workload: str, compiled: bool, watch: peers.Stopwatch, num_envs: int = 1, **options: Any) -> Any:
    """Train with this package until the stopwatch ends the run. Return the Trainer made with the options."""
    import lightning as L

    import ppo_lightning

    class Clock(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
            if module.env_steps > WARM_UP and module.env_steps % LAP == 0:
                trainer.should_stop = trainer.strategy.broadcast(watch.lap())

    algorithm, env_id, num_steps = WORKLOADS[workload]
    own = {"start_e": 0.05} if algorithm == "DQN" else {}
    module = getattr(ppo_lightning, algorithm)(learning_starts=LEARNING_STARTS, compile=compiled, **own)
    options |= {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(
        accelerator="cpu", enable_checkpointing=False, limit_val_batches=0, callbacks=[Clock()], **options
    )
    data = ppo_lightning.RolloutDataModule(
        env_id,
        num_envs=num_envs,
        num_steps=num_steps // num_envs,
        total_timesteps=10**8,
        rollouts_per_epoch=10**7,
    )
    trainer.fit(module, data)
    return trainer


def stable_baselines3(workload: str, watch: peers.Stopwatch) -> None:
    """Train Stable-Baselines3 with the same hyperparameters until the stopwatch ends the run."""
    from stable_baselines3.common.callbacks import BaseCallback

    class Clock(BaseCallback):
        def _on_step(self) -> bool:
            return not (self.num_timesteps > WARM_UP and self.num_timesteps % LAP == 0 and watch.lap())

    algorithm, env_id, _ = WORKLOADS[workload]
    model = peers.stable_baselines3_off_policy(algorithm, env_id, LEARNING_STARTS)
    model.learn(10**8, callback=Clock())


def run_one(competitor: str, workload: str, seconds: float) -> None:
    """Run a competitor in this process and print its environment steps per second."""
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    watch = peers.Stopwatch(seconds)
    if competitor == "stable-baselines3":
        stable_baselines3(workload, watch)
    else:
        ours(workload, competitor == "ours, compiled", watch)
    print("RESULT", watch.rate(LAP))


def measure(competitor: str, workload: str, seconds: float) -> float:
    """Run a competitor in a fresh process and return its environment steps per second."""
    command = [sys.executable, "-W", "ignore", __file__, "--one", competitor, "--workloads", workload]
    completed = subprocess.run(
        [*command, "--seconds", str(seconds)], capture_output=True, text=True, check=False
    )
    if completed.returncode:
        raise RuntimeError(f"{competitor} on {workload} failed:\n{completed.stderr}")
    speed = float(completed.stdout.rsplit("RESULT", 1)[1])
    print(f"{workload}: {competitor} {speed:.0f}", file=sys.stderr)
    return speed


def main() -> None:
    """Print a table and write all measurements as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=tuple(WORKLOADS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        run_one(args.one, args.workloads[0], args.seconds)
        return
    results: dict[str, dict[str, list[float]]] = {}
    print("| workload | num_steps | | SPS | x stable-baselines3 |\n|---|---|---|---|---|")
    for workload in args.workloads:
        runs = results[workload] = {competitor: [] for competitor in COMPETITORS}
        for _ in range(args.repeats):
            for competitor in COMPETITORS:
                runs[competitor].append(measure(competitor, workload, args.seconds))
        for competitor in COMPETITORS:
            # Ratios of runs in alternation, because the machine's speed drifts.
            pairs = zip(runs[competitor], runs["stable-baselines3"], strict=True)
            ratio = statistics.median(one / other for one, other in pairs)
            speed = f"{statistics.median(runs[competitor]):.0f} | {ratio:.2f}"
            print(f"| {workload} | {WORKLOADS[workload][2]} | {competitor} | {speed} |", flush=True)
    if args.json:
        machine = {"machine": platform.processor() or platform.machine(), "command": sys.argv}
        args.json.write_text(json.dumps(machine | {"runs": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
