"""Where the time of a run goes, and what its parts would take alone: ``ppo-lightning profile``."""

import argparse
import functools
import itertools
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning as L
import torch

from ppo_lightning.algorithms.minibatches import equal_parts
from ppo_lightning.callbacks.speed import other_load, processors, recommendation
from ppo_lightning.envs import BatchedEnv
from ppo_lightning.errors import ConfigError, first_line
from ppo_lightning.rollouts.collector import RolloutCollector

WARM_UP, WARM_UP_SECONDS = 3, 20.0  # iterations, until the updates are compiled and the caches filled; fewer long ones
ROUNDS = 3  # of speed and floor in turn


class StageClock(L.Callback):
    """Times the stages of a run with the fast collector, from outside, and ends it.

    Afterwards ``sps`` has the environment steps a second, ``shares`` the share of time of each stage, ``floor`` the
    seconds that an iteration's environment steps, choices of actions and minibatch updates take alone, and ``fraction`` the
    floor's time in proportion to the run's.

    The speed is measured before the clocks are put in, which cost some per cent themselves and wait for a GPU, and the floor
    right after each stretch of it: the machine's own speed drifts.

    Args:
        seconds: How long to measure after the warm-up, at least one iteration without and one with clocks.
    """

    def __init__(self, seconds: float = 10.0) -> None:
        self.seconds = seconds
        self.spent: dict[str, float] = defaultdict(float)
        self._iterations, self._warm, self._clocked, self._measured = 0, False, False, 0.0
        self._speeds: list[float] = []
        self._floors: list[dict[str, float]] = []
        self.shares: dict[str, float] = {}
        self.changes: list[tuple[str, ...]] = []  # flags worth trying

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
        """Refuses what it cannot look into.

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
        for part, name in itertools.product(data.env.parts, ("send_arrays", "recv_arrays", "reset_arrays")):
            self._timed(part, name, "environment")
        self._timed(data.collector, "_evaluate", "values and log-probabilities")
        self._timed(data.collector, "rollout", "collection")
        self._timed(pl_module, "advantages", "advantages")
        self._timed(pl_module, "update", "updates")
        self._timed(pl_module, "log_rollout", "logging")

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Goes from the warm-up to speed and floor, from there to the stages, and to the end."""
        self._iterations += 1
        elapsed = time.perf_counter() - self._start
        if not self._warm:
            self._warm = self._iterations >= WARM_UP or elapsed > WARM_UP_SECONDS
            if not self._warm:
                return
        elif self._clocked:
            trainer.should_stop = elapsed > self.seconds / 2
            return
        elif elapsed > self.seconds / 2 / ROUNDS:
            self._speeds.append(self._iterations * pl_module.data.frames_per_rollout / elapsed)
            self._floors.append(floor(pl_module, next(pl_module.minibatches(pl_module.advantages(batch)))))
            self._measured += elapsed
            self._clocked = self._measured > self.seconds / 2
            if self._clocked:
                self._put_clocks(pl_module)
        else:
            return
        self._iterations, self._start = 0, time.perf_counter()

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Adds up."""
        wall = time.perf_counter() - self._start
        inside = ("environment", "acting", "values and log-probabilities")
        stages = {stage: self.spent[stage] for stage in inside}
        stages["storing"] = self.spent["collection"] - sum(stages.values())
        stages |= {stage: self.spent[stage] for stage in ("advantages", "shuffling", "updates", "logging")}
        stages["the rest"] = wall - sum(stages.values())
        self.shares = {stage: value / wall for stage, value in stages.items()}
        self.sps = statistics.median(self._speeds)
        self.floor = {part: statistics.median(its[part] for its in self._floors) for part in self._floors[0]}
        frames = pl_module.data.frames_per_rollout
        self.floor_sps = frames / sum(self.floor.values())
        fractions = [speed * sum(its.values()) / frames for speed, its in zip(self._speeds, self._floors, strict=True)]
        self.fraction = statistics.median(fractions)
        self.changes = changes(pl_module)


def floor(module: Any, minibatch: dict[str, torch.Tensor]) -> dict[str, float]:
    """Times the raw parts of an iteration, each alone: what is left when everything else costs nothing.

    The environments step with random actions and reset themselves where they can; the policy acts on the same observations
    again and again (choosing actions, and finding log-probabilities and values); the update is repeated on one minibatch, by
    way of no hook of Lightning's.

    Args:
        module: In training; its weights stay, Adam's moments do not.
        minibatch: Tensors [B, ...].

    Returns:
        Seconds of an iteration by part.
    """
    data, agent, hparams = module.data, module.agent, module.hparams
    env = data._make(data.env.num_envs, first_env=0, stream="train")
    observation = env.reset_arrays().astype(minibatch["observation"].numpy(force=True).dtype)
    noise = agent.noise((env.num_envs,)).numpy()
    with module.trainer.precision_plugin.forward_context(), torch.inference_mode():
        policy = type(agent).array_policy(agent)
        memory = agent.initial_memory(env.num_envs)
        state = None if memory is None else memory.numpy(force=True)
        acting = data.num_steps * seconds_of(lambda: policy(observation, noise, state))
        if policy(observation, noise, state)[1] is None:
            acting += seconds_of(functools.partial(type(data.collector)._evaluate, data.collector))
    stepping = seconds_of(raw_step(env), least=0.5)
    env.close()
    optimizer = module.trainer.optimizers[0]
    (group,) = optimizer.param_groups
    lr, group["lr"] = group["lr"], 0.0
    parts = equal_parts(minibatch, module.rows_at_once)

    def update() -> None:
        with module.trainer.precision_plugin.forward_context():
            if module._compiled is not None:
                module._compiled(parts)
                return
            optimizer.zero_grad()
            for part in parts:
                (module.loss(part)[0] / len(parts)).backward()
        torch.nn.utils.clip_grad_norm_(agent.parameters(), hparams.max_grad_norm)
        optimizer.step()

    updating = hparams.update_epochs * hparams.num_minibatches * seconds_of(update, least=0.5)
    group["lr"] = lr
    return {"environment": data.num_steps * stepping, "acting": acting, "updates": updating}


def raw_step(env: BatchedEnv) -> Callable[[], Any]:
    """Returns a function that steps what the adapter steps with random actions, without the adapter where that is possible."""
    envs, spec = env.envs, env.action_spec_unbatched
    batches = [torch.stack([spec.rand() for _ in range(env.num_envs)]).numpy() for _ in range(100)]
    if isinstance(envs, list) and hasattr(envs[0], "unwrapped"):
        decode = getattr(env, "_from_row", None) or (lambda row: row)
        chosen = itertools.cycle([batch.tolist() if batch.ndim == 1 else [decode(row) for row in batch] for batch in batches])

        def step_each() -> None:
            for one, its in zip(envs, next(chosen), strict=True):
                _, _, terminated, truncated, _ = one.step(its)
                if terminated or truncated:
                    one.reset()

        return step_each
    actions = itertools.cycle(batches)
    if type(env).__name__ in ("EnvPoolEnv", "CartPoleEnv"):
        typed = itertools.cycle([batch.astype(envs.action_space.dtype) for batch in batches])
        return lambda: envs.step(next(typed))

    def step_adapter() -> None:
        *_, terminated, truncated = env.step_arrays(next(actions))
        if (done := terminated | truncated).any():
            env.reset_arrays(done)

    return step_adapter


def seconds_of(function: Callable[[], Any], least: float = 0.3) -> float:
    """Returns the mean time of a call over a time at least: a mean, as a run's speed is, with the machine's hiccups in both."""
    function()
    _wait_for_gpu()
    calls, start = 0, time.perf_counter()
    while time.perf_counter() - start < least:
        function()
        calls += 1
    _wait_for_gpu()
    return (time.perf_counter() - start) / calls


def _wait_for_gpu() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def changes(module: Any) -> list[tuple[str, ...]]:
    """Returns flags that might make a run faster: another way to compute the same first, more environments last."""
    data, cpus = module.data, processors()
    found: list[tuple[str, ...]] = []
    if not module.hparams.compile:
        found.append(("--model.compile", "true"))
    if module.device.type == "cpu" and cpus > 1:
        found.append(("--model.num_threads", str(cpus) if torch.get_num_threads() == 1 else "1"))
    if module.trainer.precision == "32-true" and data.observation_spec.dtype == torch.uint8:
        found.append(("--trainer.precision", "bf16-mixed"))
    if data.backend in ("gymnasium", "envpool") and data.observation_spec.dtype != torch.uint8:
        found.append(("--data.backend", "envpool" if data.backend == "gymnasium" else "gymnasium"))
    return [*found, ("--data.num_envs", str(2 * data.num_envs))]


def profile(args: Sequence[str], seconds: float) -> StageClock:
    """Trains for some seconds with the arguments of ``fit``, leaving no file."""
    from ppo_lightning.commands import cli

    clock = StageClock(seconds)
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    flags = [part for name in quiet for part in (f"--trainer.{name}", "false")]
    sys.argv[1:] = ["fit", *args, "--data.total_timesteps", str(10**9), "--trainer.limit_val_batches", "0", *flags]
    cli.run([clock], save_config=False)
    return clock


def main(args: Sequence[str]) -> None:
    """Runs ``ppo-lightning profile``: prints where the time goes, the floor, and what changes of the settings give.

    Args:
        args: Its own, and those of ``fit``.
    """
    parser = argparse.ArgumentParser(
        "ppo-lightning profile",
        description="Where the time of a recipe goes on this machine, and what would make it faster.",
        epilog="All other arguments are those of fit: --config RECIPE.yaml --model.compile true ...",
        allow_abbrev=False,
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="to measure each setting, after its start (default: 10)")
    parser.add_argument("--no_changes", action="store_true", help="do not try other settings")
    own, rest = parser.parse_known_args(args)
    if load := other_load():  # before this process adds to it
        print(f"Other processes use this machine ({load}): these speeds hold only beside them.\n")
    clock = profile(rest, own.seconds)
    print(f"{clock.sps:.0f} environment steps a second.\n\n| stage | share | µs a step |\n|---|---|---|")
    for stage, share in clock.shares.items():
        print(f"| {stage} | {100 * share:.1f} % | {1e6 * share / clock.sps:.2f} |")
    parts = ", ".join(f"{part} {100 * value / sum(clock.floor.values()):.0f} %" for part, value in clock.floor.items())
    print(f"\nThe raw parts alone ({parts}) would give {clock.floor_sps:.0f}: this run reaches {clock.fraction:.2f} of that.")
    if own.no_changes:
        return
    print("\n| with | steps a second | ratio |\n|---|---|---|")
    tried: dict[tuple[str, ...], float] = {}
    for change in clock.changes:
        try:
            tried[change] = sps = profile([*rest, *change], own.seconds).sps
            print(f"| {' '.join(change)} | {sps:.0f} | {sps / clock.sps:.2f} |", flush=True)
        except Exception as error:  # EnvPool has not every environment, for example; the others are worth a try
            print(f"| {' '.join(change)} | does not work: {first_line(error.__cause__ or error)} | |", flush=True)
    print(f"\n{recommendation(clock.sps, tried)}")
    print("More environments are another algorithm: a policy collects more steps between fewer updates.")
