"""Base class of the collectors."""

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.collectors import BaseCollector

from ppo_lightning.envs.state import Row
from ppo_lightning.envs.torchrl import AnyEnv, as_torchrl
from ppo_lightning.models import Actor
from ppo_lightning.models.actor import evaluating
from ppo_lightning.models.normalizers import RewardScaler
from ppo_lightning.rollouts.infos import EpisodeInfos
from ppo_lightning.utils.seeding import Shard, user_modes
from ppo_lightning.utils.watch import StepWatch


class Collector(BaseCollector):
    """Collector of rollouts [N, T] under TorchRL's collector interface.

    Episodes continue from one rollout to the next. A subclass implements :meth:`rollout`, creates ``_sums``
    and, if it sets ``can_resume``, implements :meth:`_states` and :meth:`_restore`.

    Args:
        env: The environments, batch size [N].
        agent: The agent, on any device.
        num_steps: T.
        num_rollouts: Number of rollouts of the run; None: no end, and no length.
        shard: The environments' place in the run, and its seed. None: all environments, with the seed 0.
        deterministic: Choose the most probable actions, and do not update the agent's statistics.
        reward_scaler: Scales the rewards; None: no scaling.
        precision: Makes the context in which the agent acts. It must be the context of the update, so that
            the first ratio is 1.
        step_timeout: Seconds after which a hung step terminates the process, with code 1 and the Python
            tracebacks of all threads; None: never.
    """

    can_resume = False  # whether `state_dict` may have the running episodes

    def __init__(
        self,
        env: AnyEnv,
        agent: Actor,
        num_steps: int,
        num_rollouts: int | None = None,
        shard: Shard | None = None,
        deterministic: bool = False,
        reward_scaler: RewardScaler | None = None,
        precision: Callable[[], AbstractContextManager] = nullcontext,
        step_timeout: float | None = None,
    ) -> None:
        super().__init__()
        self.env: Any = env
        self.agent = agent
        self.num_steps = num_steps
        self.num_rollouts = num_rollouts
        self.shard = shard or Shard.whole(env.batch_size[0])
        self.deterministic = deterministic
        self.reward_scaler = reward_scaler
        self.precision = precision
        self.requested_frames_per_batch = self.shard.count * num_steps
        self.total_frames = -1 if num_rollouts is None else num_rollouts * self.requested_frames_per_batch
        self.rollouts_done = 0
        self._watch = StepWatch(step_timeout)
        self.observation: Any = None  # normalized, of the running episodes; None: they are unknown
        self._memory: Any = agent.initial_memory(self.shard.count)
        self._infos = EpisodeInfos(env)
        self._sums: dict[str, Any] = {}  # name -> sums along the running episodes, [N] float64

    @abstractmethod
    def rollout(self) -> TensorDictBase:
        """Collect one rollout [N, T].

        Raises:
            NonFiniteError: An observation or a reward is NaN or infinite.
        """

    def iterator(self) -> Iterator[TensorDictBase]:
        """Yield the remaining rollouts of the run.

        Raises:
            RuntimeError: An environment raised ``SystemExit``.
        """
        while self.num_rollouts is None or self.rollouts_done < self.num_rollouts:
            try:
                with user_modes(), evaluating(self.agent):
                    rollout = self.rollout()
            except SystemExit as error:
                raise RuntimeError(f"An environment of data.env_id raised {error!r}.") from error
            yield rollout

    def draw_noise(self) -> Tensor:
        """Draw the action noise of a rollout, [T, N, ...] on the CPU.

        Every rank draws the noise of all environments and uses its own rows.
        """
        generator = self.shard.generator("noise", self.rollouts_done)
        return self.agent.noise((self.num_steps, self.shard.total), generator)[:, self.shard.rows]

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Set the seed of the environments' next reset; return the next free seed."""
        return as_torchrl(self.env).set_seed(seed, static_seed=static_seed)

    def state_dict(self) -> OrderedDict:
        """Return copies: the number of rollouts, and the N ``running`` episodes, none if they are unknown."""
        states = [] if self.observation is None else self._states()
        sums = {name: values.tolist() for name, values in self._sums.items()}
        running = [state | {name: sums[name][i] for name in sums} for i, state in enumerate(states)]
        return OrderedDict(rollouts=self.rollouts_done, running=running)

    def load_state_dict(self, state_dict: OrderedDict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.rollouts_done = state_dict["rollouts"]
        if rows := state_dict["running"]:
            self._restore(rows)
            for name, sums in self._sums.items():
                sums[:] = torch.tensor([row[name] for row in rows], dtype=torch.float64)

    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """Close the environments."""
        if close_env and not self.env.is_closed:
            self.env.close()

    def _states(self) -> list[Row]:
        """Return the states of the N running episodes without the sums, or none."""
        return []

    def _restore(self, rows: list[Row]) -> None:
        """Restore the states of the N running episodes without the sums."""
        raise AssertionError(f"{type(self).__name__} cannot resume episodes")
