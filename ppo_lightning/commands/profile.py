"""``ppo-lightning profile``: measure the time of each stage of a run and try faster settings."""

import contextlib
import io
import time
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import lightning as L
import torch
from lightning.pytorch.profilers import SimpleProfiler

from ppo_lightning.algorithms.ppo import PPO
from ppo_lightning.commands.arguments import Arguments
from ppo_lightning.commands.options import QUIET, parser_of
from ppo_lightning.envs.gymnasium import GymnasiumEnv
from ppo_lightning.errors import first_line
from ppo_lightning.rollouts.collector import RolloutCollector
from ppo_lightning.utils.threads import processors

WARM_UP, WARM_UP_SECONDS = 3, 20.0  # for compilation and caches: iterations, or at most this time
STAGES = ("collect", "advantages", "store", "update", "log")  # marks, also for --trainer.profiler simple
SLOW = 0.5  # share of the time of a run from which on its environments are slow
GAIN = 1.1  # smallest speedup for which another setting is recommended


class StageProfiler(SimpleProfiler):
    """Lightning's profiler, which waits for the GPU at the end of a stage, and prints no report."""

    def stop(self, action_name: str) -> None:
        """Stop the clock of a stage."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        super().stop(action_name)

    def describe(self) -> None:
        """Print nothing."""


class StageClock(L.Callback):
    """Callback that measures the stages of a run for some seconds after a warm-up, and then ends the run."""

    def __init__(self, seconds: float = 10.0) -> None:
        self.seconds = seconds
        self.sps = 0.0  # environment steps per second
        self.warm_up = 0.0  # seconds, with compilation
        self.shares: dict[str, float] = {}  # of the time, by stage
        self.environments = 0.0  # share of the time, within the collection
        self.changes: list[tuple[str, ...]] = []  # flags worth trying
        self._profiler = StageProfiler()
        self._seconds = 0.0  # inside of the environments
        self._is_warm = False

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Record the stages, and those of updates from the start."""
        trainer.profiler = self._profiler
        if "learning_starts" in pl_module.hparams:
            pl_module.hparams.learning_starts = 0

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Lift the end of the run, whose length has chosen the defaults."""
        pl_module.data.total_timesteps = 10**9

    def on_train_start(self, *_: Any) -> None:
        """Start the clock."""
        self._iterations = 0
        self._profiler.recorded_durations.clear()
        self._started = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        """Begin the measurement after the warm-up, and end the run after it."""
        self._iterations += 1
        data = pl_module.data
        wall = time.perf_counter() - self._started
        if self._is_warm and wall >= self.seconds and not self.sps:
            self.sps = self._iterations * data.frames_per_rollout / wall
            spent = self._profiler.recorded_durations
            self.shares = {stage: sum(spent[stage]) / wall for stage in STAGES if stage in spent}
            self.shares["other"] = 1 - sum(self.shares.values())
            self.environments = self._seconds / wall
            self.changes = changes(pl_module, self.environments)
            trainer.should_stop = True
        elif not self._is_warm and (self._iterations >= WARM_UP or wall >= WARM_UP_SECONDS):
            self._is_warm = True
            self.warm_up = wall
            if isinstance(data.collector, RolloutCollector):
                env: Any = data.collector.env
                env.step_arrays = self._timed(env.step_arrays)
                env.reset_arrays = self._timed(env.reset_arrays)
            self.on_train_start()

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of the environments that adds its duration to the clock."""

        def call(*args: Any) -> Any:
            start = time.perf_counter()
            value = method(*args)
            self._seconds += time.perf_counter() - start
            return value

        return call


def changes(module: Any, environment_share: float) -> list[tuple[str, ...]]:
    """Return flags that might make a run faster and leave the algorithm as it is."""
    data = module.data
    cores = processors()
    candidates: list[tuple[str, ...]] = []
    if not module.hparams.compile:
        candidates.append(("--model.compile", "true"))
    if module.device.type == "cpu" and cores > 1:
        candidates.append(("--num_threads", str(cores) if torch.get_num_threads() == 1 else "1"))
    takes_bf16 = isinstance(module, PPO) and module.trainer.precision != "bf16-mixed"
    if takes_bf16 and data.specs.observation.dtype == torch.uint8:
        candidates.append(("--trainer.precision", "bf16-mixed"))
    num_workers = min(data.shard.count, cores)
    # Only the backend 'gymnasium' has workers.
    in_process = ("--data.num_workers", "0") if data.factory.num_workers else ()
    registered = gymnasium.registry.get(data.env_id)
    if registered is not None and registered.vector_entry_point and data.backend != "vectorized":
        candidates.append(("--data.backend", "vectorized", *in_process))
    if data.backend in ("gymnasium", "envpool") and data.specs.observation.dtype != torch.uint8:
        other = "envpool" if data.backend == "gymnasium" else "gymnasium"
        candidates.append(("--data.backend", other, *in_process))
    if in_process:
        candidates.append(in_process)
    elif isinstance(data.env, GymnasiumEnv) and environment_share > SLOW and num_workers > 1:
        candidates.append(("--data.num_workers", str(num_workers)))
    return candidates


def recommendation(sps: float, tried: dict[tuple[str, ...], float]) -> str:
    """Return a sentence that names the fastest change."""
    best = max(tried, key=lambda change: tried[change], default=())
    if not best or tried[best] < GAIN * sps:
        return "None of these settings is more than 10 % faster."
    return f"Set {' '.join(best)}: {tried[best] / sps:.1f} times as fast."


def break_even(eager: StageClock, compiled: StageClock) -> str:
    """Return a sentence that names the length of a run from which on compilation pays."""
    saved = 1 / eager.sps - 1 / compiled.sps  # seconds per step
    cost = max(compiled.warm_up - eager.warm_up, 0.0)
    when = f"in runs of more than {round(cost / saved, -3):.0f} steps" if saved > 0 else "in no run"
    return f"Compilation takes {cost:.0f} s: it pays {when}."


def profile(args: Sequence[str], seconds: float) -> StageClock:
    """Measure a run with these arguments of ``fit`` for some seconds, without writing a file."""
    from ppo_lightning.commands import cli

    clock = StageClock(seconds)
    limits = ("limit_val_batches=0", "max_steps=-1", "max_epochs=-1", "max_time=null", "fast_dev_run=0")
    endless = [f"--trainer.{limit}" for limit in limits]
    with contextlib.redirect_stdout(io.StringIO()):  # of the summary
        cli.run([clock], Arguments(["fit", *args, *endless, *QUIET]), save_config=False)
    return clock


def main(args: Sequence[str]) -> None:
    """Run ``ppo-lightning profile``: print the time of each stage and the speed with other settings."""
    arguments = "--config RECIPE.yaml --model.compile true ..."
    parser = parser_of("profile", f"All other arguments are passed to fit: {arguments}")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement (default: 10)")
    options, flags = parser.parse_known_args(args)
    clock = profile(flags, options.seconds)
    print(f"{clock.sps:.0f} environment steps per second.\n\n| stage | share | µs per step |\n|---|---|---|")
    for stage, share in clock.shares.items():
        print(f"| {stage} | {100 * share:.1f} % | {1e6 * share / clock.sps:.2f} |")
    if clock.environments:
        print(f"\nWithin collect, the environments take {100 * clock.environments:.1f} % of the time.")
    print("\n| with | steps per second | ratio |\n|---|---|---|")
    tried: dict[tuple[str, ...], float] = {}
    note = ""
    for change in clock.changes:
        try:
            trial = profile([*flags, *change], options.seconds)
            tried[change] = sps = trial.sps
            print(f"| {' '.join(change)} | {sps:.0f} | {sps / clock.sps:.2f} |", flush=True)
            if "--model.compile" in change:
                note = f" {break_even(clock, trial)}"
        except Exception as error:  # for example, EnvPool lacks some environments
            reason = first_line(error.__cause__ or error)
            print(f"| {' '.join(change)} | does not work: {reason} | |", flush=True)
    print(f"\n{recommendation(clock.sps, tried)}{note}")
