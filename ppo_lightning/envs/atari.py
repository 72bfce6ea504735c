"""Atari games with the preprocessing of Mnih et al. (2015), identical on two backends.

A backend steps games and returns single frames. :class:`AtariEnv` adds what all backends share: lives, the
frame stack and reward clipping. An id only selects the game, so ``ALE/Breakout-v5`` and
``BreakoutNoFrameskip-v4`` are equal.
"""

import inspect
import re
from abc import abstractmethod
from typing import Any

import numpy as np
from gymnasium import spaces

from ppo_lightning.envs.batched import BatchedEnv
from ppo_lightning.errors import ConfigError, import_extra, nearest

ATARI_ID = re.compile(r"ALE/(\w+)-v5|(\w+)NoFrameskip-v4")


class AtariEnv(BatchedEnv):
    """N copies of an Atari game.

    Observations are bytes [frame_stack, 84, 84] with the newest frame last. With ``episodic_life``,
    ``terminated`` is also true at the loss of a life, while ``episode_done`` marks the end of the game.
    Resetting a finished environment starts the next life or the next game.

    Args:
        env_id: ``ALE/Game-v5`` or ``GameNoFrameskip-v4``.
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
        num_threads: Threads of the backend ``envpool``. 0 lets it choose.

    Raises:
        ConfigError: The game does not exist, an option is out of range, or the backend's package is missing.

    Example:
        >>> from ppo_lightning.envs import make_env
        >>> env = make_env("ALE/Pong-v5", num_envs=2, env_kwargs={"frame_stack": 3})
        >>> env.reset_arrays().shape
        (2, 3, 84, 84)
    """

    # Without this flag, TorchRL sees the attribute frame_skip and adds a frame-skip transform.
    _has_frame_skip = True

    def __init__(
        self,
        env_id: str,
        seeds: list[int],
        /,
        *,
        noop_max: int = 30,
        frame_skip: int = 4,
        episodic_life: bool = True,
        fire_reset: bool = True,
        screen_size: int = 84,
        clip_reward: bool = True,
        frame_stack: int = 4,
        repeat_action_probability: float = 0.0,
        max_episode_frames: int = 108_000,
        num_threads: int = 0,
    ) -> None:
        self.rom = rom_name(env_id)
        self.seeds = list(seeds)
        self.game = game_name(self.rom)
        for name, value, minimum in (
            ("noop_max", noop_max, 0),
            ("frame_skip", frame_skip, 1),
            ("screen_size", screen_size, 1),
            ("frame_stack", frame_stack, 1),
            ("max_episode_frames", max_episode_frames, frame_skip),
            ("num_threads", num_threads, 0),
        ):
            if value < minimum:
                raise ConfigError(f"data.env_kwargs.{name} is {value}: it must be at least {minimum}.")
        if not 0 <= repeat_action_probability < 1:
            name = "data.env_kwargs.repeat_action_probability"
            raise ConfigError(f"{name} is {repeat_action_probability}: it must be at least 0 and below 1.")
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
        self.max_episode_frames = max_episode_frames // frame_skip * frame_skip
        self.num_threads = min(num_threads, len(seeds))
        self.render_fps = 60 / frame_skip
        self.frame_stack = frame_stack
        count = len(seeds)
        picture = (frame_stack, screen_size, screen_size)
        self._stack = np.zeros((count, *picture), np.uint8)
        self._lives = np.zeros(count, np.int64)
        super().__init__(spaces.Box(0, 255, picture, np.uint8), spaces.Discrete(self._make()), self.seeds)
        self.episode_done = np.ones(count, bool)

    @property
    def untransformable(self) -> str:
        """See :attr:`BatchedEnv.untransformable`."""
        return (
            "Atari games, whose lives and clipped rewards they would count as episodes and returns: remove"
            " them, and set the preprocessing in data.env_kwargs."
        )

    @property
    def preprocessing(self) -> dict[str, Any]:
        """Settings of the preprocessing, see :attr:`BatchedEnv.preprocessing`."""
        names = (
            "noop_max",
            "frame_skip",
            "episodic_life",
            "fire_reset",
            "screen_size",
            "clip_reward",
            "frame_stack",
        )
        return {name: getattr(self, name) for name in names}

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
    def _step_games(
        self, action: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Step all games.

        Returns:
            Frames [N, 1, H, W], rewards [N], ``terminated`` [N], ``truncated`` [N] and lives [N].
        """

    def reseed(self, seeds: list[int]) -> None:
        """Recreate the games, see :meth:`BatchedEnv.reseed`."""
        self._close_envs()
        self.seeds = list(seeds)
        self._make()

    def reset_arrays(self, mask: np.ndarray | None = None) -> np.ndarray:
        """Start new games or lives, see :meth:`BatchedEnv.reset_arrays`."""
        assert self.episode_done is not None
        all_rows = np.ones(self.num_envs, bool)
        new_game_rows = np.flatnonzero(all_rows if mask is None else mask & self.episode_done)
        if len(new_game_rows):
            frames, self._lives[new_game_rows] = self._new_games(new_game_rows)
            self._fill_stack(new_game_rows, frames)
        next_life_rows = np.flatnonzero(~all_rows if mask is None else mask & ~self.episode_done)
        if len(next_life_rows):
            self._fill_stack(next_life_rows, self._next_lives(next_life_rows))
        return self._stack

    def _fill_stack(self, rows: np.ndarray, frames: np.ndarray) -> None:
        # detail 20
        self._stack[rows] = frames

    def _step_arrays(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Step all games, see :meth:`BatchedEnv._step_arrays`."""
        frames, reward, terminated, truncated, lives = self._step_games(action)
        self._stack[:, :-1] = self._stack[:, 1:]
        self._stack[:, -1:] = frames
        self.episode_done = terminated | truncated
        if self.episodic_life:
            # detail 16
            terminated = terminated | ((lives < self._lives) & (lives > 0) & ~truncated)
        self._lives = lives.astype(np.int64)
        return self._stack, reward, terminated, truncated

    def learning_reward(self, reward: np.ndarray) -> np.ndarray:
        """Return the clipped reward, see :meth:`BatchedEnv.learning_reward`."""
        # detail 19
        return np.sign(reward) if self.clip_reward else reward


def check_options(env_kwargs: dict[str, Any]) -> None:
    """Check that each name is an option of :class:`AtariEnv` and each value has the type of the default.

    Args:
        env_kwargs: Options by name.

    Raises:
        ConfigError: An option does not exist or has the wrong type. For an unknown name, the message lists
            the closest options, or all of them.
    """
    parameters = inspect.signature(AtariEnv.__init__).parameters.values()
    options = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    for name, value in env_kwargs.items():
        if name not in options:
            hint = nearest(name, list(options)) or f": they are {', '.join(options)}."
            raise ConfigError(f"data.env_kwargs.{name} is not an option of Atari games{hint}")
        kind = type(options[name])
        if type(value) is not kind and not (kind is float and type(value) is int):
            word = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
            raise ConfigError(f"data.env_kwargs.{name} is {value!r}: it must be {word}.")


def rom_name(env_id: str) -> str:
    """Return the name of a game's ROM, for example ``beam_rider`` for ``ALE/BeamRider-v5``.

    Raises:
        ConfigError: The game does not exist. The message lists the closest names.
    """
    match = ATARI_ID.fullmatch(env_id)
    name = next(filter(None, match.groups())) if match else env_id
    roms = {rom.replace("_", ""): rom for rom in import_extra("ale_py.roms", extra="atari").get_all_rom_ids()}
    rom = roms.get(name.lower())
    if match is None or rom is None:
        known = {key: f"ALE/{game_name(rom)}-v5" for key, rom in roms.items()}
        hint = nearest(name.removesuffix("-v5"), known) or ": ale_py.roms.get_all_rom_ids() lists the names."
        raise ConfigError(f"env_id {env_id!r} is not an Atari game{hint}")
    return rom


def game_name(rom: str) -> str:
    """Convert the name of a ROM to the name in ids, for example ``beam_rider`` to ``BeamRider``."""
    return "".join(part[:1].upper() + part[1:] for part in rom.split("_")).replace("3d", "3D")
