"""Environment steps a second, ours beside Stable-Baselines3's, in alternation on the same machine.

`python benchmarks/speed.py [--workloads NAME ...] [--repeats 5] [--json PATH]`; needs the extra `benchmark`, and a machine that
does nothing else. Every run is a process of its own, with the same environment, network and hyperparameters. Its
speed is that of whole iterations (collection and update) after the first ones, so that start-up and compilation do not count.
A step is a decision of the agent: of Atari four frames. SB3 steps Atari through its own wrappers, one game after the other.
"""

import argparse
import functools
import json
import platform
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

WARM_UP = 2  # iterations
# Environment, recipe of the hyperparameters, environments, steps, iterations to time.
WORKLOADS: dict[str, tuple[str, str, int, int, int]] = {
    "cartpole-4x128": ("CartPole-v1", "cartpole", 4, 128, 60),
    "halfcheetah-1x2048": ("HalfCheetah-v4", "mujoco", 1, 2048, 6),
    "breakout-8x128": ("ALE/Breakout-v5", "atari", 8, 128, 6),
    "pong-16x128": ("ALE/Pong-v5", "pong_fast", 16, 128, 4),
}
# In our names; SB3's are in `stable_baselines3` below.
RECIPES: dict[str, dict[str, Any]] = {
    "cartpole": {"learning_rate": 2.5e-4, "num_minibatches": 4, "update_epochs": 4, "ent_coef": 0.01, "clip_coef": 0.2},
    "mujoco": {
        "learning_rate": 3e-4, "num_minibatches": 32, "update_epochs": 10, "ent_coef": 0.0, "clip_coef": 0.2,
        "norm_reward": True,
    },
    "atari": {"learning_rate": 2.5e-4, "num_minibatches": 4, "update_epochs": 4, "ent_coef": 0.01, "clip_coef": 0.1},
    "pong_fast": {"learning_rate": 2.5e-4, "num_minibatches": 8, "update_epochs": 3, "ent_coef": 0.01, "clip_coef": 0.2},
}  # fmt: skip
# Backend, compiled or not, and precision of ours; nothing for the other. The last one is what the others are compared with.
COMPETITORS: dict[str, tuple[str, bool, str] | None] = {
    "ours": ("gymnasium", False, "32-true"),
    "ours, compiled": ("gymnasium", True, "32-true"),
    "stable-baselines3": None,
}
ATARI_COMPETITORS: dict[str, tuple[str, bool, str] | None] = {
    "ours, envpool": ("envpool", False, "32-true"),
    "ours, envpool, compiled": ("envpool", True, "32-true"),
    "ours, envpool, compiled, bf16": ("envpool", True, "bf16-mixed"),
    "ours, ale, compiled, bf16": ("ale", True, "bf16-mixed"),
    "ours, gymnasium, compiled, bf16": ("gymnasium", True, "bf16-mixed"),
    "stable-baselines3": None,
}


def competitors(workload: str) -> dict[str, tuple[str, bool, str] | None]:
    """Returns who runs a workload."""
    return ATARI_COMPETITORS if WORKLOADS[workload][0].startswith("ALE/") else COMPETITORS


def ours(workload: str, backend: Any, compile: bool, precision: Any) -> list[float]:
    """Trains; returns the time at which each iteration ended."""
    import lightning as L

    from ppo_lightning import PPO, CNNAgent, MLPAgent, RolloutDataModule

    env_id, recipe, num_envs, num_steps, iterations = WORKLOADS[workload]
    times: list[float] = []

    class Clock(L.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            times.append(time.perf_counter())

    agent: Any = CNNAgent if env_id.startswith("ALE/") else functools.partial(MLPAgent, norm_obs=recipe == "mujoco")
    steps = num_envs * num_steps * (WARM_UP + iterations)
    trainer = L.Trainer(
        max_epochs=-1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, limit_val_batches=0, callbacks=[Clock()], precision=precision,
    )  # fmt: skip
    data = RolloutDataModule(env_id, backend, num_envs=num_envs, num_steps=num_steps, total_timesteps=steps)
    trainer.fit(PPO(**RECIPES[recipe], compile=compile, agent=agent), data)
    return times


def stable_baselines3(workload: str) -> list[float]:
    """Does the same."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_atari_env, make_vec_env
    from stable_baselines3.common.vec_env import VecFrameStack, VecNormalize

    env_id, recipe, num_envs, num_steps, iterations = WORKLOADS[workload]
    times: list[float] = []

    class Clock(BaseCallback):
        def _on_rollout_start(self) -> None:
            times.append(time.perf_counter())

        def _on_step(self) -> bool:
            return True

        def _on_training_end(self) -> None:
            times.append(time.perf_counter())

    env: Any
    atari = env_id.startswith("ALE/")
    if atari:
        import ale_py
        import gymnasium

        gymnasium.register_envs(ale_py)
        game = env_id.removeprefix("ALE/").removesuffix("-v5")
        env = VecFrameStack(make_atari_env(f"{game}NoFrameskip-v4", n_envs=num_envs), 4)
    else:
        env = make_vec_env(env_id, n_envs=num_envs)
    if recipe == "mujoco":
        env = VecNormalize(env)
    options, batch = RECIPES[recipe], num_envs * num_steps
    lr, minibatches = options["learning_rate"], options["num_minibatches"]
    model = PPO(
        "CnnPolicy" if atari else "MlpPolicy", env, learning_rate=lambda left: left * lr, n_steps=num_steps,
        batch_size=batch // minibatches, n_epochs=options["update_epochs"], clip_range=options["clip_coef"],
        clip_range_vf=options["clip_coef"], ent_coef=options["ent_coef"], device="cpu",
    )  # fmt: skip
    model.learn(batch * (WARM_UP + iterations), callback=Clock())
    return times[1:]


def one(competitor: str, workload: str) -> None:
    """Runs in a process of its own and prints the environment steps per second."""
    warnings.simplefilter("ignore")
    options = competitors(workload)[competitor]
    times = stable_baselines3(workload) if options is None else ours(workload, *options)
    _, _, num_envs, num_steps, iterations = WORKLOADS[workload]
    assert len(times) == WARM_UP + iterations
    print(f"SPS {num_envs * num_steps * iterations / (times[-1] - times[WARM_UP - 1])}")


def measure(competitor: str, workload: str) -> float:
    """Runs a competitor in a fresh process; returns its environment steps per second."""
    command = [sys.executable, "-W", "ignore", __file__, "--one", competitor, "--workloads", workload]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{competitor} on {workload} failed:\n{done.stderr}")
    return float(done.stdout.rsplit("SPS ", 1)[1])


def main() -> None:
    """Prints a table, and writes every figure as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        one(args.one, args.workloads[0])
        return
    runs: dict[str, dict[str, list[float]]] = {name: {who: [] for who in competitors(name)} for name in args.workloads}
    for _ in range(args.repeats):
        for workload, speeds in runs.items():
            for competitor in speeds:
                speeds[competitor].append(measure(competitor, workload))
                print(f"{workload}: {competitor} {speeds[competitor][-1]:.0f}", file=sys.stderr)
    print("| workload | | SPS | ratio |\n|---|---|---|---|")
    for workload, speeds in runs.items():
        medians = {who: statistics.median(values) for who, values in speeds.items()}
        for who, median in medians.items():
            print(f"| {workload} | {who} | {median:.0f} | {median / medians['stable-baselines3']:.2f} |")
    if args.json:
        machine = {"machine": platform.processor() or platform.machine(), "python": platform.python_version()}
        args.json.write_text(json.dumps({**machine, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
