"""Time of the environment, the policy and the updates alone, measured in the process of a run."""

import functools
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import lightning as L
import torch

from ppo_lightning.algorithms.minibatches import equal_parts
from ppo_lightning.algorithms.update import CompiledUpdate
from ppo_lightning.envs import BatchedEnv
from ppo_lightning.rollouts.storage import add_evaluation

# The warm-up, for compilation and caches, ends after this number of iterations or this time.
WARM_UP = 3
WARM_UP_SECONDS = 20.0
ROUNDS = 5  # alternating measurements of speed and floor


class FloorClock(L.Callback):
    """Callback that measures speed and floor of a run in alternation, and then ends the run.

    The alternation cancels drifts of the machine's speed. Afterwards ``sps`` holds the environment steps
    per second, ``floor`` the seconds of each part of an iteration alone, ``floor_sps`` the environment
    steps per second without overhead, and ``fraction`` the ratio of ``sps`` to ``floor_sps``.

    Args:
        seconds: Total duration of the measurements of speed.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
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
        elif elapsed > self.seconds / ROUNDS:
            self._speeds.append(self._iterations * pl_module.data.frames_per_rollout / elapsed)
            self._floors.append(floor(pl_module, list(pl_module.minibatches(pl_module.advantages(batch)))))
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


def floor(module: Any, epoch: list[dict[str, torch.Tensor]]) -> dict[str, float]:
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
        if policy(observation, noise, state)[1] is None:
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


def raw_step(env: BatchedEnv) -> Callable[[], Any]:
    """Return a function that steps the environments with random actions, if possible without the adapter."""
    envs = env.envs
    spec = env.action_spec_unbatched
    batches = [torch.stack([spec.rand() for _ in range(env.num_envs)]).numpy() for _ in range(100)]
    if isinstance(envs, list) and hasattr(envs[0], "unwrapped"):
        decode = getattr(env, "_from_row", None) or (lambda row: row)
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
        least: Minimum duration of the measurement in seconds.
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
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
