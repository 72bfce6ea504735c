"""Procgen's sixteen games (Cobbe et al., "Leveraging Procedural Generation to Benchmark RL", 2020)."""

from typing import Annotated, Any, Literal

import numpy as np
from gymnasium import spaces

from ppo_lightning.envs.batched import BatchedEnv, Copies, Step, close_all
from ppo_lightning.envs.contract import fitting, require_known
from ppo_lightning.errors import import_extra
from ppo_lightning.private import prepare_close
from ppo_lightning.utils.arguments import Range, check_arguments


class ProcgenEnv(BatchedEnv):
    """N copies of a Procgen game with byte observations [3, 64, 64].

    Procgen starts the next level by itself, so the final observation of an episode is not available. The
    observation before the last step replaces it. As in CleanRL, every episode end is ``terminated``,
    including the time limit of 1000 steps, so that no value is bootstrapped from this observation. All copies
    draw their levels from one generator.

    Args:
        env_id: Name of the game, for example ``starpilot``.
        seeds: One seed per environment.
        distribution_mode: Difficulty of the levels.
        num_levels: Number of levels, starting at ``start_level``. 0 means unlimited.
        start_level: First level.
        num_threads: Number of Procgen's threads.
        **options: Further options of Procgen, for example ``use_backgrounds``.

    Example:
        >>> env = ProcgenEnv("starpilot", [1, 2])
        >>> env.reset_arrays().shape
        (2, 3, 64, 64)
    """

    action_names = (
        *("LEFT-DOWN", "LEFT", "LEFT-UP", "DOWN", "-", "UP", "RIGHT-DOWN", "RIGHT", "RIGHT-UP"),
        *"DAWSQE",
    )
    flags_time_limits = False
    _next: np.ndarray  # the current observations inside Procgen
    _first: np.ndarray  # whether these belong to a new episode
    render_fps = 15.0

    def __init__(
        self,
        env_id: str,
        seeds: list[int],
        /,
        *,
        distribution_mode: Literal["easy", "hard"] = "easy",
        num_levels: Annotated[int, Range(0, 2**31 - 1)] = 0,
        start_level: Annotated[int, Range(0, 2**31 - 1)] = 0,
        num_threads: Annotated[int, Range(0)] = 4,
        **options: Any,
    ) -> None:
        check_arguments(ProcgenEnv.__init__, locals(), "data.env_kwargs")
        self._procgen = import_extra("procgen", extra="procgen")
        games = self._procgen.env.ENV_NAMES
        require_known(env_id, games, "a game of Procgen", f"they are {', '.join(games)}")
        self._options = options | {
            "distribution_mode": distribution_mode,
            "num_levels": num_levels,
            "start_level": start_level,
            "num_threads": min(num_threads, len(seeds)),
        }
        self.game = env_id
        super().__init__(
            spaces.Box(0, 255, (3, 64, 64), np.uint8), spaces.Discrete(len(self.action_names)), seeds
        )
        self.reseed(seeds)

    def reseed(self, seeds: list[int]) -> None:
        """Restart the generator of levels."""
        self._seeds = np.random.default_rng(seeds)
        self._make()

    def reset_arrays(self, mask: np.ndarray | None = None) -> np.ndarray:
        """Reset environments. A mask may only select finished episodes."""
        if mask is None:
            if self._played:
                self._make()
            mask = self._first
        assert self._first[mask].all(), "Procgen ends no level early: remove the transform that does"
        self._observation[mask] = self._next[mask]
        self._first = self._first & ~mask
        return self._observation

    def _make(self) -> None:
        self._free()
        seed = int(self._seeds.integers(2**31))
        with fitting(self.game, self._options, Exception):  # Procgen also raises the base class
            self.envs = self._procgen.ProcgenGym3Env(
                num=self.num_envs, env_name=self.game, rand_seed=seed, **self._options
            )
        prepare_close(self.envs)
        self._observe()
        self._played = False

    def close(self) -> None:
        """Close the games, and free their buffers."""
        self._free()
        super().close()

    __del__ = close  # what `_free` does must come before the garbage collector

    def _free(self) -> None:
        close_all(self.envs)
        if self.envs:
            # Free the buffers one by one. The garbage collector crashes when it frees them together.
            self.envs.__dict__.clear()
        self.envs = ()

    def _observe(self) -> np.ndarray:
        reward, observation, self._first = self.envs.observe()
        self._next = observation["rgb"].transpose(0, 3, 1, 2)
        return reward

    def _step_arrays(self, action: np.ndarray) -> Step:
        self._played = True
        self.envs.act(action)
        reward = self._observe()
        np.copyto(self._observation, self._next, where=~self._first[:, None, None, None])
        never = np.zeros(self.num_envs, bool)
        return Step(self._observation, reward.astype(np.float64), self._first, never, self._first)

    def render(self) -> np.ndarray | None:
        """Return a picture; at an episode end, Procgen already shows the next level."""
        return self.envs.get_info()[0].get("rgb")


def make(env_id: str, copies: Copies, /, **env_kwargs: Any) -> ProcgenEnv:
    """Make copies of a game for the backend ``procgen``, see :class:`ProcgenEnv`."""
    if copies.render:
        env_kwargs["render_mode"] = "rgb_array"
    return ProcgenEnv(env_id, copies.seeds, **env_kwargs)
