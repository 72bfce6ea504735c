"""Atari games of several players from PettingZoo, with the preprocessing of CleanRL."""

import pkgutil
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from gymnasium import spaces

from ppo_lightning.envs.batched import Step
from ppo_lightning.envs.contract import fitting, require_known
from ppo_lightning.errors import ConfigError, import_extra
from ppo_lightning.games.env import GameEnv
from ppo_lightning.games.pettingzoo import import_pettingzoo, whole_games
from ppo_lightning.utils.arguments import Range, check_arguments

FRAME_SKIP = 4  # frames per action
FRAME_STACK = 4  # pictures per observation
SCREEN_SIZE = 84  # height and width of the pictures, pixels


class PettingZooAtari(GameEnv):
    """Atari games of P players who act at once, with one row per player.

    The preprocessing is that of CleanRL's ``ppo_pettingzoo_ma_atari.py``: the pixelwise maximum of the last
    two frames, 4 frames per action, the blue channel, 84 x 84 pixels, 4 pictures, and P channels that
    indicate the player. At the start of a game, missing pictures are 0. Rewards for training are the sum over
    the 4 frames, clipped to [-1, 1]. There are no no-ops, no FIRE at the start, no sticky actions and no
    terminations at the loss of a life.

    Source: Huang et al., "CleanRL" (2022), with SuperSuit 3.4.0. SuperSuit's scaling is bilinear. Here, a
    pixel is the mean of its area, as in the other Atari environments of this package.

    Args:
        env_id: A game, for example ``atari/pong_v3``.
        seeds: One seed per row. A game uses that of its first row. Rows are added if the last game is
            incomplete.
        max_episode_frames: Time limit of a game in frames, rounded down to a multiple of 4.
        **env_kwargs: Arguments of the game's ``parallel_env``.

    Example:
        >>> env = PettingZooAtari("atari/pong_v3", [1, 2, 3, 4])
        >>> env.reset_arrays().shape, env.num_players
        ((4, 6, 84, 84), 2)
    """

    render_fps = 60 / FRAME_SKIP

    def __init__(
        self,
        env_id: str,
        seeds: list[int],
        /,
        *,
        max_episode_frames: Annotated[int, Range(FRAME_SKIP)] = 100_000,
        **env_kwargs: Any,
    ) -> None:
        check_arguments(PettingZooAtari.__init__, locals(), "data.env_kwargs")
        self._cv2 = import_extra("cv2", extra="atari")
        self.max_episode_steps = max_episode_frames // FRAME_SKIP
        first = make_game(env_id, env_kwargs)
        players = first.possible_agents
        count = len(players)
        seeds = whole_games(seeds, count)
        self.num_players = count
        self.envs = [first, *(make_game(env_id, env_kwargs) for _ in range(len(seeds) // count - 1))]
        shape = (FRAME_STACK + count, SCREEN_SIZE, SCREEN_SIZE)
        super().__init__(spaces.Box(0, 255, shape, np.uint8), first.action_space(players[0]), seeds)
        num_games = len(self.envs)
        self._buttons = first.action_mapping
        # The last two screens of each game, and the index of the last one.
        self._screens = np.zeros((num_games, 2, *first.observation_space(players[0]).shape), np.uint8)
        self._frames = np.zeros(num_games, np.int64)  # of the running games
        # detail 22: the network divides bytes by 255, which turns these indicators into 1.
        self._by_game = self._observation.reshape(num_games, count, *shape)
        self._by_game[:, range(count), range(FRAME_STACK, FRAME_STACK + count)] = 255

    def reset_arrays(self, mask: np.ndarray | None = None) -> np.ndarray:
        """Start the games of all masked rows anew."""
        seeds = self._next_seeds.take()
        for g in range(len(self.envs)):
            if mask is not None and not mask.reshape(-1, self.num_players)[g].any():
                continue
            observation, _ = self.envs[g].reset(seed=seeds[g * self.num_players])
            screens = self._screens[g]
            screens[1] = next(iter(observation.values()))
            screens[0] = screens[1]
            self._frames[g] = 0
            self._by_game[g, :, :FRAME_STACK] = 0
            self._add_picture(g)
        return self._observation

    def _step_arrays(self, action: np.ndarray) -> Step:
        buttons = self._buttons[action.reshape(-1, self.num_players)]
        over = list(map(self._step_game, range(len(self.envs)), buttons))
        terminated = np.repeat(over, self.num_players)
        truncated = np.repeat(self._frames >= self.max_episode_steps * FRAME_SKIP, self.num_players)
        return Step(self._observation, self._results[0], terminated, truncated, terminated | truncated)

    def _step_game(self, g: int, buttons: np.ndarray) -> bool:
        """Hold the buttons [P] for 4 frames of a game, and return whether the game is over."""
        ale = self.envs[g].ale
        screens = self._screens[g]
        reward = self._results[0].reshape(-1, self.num_players)[g]  # a view
        reward[:] = 0
        over = False
        for frame in range(FRAME_SKIP):
            reward += ale.act(buttons)
            over = ale.game_over()
            # Only the last two screens are needed. If the game ends in between, the screen before its last
            # one is unknown. The value of this final observation is 0, whatever it shows.
            if over and frame < FRAME_SKIP - 1:
                ale.getScreenRGB(screens[1])
                screens[0] = screens[1]
                break
            if frame >= FRAME_SKIP - 2:
                ale.getScreenRGB(screens[frame % 2])
        self._frames[g] += frame + 1
        if not over and ale.allLives().min() < 0:
            raise ConfigError(f"{self.envs[g].metadata['name']} does not end for all players at once.")
        self._add_picture(g)
        return over

    def _add_picture(self, g: int) -> None:
        """Append the maximum of the last two screens of a game to the observations of its players."""
        rows = self._by_game[g]
        rows[:, : FRAME_STACK - 1] = rows[:, 1:FRAME_STACK]
        one, other = self._screens[g][..., 2]
        size = (SCREEN_SIZE, SCREEN_SIZE)
        blue = np.maximum(one, other)
        rows[:, FRAME_STACK - 1] = self._cv2.resize(blue, size, interpolation=self._cv2.INTER_AREA)

    def learning_reward(self, reward: np.ndarray) -> np.ndarray:
        """Return the clipped reward."""
        return np.clip(reward, -1, 1)

    def render(self) -> np.ndarray:
        """Return the screen of the first game."""
        return self.envs[0].ale.getScreenRGB()


def make_game(env_id: str, env_kwargs: dict[str, Any]) -> Any:
    """Make a game of PettingZoo with the ROM of ``ale_py``, without its wrappers."""
    name = env_id.removeprefix("atari/").replace("-v", "_v")
    games = import_pettingzoo("pettingzoo.atari")
    import_pettingzoo("multi_agent_ale_py")
    roms = Path(str(import_extra("ale_py", extra="atari").__file__)).parent
    names = [module.name for module in pkgutil.iter_modules(games.__path__) if "_v" in module.name]
    require_known(name, names, "an Atari game of PettingZoo", f"they are {', '.join(names)}")
    make = import_pettingzoo(f"pettingzoo.atari.{name}").parallel_env
    with fitting(env_id, env_kwargs, TypeError, AssertionError, OSError):
        return make(obs_type="rgb_image", auto_rom_install_path=str(roms), **env_kwargs).unwrapped
