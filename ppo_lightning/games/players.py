"""Players of games: agents, random play and search."""

from collections.abc import Callable

import numpy as np
import torch

from ppo_lightning.checkpoints.agent import check_same_spaces, trained_agent
from ppo_lightning.checkpoints.file import read_checkpoint
from ppo_lightning.envs import BatchedEnv
from ppo_lightning.errors import ConfigError
from ppo_lightning.games.minimax import minimax_player
from ppo_lightning.models import ActorCritic
from ppo_lightning.spaces.specs import choice_counts, mask_columns

# Function of raw observations [B, ...] and a random generator to actions [B, ...].
Player = Callable[[np.ndarray, np.random.Generator], np.ndarray]


def make_player(name: str, env_id: str, env: BatchedEnv) -> Player:
    """Make a player by name.

    Args:
        name: ``random``, ``minimax:2`` (the depth), or the file of a checkpoint, ``.ckpt``, whose agent
            samples its actions.
        env_id: Id of the game.
        env: An environment of the game.

    Raises:
        ConfigError: The name is none of these, or the player does not know the game.

    Example:
        >>> env = make_env("TicTacToe-v1", 2, "envpool")
        >>> make_player("minimax:9", "TicTacToe-v1", env)(env.reset_arrays(), np.random.default_rng(1)).shape
        (2,)
    """
    kind, _, depth = name.partition(":")
    if name == "random":
        return random_player(env)
    if kind == "minimax" and depth.isdecimal():
        return minimax_player(env_id, int(depth))
    if not name.endswith(".ckpt"):
        raise ConfigError(
            f"The opponent {name!r} is unknown: give random, minimax:2 or a checkpoint (.ckpt)."
        )
    agent = trained_agent(read_checkpoint(name))
    check_same_spaces(agent, env)
    return agent_player(agent)


def agent_player(agent: ActorCritic, deterministic: bool = False) -> Player:
    """Return a player who acts with an agent.

    Args:
        agent: The agent, whose weights may change between games.
        deterministic: Choose the most probable actions instead of sampling.

    Raises:
        ConfigError: The agent has a memory.
    """
    if agent.memory is not None:
        raise ConfigError("An agent with a memory cannot play games: set model.agent.memory to null.")

    @torch.no_grad()
    def play(observation: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        noise = None
        if not deterministic:
            seeded = torch.Generator().manual_seed(int(generator.integers(2**31)))
            noise = agent.noise((len(observation),), seeded).to(agent.device)
        inputs = agent.normalize(torch.tensor(observation, device=agent.device))
        return agent.head.for_environment(agent.act(inputs, noise)[0]).numpy(force=True)

    return play


def random_player(env: BatchedEnv) -> Player:
    """Return a player who chooses uniformly among the legal actions.

    Raises:
        ConfigError: The actions of the environment are not one discrete choice.
    """
    observation_spec, action_spec = env.agent_specs
    counts = choice_counts(action_spec)
    if len(counts) != 1:
        raise ConfigError("The opponent 'random' needs one discrete action: set model.rating_games to 0.")
    mask = mask_columns(observation_spec)

    def play(observation: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        keys = generator.random((len(observation), counts[0]))
        if mask is not None:
            keys[observation[:, mask] <= 0] = -1
        return keys.argmax(1)

    return play
