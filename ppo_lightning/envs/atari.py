"""Atari games with the preprocessing of Mnih et al. (2015), the same from three backends.

The backends step games and give single frames; what is common to all stands in :class:`AtariEnv`: lives, frame stack and the
sign of the reward. Nothing is inherited from an id: ``ALE/Breakout-v5`` and ``BreakoutNoFrameskip-v4`` name the game alone.
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

    Observations are bytes [frame_stack, 84, 84] (three times as many channels in colour), the newest frame last.
    ``terminated`` is also true where a life was lost, if ``episodic_life``; ``episode_done`` is the end of the game, and
    resetting an environment that is done starts the next life or the next game.

    Args:
        env_id: See above.
        seeds: One seed an environment.
        noop_max: Up to so many frames without action begin a game.
        frame_skip: Frames an action is repeated for; an observation is the maximum of the last two.
        episodic_life: Learning is cut where a life is lost.
        fire_reset: FIRE is pressed at the start of a game that has that button, and of the next life (not by the backend
            ``ale``, which cannot step one game alone: there the agent presses it).
        screen_size: Height and width of the pictures.
        grayscale: One channel a frame.
        clip_reward: The agent learns from the sign of the reward.
        frame_stack: Frames in an observation.
        repeat_action_probability: Of the action before, at each frame (sticky actions).
        full_action_space: All 18 actions instead of those that the game uses.
        max_episode_frames: A game is cut after so many frames of its steps, rounded down to whole ones.
        num_threads: Of the backends ``envpool`` and ``ale``; 0 lets them choose.

    Raises:
        ConfigError: No such game, an option out of its range, or the backend's package is missing.
    """

    _has_frame_skip = True  # or TorchRL, seeing the attribute frame_skip, wraps it to skip frames once more

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
        grayscale: bool = True,
        clip_reward: bool = True,
        frame_stack: int = 4,
        repeat_action_probability: float = 0.0,
        full_action_space: bool = False,
        max_episode_frames: int = 108_000,
        num_threads: int = 0,
    ) -> None:
        self.rom, self.seeds = rom_of(env_id), list(seeds)
        self.game = game_name(self.rom)
        for name, value, least in (
            ("noop_max", noop_max, 0),
            ("frame_skip", frame_skip, 1),
            ("screen_size", screen_size, 1),
            ("frame_stack", frame_stack, 1),
            ("max_episode_frames", max_episode_frames, frame_skip),
            ("num_threads", num_threads, 0),
        ):
            if value < least:
                raise ConfigError(f"data.env_kwargs.{name} is {value}: it must be at least {least}.")
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
        self.screen_size, self.grayscale = screen_size, grayscale
        self.episodic_life, self.clip_reward = episodic_life, clip_reward
        self.repeat_action_probability, self.full_action_space = repeat_action_probability, full_action_space
        self.max_episode_frames = max_episode_frames // frame_skip * frame_skip
        self.num_threads = min(num_threads, len(seeds))
        self.render_fps = 60 / frame_skip
        self.channels, self.frame_stack = 1 if grayscale else 3, frame_stack
        count, picture = len(seeds), (self.channels * frame_stack, screen_size, screen_size)
        self._stack = np.zeros((count, *picture), np.uint8)
        self._lives = np.zeros(count, np.int64)
        super().__init__(spaces.Box(0, 255, picture, np.uint8), spaces.Discrete(self._make()), self.seeds)
        self.episode_done = np.ones(count, bool)

    @property
    def preprocessing(self) -> dict[str, Any]:
        """See :attr:`BatchedEnv.preprocessing`."""
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
        """Creates the games from ``self.seeds``; returns the number of actions."""

    @abstractmethod
    def _new_games(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Starts new games in the environments ``rows`` [K]; returns their frames [K, C, H, W] and lives [K]."""

    def _next_lives(self, rows: np.ndarray) -> np.ndarray | None:
        """Goes on after the loss of a life in the environments ``rows`` [K]; returns their frames [K, C, H, W] if it did."""
        return None

    @abstractmethod
    def _step_games(
        self, action: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Steps all; returns frames [N, C, H, W], rewards, whether games are over, whether they are cut, and lives, all [N]."""

    def reseed(self, seeds: list[int]) -> None:
        """See :meth:`BatchedEnv.reseed`."""
        self._close_envs()
        self.seeds = list(seeds)
        self._make()

    def reset_arrays(self, mask: np.ndarray | None = None) -> np.ndarray:
        """See :meth:`BatchedEnv.reset_arrays`."""
        assert self.episode_done is not None
        everyone = np.ones(self.num_envs, bool)
        over = np.flatnonzero(everyone if mask is None else mask & self.episode_done)
        if len(over):
            frames, self._lives[over] = self._new_games(over)
            self._fill_stack(over, frames)
        lost = np.flatnonzero(~everyone if mask is None else mask & ~self.episode_done)
        if len(lost) and (following := self._next_lives(lost)) is not None:
            self._fill_stack(lost, following)
        return self._stack

    def _fill_stack(self, rows: np.ndarray, frames: np.ndarray) -> None:
        # detail 20
        self._stack[rows] = np.tile(frames, (1, self._stack.shape[1] // self.channels, 1, 1))

    def _step_arrays(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """See :meth:`BatchedEnv._step_arrays`."""
        frames, reward, terminated, truncated, lives = self._step_games(action)
        self._stack[:, : -self.channels] = self._stack[:, self.channels :]
        self._stack[:, -self.channels :] = frames
        self.episode_done = terminated | truncated
        if self.episodic_life:
            # detail 16
            terminated = terminated | ((lives < self._lives) & (lives > 0) & ~truncated)
        self._lives = lives.astype(np.int64)
        return self._stack, reward, terminated, truncated

    def learning_reward(self, reward: np.ndarray) -> np.ndarray:
        """See :meth:`BatchedEnv.learning_reward`."""
        # detail 19
        return np.sign(reward) if self.clip_reward else reward


def check_options(env_kwargs: dict[str, Any]) -> None:
    """Demands that every name is an option of :class:`AtariEnv`, and that its value is of the type of the default.

    Raises:
        ConfigError: One is not; the message names the closest ones, or all.
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


def rom_of(env_id: str) -> str:
    """Returns what a game's file is called, as in ``beam_rider`` for ``ALE/BeamRider-v5``.

    Raises:
        ConfigError: There is no such game; the message names the closest ones.
    """
    match = ATARI_ID.fullmatch(env_id)
    name = next(filter(None, match.groups())) if match else env_id
    roms = {rom.replace("_", ""): rom for rom in import_extra("ale_py.roms", extra="atari").get_all_rom_ids()}
    rom = roms.get(name.lower())
    if match is None or rom is None:
        known = {key: f"ALE/{game_name(rom)}-v5" for key, rom in roms.items()}
        hint = nearest(name.removesuffix("-v5"), known) or ": ale_py.roms.get_all_rom_ids() has the names."
        raise ConfigError(f"env_id {env_id!r} is not an Atari game{hint}")
    return rom


def game_name(rom: str) -> str:
    """From ``beam_rider`` to ``BeamRider``, as the ids have it."""
    return "".join(part[:1].upper() + part[1:] for part in rom.split("_")).replace("3d", "3D")
