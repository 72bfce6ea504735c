"""Compare the throughput of this package, Stable-Baselines3 and a TorchRL loop with the floor of raw parts.

`python benchmarks/speed.py [--workloads NAME ...] [--competitors NAME ...] [--repeats 5] [--seconds 10]
[--quick] [--threads N] [--busy N] [--device cuda] [--json PATH]` needs the extra `benchmark` and an idle
machine.

Every run is a separate process, in alternation, with the same environment, network and hyperparameters.
Throughput is measured over whole iterations (collection and update) after a warm-up, without start-up and
compilation. A step is one decision of the agent, which is four frames in Atari. Each competitor runs with
the number of PyTorch threads with which it is fastest (`peers.THREADS`), ours with the default. The floor is
the sum of the times of the environment, the policy and the updates alone.

`--busy N` starts N endless Python loops beside each run. `"ours, compiled, overlap"`, which runs only if it
is named, collects the next rollout during the update.
"""

import argparse
import functools
import itertools
import json
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peers

# Environment, hyperparameters, our backend, environments, steps per rollout, minimum seconds to measure.
WORKLOADS: dict[str, tuple[str, str, str, int, int, float]] = {
    "cartpole-4x128": ("CartPole-v1", "classic", "gymnasium", 4, 128, 0),
    "cartpole-lstm-4x128": ("CartPole-v1", "lstm", "gymnasium", 4, 128, 0),
    "cartpole-lstm-64x128": ("CartPole-v1", "lstm", "vectorized", 64, 128, 0),
    "cartpole-64x128": ("CartPole-v1", "classic", "vectorized", 64, 128, 0),
    "cartpole-2048x128": ("CartPole-v1", "classic", "vectorized", 2048, 128, 20),
    "halfcheetah-1x2048": ("HalfCheetah-v4", "mujoco", "gymnasium", 1, 2048, 0),
    "halfcheetah-16x256": ("HalfCheetah-v4", "mujoco", "envpool", 16, 256, 0),
    "breakout-8x128": ("ALE/Breakout-v5", "atari", "envpool", 8, 128, 20),
    "breakout-64x128": ("ALE/Breakout-v5", "atari", "envpool", 64, 128, 20),
    "breakout-lstm-8x128": ("ALE/Breakout-v5", "atari-lstm", "envpool", 8, 128, 20),
    "starpilot-64x256": ("starpilot", "procgen", "procgen", 64, 256, 1),
}
# Hyperparameters with our names. `peers.py` translates them.
RECIPES: dict[str, dict[str, Any]] = {
    "classic": {
        "learning_rate": 2.5e-4, "num_minibatches": 4, "update_epochs": 4, "ent_coef": 0.01, "clip_coef": 0.2,
    },
    "mujoco": {
        "learning_rate": 3e-4, "num_minibatches": 32, "update_epochs": 10, "ent_coef": 0.0, "clip_coef": 0.2,
        "norm_reward": True,
    },
    "atari": {
        "learning_rate": 2.5e-4, "num_minibatches": 4, "update_epochs": 4, "ent_coef": 0.01, "clip_coef": 0.1,
    },
    "procgen": {
        "learning_rate": 5e-4, "anneal_lr": False, "gamma": 0.999, "num_minibatches": 8, "update_epochs": 3,
        "ent_coef": 0.01, "clip_coef": 0.2, "norm_reward": True,
    },
}  # fmt: skip
RECIPES |= {"lstm": RECIPES["classic"], "atari-lstm": RECIPES["atari"]}
QUICK = ("cartpole-4x128", "cartpole-64x128")
OVERLAP = "ours, compiled, overlap"
# The warm-up of the floor, for compilation and caches, ends after this number of iterations or this time.
WARM_UP = 3
WARM_UP_SECONDS = 20.0
ROUNDS = 5  # alternating measurements of speed and floor


def competitors(workload: str, device: str) -> dict[str, Any]:
    """Return the competitors of a workload: our options and precision, or functions of others, by name."""
    kind = WORKLOADS[workload][1]
    ours: dict[str, Any] = {"ours": ({}, "32-true"), "ours, compiled": ({"compile": True}, "32-true")}
    if kind in ("classic", "mujoco"):
        ours[OVERLAP] = ({"compile": True, "overlap": True}, "32-true")
    if kind == "lstm":  # "ours" has an LSTM
        ours["ours, min_gru"] = ({"memory": "min_gru"}, "32-true")
        ours["ours, min_gru, compiled"] = ({"memory": "min_gru", "compile": True}, "32-true")
        ours["ours, without memory"] = ({"memory": None}, "32-true")
        return ours | {
            "sb3-contrib, like ours": peers.recurrent_ppo_like_ours,
            "sb3-contrib": peers.recurrent_ppo,
        }
    if kind == "atari-lstm":
        without = {"ours, without memory": ({"memory": None}, "32-true")}
        return ours | {"ours, compiled, bf16": ({"compile": True}, "bf16-mixed")} | without
    if kind == "procgen":  # compilation gains nothing here on a CPU
        return {
            "ours": ours["ours"],
            "ours, bf16": ({}, "bf16-mixed"),
            "without channels-last and parts": without_channels_last,
        }
    if kind == "atari":
        ours["ours, compiled, bf16"] = ({"compile": True}, "bf16-mixed")
        return ours | {"stable-baselines3": peers.stable_baselines3}
    if WORKLOADS[workload][3] > 100 or device != "cpu":
        return ours
    return ours | {"stable-baselines3": peers.stable_baselines3, "torchrl": peers.torchrl_loop}


def train(
    workload: str,
    callback: Any,
    options: dict[str, Any],
    env_kwargs: Any = None,
    **trainer: Any,
) -> Any:
    """Train with this package, without logs and files, until the callback ends the run.

    Args:
        workload: Key of ``WORKLOADS``.
        callback: Lightning callback or stopwatch.
        options: Options of ``PPO`` beside those of the workload, ``num_threads`` for ``Threads``,
            ``hidden_sizes`` for ``MLPAgent`` and ``overlap`` for the data module.
        env_kwargs: Arguments of the environment.
        **trainer: Arguments of Lightning's Trainer.

    Returns:
        The Trainer.
    """
    import lightning as L

    from ppo_lightning import PPO, CNNAgent, MLPAgent, RecurrentPPO, RolloutDataModule
    from ppo_lightning.callbacks import Threads

    class StopwatchCallback(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            trainer.should_stop = trainer.strategy.broadcast(callback.lap())

    env_id, kind, backend, num_envs, num_steps, _ = WORKLOADS[workload]
    options = {"memory": "lstm" if kind.endswith("lstm") else None, **options}
    hidden_sizes = options.pop("hidden_sizes", (64, 64))
    overlap = options.pop("overlap", False)
    agent: Any = functools.partial(MLPAgent, norm_obs=kind == "mujoco", hidden_sizes=hidden_sizes)
    if kind in ("atari", "atari-lstm", "procgen"):
        agent = functools.partial(CNNAgent, body="impala" if kind == "procgen" else "nature")
    if kind == "atari-lstm":  # single frames, with and without memory
        env_kwargs = {"frame_stack": 1}
    threads = Threads(options.pop("num_threads", None))
    if memory := options.pop("memory"):
        agent = functools.partial(agent.func, shared=True, memory=memory)
    lightning_trainer = L.Trainer(
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        callbacks=[StopwatchCallback() if isinstance(callback, peers.Stopwatch) else callback, threads],
        **trainer,
    )
    data = RolloutDataModule(
        env_id, backend, num_envs, num_steps, 10**9, env_kwargs=env_kwargs, overlap=overlap
    )  # type: ignore
    algorithm = RecurrentPPO if memory else PPO
    lightning_trainer.fit(algorithm(**RECIPES[kind], **options, agent=agent), data)
    return lightning_trainer


def ours(
    workload: str, options: dict[str, Any], precision: str, seconds: float, device: str
) -> dict[str, Any]:
    """Train with this package and return throughput, floor and their ratio."""
    if options.get("overlap"):  # its thread steps the environments that the floor would step
        watch = peers.Stopwatch(seconds)
        train(workload, watch, options, precision=precision, accelerator=device)
        return {"sps": watch.rate(WORKLOADS[workload][3] * WORKLOADS[workload][4])}
    clock = floor_clock(seconds)
    train(workload, clock, options, precision=precision, accelerator=device)
    return {"sps": clock.sps, "fraction": clock.fraction, "floor_sps": clock.floor_sps, "floor": clock.floor}


def floor_clock(seconds: float) -> Any:
    """Return a callback that measures speed and floor of a run in alternation, and then ends the run.

    The alternation cancels drifts of the machine's speed. Afterwards ``sps`` holds the environment steps
    per second, ``floor`` the seconds of each part of an iteration alone, ``floor_sps`` the environment
    steps per second without overhead, and ``fraction`` the ratio of ``sps`` to ``floor_sps``.

    Args:
        seconds: Total duration of the measurements of speed.
    """
    import lightning as L

    class FloorClock(L.Callback):
        def __init__(self) -> None:
            self._speeds: list[float] = []
            self._floors: list[dict[str, float]] = []
            self._iterations = 0
            self._warm = False

        def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
            self._start = time.perf_counter()

        def on_train_batch_end(
            self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            self._iterations += 1
            elapsed = time.perf_counter() - self._start
            if not self._warm:
                self._warm = self._iterations >= WARM_UP or elapsed > WARM_UP_SECONDS
                if not self._warm:
                    return
            elif elapsed > seconds / ROUNDS:
                self._speeds.append(self._iterations * pl_module.data.frames_per_rollout / elapsed)
                epoch = list(pl_module.minibatches(pl_module.advantages(batch)))
                self._floors.append(floor(pl_module, epoch))
                trainer.should_stop = len(self._floors) >= ROUNDS
            else:
                return
            self._iterations = 0
            self._start = time.perf_counter()

        def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
            frames = pl_module.data.frames_per_rollout
            self.sps = statistics.median(self._speeds)
            self.floor = {
                part: statistics.median(parts[part] for parts in self._floors) for part in self._floors[0]
            }
            self.floor_sps = frames / sum(self.floor.values())
            pairs = zip(self._speeds, self._floors, strict=True)
            self.fraction = statistics.median(speed * sum(parts.values()) / frames for speed, parts in pairs)

    return FloorClock()


def floor(module: Any, epoch: list[dict[str, Any]]) -> dict[str, float]:
    """Measure the parts of an iteration alone: their sum is the time of an iteration without overhead.

    The environments step with random actions. The policy acts on the same observations repeatedly,
    including log-probabilities and values. The eager update is repeated on one minibatch without Lightning's
    hooks, the compiled update on the minibatches of one epoch.

    Args:
        module: Algorithm in training. Its weights are kept; Adam's moments change.
        epoch: Minibatches of tensors [B, ...].

    Returns:
        Seconds per iteration, by part.
    """
    import torch

    from ppo_lightning.algorithms.minibatches import equal_parts
    from ppo_lightning.algorithms.update import CompiledUpdate
    from ppo_lightning.rollouts.storage import add_evaluation

    data = module.data
    agent = module.agent
    hparams = module.hparams
    minibatch = epoch[0]
    compiled = isinstance(module.optimize, CompiledUpdate)
    env = data.factory.make(data.env.num_envs, data.seed)
    observation = env.reset_arrays().astype(minibatch["observation"].numpy(force=True).dtype)
    noise = agent.noise((env.num_envs,)).numpy()
    with module.trainer.precision_plugin.forward_context(), torch.inference_mode():
        policy = type(agent).array_policy(agent)
        memory = agent.initial_memory(env.num_envs)
        state = None if memory is None else memory.numpy(force=True)
        acting = data.num_steps * mean_seconds(lambda: policy(observation, noise, state))
        if len(policy(observation, noise, state)) == 1:  # the rest is computed for the whole rollout
            acting += mean_seconds(functools.partial(add_evaluation, agent, data.collector._rollout))
    stepping = mean_seconds(raw_step(env), min_seconds=0.5)
    env.close()
    optimizer = module.trainer.optimizers[0]
    (group,) = optimizer.param_groups
    lr, group["lr"] = group["lr"], 0.0
    parts = equal_parts(minibatch, module.microbatch_size)

    def update() -> None:
        with module.trainer.precision_plugin.forward_context():
            if compiled:
                module.optimize(epoch)
                return
            optimizer.zero_grad()
            for part in parts:
                (module.total_loss(part)[0] / len(parts)).backward()
        torch.nn.utils.clip_grad_norm_(agent.parameters(), hparams.max_grad_norm)
        optimizer.step()

    updates = hparams.update_epochs * (1 if compiled else hparams.num_minibatches)
    updating = updates * mean_seconds(update, min_seconds=0.5)
    group["lr"] = lr
    return {"environment": data.num_steps * stepping, "acting": acting, "updates": updating}


def raw_step(env: Any) -> Callable[[], Any]:
    """Return a function that steps the environments with random actions, if possible without the adapter."""
    import torch

    envs = env.envs
    spec = env.action_spec_unbatched
    batches = [torch.stack([spec.rand() for _ in range(env.num_envs)]).numpy() for _ in range(100)]
    if isinstance(envs, list) and hasattr(envs[0], "unwrapped"):
        decode = env.format.from_row or (lambda row: row)
        chosen = itertools.cycle(
            [batch.tolist() if batch.ndim == 1 else [decode(row) for row in batch] for batch in batches]
        )

        def step_one_by_one() -> None:
            for single, action in zip(envs, next(chosen), strict=True):
                _, _, terminated, truncated, _ = single.step(action)
                if terminated or truncated:
                    single.reset()

        return step_one_by_one
    actions = itertools.cycle(batches)
    if type(env).__name__ in ("EnvPoolEnv", "CartPoleEnv"):
        typed = itertools.cycle([batch.astype(envs.action_space.dtype) for batch in batches])
        return lambda: envs.step(next(typed))

    def step_adapter() -> None:
        *_, terminated, truncated, _ = env.step_arrays(next(actions))
        if (ended := terminated | truncated).any():
            env.reset_arrays(ended)

    return step_adapter


def mean_seconds(function: Callable[[], Any], min_seconds: float = 0.3) -> float:
    """Return the mean time of a call in seconds. Like the speed of a run, the mean includes interruptions.

    Args:
        function: Function to measure.
        min_seconds: Minimum duration of the measurement in seconds.
    """
    function()
    _wait_for_gpu()
    calls = 0
    start = time.perf_counter()
    while time.perf_counter() - start < min_seconds:
        function()
        calls += 1
    _wait_for_gpu()
    return (time.perf_counter() - start) / calls


def _wait_for_gpu() -> None:
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def without_channels_last(
    env_id: str, recipe: dict[str, Any], num_envs: int, num_steps: int, seconds: float
) -> float:
    """Return the throughput of Starpilot without channels-last layout and microbatches."""
    from ppo_lightning.models import cnn

    cnn.channels_last = lambda network: network
    cnn.scaled = lambda observation: observation.float() / 255
    watch = peers.Stopwatch(seconds)
    frames = num_envs * num_steps
    train("starpilot-64x256", watch, {"microbatch_size": frames}, accelerator="cpu")
    return watch.rate(frames)


def run_one(competitor: str, workload: str, seconds: float, device: str, threads: int | None) -> None:
    """Run a competitor in this process and print a line of JSON.

    Args:
        competitor: Name from :func:`competitors`.
        workload: Key of ``WORKLOADS``.
        seconds: Duration of the measurement.
        device: Device of this package's runs.
        threads: Number of PyTorch threads. None selects our default, and ``peers.THREADS`` for others.
    """
    import torch

    warnings.simplefilter("ignore")
    env_id, kind, _, num_envs, num_steps, min_seconds = WORKLOADS[workload]
    seconds = max(seconds, min_seconds)
    options = competitors(workload, device)[competitor]
    if callable(options):
        if number := threads or peers.THREADS.get(kind):
            torch.set_num_threads(number)
        result = {"sps": options(env_id, RECIPES[kind], num_envs, num_steps, seconds)}
        result["threads"] = torch.get_num_threads()
    else:
        settings, precision = options
        result = ours(workload, settings | {"num_threads": threads}, precision, seconds, device)
        result["threads"] = threads
    print("RESULT", json.dumps(result))


def measure(competitor: str, workload: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run a competitor in a fresh process and return its results."""
    command = [sys.executable, "-W", "ignore", __file__, "--one", competitor, "--workloads", workload]
    command += ["--seconds", str(args.seconds), "--device", args.device]
    command += ["--threads", str(args.threads)] if args.threads else []
    start = time.perf_counter()
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(args.busy)]
    try:
        completed = subprocess.run(command, capture_output=True, text=True, check=False)
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    if completed.returncode:
        raise RuntimeError(f"{competitor} on {workload} failed:\n{completed.stderr}")
    result = json.loads(completed.stdout.rsplit("RESULT", 1)[1])
    duration = time.perf_counter() - start
    print(f"{workload}: {competitor} {result['sps']:.0f} ({duration:.0f} s in total)", file=sys.stderr)
    return result


def median(runs: list[dict[str, Any]], key: str) -> float:
    """Return the median of a measurement over runs."""
    return statistics.median(run[key] for run in runs)


def report(results: dict[str, dict[str, list[dict[str, Any]]]]) -> None:
    """Print throughputs with their ratios, and the share of the floor in our runs."""
    others = ("stable-baselines3", "torchrl", "without channels-last and parts")
    others += ("sb3-contrib, like ours", "sb3-contrib")
    others = tuple(other for other in others if any(other in runs for runs in results.values()))
    print(f"| workload | | threads | SPS | of the floor | {' | '.join(f'x {other}' for other in others)} |")
    print(f"|---|---|---|---|---|{'---|' * len(others)}")
    for workload, by_competitor in results.items():
        for competitor, runs in by_competitor.items():
            fraction = f"{median(runs, 'fraction'):.2f}" if "fraction" in runs[0] else ""
            # Ratios of runs in alternation, because the machine's speed drifts.
            ratios = []
            for other in others:
                pairs = zip(runs, by_competitor[other], strict=True) if other in by_competitor else ()
                speedups = [run["sps"] / other_run["sps"] for run, other_run in pairs]
                ratios.append(
                    f"{statistics.median(speedups):.2f}" if speedups and other != competitor else ""
                )
            threads = runs[0]["threads"] or "default"
            speed = f"{median(runs, 'sps'):.0f}"
            print(f"| {workload} | {competitor} | {threads} | {speed} | {fraction} | {' | '.join(ratios)} |")


def main() -> None:
    """Print a table and write all measurements as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=None)
    parser.add_argument(
        "--competitors", nargs="+", help='for example "ours, compiled" stable-baselines3 (default: all)'
    )
    parser.add_argument("--repeats", type=int, default=None)
    parser.add_argument("--seconds", type=float, default=None)
    parser.add_argument(
        "--quick", action="store_true", help="small workloads, once, in less than three minutes"
    )
    parser.add_argument(
        "--threads", type=int, help="PyTorch threads of all competitors (default: the best of each)"
    )
    parser.add_argument(
        "--busy", type=int, default=0, help="endless Python loops beside each run (default: 0)"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    names = args.workloads or (QUICK if args.quick else tuple(WORKLOADS))
    args.repeats = args.repeats or (1 if args.quick else 5)
    args.seconds = args.seconds or (4 if args.quick else 10)
    if args.one:
        run_one(args.one, names[0], args.seconds, args.device, args.threads)
        return
    results: dict[str, dict[str, list[dict[str, Any]]]] = {
        name: {
            competitor: []
            for competitor in competitors(name, args.device)
            if competitor in (args.competitors or {competitor} - {OVERLAP})
        }
        for name in names
    }
    for workload, by_competitor in results.items():
        for _ in range(args.repeats):
            for competitor, runs in by_competitor.items():
                runs.append(measure(competitor, workload, args))
        if args.json:  # after each workload, because all take an hour
            machine = {
                "machine": platform.processor() or platform.machine(),
                "python": platform.python_version(),
            }
            args.json.write_text(
                json.dumps(machine | {"command": sys.argv, "runs": results}, indent=1) + "\n"
            )
    report(results)


if __name__ == "__main__":
    main()
