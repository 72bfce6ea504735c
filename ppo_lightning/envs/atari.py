"""Atari games with the preprocessing of Mnih et al. (2015), identical on two backends."""

import contextlib
import re
from abc import abstractmethod
from typing import Annotated

import gymnasium
import numpy as np
from gymnasium import spaces

from ppo_lightning.envs.batched import BatchedEnv, Step, close_all
from ppo_lightning.errors import ConfigError, import_extra, nearest
from ppo_lightning.utils.arguments import Range, check_arguments

ATARI_ID = re.compile(r"ALE/(\w+)-v5|(\w+)NoFrameskip-v4")
Arrays = tuple[np.ndarray, ...]


class AtariEnv(BatchedEnv):
    """N copies of an Atari game.

    A backend steps games and returns single frames. This class adds lives, frame stack and reward clipping.
    Observations are bytes [frame_stack, 84, 84] with the newest frame last. With ``episodic_life``,
    ``terminated`` is also true at the loss of a life, while ``Step.over`` marks the end of the game.
    Resetting a finished environment starts the next life or the next game.

    Args:
        env_id: ``ALE/Game-v5`` or ``GameNoFrameskip-v4``, which only select the game.
        seeds: One seed per environment.
        noop_max: Maximum number of frames without action at the start of a game.
        frame_skip: Frames per action. An observation is the pixelwise maximum of the last two.
        episodic_life: Treat the loss of a life as termination.
        fire_reset: Press FIRE at the start of a game that has this button, and at the start of the next life.
        screen_size: Height and width of the pictures, pixels.
        clip_reward: Train on the sign of the reward.
        frame_stack: Frames per observation.
        repeat_action_probability: Probability, at each frame, of repeating the previous action (sticky
            actions).
        max_episode_frames: Time limit of a game in frames, rounded down to a multiple of ``frame_skip``.
        num_threads: Threads of the backend ``envpool``, see :class:`~ppo_lightning.envs.envpool.EnvPoolEnv`.

    Example:
        >>> from ppo_lightning.envs import make_env
        >>> env = make_env("ALE/Pong-v5", num_envs=2, env_kwargs={"frame_stack": 3})
        >>> env.reset_arrays().shape
        (2, 3, 84, 84)
    """

    untransformable = "Atari games: remove them, and set the preprocessing in data.env_kwargs."

    def __init__(
        self,
        env_id: str,
        seeds: list[int],
        /,
        *,
        noop_max: Annotated[int, Range(0)] = 30,
        frame_skip: Annotated[int, Range(1)] = 4,
        episodic_life: bool = True,
        fire_reset: bool = True,
        screen_size: Annotated[int, Range(1)] = 84,
        clip_reward: bool = True,
        frame_stack: Annotated[int, Range(1)] = 4,
        repeat_action_probability: Annotated[float, Range(0, 1)] = 0.0,
        max_episode_frames: Annotated[int, Range(1)] = 108_000,
        num_threads: Annotated[int, Range(0)] = 0,
    ) -> None:
        check_arguments(AtariEnv.__init__, locals(), "data.env_kwargs")
        self.game = game_name(env_id)
        self.seeds = list(seeds)
        # detail 14
        self.noop_max = noop_max
        # detail 15
        self.frame_skip = frame_skip
        # detail 17
        self.fire_reset = fire_reset
        # detail 18
        self.screen_size = screen_size
        self.episodic_life = episodic_life
        self.clip_reward = clip_reward
        self.repeat_action_probability = repeat_action_probability
        self.max_episode_steps = max(max_episode_frames // frame_skip, 1)
        self.num_threads = num_threads
        self.render_fps = 60 / frame_skip
        self.frame_stack = frame_stack
        picture = spaces.Box(0, 255, (frame_stack, screen_size, screen_size), np.uint8)
        super().__init__(picture, spaces.Discrete(self._make()), self.seeds)
        self.lives = np.zeros(self.num_envs, np.int64)
        self.over = np.ones(self.num_envs, bool)

    @abstractmethod
    def _make(self) -> int:
        """Create the games from ``self.seeds`` and return the number of actions."""

    @abstractmethod
    def _new_games(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Start new games in the environments ``rows`` [K]. Return frames [K, 1, H, W] and lives [K]."""

    @abstractmethod
    def _next_lives(self, rows: np.ndarray) -> np.ndarray:
        """Start the next lives in the environments ``rows`` [K]. Return frames [K, 1, H, W]."""

    @abstractmethod
    def _step_games(self, action: np.ndarray) -> Arrays:
        """Return frames [N, 1, H, W], rewards, ``terminated``, ``truncated`` and lives [N] of a step."""

    def reseed(self, seeds: list[int]) -> None:
        """Recreate the games with new seeds."""
        super().reseed(seeds)
        close_all(self.envs)
        self.seeds = list(seeds)
        self._make()

    def reset_arrays(self, mask: np.ndarray | None = None) -> np.ndarray:
        """Start new games, or new lives in games that are not over."""
        if mask is None:
            mask = self.over = np.ones(self.num_envs, bool)
        # The stack of a new episode repeats the first frame.
        # detail 20
        new_games = np.flatnonzero(mask & self.over)
        if len(new_games):
            self._observation[new_games], self.lives[new_games] = self._new_games(new_games)
        new_lives = np.flatnonzero(mask & ~self.over)
        if len(new_lives):
            self._observation[new_lives] = self._next_lives(new_lives)
        return self._observation

    def _step_arrays(self, action: np.ndarray) -> Step:
        frames, reward, terminated, truncated, lives = self._step_games(action)
        self._observation[:, :-1] = self._observation[:, 1:]
        self._observation[:, -1:] = frames
        self.over = terminated | truncated
        if self.episodic_life:
            # detail 16
            terminated = terminated | ((lives < self.lives) & (lives > 0) & ~truncated)
        self.lives = lives.astype(np.int64)
        return Step(self._observation, reward, terminated, truncated, self.over)

    def learning_reward(self, reward: np.ndarray) -> np.ndarray:
        """Return the clipped reward."""
        # detail 19
        return np.sign(reward) if self.clip_reward else reward


def is_atari(env_id: str) -> bool:
    """Return whether an id from :func:`full_id` selects an Atari game."""
    return ATARI_ID.fullmatch(env_id) is not None


def full_id(env_id: str) -> str:
    """Add ``ALE/`` to the id of an Atari game, as EnvPool and CleanRL write it. Other ids are unchanged."""
    if env_id.endswith("-v5") and env_id not in gymnasium.registry:
        with contextlib.suppress(ConfigError):  # no Atari game
            return f"ALE/{game_name(f'ALE/{env_id}')}-v5"
    return env_id


def game_name(env_id: str) -> str:
    """Return the name of a game as in the ids of ``ale_py``, for example ``BeamRider``."""
    match = ATARI_ID.fullmatch(env_id)
    name = next(filter(None, match.groups())) if match else env_id
    games = {}
    for rom in import_extra("ale_py.roms", extra="atari").get_all_rom_ids():
        game = "".join(part[:1].upper() + part[1:] for part in rom.split("_")).replace("3d", "3D")
        games[game.lower()] = game
    if match is None or name.lower() not in games:
        known = {key: f"ALE/{game}-v5" for key, game in games.items()}
        hint = nearest(name.removesuffix("-v5"), known) or ": ale_py.roms.get_all_rom_ids() lists the names."
        raise ConfigError(f"env_id {env_id!r} is not an Atari game{hint}")
    return games[name.lower()]
