"""Atari backends: EnvPool and Gymnasium."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import AtariPreprocessing

from ppo_lightning.envs.atari import Arrays, AtariEnv
from ppo_lightning.envs.state import set_wrapper_attributes, wrapper_attributes
from ppo_lightning.errors import import_extra
from ppo_lightning.utils.threads import threads_of


class EnvPoolAtari(AtariEnv):
    """Atari games stepped by EnvPool.

    EnvPool's reset always starts a new game, even if the current one is not over. The next life begins with a
    step whose action EnvPool ignores. This class makes that step for the affected environments only, outside
    the rollout.
    """

    def _make(self) -> int:
        envpool = import_extra("envpool", extra="envpool")
        self.envs = envpool.make(
            f"{self.game}-v5".replace("3D", "3d"),
            env_type="gymnasium",
            num_envs=len(self.seeds),
            seed=self.seeds,
            num_threads=threads_of(self.num_threads, len(self.seeds)),
            noop_max=max(self.noop_max, 1),  # with fire_reset, EnvPool makes one no-op less
            frame_skip=self.frame_skip,
            episodic_life=self.episodic_life,
            use_fire_reset=self.fire_reset,
            img_height=self.screen_size,
            img_width=self.screen_size,
            stack_num=1,
            reward_clip=False,
            repeat_action_probability=self.repeat_action_probability,
            max_episode_steps=self.max_episode_steps,
        )
        return int(self.envs.action_space.n)

    def _new_games(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        frames, info = self.envs.reset(rows)
        order = np.argsort(info["env_id"])
        return frames[order], info["lives"][order]

    def _next_lives(self, rows: np.ndarray) -> np.ndarray:
        frames, _, _, _, info = self.envs.step(np.zeros(len(rows), np.int32), rows.astype(np.int32))
        return frames[np.argsort(info["env_id"])]

    def _step_games(self, action: np.ndarray) -> Arrays:
        frames, reward, _, truncated, info = self.envs.step(action.astype(np.int32))
        return frames, reward, info["terminated"].astype(bool), truncated, info["lives"]


class GymnasiumAtari(AtariEnv):
    """Atari games in Gymnasium's ``AtariPreprocessing``, stepped one after the other.

    This class adds FIRE and lives, which the wrapper lacks.
    """

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
                    # No limit, because ALE also counts the frames before the first step.
                    max_num_frames_per_episode=0,
                ),
                noop_max=self.noop_max,
                frame_skip=self.frame_skip,
                screen_size=self.screen_size,
                terminal_on_life_loss=False,
            )
            for _ in self.seeds
        ]
        self._frames_played = np.zeros(len(self.seeds), np.int64)
        game: Any = self.envs[0].unwrapped
        self.action_names = game.get_action_meanings()
        self._fires = self.fire_reset and self.action_names[1] == "FIRE"
        return int(game.action_space.n)

    def _new_games(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        seeds = self._next_seeds.take()
        self._frames_played[rows] = 0
        for row in rows:
            self.envs[row].reset(seed=seeds[row])
            if self._fires:
                self.envs[row].env.step(1)
        games: list[Any] = [self.envs[row].unwrapped for row in rows]
        return np.stack([self._frame(game) for game in games]), np.array([game.ale.lives() for game in games])

    def _next_lives(self, rows: np.ndarray) -> np.ndarray:
        for row in rows:
            self.envs[row].step(0)  # leave the frame in which the life was lost
            if self._fires:
                self.envs[row].env.step(1)
        return np.stack([self._frame(self.envs[row].unwrapped) for row in rows])

    def render(self) -> np.ndarray:
        """Return the raw screen of the console."""
        game: Any = self.envs[0].unwrapped
        return game.ale.getScreenRGB()

    def get_state(self) -> list[dict[str, Any]]:
        """Return emulator, generator of the no-ops, frame stack and counters."""
        return [
            {
                "ale": np.frombuffer(game.unwrapped.ale.cloneState(include_rng=True).serialize(), np.uint8),
                "random": game.unwrapped.np_random.bit_generator.state,
                "stack": self._observation[i].copy(),
                "counts": np.array([self.lives[i], self._frames_played[i], self.over[i]]),
                "wrappers": wrapper_attributes(game),
            }
            for i, game in enumerate(self.envs)
        ]

    def set_state(self, states: list[dict[str, Any]]) -> None:
        """Restore the games."""
        self._next_seeds.take()
        ale_py = import_extra("ale_py", extra="atari")
        for i, (game, saved) in enumerate(zip(self.envs, states, strict=True)):
            game.reset()
            emulator: Any = game.unwrapped
            emulator.ale.restoreState(ale_py.ALEState(saved["ale"].tobytes()))
            emulator.np_random.bit_generator.state = saved["random"]
            self._observation[i] = saved["stack"]
            self.lives[i], self._frames_played[i], self.over[i] = saved["counts"].tolist()
            set_wrapper_attributes(game, saved["wrappers"])

    def _frame(self, game: Any) -> np.ndarray:
        """Return the current screen, [1, H, W]."""
        size = (self.screen_size, self.screen_size)
        screen = game.ale.getScreenGrayscale()
        return self._cv2.resize(screen, size, interpolation=self._cv2.INTER_AREA)[None]

    def _step_games(self, action: np.ndarray) -> Arrays:
        steps = [env.step(int(button)) for env, button in zip(self.envs, action, strict=True)]
        frames, rewards, terminated, _, infos = zip(*steps, strict=True)
        self._frames_played += self.frame_skip
        truncated = self._frames_played >= self.max_episode_steps * self.frame_skip
        lives = np.array([info["lives"] for info in infos])
        pictures = np.stack(frames)[:, None]
        return pictures, np.array(rewards, np.float64), np.array(terminated), truncated, lives
