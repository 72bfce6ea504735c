"""The rollout collector for TorchRL environments and for environments with TorchRL transforms."""

import copy
from collections import OrderedDict
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torchrl.data import Bounded, Composite
from torchrl.envs import TransformedEnv
from torchrl.envs.batched_envs import BatchedEnvBase

from ppo_lightning.errors import ConfigError
from ppo_lightning.models.normalizers import CollectorMoments
from ppo_lightning.rollouts.base import Collector
from ppo_lightning.spaces.specs import row_spec
from ppo_lightning.utils.finite import require_finite
from ppo_lightning.utils.scans import tensor_episode_sums

# Keys that mean something in our rollouts; those of another environment may mean anything.
MEANT = ("weight", "discount", "player", "memory", ("next", "memory"), ("next", "info"))


class TensorCollector(Collector):
    """Collector of rollouts [N, T] from any TorchRL environment, transforms included.

    A rollout holds the keys of :class:`RolloutCollector` with the same values, and the other keys of the
    environment. Rollouts stay on the device of the environment. Only acting, normalization of observations
    and clipping of actions happen at each step. The rest is computed once per rollout: checks for non-finite
    values, sums along episodes and scaling of rewards.

    The environment keeps raw observations and received actions in its own TensorDict, so that a stateless
    environment may compute the next state from them. The rollout stores normalized observations and drawn
    actions.

    The arguments are those of :class:`~ppo_lightning.rollouts.base.Collector`. The environment's own
    computations are outside of ``precision``.

    Example:
        >>> from torchrl.envs import GymEnv, SerialEnv
        >>> env = SerialEnv(2, lambda: GymEnv("CartPole-v1", categorical_action_encoding=True))
        >>> agent = MLPAgent(env.observation_spec_unbatched["observation"], env.action_spec_unbatched)
        >>> TensorCollector(env, agent, num_steps=8).rollout().batch_size
        torch.Size([2, 8])
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        env = self.env
        self._device = env.device or torch.device("cpu")
        self._bounds: tuple[Tensor, Tensor] | None = None
        action_spec = env.action_spec_unbatched
        if isinstance(action_spec, Composite):
            action_spec = row_spec(action_spec)
        self._action_dtype = action_spec.dtype
        if isinstance(action_spec, Bounded) and action_spec.dtype.is_floating_point:
            self._bounds = (action_spec.space.low.to(self._device), action_spec.space.high.to(self._device))
        self._carrier: Any = None  # the environment's input at the next step
        # Apple GPUs (MPS) have no float64.
        exact = torch.device("cpu") if self._device.type == "mps" else self._device
        scaled_on = exact if self.reward_scaler is None else self.reward_scaler.mean.device
        self._sums = {
            name: torch.zeros(self.shard.count, dtype=torch.float64, device=device)
            for name, device in (("discounted", scaled_on), ("episode_reward", exact), ("step_count", exact))
        }

    @torch.no_grad()
    def rollout(self) -> TensorDictBase:
        """Collect one rollout, see :meth:`Collector.rollout`."""
        normalizer = self.agent.normalizer
        # A copy: the agent's statistics change only when the whole rollout is known to be finite.
        moments = None
        if normalizer is not None and not self.deterministic:
            moments = CollectorMoments(normalizer, arrays=False)
        steps: list[TensorDictBase] = []
        try:
            outputs = self._walk(moments, steps)
        except Exception:
            if steps:  # the exception may be a consequence of a non-finite observation
                self._require_finite(_stacked(steps), self._carrier["observation"])
            raise
        finally:
            self._watch.stop()
        rollout = _stacked(steps)
        self._require_finite(rollout, self._carrier["observation"])
        following = rollout["next"]
        # Of copies that return `done` alone, TorchRL (SerialEnv) does not set `terminated`, as of one.
        cut = following.get("truncated", torch.zeros_like(following["done"]))
        following["terminated"] = following["terminated"] | (following["done"] & ~cut)
        if moments is not None:
            moments.store()
        for key in outputs[0]:
            rollout[key] = torch.stack([output[key] for output in outputs], dim=1).to(self._device)
        if moments is None:
            for key in ("observation", ("next", "observation")):
                rollout[key] = self._normalize(rollout[key]).to(self._device)
        self._add_episodes(rollout["next"])
        self._infos.add_to(rollout["next"])
        self.rollouts_done += 1
        return rollout

    def _walk(self, moments: CollectorMoments | None, steps: list[TensorDictBase]) -> list[dict[Any, Tensor]]:
        """Step the environments, and return what the agent adds to each step by key.

        ``moments`` are updated in place, None: the agent's own. ``steps`` receives the environment's, [N].
        """
        agent = self.agent
        stored: list[dict[Any, Tensor]] = []
        if self.observation is None:
            with torch.enable_grad():
                self._carrier = detached(self.env.reset())
            first = self._carrier["observation"].to(agent.device)
            self.observation = agent.normalize(first) if moments is None else moments.normalize([first])[0]
        noise = None if self.deterministic else self.draw_noise().to(agent.device)
        for t in range(self.num_steps):
            self._watch.step_begins()
            with self.precision():
                *outputs, memory = agent.act(
                    self.observation, None if noise is None else noise[t], self._memory
                )
            output: dict[Any, Tensor] = dict(zip(agent.out_keys, outputs, strict=True))
            if self._memory is not None and memory is not None:
                output |= {"memory": self._memory, ("next", "memory"): memory}
            if moments is not None:
                output["observation"] = self.observation
            stored.append(output)
            self._carrier["action"] = self._for_environment(output["action"])
            try:
                with torch.enable_grad():  # an environment may learn
                    answer = self.env.step_and_maybe_reset(self._carrier)
                step, self._carrier = map(detached, answer)
            except Exception as error:
                error.add_note(f"{type(self.env).__name__}: step() or reset() raised this.")
                raise
            steps.append(step)
            done = step["next", "done"].reshape(-1)
            if self._infos.exist and done.any():
                self._infos.read(t, done.numpy())
            fresh = self._carrier["observation"]
            if moments is None:
                self.observation = self._normalize(fresh)
            else:
                # First the statistics of all observations, then of those after resets, as in
                # `RolloutCollector`.
                raw = step["next", "observation"]
                batches = [raw, fresh[done]] if done.any() else [raw]
                following, *begun = moments.normalize([batch.to(agent.device) for batch in batches])
                output["next", "observation"] = self.observation = following
                if begun:
                    self.observation = following.clone()
                    self.observation[done.to(following.device)] = begun[0]
            if memory is not None:
                self._memory = memory.masked_fill(done[:, None].to(memory.device), 0)
        return stored

    def _normalize(self, observation: Tensor) -> Tensor:
        return self.agent.normalize(observation.to(self.agent.device))

    def _for_environment(self, action: Tensor) -> Tensor:
        action = action.to(self._device, self._action_dtype)
        return action if self._bounds is None else action.clamp(*self._bounds)

    def _require_finite(self, rollout: TensorDictBase, fresh: Tensor) -> None:
        """Check a raw rollout [N, T] and the observations after it. A failure is located step by step."""
        keys = ("observation", ("next", "observation"), ("next", "reward"))
        if all(values.isfinite().all() for values in (*(rollout[key] for key in keys), fresh)):
            return
        step = self.rollouts_done * self.num_steps
        for t in range(rollout.shape[1]):
            for key, name in zip(keys, ("observation", "observation", "reward"), strict=True):
                require_finite(name, rollout[key][:, t].numpy(force=True), step + t, self.shard.first)
        require_finite("observation", fresh.numpy(force=True), step + rollout.shape[1], self.shard.first)

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
            sums = tensor_episode_sums(increments, done, self._sums[key])
            following[key] = sums.T.reshape(shape).to(dtype).to(self._device)
        if self.reward_scaler is not None:
            scaled = self.reward_scaler.scale(reward, done, self._sums["discounted"])
            following["reward"] = scaled.T.reshape(shape).float().to(self._device)

    def state_dict(self) -> OrderedDict:
        """Return the collector's state and the buffers of transforms."""
        env = self.env  # copies of a single environment have nested states, and take no `keep_vars`
        values = env.state_dict() if isinstance(env, BatchedEnvBase) else env.state_dict(keep_vars=True)
        state = {
            key: value.detach() if isinstance(value, Tensor) else value
            for key, value in values.items()
            if not is_lazy(value)  # a buffer without a shape yet has no data
        }
        return OrderedDict(super().state_dict(), env=copy.deepcopy(state))

    def load_state_dict(self, state_dict: OrderedDict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        super().load_state_dict(state_dict)
        if (state := state_dict.get("env")) is None:  # of a collector of arrays
            return
        transform = self.env.transform if isinstance(self.env, TransformedEnv) else nn.Module()
        lazy = {name: buffer for name, buffer in transform.named_buffers() if is_lazy(buffer)}
        for name in lazy.keys() & state.keys():
            lazy[name].materialize(state[name].shape)
        try:
            self.env.load_state_dict(state, strict=lazy.keys() <= state.keys())
        except RuntimeError as error:
            raise ConfigError("data.transforms are other than in the run of ckpt_path: keep them.") from error


def detached(step: TensorDictBase) -> TensorDictBase:
    """Return a step without the graph of an environment that learns."""
    return step.detach() if any(x.requires_grad for x in step.values(True, True)) else step


def _stacked(steps: list[TensorDictBase]) -> TensorDictBase:
    """Stack steps [N] to a rollout [N, T], with float32 in the place of float64, without :data:`MEANT`."""
    rollout = TensorDict.maybe_dense_stack(steps, dim=1).exclude(*MEANT)
    for key, values in rollout.items(True, leaves_only=True):
        if values.dtype == torch.float64:
            rollout[key] = values.float()
    return rollout
