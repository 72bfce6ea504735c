"""Groups of players with different spaces in one batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from ppo_lightning.errors import ConfigError
from ppo_lightning.spaces.entries import GROUP
from ppo_lightning.spaces.specs import MASK


class PlayerGroups:
    """Padding of observations and actions to the widest ones of all groups.

    The observations get the entries ``group``, the index of the player's group, and ``observation``, padded
    with zeros. If the groups have different numbers of actions, an ``action_mask`` forbids the others.

    Args:
        env: A game of PettingZoo.
        group_map: Name of each group -> its players.
        name: Name of the game, for messages.

    Raises:
        ConfigError: A player is in no group or in two, the players of a group have different spaces, or a
            space is no vector of floats or no discrete action.

    Example:
        >>> from ppo_lightning.envs.pettingzoo import import_pettingzoo
        >>> env = import_pettingzoo("mpe2.simple_tag_v3").parallel_env(num_adversaries=1)
        >>> groups = PlayerGroups(env, {"adversaries": ["adversary_0"], "agents": ["agent_0"]}, "tag")
        >>> groups.pad("agent_0", np.zeros(8))["group"], groups.space["observation"].shape
        (1, (10,))
    """

    def __init__(self, env: Any, group_map: Mapping[str, Sequence[str]], name: str) -> None:
        players = list(env.possible_agents)
        members = [player for group in group_map.values() for player in group]
        if sorted(members) != sorted(players):
            raise ConfigError(
                f"data.env_kwargs.group_map has the players {sorted(members)}, and {name} has"
                f" {sorted(players)}: each must be in one group."
            )
        self._index = {player: i for i, group in enumerate(group_map.values()) for player in group}
        views = {player: env.observation_space(player) for player in players}
        actions = {player: env.action_space(player) for player in players}
        for player in players:
            box, first = views[player], next(iter(list(group_map.values())[self._index[player]]))
            is_vector = isinstance(box, spaces.Box) and len(box.shape) == 1 and box.dtype.kind == "f"
            if not is_vector or not isinstance(actions[player], spaces.Discrete):
                raise ConfigError(
                    f"{name}: data.env_kwargs.group_map needs vectors of floats and discrete actions, and"
                    f" {player!r} has {box} and {actions[player]}."
                )
            if (box, actions[player]) != (views[first], actions[first]):
                raise ConfigError(
                    f"data.env_kwargs.group_map: {first!r} and {player!r} share a group and have different"
                    " spaces."
                )
        width = max(box.shape[0] for box in views.values())
        counts = {player: int(actions[player].n) for player in players}
        most = max(counts.values())
        self.actions = spaces.Discrete(most)
        self._padding = {player: (0, width - box.shape[0]) for player, box in views.items()}
        parts: dict[str, spaces.Space] = {
            GROUP: spaces.Discrete(len(group_map)),
            "observation": spaces.Box(-np.inf, np.inf, (width,), np.float32),
        }
        self._masks: dict[str, np.ndarray] = {}
        if min(counts.values()) < most:
            parts[MASK] = spaces.MultiBinary(most)
            self._masks = {player: np.arange(most) < count for player, count in counts.items()}
        self.space = spaces.Dict(parts)

    def pad(self, player: str, observation: np.ndarray) -> dict[str, Any]:
        """Return the observation of a player with all entries of ``space``."""
        parts = {GROUP: self._index[player], "observation": np.pad(observation, self._padding[player])}
        return parts | ({MASK: self._masks[player]} if self._masks else {})
