"""The rollout collector for natively batched environments.

TorchRL's ``Collector`` adds 300-700 microseconds to each step of an environment and a policy that take about
100. This collector steps arrays and writes into one preallocated TensorDict.
"""

from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.data import TensorSpec

from ppo_lightning.envs.batched import BatchedEnv, Step
from ppo_lightning.envs.state import Row, from_plain, to_plain
from ppo_lightning.envs.torchrl import untransformed
from ppo_lightning.models.normalizers import CollectorMoments
from ppo_lightning.rollouts.base import Collector
from ppo_lightning.rollouts.storage import add_evaluation, allocate, without_autocast
from ppo_lightning.utils.finite import require_finite
from ppo_lightning.utils.scans import episode_sums


class RolloutCollector(Collector):
    """Collector of rollouts [N, T] from natively batched environments.

    A rollout holds the agent's ``rollout_keys`` and, under ``next``, ``observation``, ``reward``, ``done``,
    ``terminated``, ``truncated``, ``episode_done``, ``episode_reward`` and ``step_count``.

    - At episode ends, ``("next", "observation")`` is the final observation.
    - ``done`` ends the flow of advantages, ``episode_done`` ends the episode. They differ where an Atari game
      continues after the loss of a life.
    - ``episode_reward`` and ``step_count`` are sums over the episode so far. ``episode_reward`` sums the
      environment's own rewards, ``reward`` is scaled if there is a scaler.
    - Observations are normalized by the statistics up to their step, as the agent saw them.
    - Actions are stored before the environment clips them.
    - An agent with a memory adds ``memory`` [N, T, M] and ``("next", "memory")``. At all steps, ``memory`` is
      the state before the first step. ``("next", "memory")`` is the state after a step, written only at
      episode ends and at the last step.
    - ``("next", "info")`` [N, T, names], if an info has a number of ``data.log_info``, otherwise NaN.
    - ``weight`` [N, T], if not all steps of the environments count: see
      :class:`~ppo_lightning.rollouts.weighted_collector.WeightedCollector`.

    A subclass adds to :meth:`rollout_keys`, and overrides :meth:`step`, which is called once a step, or
    :meth:`row_rewards`.

    Episodes continue from one rollout to the next. The storage is reused, so that the next rollout overwrites
    this one.

    The arguments are those of :class:`~ppo_lightning.rollouts.base.Collector`.

    Example:
        >>> env = make_env("CartPole-v1", num_envs=4)
        >>> collector = RolloutCollector(env, MLPAgent(*env.agent_specs), num_steps=128, num_rollouts=10)
        >>> rollout = next(iter(collector))
    """

    env: BatchedEnv
    can_resume = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        env = self.env = untransformed(self.env)  # below the view of `make_env`
        if self._memory is not None:
            self._memory = self._memory.numpy(force=True)
        self._evaluated = True  # whether the policy gave all that a step stores
        self._sums = {name: np.zeros(env.num_envs) for name in ("discounted", "episode_reward", "step_count")}
        self._raw_rewards = np.zeros((self.num_steps, env.num_envs))
        self._rollout = allocate(self.rollout_keys(), self.agent, env.num_envs, self.num_steps)
        # NumPy views [T, N, ...] of the storage: writing a step through them costs a third of a tensor copy.
        self._store = {
            key: value.transpose(0, 1).numpy() for key, value in self._rollout.items(True, leaves_only=True)
        }
        self._weight: np.ndarray | None = self._store.get("weight")  # None: all steps count
        assert env.valid is None or self._weight is not None, "make_collector chooses another class"

    def rollout_keys(self) -> dict[str, TensorSpec]:
        """Return the specs of a step that the rollout stores, by key."""
        observation_spec = self.env.observation_spec_unbatched["observation"]
        return self.agent.rollout_keys(observation_spec, self.env.action_spec_unbatched)

    def rollout(self) -> TensorDictBase:
        """Collect one rollout [N, T]."""
        normalizer = self.agent.normalizer
        self._moments = None if normalizer is None else CollectorMoments(normalizer, arrays=True)
        try:
            with self.precision():
                torch.set_autocast_cache_enabled(True)  # no weight changes during a rollout
                observation = self._walk()
        finally:
            self._watch.stop()
        steps_before = self.rollouts_done * self.num_steps
        require_finite("reward", self._raw_rewards.T, steps_before, self.shard.first)
        if self._moments is not None and not self.deterministic:
            self._moments.store()  # only now, when the whole rollout is known to be finite
        self.finish()
        self.rollouts_done += 1
        self.observation = observation
        rollout = self._rollout.copy()  # keys that are added do not stay
        self._infos.add_to(rollout["next"])
        return rollout

    def _walk(self) -> np.ndarray:
        """Step the environments, write the steps into the storage, and return the last observations."""
        env = self.env
        memory = self._memory
        store = self._store
        rewards = self._raw_rewards
        observations = store["observation"]
        next_observations = store["next", "observation"]
        targets = [store[key] for key in self.agent.out_keys]
        terminateds = store["next", "terminated"][..., 0]
        truncateds = store["next", "truncated"][..., 0]
        episode_dones = store["next", "episode_done"][..., 0]
        policy, apart = self.agent.array_policy(), without_autocast("cpu")
        noise = None if self.deterministic else self.draw_noise().numpy()
        # detail 1
        observation, self.observation = self.observation, None  # unknown, if a step fails
        if observation is None:
            for sums in self._sums.values():
                sums[:] = 0  # a failed step left episodes
            if memory is not None:
                memory[:] = 0
            with apart:
                (observation,) = self.normalized(0, env.reset_arrays())
        if memory is not None:
            store["memory"][0] = memory
        for t in range(self.num_steps):
            self._watch.step_begins()
            row = observations[t]
            row[:] = observation
            outputs = policy(row, None if noise is None else noise[t], memory)
            for rows, values in zip(targets, outputs, strict=False):
                rows[t] = values
            with apart:
                raw, rewards[t], terminated, truncated, episode_dones[t] = self.step(t, outputs[0])
            terminateds[t] = terminated
            truncateds[t] = truncated
            done = fresh = None
            # count_nonzero takes a third of the time of any().
            if np.count_nonzero(terminated) or np.count_nonzero(truncated):
                done = terminated | truncated
                self._infos.read(t, done)
                raw = raw.copy()  # the reset may write into it
                with apart:
                    first = env.reset_arrays(done)[done]
                fresh = None if env.resets_late else first  # otherwise the final observations
                if memory is not None:
                    store["next", "memory"][t][done] = memory[done]
                    # detail 34
                    memory[done] = 0
            observation, *begun = self.normalized(t, raw, fresh, done)
            next_observations[t] = observation  # the final one at episode ends: nothing resets itself
            if begun:
                observation[done] = begun[0]
        self._evaluated = len(outputs) == len(targets)
        return observation

    def step(self, t: int, action: np.ndarray) -> Step:
        """Step the environments at step t of the rollout, see :meth:`BatchedEnv.step_arrays`."""
        return self.env.step_arrays(action)

    def normalized(
        self, t: int, raw: np.ndarray, fresh: np.ndarray | None = None, done: np.ndarray | None = None
    ) -> list[np.ndarray]:
        """Check and normalize raw observations [N, ...] and first ones [K, ...] of environments ``done``."""
        step = self.rollouts_done * self.num_steps + t
        require_finite("observation", raw, step, self.shard.first)
        batches = [raw]
        if fresh is not None:
            require_finite("observation", fresh, step, self.shard.first, done)
            batches.append(fresh)
        if self._moments is None:
            return batches
        return self._moments.normalize(batches, not self.deterministic, self.counted(t, batches, done))

    def counted(self, t: int, batches: list[np.ndarray], done: np.ndarray | None) -> list[np.ndarray]:
        """Return which rows of batches enter the statistics, each [B] bool; none: all rows do."""
        return []

    def finish(self) -> None:
        """Complete the storage after the last step: everything that can wait until then."""
        store = self._store
        keys = ("terminated", "truncated", "done", "episode_done")
        terminated, truncated, done, episode_done = (store["next", key][..., 0] for key in keys)
        np.logical_or(terminated, truncated, out=done)
        if self._memory is not None:
            store["next", "memory"][-1][~done[-1]] = self._memory[~done[-1]]
        rewards = self.env.learning_reward(self._raw_rewards)
        if self.reward_scaler is not None:
            arrays = (rewards, done, self._sums["discounted"], self._weight)
            tensors: Any = [None if array is None else torch.from_numpy(array) for array in arrays]
            rewards = self.reward_scaler.scale(*tensors).numpy()
        store["next", "reward"][..., 0] = rewards
        if not self._evaluated:
            with self.precision():
                add_evaluation(self.agent, self._rollout)
        steps = np.ones(done.shape) if self._weight is None else self._weight
        for name, values in (("episode_reward", self.row_rewards()), ("step_count", steps)):
            store["next", name][..., 0] = episode_sums(values, episode_done, self._sums[name])

    def row_rewards(self) -> np.ndarray:
        """Return the rewards whose sum is the return of a row, [T, N]: the environment's own."""
        return self._raw_rewards

    def _states(self) -> list[Row]:
        states = self.env.get_state() or []
        arrays = {"observation": self.observation}
        if self._memory is not None:
            arrays["memory"] = self._memory
        rows = [state | {key: values[i] for key, values in arrays.items()} for i, state in enumerate(states)]
        return [to_plain(row) for row in rows]

    def _restore(self, rows: list[Row]) -> None:
        rows = [from_plain(row) for row in rows]
        self.env.set_state(rows)
        self.observation = np.stack([row["observation"] for row in rows])
        if self._memory is not None:
            self._memory[:] = np.stack([row["memory"] for row in rows])
