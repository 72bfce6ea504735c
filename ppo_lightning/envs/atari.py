"""Atari games with the preprocessing of Mnih et al. (2015), the same from three backends.

The backends step games and give single frames; what is common to all stands in :class:`AtariEnv`: lives, frame stack and the
sign of the reward. Nothing is inherited from an id: ``ALE/Breakout-v5``, ``BreakoutNoFrameskip-v4`` and EnvPool's
``Breakout-v5`` name the game alone.
"""

import re
from abc import abstractmethod
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import AtariPreprocessing

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
        max_episode_frames: A game is cut after so many frames.
        num_threads: Of the backends ``envpool`` and ``ale``; 0 lets them choose.

    Raises:
        ConfigError: No such game, or the backend's package is missing.
    """

    def __init__(
        self,
        env_id: str,
        seeds: list[int],
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
        self.game, self.seeds = game_of(env_id), list(seeds)
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
        self.max_episode_frames, self.num_threads = max_episode_frames, num_threads
        self.channels = 1 if grayscale else 3
        count, picture = len(seeds), (self.channels * frame_stack, screen_size, screen_size)
        self._stack = np.zeros((count, *picture), np.uint8)
        self._lives = np.zeros(count, np.int64)
        super().__init__(spaces.Box(0, 255, picture, np.uint8), spaces.Discrete(self._make()), self.seeds)
        self.episode_done = np.ones(count, bool)

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
    def _step_games(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Steps all; returns frames [N, C, H, W], rewards, whether games are over, whether they are cut, and lives, all [N]."""

    def reseed(self, seeds: list[int]) -> None:
        """See :meth:`BatchedEnv.reseed`."""
        self.seeds = list(seeds)
        self._make()

    def reset_arrays(self, mask: np.ndarray | None = None) -> np.ndarray:
        """See :meth:`BatchedEnv.reset_arrays`."""
        assert self.episode_done is not None
        over = np.ones(self.num_envs, bool) if mask is None else mask & self.episode_done
        lost = ~over if mask is None else mask & ~self.episode_done
        if over.any():
            rows = np.flatnonzero(over)
            frames, self._lives[rows] = self._new_games(rows)
            # detail 20
            self._stack[rows] = np.tile(frames, (1, self._stack.shape[1] // self.channels, 1, 1))
        if lost.any():
            rows = np.flatnonzero(lost)
            following = self._next_lives(rows)
            if following is not None:
                self._stack[rows] = np.tile(following, (1, self._stack.shape[1] // self.channels, 1, 1))
        return self._stack

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


class EnvPoolAtari(AtariEnv):
    """EnvPool's games.

    Its own reset of a game that is not over starts a new one; the next life begins with a step whose action it ignores. That
    step is made here, for those environments alone, and enters no rollout.
    """

    def _make(self) -> int:
        envpool = import_extra("envpool", extra="envpool")
        self.envs = envpool.make(
            f"{self.game}-v5",
            env_type="gymnasium",
            num_envs=len(self.seeds),
            seed=self.seeds,
            num_threads=self.num_threads,
            noop_max=max(self.noop_max, 1),  # it makes one less if it fires
            frame_skip=self.frame_skip,
            episodic_life=self.episodic_life,
            use_fire_reset=self.fire_reset,
            img_height=self.screen_size,
            img_width=self.screen_size,
            gray_scale=self.grayscale,
            stack_num=1,
            reward_clip=False,
            repeat_action_probability=self.repeat_action_probability,
            full_action_space=self.full_action_space,
            max_episode_steps=self.max_episode_frames // self.frame_skip,
        )
        return int(self.envs.action_space.n)

    def _new_games(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        frames, info = self.envs.reset(rows)
        order = np.argsort(info["env_id"])
        return frames[order], info["lives"][order]

    def _next_lives(self, rows: np.ndarray) -> np.ndarray:
        frames, _, _, _, info = self.envs.step(np.zeros(len(rows), np.int32), rows.astype(np.int32))
        return frames[np.argsort(info["env_id"])]

    def _step_games(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        frames, reward, _, truncated, info = self.envs.step(action.astype(np.int32))
        return frames, reward, info["terminated"].astype(bool), truncated, info["lives"]

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Stops EnvPool's threads."""
        if not self.is_closed:
            self.envs.close()
        super().close(raise_if_closed=raise_if_closed)


class AleAtari(AtariEnv):
    """The games of ``ale_py``'s own vector environment."""

    def _make(self) -> int:
        ale_py = import_extra("ale_py.vector_env", extra="atari")
        self.envs = ale_py.AtariVectorEnv(
            snake_case(self.game),
            len(self.seeds),
            num_threads=self.num_threads,
            max_num_frames_per_episode=self.max_episode_frames,
            repeat_action_probability=self.repeat_action_probability,
            full_action_space=self.full_action_space,
            img_height=self.screen_size,
            img_width=self.screen_size,
            grayscale=self.grayscale,
            stack_num=1,
            frameskip=self.frame_skip,
            noop_max=self.noop_max,
            episodic_life=False,  # its next life is a new game
            reward_clipping=False,
            use_fire_reset=self.fire_reset,
        )
        self._seeds_to_use: np.ndarray | None = np.array(self.seeds)
        return int(self.envs.single_action_space.n)

    def _new_games(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        seeds, self._seeds_to_use = self._seeds_to_use, None
        mask = np.zeros(len(self.seeds), bool)
        mask[rows] = True
        # An explicit reset takes the place of the automatic one, whose step would ignore the action.
        frames, info = self.envs.reset(seed=seeds, options=None if mask.all() else {"reset_mask": mask})
        return self._channels_first(frames)[rows], info["lives"][rows]

    def _step_games(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        frames, reward, terminated, truncated, info = self.envs.step(action.astype(np.int64))
        return self._channels_first(frames), reward.astype(np.float64), terminated, truncated, info["lives"]

    def _channels_first(self, frames: np.ndarray) -> np.ndarray:
        """From [N, 1, H, W] or [N, 1, H, W, 3] to [N, C, H, W]."""
        return frames if self.grayscale else frames[:, 0].transpose(0, 3, 1, 2)

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Stops its threads."""
        if not self.is_closed:
            self.envs.close()
        super().close(raise_if_closed=raise_if_closed)


class GymnasiumAtari(AtariEnv):
    """Gymnasium's ``AtariPreprocessing`` around each game, one after the other, with FIRE and lives, which it lacks."""

    def _make(self) -> int:
        ale_py = import_extra("ale_py", extra="atari")
        self._cv2 = import_extra("cv2", extra="atari")
        gymnasium.register_envs(ale_py)
        self.envs = [
            AtariPreprocessing(
                gymnasium.make(
                    f"ALE/{self.game}-v5",
                    frameskip=1,
                    repeat_action_probability=self.repeat_action_probability,
                    full_action_space=self.full_action_space,
                    max_num_frames_per_episode=self.max_episode_frames,
                ),
                noop_max=self.noop_max,
                frame_skip=self.frame_skip,
                screen_size=self.screen_size,
                terminal_on_life_loss=False,
                grayscale_obs=self.grayscale,
            )
            for _ in self.seeds
        ]
        self._seeds_to_use: list[int] | None = list(self.seeds)
        game: Any = self.envs[0].unwrapped
        self._fires = self.fire_reset and game.get_action_meanings()[1] == "FIRE"
        return int(game.action_space.n)

    def _new_games(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        seeds, self._seeds_to_use = self._seeds_to_use, None
        for row in rows:
            self.envs[row].reset(seed=None if seeds is None else seeds[row])
            if self._fires:
                self.envs[row].env.step(1)
        games: list[Any] = [self.envs[row].unwrapped for row in rows]
        return np.stack([self._frame(game) for game in games]), np.array([game.ale.lives() for game in games])

    def _next_lives(self, rows: np.ndarray) -> np.ndarray:
        for row in rows:
            self.envs[row].step(0)  # out of the state in which the life was lost
            if self._fires:
                self.envs[row].env.step(1)
        return np.stack([self._frame(self.envs[row].unwrapped) for row in rows])

    def _frame(self, game: Any) -> np.ndarray:
        """Returns the present screen, [C, H, W]."""
        screen = game.ale.getScreenGrayscale() if self.grayscale else game.ale.getScreenRGB()
        size = (self.screen_size, self.screen_size)
        return self._channels_first(self._cv2.resize(screen, size, interpolation=self._cv2.INTER_AREA))

    def _channels_first(self, frame: np.ndarray) -> np.ndarray:
        return frame[None] if self.grayscale else frame.transpose(2, 0, 1)

    def _step_games(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        steps = [env.step(int(one)) for env, one in zip(self.envs, action, strict=True)]
        frames, rewards, terminated, truncated, infos = zip(*steps, strict=True)
        lives = np.array([info["lives"] for info in infos])
        pictures = np.stack([self._channels_first(frame) for frame in frames])
        return pictures, np.array(rewards, np.float64), np.array(terminated), np.array(truncated), lives

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Closes every game."""
        if not self.is_closed:
            for env in self.envs:
                env.close()
        super().close(raise_if_closed=raise_if_closed)


def game_of(env_id: str) -> str:
    """Returns the name of an id's game, as in ``ALE/BeamRider-v5``.

    Raises:
        ConfigError: There is no such game; the message names the closest ones.
    """
    match = ATARI_ID.fullmatch(env_id)
    name = next(filter(None, match.groups())) if match else env_id.removesuffix("-v5")
    games = import_extra("ale_py.roms", extra="atari").get_all_rom_ids()
    if snake_case(name) not in games:
        hint = nearest(snake_case(name), games) or ": ale_py.roms.get_all_rom_ids() has the names."
        raise ConfigError(f"env_id {env_id!r} is not an Atari game{hint}")
    return name


def snake_case(name: str) -> str:
    """From ``BeamRider`` to ``beam_rider``, as the files of the games are called."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


ATARI = {"envpool": EnvPoolAtari, "ale": AleAtari, "gymnasium": GymnasiumAtari}
