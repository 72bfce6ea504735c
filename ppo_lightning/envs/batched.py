"""The base of all natively batched environments: arrays for the fast collector, TensorDicts for TorchRL."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Categorical, Composite, TensorSpec, Unbounded
from torchrl.envs import EnvBase

from ppo_lightning.spaces.specs import row_spec, spec_from_space, stored
from ppo_lightning.utils.seeding import derive_seed


class BatchedEnv(EnvBase):
    """N environments that step together.

    The collector of this package calls :meth:`reset_arrays` and :meth:`step_arrays`; TorchRL's collectors, rollouts and
    transforms use the same object as an ``EnvBase`` of batch size [N]. An environment that finished is never reset
    behind the caller's back: ``step`` returns the episode's real last observation, and the caller resets by mask.

    Args:
        observation_space: Of one environment.
        action_space: Of one environment.
        seeds: One seed an environment, N in all.
    """

    envs: Any  # what a subclass steps: one vector environment, or a list of single ones
    action_names: Sequence[str] | None = None  # of discrete actions
    can_restart = False  # whether `max_restarts` is honoured
    numbers_its_envs = False  # whether the constructor takes `first_env`
    render_fps = 30.0  # makes a video as fast as the game

    def __init__(self, observation_space: spaces.Space, action_space: spaces.Space, seeds: list[int]) -> None:
        super().__init__(device="cpu", batch_size=[len(seeds)])
        self.spaces = observation_space, action_space
        self.is_closed = (
            False  # TorchRL says so at its own first reset only, and a closed environment is not closed again
        )
        self.num_envs = len(seeds)
        flag = Categorical(2, shape=(1,), dtype=torch.bool)
        observation_spec, action_spec = self.agent_specs
        self.observation_spec_unbatched = Composite(observation=stored(observation_spec))
        self.action_spec_unbatched = (
            row_spec(action_spec) if isinstance(action_spec, Composite) else action_spec
        )
        self._bounds: tuple[np.ndarray, np.ndarray] | None = None
        if isinstance(action_space, spaces.Box) and np.issubdtype(action_space.dtype, np.floating):
            self._bounds = action_space.low, action_space.high
        # Whose episode ended with the last step, [N], where those are others than the ones that are done: the loss of a
        # life ends what the agent learns from, and the game goes on. None: the ones that are done.
        self.episode_done: np.ndarray | None = None
        # How often, of all environments together, one that fails is made anew; and whose last step did, [N], None: nobody's.
        self.max_restarts = 0
        self.broken: np.ndarray | None = None
        self.reward_spec_unbatched = Unbounded(shape=(1,), dtype=torch.float32)
        self.done_spec_unbatched = Composite(done=flag, terminated=flag.clone(), truncated=flag.clone())

    @property
    def agent_specs(self) -> tuple[TensorSpec, TensorSpec]:
        """What an agent is built from: observations and actions of one environment, part by part.

        The arrays that are exchanged hold all parts of one in a row, see :func:`~ppo_lightning.spaces.specs.columns`.
        """
        return spec_from_space(self.spaces[0]), spec_from_space(self.spaces[1])

    @property
    def preprocessing(self) -> dict[str, Any]:
        """Settings of the preprocessing by name, for the manifest of a run."""
        return {}

    @abstractmethod
    def reset_arrays(self, mask: np.ndarray | None = None) -> np.ndarray:
        """Starts new episodes.

        Args:
            mask: [N] bool, the environments to reset; all when None.

        Returns:
            The observations of all N environments, [N, ...]; valid until the next call.
        """

    def step_arrays(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Steps every environment once.

        Args:
            action: [N, ...]; continuous ones are clipped to their bounds, in a copy.

        Returns:
            Observation [N, ...] (the real last one where an episode ended), reward [N], terminated [N] and
            truncated [N]; valid until the next call. An environment that finished must be reset before the next step.
        """
        if self._bounds is not None:
            low, high = self._bounds
            # detail 27
            action = np.minimum(np.maximum(action, low), high)
        return self._step_arrays(action)

    def episodes_over(self, done: np.ndarray) -> np.ndarray:
        """Returns whose episode ended with the last step, [N], of those that are ``done`` [N]."""
        return done if self.episode_done is None else self.episode_done

    def render(self) -> np.ndarray | None:
        """Returns a picture of the first environment for people, [H, W, 3] uint8, if it was made to be rendered."""
        return None

    def learning_reward(self, reward: np.ndarray) -> np.ndarray:
        """Returns what the agent learns from, for the rewards [N] of a step; returns of episodes are of ``reward``."""
        return reward

    @abstractmethod
    def _step_arrays(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Does what :meth:`step_arrays` does, with actions within their bounds."""

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: object) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        if mask is not None:
            mask = mask.reshape(self.num_envs).numpy()
        observation = torch.tensor(self.reset_arrays(mask), dtype=self.observation_spec["observation"].dtype)
        return TensorDict({"observation": observation, **self._flags()}, batch_size=self.batch_size)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        observation, reward, terminated, truncated = self.step_arrays(tensordict["action"].numpy())
        return TensorDict(
            {
                "observation": torch.tensor(observation, dtype=self.observation_spec["observation"].dtype),
                "reward": torch.tensor(reward, dtype=torch.float32).unsqueeze(-1),
                **self._flags(terminated, truncated),
            },
            batch_size=self.batch_size,
        )

    def _flags(
        self, terminated: np.ndarray | None = None, truncated: np.ndarray | None = None
    ) -> dict[str, torch.Tensor]:
        shape = (self.num_envs, 1)
        ended = (
            torch.zeros(shape, dtype=torch.bool)
            if terminated is None
            else torch.tensor(terminated).reshape(shape)
        )
        cut = (
            torch.zeros(shape, dtype=torch.bool)
            if truncated is None
            else torch.tensor(truncated).reshape(shape)
        )
        return {"terminated": ended, "truncated": cut, "done": ended | cut}

    def _set_seed(self, seed: int | None) -> None:
        if seed is not None:
            self.reseed([derive_seed(seed, "train", index) for index in range(self.num_envs)])

    @abstractmethod
    def reseed(self, seeds: list[int]) -> None:
        """Makes the next full reset start from these seeds, one an environment."""

    def get_state(self) -> list[dict[str, Any]] | None:
        """Returns what each environment needs to go on with its episode, [N], in tensors and plain types; None: it cannot."""
        return None

    def set_state(self, states: list[dict[str, Any]]) -> None:
        """Takes back what :meth:`get_state` returned, in the place of a first reset."""
        raise AssertionError(f"{type(self).__name__} has no state to go on from")

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Closes the environments and stops their threads."""
        if not self.is_closed:
            self._close_envs()
        super().close(raise_if_closed=raise_if_closed)

    def _close_envs(self) -> None:
        for env in self.envs if isinstance(self.envs, list) else [self.envs]:
            env.close()
