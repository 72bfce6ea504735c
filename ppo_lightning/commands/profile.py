"""``ppo-lightning profile``: where the time of a run goes, and what would make it faster."""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning as L
import torch

from ppo_lightning.callbacks.speed import other_load, processors, recommendation
from ppo_lightning.envs.cartpole import IDS
from ppo_lightning.errors import ConfigError, first_line
from ppo_lightning.rollouts.collector import RolloutCollector

WARM_UP, WARM_UP_SECONDS = (
    3,
    20.0,
)  # iterations, until the updates are compiled and the caches filled; fewer long ones
INSIDE = ("environment", "acting", "values and log-probabilities")  # of a collection


class StageClock(L.Callback):
    """Time the stages of a run with the fast collector, from outside, and end the run.

    Afterwards ``sps`` has the environment steps per second, ``shares`` the share of time of each stage, and ``changes`` the
    flags worth trying. The speed is measured before the clocks are put in, which cost some per cent themselves and wait for
    a GPU.

    Args:
        seconds: How long to measure after the warm-up, at least one iteration without and one with clocks.
    """

    def __init__(self, seconds: float = 10.0) -> None:
        self.seconds = seconds
        self.spent: dict[str, float] = defaultdict(float)
        self.sps = 0.0
        self.shares: dict[str, float] = {}
        self.changes: list[tuple[str, ...]] = []
        self._iterations, self._phase = 0, "warm-up"

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
        """Refuse what it cannot look into.

        Raises:
            ConfigError: The environment goes through TorchRL's collector.
        """
        if not isinstance(pl_module.data.collector, RolloutCollector):
            raise ConfigError(
                "profile times natively batched environments only: leave out data.transforms, or name one by its id."
            )
        self._start = time.perf_counter()

    def _put_clocks(self, pl_module: Any) -> None:
        data, policy, minibatches = pl_module.data, pl_module.agent.array_policy, pl_module.minibatches

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

        pl_module.agent.array_policy, pl_module.minibatches = timed_policy, timed_minibatches
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
        """Go from the warm-up to the speed, from there to the stages, and to the end."""
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
        self._iterations, self._start = 0, time.perf_counter()

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Add up."""
        wall = time.perf_counter() - self._start
        stages = {stage: self.spent[stage] for stage in INSIDE}
        stages["storing"] = self.spent["collection"] - sum(stages.values())
        stages |= {stage: self.spent[stage] for stage in ("advantages", "shuffling", "updates", "logging")}
        stages["the rest"] = wall - sum(stages.values())
        self.shares = {stage: value / wall for stage, value in stages.items()}
        self.changes = changes(pl_module)


def _wait_for_gpu() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def changes(module: Any) -> list[tuple[str, ...]]:
    """Return flags that might make a run faster: another way to compute the same first, more environments last."""
    data, cpus = module.data, processors()
    found: list[tuple[str, ...]] = []
    if not module.hparams.compile:
        found.append(("--model.compile", "true"))
    if module.device.type == "cpu" and cpus > 1:
        found.append(("--num_threads", str(cpus) if torch.get_num_threads() == 1 else "1"))
    if module.trainer.precision == "32-true" and data.specs.observation.dtype == torch.uint8:
        found.append(("--trainer.precision", "bf16-mixed"))
    if data.env_id in IDS and data.backend != "vectorized":
        found.append(("--data.backend", "vectorized"))
    if data.backend in ("gymnasium", "envpool") and data.specs.observation.dtype != torch.uint8:
        found.append(("--data.backend", "envpool" if data.backend == "gymnasium" else "gymnasium"))
    return [*found, ("--data.num_envs", str(2 * data.num_envs))]


def profile(args: Sequence[str], seconds: float) -> StageClock:
    """Train for some seconds with the arguments of ``fit``, leaving no file."""
    from ppo_lightning.commands import cli

    clock = StageClock(seconds)
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    flags = [part for name in quiet for part in (f"--trainer.{name}", "false")]
    ended = ("--data.total_timesteps", str(10**9), "--trainer.limit_val_batches", "0")
    cli.run([clock], ["fit", *args, *ended, *flags], save_config=False)
    return clock


def main(args: Sequence[str]) -> None:
    """Run ``ppo-lightning profile``: print where the time goes, and what changes of the settings give.

    Args:
        args: Its own, and those of ``fit``.
    """
    parser = argparse.ArgumentParser(
        "ppo-lightning profile",
        description="Where the time of a recipe goes on this machine, and what would make it faster.",
        epilog="All other arguments are those of fit: --config RECIPE.yaml --model.compile true ...",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="to measure each setting, after its start (default: 10)"
    )
    parser.add_argument("--no_changes", action="store_true", help="do not try other settings")
    own, rest = parser.parse_known_args(args)
    if load := other_load():  # before this process adds to it
        print(f"Other processes use this machine ({load}): these speeds hold only beside them.\n")
    clock = profile(rest, own.seconds)
    print(f"{clock.sps:.0f} environment steps a second.\n\n| stage | share | µs a step |\n|---|---|---|")
    for stage, share in clock.shares.items():
        print(f"| {stage} | {100 * share:.1f} % | {1e6 * share / clock.sps:.2f} |")
    if own.no_changes:
        return
    print("\n| with | steps a second | ratio |\n|---|---|---|")
    tried: dict[tuple[str, ...], float] = {}
    for change in clock.changes:
        try:
            tried[change] = sps = profile([*rest, *change], own.seconds).sps
            print(f"| {' '.join(change)} | {sps:.0f} | {sps / clock.sps:.2f} |", flush=True)
        except (
            Exception
        ) as error:  # EnvPool has not every environment, for example; the others are worth a try
            print(
                f"| {' '.join(change)} | does not work: {first_line(error.__cause__ or error)} | |",
                flush=True,
            )
    print(f"\n{recommendation(clock.sps, tried)}")
    print("More environments are another algorithm: a policy collects more steps between fewer updates.")
