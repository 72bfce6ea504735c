"""Batched environments whose states and observations are tensors on one device."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase

from ppo_lightning.errors import ConfigError
from ppo_lightning.spaces.specs import entries, join_vectors, spec_from_space
from ppo_lightning.utils.seeding import derive_seed

State = tuple[Tensor, ...]
Observations = Tensor | Mapping[str, Any]  # [N, ...], or by the names of the observation space


class TensorStep(NamedTuple):
    """What a step returns, tensors on the environment's device.

    Attributes:
        observation: Next observations, [N, ...], a dictionary if the space is one. A simulator with
            autoreset gives the first observation of the new episode at episode ends.
        reward: [N].
        terminated: [N] bool.
        truncated: [N] bool.
        final_observation: Last observations of the episodes that ended, [N, ...]; other rows do not matter.
            None: ``observation`` holds them, or a simulator with autoreset does not give them.
    """

    observation: Observations
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    final_observation: Observations | None = None


class TensorEnv(EnvBase):
    """N environments that step together as tensors on one device.

    A subclass implements :meth:`reset` and :meth:`step` as ``reset_tensors`` and ``step_tensors``. Rollouts
    stay on the device. Return an instance from the function ``data.env_id``.

    A simulator with autoreset sets ``autoresets``. If its steps have no ``final_observation``, an
    episode that ends is stored with the last observation before its end: a time limit is then bootstrapped
    with the value of the last seen observation.

    Args:
        observation_space: Observation space of one environment. A dictionary of float vectors is joined to
            one vector, whose entries ``model.agent.actor_keys`` and ``critic_keys`` can choose.
        action_space: Action space of one environment.
        num_envs: N.
        device: Device of all tensors.

    Raises:
        ConfigError: A dictionary of observations has other parts than float vectors.

    Example:
        >>> class Walk(TensorEnv):
        ...     def reset_tensors(self, mask):
        ...         place = torch.zeros(self.num_envs, 1)
        ...         self.place = place if mask is None else self.place * ~mask[:, None]
        ...         return self.place
        ...     def step_tensors(self, action):
        ...         self.place = self.place + action[:, None]
        ...         arrived = self.place[:, 0] > 5
        ...         return TensorStep(self.place, arrived.float(), arrived, torch.zeros_like(arrived))
        >>> env = Walk(spaces.Box(0, 9, (1,)), spaces.Discrete(2), num_envs=3)
        >>> env.rollout(4)["next", "reward"].shape
        torch.Size([3, 4, 1])
    """

    autoresets = False

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        num_envs: int,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(device=torch.device(device), batch_size=[num_envs])
        self.num_envs = num_envs
        self._observation_space = observation_space
        joined = join_vectors(observation_space)
        if isinstance(joined, spaces.Dict | spaces.Tuple):
            raise ConfigError(
                f"{observation_space} must be a Box or a dictionary of float vectors on a device."
            )
        # What agents are built from: the specs of TorchRL lose the names of the entries.
        self.agent_specs = spec_from_space(joined), spec_from_space(action_space)
        self.observation_spec_unbatched = Composite(observation=self.agent_specs[0].clone()).to(device)
        self.action_spec_unbatched = self.agent_specs[1].clone().to(device)
        self.reward_spec_unbatched = Unbounded(shape=(1,), dtype=torch.float32, device=self.device)
        flag = Categorical(2, shape=(1,), dtype=torch.bool, device=self.device)
        self.done_spec_unbatched = Composite(done=flag, terminated=flag.clone(), truncated=flag.clone())
        self._begun = torch.empty(0)  # last observations of a simulator with autoreset
        self._over = torch.empty(0)  # where the last step ended an episode

    @abstractmethod
    def reset_tensors(self, mask: Tensor | None) -> Any:
        """Start new episodes.

        Args:
            mask: Environments to reset, [N] bool. None resets all. A simulator with autoreset gets a mask
                only where a transform ended an episode.

        Returns:
            Observations of all environments, [N, ...], a dictionary if the space is one.
        """

    @abstractmethod
    def step_tensors(self, action: Tensor) -> TensorStep:
        """Step every environment once, with actions inside their bounds, [N, ...]."""

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        if mask is not None:
            mask = mask.reshape(-1)
        if mask is not None and self.autoresets and (mask <= self._over).all():  # these have begun
            observation = self._begun
        else:
            observation = self.rows(self.reset_tensors(mask))
        self._begun = observation.clone()
        self._over = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        return self._pack({"observation": observation, **self.full_done_spec.zero()})

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        step = self.step_tensors(self._clipped(tensordict["action"]))
        terminated, truncated = step.terminated.bool(), step.truncated.bool()
        done = terminated | truncated
        following = self.final_rows(step, done)
        self._over = done.clone()
        if self.autoresets:
            self._begun = self.rows(step.observation).clone()
        flags = {"terminated": terminated, "truncated": truncated, "done": done}
        columns = {"reward": step.reward.float()} | flags
        columns = {key: values.unsqueeze(-1) for key, values in columns.items()}
        return self._pack({"observation": following, **columns})

    def rows(self, observation: Observations) -> Tensor:
        """Return observations as tensors [N, ...], the entries of a dictionary as columns."""
        return _joined(observation, self._observation_space)

    def final_rows(self, step: TensorStep, done: Tensor) -> Tensor:
        """Return the observations after a step, [N, ...], where an episode is ``done`` [N] the last ones."""
        rows = self.rows(step.observation)
        if step.final_observation is not None:
            final = self.rows(step.final_observation)
        elif self.autoresets:
            final = self._begun
        else:
            return rows
        return torch.where(done.reshape(-1, *[1] * (rows.ndim - 1)), final.to(rows.dtype), rows)

    def _clipped(self, action: Tensor) -> Tensor:
        spec = self.action_spec_unbatched
        if isinstance(spec, Bounded) and spec.dtype.is_floating_point:
            return action.clamp(spec.space.low, spec.space.high)
        return action.clone()

    def _pack(self, values: dict[str, Tensor]) -> TensorDictBase:
        copies = {key: tensor.clone() for key, tensor in values.items()}  # a simulator may reuse its tensors
        return TensorDict(copies, batch_size=self.batch_size, device=self.device)

    def reseed(self, seeds: list[int]) -> None:
        """Set the seeds for the next full reset, one per environment. Without randomness, this is nothing."""

    def _set_seed(self, seed: int | None) -> None:
        if seed is not None:
            self.reseed([derive_seed(seed, "train", index) for index in range(self.num_envs)])


class FunctionalEnv(TensorEnv):
    """A :class:`TensorEnv` whose steps are functions of its state: a rollout can be one compiled graph."""

    state: State  # tensors [N, ...]

    @abstractmethod
    def transition(self, state: State, action: Tensor) -> tuple[State, TensorStep, Observations]:
        """Step every environment once, and reset those whose episode ended, as a function without effects.

        Args:
            state: States before the step.
            action: Actions inside their bounds, [N, ...].

        Returns:
            States after the step and the resets, the step with the final observations of ended episodes (as
            ``observation`` or ``final_observation``), and the observations to act on, [N, ...], a dictionary
            if the space is one.
        """


def _joined(observation: Any, space: spaces.Space) -> Tensor:
    if not isinstance(space, spaces.Dict):
        return observation.unsqueeze(-1) if space.shape == () else observation
    parts = [_joined(observation[name], part).flatten(1) for name, part in entries(space)]
    return torch.cat(parts, dim=1)
