"""Players of games: agents, random play, search and functions of the user."""

import pkgutil
from collections.abc import Callable

import numpy as np
import torch

from ppo_lightning.envs.factory import Specs
from ppo_lightning.errors import ConfigError, first_line
from ppo_lightning.models import ActorCritic
from ppo_lightning.rollouts.minimax import Minimax
from ppo_lightning.spaces.specs import choice_counts, mask_columns

# Function of raw observations [B, ...] and a random generator to actions [B, ...].
Player = Callable[[np.ndarray, np.random.Generator], np.ndarray]


class AgentPlayer:
    """A player who acts with an agent.

    Args:
        agent: The agent, whose weights may change between games.
        deterministic: Choose the most probable actions instead of sampling.

    Raises:
        ConfigError: The agent has a memory.

    Example:
        >>> from torchrl.data import Categorical, Unbounded
        >>> from ppo_lightning.models import MLPAgent
        >>> player = AgentPlayer(MLPAgent(Unbounded((4,)), Categorical(2, shape=())))
        >>> player(np.zeros((3, 4), np.float32), np.random.default_rng(1)).shape
        (3,)
    """

    def __init__(self, agent: ActorCritic, deterministic: bool = False) -> None:
        if agent.memory is not None:
            raise ConfigError("An agent with a memory cannot play games: set model.agent.memory to null.")
        self.agent = agent
        self.deterministic = deterministic

    @torch.no_grad()
    def __call__(self, observation: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Return actions, see :data:`Player`."""
        noise = None
        if not self.deterministic:
            seeded = torch.Generator().manual_seed(int(generator.integers(2**31)))
            noise = self.agent.noise((len(observation),), seeded).to(self.agent.device)
        inputs = self.agent.normalize(torch.tensor(observation, device=self.agent.device))
        return self.agent.head.for_environment(self.agent.act(inputs, noise)[0]).numpy(force=True)


class RandomPlayer:
    """A player who chooses uniformly among the legal actions of a discrete action space.

    Args:
        specs: Specs of one environment.

    Raises:
        ConfigError: The actions are not one discrete choice.

    Example:
        >>> from torchrl.data import Categorical, Unbounded
        >>> player = RandomPlayer(Specs(Unbounded((4,)), Categorical(2, shape=())))
        >>> player(np.zeros((3, 4), np.float32), np.random.default_rng(1)).max() < 2
        True
    """

    def __init__(self, specs: Specs) -> None:
        counts = choice_counts(specs.action)
        if len(counts) != 1:
            raise ConfigError(
                "The opponent 'random' needs one discrete action: name a function of yours as opponent."
            )
        self._num_actions = counts[0]
        self._mask = mask_columns(specs.observation)

    def __call__(self, observation: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Return actions, see :data:`Player`."""
        keys = generator.random((len(observation), self._num_actions))
        if self._mask is not None:
            keys[observation[:, self._mask] <= 0] = -1
        return keys.argmax(1)


def make_player(name: str, env_id: str, specs: Specs) -> Player:
    """Make a scripted player.

    Args:
        name: ``random``, ``minimax:2`` (the depth), ``perfect`` (TicTacToe), or the import path of a function
            of raw observations [B, ...] and a ``np.random.Generator`` that returns actions [B, ...].
        env_id: Id of the game.
        specs: Specs of one environment.

    Raises:
        ConfigError: The name is none of these, or the player does not know the game.

    Example:
        >>> from torchrl.data import Categorical, Unbounded
        >>> specs = Specs(Unbounded((91,)), Categorical(7, shape=()))
        >>> make_player("minimax:2", "ConnectFour-v1", specs).depth
        2
    """
    kind, _, depth = name.partition(":")
    if name == "random":
        return RandomPlayer(specs)
    if name == "perfect" and env_id == "TicTacToe-v1":
        return Minimax(env_id, depth=9)
    if kind == "minimax" and depth.isdecimal():
        return Minimax(env_id, int(depth))
    try:
        player = pkgutil.resolve_name(name) if "." in name else None
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"The opponent {name!r} cannot be imported: {first_line(error)}.") from error
    if not callable(player):
        raise ConfigError(
            f"The opponent {name!r} is unknown: give random, minimax:2, perfect (TicTacToe-v1), or the import"
            " path of a function."
        )
    return player
