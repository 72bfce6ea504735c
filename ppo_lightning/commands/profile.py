"""``ppo-lightning profile``: measure the time of each stage of a run and try faster settings."""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gymnasium
import lightning as L
import torch

from ppo_lightning.callbacks.speed import other_load, recommendation
from ppo_lightning.envs.factory import largest_divisor
from ppo_lightning.envs.gymnasium import GymnasiumEnv
from ppo_lightning.envs.step_time import SLOW
from ppo_lightning.errors import ConfigError, first_line
from ppo_lightning.rollouts.collector import RolloutCollector
from ppo_lightning.utils.processors import processors

# The warm-up, for compilation and caches, ends after this number of iterations or this time.
WARM_UP = 3
WARM_UP_SECONDS = 20.0
COLLECTION_STAGES = ("environment", "acting", "values and log-probabilities")


class StageClock(L.Callback):
    """Callback that measures the stages of a run with the fast collector, and then ends the run.

    Afterwards ``sps`` holds the environment steps per second, ``shares`` the share of time of each
    stage, and ``changes`` the flags worth trying. Throughput is measured before the stages, whose
    clocks have an overhead of a few per cent and synchronize with the GPU.

    Args:
        seconds: Duration of the measurement after the warm-up. At least one iteration is measured without
            clocks and one with clocks.

    Example:
        >>> clock = StageClock(seconds=5.0)
        >>> trainer = L.Trainer(callbacks=[clock])
    """

    def __init__(self, seconds: float = 10.0) -> None:
        self.seconds = seconds
        self.spent: dict[str, float] = defaultdict(float)
        self.sps = 0.0
        self.shares: dict[str, float] = {}
        self.changes: list[tuple[str, ...]] = []
        self._iterations = 0
        self._phase = "warm-up"

    def _timed(self, owner: Any, name: str, stage: str) -> None:
        function = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            _wait_for_gpu()
            self.spent[stage] += time.perf_counter() - start
            return result

        setattr(owner, name, timed)

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Check that the stages can be measured, and start the clock.

        Raises:
            ConfigError: The run uses a TensorCollector, or collects during the update.
        """
        if pl_module.data.overlap:
            raise ConfigError("profile times one stage after the other: leave out data.overlap.")
        if not isinstance(pl_module.data.collector, RolloutCollector):
            raise ConfigError(
                "profile times natively batched environments only:"
                " leave out data.transforms, and give the id of an environment."
            )
        self._start = time.perf_counter()

    def _put_clocks(self, pl_module: Any) -> None:
        data = pl_module.data
        policy = pl_module.agent.array_policy
        minibatches = pl_module.minibatches

        def timed_policy() -> Callable[..., Any]:
            self._policy = policy()
            self._timed(self, "_policy", "acting")
            return self._policy

        def timed_minibatches(rollout: Any) -> Iterator[Any]:
            start = time.perf_counter()
            for minibatch in minibatches(rollout):
                _wait_for_gpu()
                self.spent["shuffling"] += time.perf_counter() - start
                yield minibatch
                start = time.perf_counter()

        pl_module.agent.array_policy = timed_policy
        pl_module.minibatches = timed_minibatches
        for name in ("step_arrays", "reset_arrays"):
            self._timed(data.env, name, "environment")
        self._timed(data.collector, "_evaluate", "values and log-probabilities")
        self._timed(data.collector, "rollout", "collection")
        self._timed(pl_module, "advantages", "advantages")
        self._timed(pl_module, "update", "updates")
        self._timed(pl_module, "log_rollout", "logging")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Advance through the phases: warm-up, throughput, stages, end."""
        self._iterations += 1
        elapsed = time.perf_counter() - self._start
        if self._phase == "warm-up":
            if self._iterations < WARM_UP and elapsed < WARM_UP_SECONDS:
                return
            self._phase = "speed"
        elif elapsed < self.seconds / 2:
            return
        elif self._phase == "speed":
            self.sps = self._iterations * pl_module.data.frames_per_rollout / elapsed
            self._put_clocks(pl_module)
            self._phase = "stages"
        else:
            trainer.should_stop = True
            return
        self._iterations = 0
        self._start = time.perf_counter()

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Compute the shares of the stages."""
        wall = time.perf_counter() - self._start
        stages = {stage: self.spent[stage] for stage in COLLECTION_STAGES}
        stages["storing"] = self.spent["collection"] - sum(stages.values())
        stages |= {stage: self.spent[stage] for stage in ("advantages", "shuffling", "updates", "logging")}
        stages["updates"] -= stages["shuffling"]  # the update draws its minibatches
        stages["other"] = wall - sum(stages.values())
        self.shares = {stage: value / wall for stage, value in stages.items()}
        self.changes = changes(pl_module, self.shares["environment"])


def _wait_for_gpu() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def changes(module: Any, environment_share: float) -> list[tuple[str, ...]]:
    """Return flags that might make a run faster. The last one changes the number of environments.

    Args:
        module: The algorithm, in a run.
        environment_share: Share of the time that the environments take.
    """
    data = module.data
    cores = processors()
    candidates: list[tuple[str, ...]] = []
    if not module.hparams.compile:
        candidates.append(("--model.compile", "true"))
    if module.device.type == "cpu" and cores > 1:
        candidates.append(("--num_threads", str(cores) if torch.get_num_threads() == 1 else "1"))
    if module.trainer.precision == "32-true" and data.specs.observation.dtype == torch.uint8:
        candidates.append(("--trainer.precision", "bf16-mixed"))
    num_workers = largest_divisor(data.num_envs // module.trainer.world_size, cores)
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
    return [*candidates, ("--data.num_envs", str(2 * data.num_envs))]


def profile(args: Sequence[str], seconds: float) -> StageClock:
    """Measure a run without writing a file.

    Args:
        args: Arguments of ``fit``.
        seconds: Duration of the measurement.
    """
    from ppo_lightning.commands import cli

    clock = StageClock(seconds)
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    flags = [part for name in quiet for part in (f"--trainer.{name}", "false")]
    endless = ("--data.total_timesteps", str(10**9), "--trainer.limit_val_batches", "0")
    cli.run([clock], ["fit", *args, *endless, *flags], save_config=False)
    return clock


def main(args: Sequence[str]) -> None:
    """Run ``ppo-lightning profile``: print the time of each stage and the speed with other settings.

    Args:
        args: Arguments of the command. Unknown ones are passed to ``fit``.
    """
    parser = argparse.ArgumentParser(
        "ppo-lightning profile",
        description="Measure the time of each stage of a recipe on this machine, and try faster settings.",
        epilog="All other arguments are passed to fit: --config RECIPE.yaml --model.compile true ...",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="duration of each measurement (default: 10)"
    )
    parser.add_argument("--no_changes", action="store_true", help="do not try other settings")
    options, flags = parser.parse_known_args(args)
    if load := other_load():  # before this process adds to it
        print(f"Other processes use this machine ({load}), so these speeds are lower than on an idle one.\n")
    clock = profile(flags, options.seconds)
    print(f"{clock.sps:.0f} environment steps per second.\n\n| stage | share | µs per step |\n|---|---|---|")
    for stage, share in clock.shares.items():
        print(f"| {stage} | {100 * share:.1f} % | {1e6 * share / clock.sps:.2f} |")
    if options.no_changes:
        return
    print("\n| with | steps per second | ratio |\n|---|---|---|")
    tried: dict[tuple[str, ...], float] = {}
    for change in clock.changes:
        try:
            tried[change] = sps = profile([*flags, *change], options.seconds).sps
            print(f"| {' '.join(change)} | {sps:.0f} | {sps / clock.sps:.2f} |", flush=True)
        except Exception as error:  # for example, EnvPool lacks some environments
            reason = first_line(error.__cause__ or error)
            print(f"| {' '.join(change)} | does not work: {reason} | |", flush=True)
    print(f"\n{recommendation(clock.sps, tried)}")
    print("More environments change the algorithm: the policy collects more steps between fewer updates.")
