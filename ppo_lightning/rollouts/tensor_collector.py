"""The rollout collector for TorchRL environments and for environments with TorchRL transforms."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.collectors import BaseCollector
from torchrl.data import Bounded
from torchrl.envs import EnvBase

from ppo_lightning.envs.state import Row
from ppo_lightning.models import ActorCritic
from ppo_lightning.models.normalizers import RewardScaler
from ppo_lightning.models.tensor_statistics import TensorMoments, scale
from ppo_lightning.rollouts.collector import Precision
from ppo_lightning.utils.finite import require_finite
from ppo_lightning.utils.scans import discounted_sum
from ppo_lightning.utils.seeding import derive_seed
from ppo_lightning.utils.watch import StepWatch


class TensorCollector(BaseCollector):
    """Collector of rollouts [N, T] from any TorchRL environment, transforms included.

    A rollout holds the keys of :class:`RolloutCollector` with the same values, and the other keys of the
    environment. Rollouts stay on the device of the environment. Only acting, normalization of observations
    and clipping of actions happen at each step. The rest is computed once per rollout: checks for non-finite
    values, sums along episodes and scaling of rewards.

    The environment keeps raw observations and received actions in its own TensorDict, so that a stateless
    environment may compute the next state from them. The rollout stores normalized observations and drawn
    actions.

    Args:
        env: The environments, batch size [N].
        agent: The agent, on any device.
        num_steps: T.
        num_rollouts: Number of rollouts of the run; None: no end, and no length.
        seed: The run's seed, from which the seed of the action noise is derived.
        deterministic: Choose the most probable actions, and do not update the agent's statistics.
        reward_scaler: Scales the rewards; None: no scaling.
        first_env: As for :class:`RolloutCollector`.
        total_envs: As for :class:`RolloutCollector`.
        precision: As for :class:`RolloutCollector`, without the environment's own computations.
        step_timeout: As for :class:`RolloutCollector`.

    Example:
        >>> from torchrl.envs import GymEnv, SerialEnv
        >>> env = SerialEnv(2, lambda: GymEnv("CartPole-v1", categorical_action_encoding=True))
        >>> agent = MLPAgent(env.observation_spec_unbatched["observation"], env.action_spec_unbatched)
        >>> TensorCollector(env, agent, num_steps=8).rollout().batch_size
        torch.Size([2, 8])
    """

    can_resume = False

    def __init__(
        self,
        env: EnvBase,
        agent: ActorCritic,
        num_steps: int,
        num_rollouts: int | None = None,
        seed: int = 0,
        deterministic: bool = False,
        reward_scaler: RewardScaler | None = None,
        first_env: int = 0,
        total_envs: int | None = None,
        precision: Precision = nullcontext,
        step_timeout: float | None = None,
    ) -> None:
        super().__init__()
        self.env = env
        self.agent = agent
        self.num_steps = num_steps
        self.deterministic = deterministic
        self.reward_scaler = reward_scaler
        self.precision = precision
        num_envs = env.batch_size[0]
        self.requested_frames_per_batch = num_envs * num_steps
        self.total_frames = -1 if num_rollouts is None else num_rollouts * self.requested_frames_per_batch
        self._frames = 0
        self._watch = StepWatch(step_timeout)
        self._rows = slice(first_env, first_env + num_envs)
        self._total_envs = total_envs or num_envs
        self._generator = torch.Generator().manual_seed(derive_seed(seed, "noise"))
        # Seeded runs keep the numbers that TorchRL's Collector gave, which acted once for a test.
        agent.noise((self._total_envs,), self._generator)
        self._device = env.device or torch.device("cpu")
        self._bounds: tuple[Tensor, Tensor] | None = None
        action_spec = env.action_spec_unbatched
        self._action_dtype = action_spec.dtype
        if isinstance(action_spec, Bounded) and action_spec.dtype.is_floating_point:
            self._bounds = (action_spec.space.low.to(self._device), action_spec.space.high.to(self._device))
        self._carrier: TensorDictBase | None = None  # the environment's input at the next step
        self._observation: Tensor | None = None  # normalized, of the running episodes, on the agent's device
        self._memory = agent.initial_memory(num_envs)
        # Apple GPUs (MPS) have no float64.
        exact = torch.device("cpu") if self._device.type == "mps" else self._device
        self._episode = {
            key: torch.zeros(num_envs, dtype=torch.float64, device=exact)
            for key in ("episode_reward", "step_count")
        }
        scaled_on = exact if reward_scaler is None else reward_scaler.mean.device
        self._discounted = torch.zeros(num_envs, dtype=torch.float64, device=scaled_on)

    @torch.no_grad()
    def rollout(self) -> TensorDictBase:
        """Collect one rollout [N, T].

        Raises:
            NonFiniteError: An observation or a reward is NaN or infinite.
        """
        normalizer = self.agent.normalizer
        # A copy: the agent's statistics change only when the whole rollout is known to be finite.
        moments = None if normalizer is None or self.deterministic else TensorMoments(normalizer)
        steps: list[TensorDictBase] = []
        try:
            outputs = self._walk(moments, steps)
        except Exception:
            if (
                steps and self._carrier is not None
            ):  # the exception may be a consequence of a non-finite observation
                self._require_finite(_stacked(steps), self._carrier["observation"])
            raise
        finally:
            self._watch.stop()
        rollout = _stacked(steps)
        assert self._carrier is not None
        self._require_finite(rollout, self._carrier["observation"])
        if moments is not None:
            moments.store()
        for key in outputs[0]:
            rollout[key] = torch.stack([output[key] for output in outputs], dim=1).to(self._device)
        if moments is None:
            for key in ("observation", ("next", "observation")):
                rollout[key] = self._normalize(rollout[key]).to(self._device)
        self._add_episodes(rollout["next"])
        self._frames += self.requested_frames_per_batch
        return rollout

    def _walk(self, moments: TensorMoments | None, steps: list[TensorDictBase]) -> list[dict[Any, Tensor]]:
        """Step the environments through a rollout.

        Args:
            moments: Statistics of the observations, updated in place; None: observations are normalized by
                the agent's statistics.
            steps: Receives each step of the environment, batch size [N].

        Returns:
            What the agent adds to each step, by key, each [N, ...].
        """
        agent = self.agent
        outputs: list[dict[Any, Tensor]] = []
        if self._carrier is None or self._observation is None:
            self._carrier = self.env.reset()
            first = self._carrier["observation"]
            if moments is None:
                self._observation = self._normalize(first)
            else:
                (self._observation,) = moments.update_and_normalize([first.to(agent.device)])
        for _ in range(self.num_steps):
            self._watch.step_begins()
            noise = None
            if not self.deterministic:
                noise = agent.noise((self._total_envs,), self._generator)[self._rows].to(agent.device)
            with self.precision():
                action, log_prob, value, memory = agent.act(self._observation, noise, self._memory)
            output: dict[Any, Tensor] = {
                "action": action,
                "action_log_prob": log_prob,
                "state_value": value.unsqueeze(-1),
            }
            if self._memory is not None and memory is not None:
                output |= {"memory": self._memory, ("next", "memory"): memory}
            if moments is not None:
                output["observation"] = self._observation
            outputs.append(output)
            self._carrier["action"] = self._for_environment(action)
            try:
                step, self._carrier = self.env.step_and_maybe_reset(self._carrier)
            except Exception as error:
                error.add_note(f"{type(self.env).__name__}: step() or reset() raised this.")
                raise
            steps.append(step)
            done = step["next", "done"].reshape(-1)
            if moments is None:
                self._observation = self._normalize(self._carrier["observation"])
            else:
                raw = step["next", "observation"].to(agent.device)
                fresh = self._carrier["observation"].to(agent.device)
                self._observation, output["next", "observation"] = _normalize_step(moments, raw, fresh, done)
            if memory is not None:
                self._memory = memory.masked_fill(done[:, None].to(memory.device), 0)
        return outputs

    def _normalize(self, observation: Tensor) -> Tensor:
        return self.agent.normalize(observation.to(self.agent.device))

    def _for_environment(self, action: Tensor) -> Tensor:
        action = action.to(self._device, self._action_dtype)
        return action if self._bounds is None else action.clamp(*self._bounds)

    def _require_finite(self, rollout: TensorDictBase, fresh: Tensor) -> None:
        """Check a rollout [N, T] on its device; only a failure is located step by step.

        Args:
            rollout: Steps, with raw observations.
            fresh: Observations after the rollout, [N, ...].
        """
        observation = rollout["observation"]
        following = rollout["next", "observation"]
        reward = rollout["next", "reward"]
        if all(_is_finite(values) for values in (observation, following, reward, fresh)):
            return
        step = self._frames // self.env.batch_size[0]
        for t in range(rollout.shape[1]):
            for key, values in (("observation", observation), ("observation", following), ("reward", reward)):
                require_finite(key, values[:, t].numpy(force=True), step + t, self._rows.start)
        require_finite("observation", fresh.numpy(force=True), step + rollout.shape[1], self._rows.start)

    def _add_episodes(self, following: TensorDictBase) -> None:
        """Add sums along episodes to ``next`` [N, T], and scale the rewards."""
        shape = (*following.batch_size, 1)
        reward = following["reward"].reshape(following.batch_size).T
        done = following["done"].reshape(following.batch_size).T
        following["episode_done"] = following["done"].clone()
        for key, increments, dtype in (
            ("episode_reward", reward, torch.float32),
            ("step_count", torch.ones_like(reward), torch.int64),
        ):
            sums = discounted_sum(increments, done, self._episode[key])
            following[key] = sums.T.reshape(shape).to(dtype).to(self._device)
        if self.reward_scaler is not None:
            scaled = scale(self.reward_scaler, reward, done, self._discounted)
            following["reward"] = scaled.T.reshape(shape).float().to(self._device)

    def iterator(self) -> Iterator[TensorDictBase]:
        """Yield the remaining rollouts of the run.

        Raises:
            RuntimeError: An environment raised ``SystemExit``.
        """
        while self.total_frames < 0 or self._frames < self.total_frames:
            try:
                rollout = self.rollout()
            except SystemExit as error:
                raise RuntimeError(f"An environment of data.env_id raised {error!r}.") from error
            yield rollout

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the action noise and the environments, which start afresh; return the next free seed."""
        self._generator.manual_seed(derive_seed(seed, "noise"))
        self._carrier = None
        self._memory = self.agent.initial_memory(self.env.batch_size[0])
        for sums in (self._discounted, *self._episode.values()):
            sums.zero_()
        return self.env.set_seed(seed, static_seed=static_seed)

    def running(self) -> list[Row] | None:
        """Return None: the states of the running episodes are unknown."""
        return None

    def resume(self, rows: list[Row]) -> None:
        """Raise an error: the states of the running episodes are unknown."""
        raise AssertionError(f"{type(self).__name__} cannot resume episodes")

    def state_dict(self) -> OrderedDict:
        """Return the number of rollouts, the state of the action noise and the buffers of transforms."""
        # Rollouts, unlike frames, are the same on any number of ranks.
        rollouts = self._frames // self.requested_frames_per_batch
        generator = self._generator.get_state()
        return OrderedDict(rollouts=rollouts, generator=generator, env=self.env.state_dict())

    def load_state_dict(self, state_dict: OrderedDict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._frames = state_dict["rollouts"] * self.requested_frames_per_batch
        self._generator.set_state(state_dict["generator"].cpu())
        self.env.load_state_dict(state_dict["env"])

    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """Close the environments."""
        if close_env and not self.env.is_closed:
            self.env.close()


def _normalize_step(
    moments: TensorMoments, raw: Tensor, fresh: Tensor, done: Tensor
) -> tuple[Tensor, Tensor]:
    """Normalize the observations of a step by the statistics up to that step.

    Args:
        moments: Statistics, updated in place: first by all observations of the step, then by those after
            resets, as in :class:`RolloutCollector`.
        raw: Next observations, final ones included, [N, ...].
        fresh: The same with the first observations of new episodes, [N, ...].
        done: Which environments were reset, [N] bool.

    Returns:
        Both normalized, each [N, ...]: the observations to act on, and the next observations.
    """
    if not done.any():
        (normalized,) = moments.update_and_normalize([raw])
        return normalized, normalized
    done = done.to(raw.device)
    following, begun = moments.update_and_normalize([raw, fresh[done]])
    observation = following.clone()
    observation[done] = begun
    return observation, following


def _is_finite(values: Tensor) -> bool:
    return not values.is_floating_point() or bool(values.isfinite().all())


def _stacked(steps: list[TensorDictBase]) -> TensorDictBase:
    """Stack steps [N] to a rollout [N, T], with float32 in the place of float64."""
    rollout = TensorDict.maybe_dense_stack(steps, dim=1)
    for key, values in rollout.items(True, leaves_only=True):
        if values.dtype == torch.float64:
            rollout[key] = values.float()
    return rollout
