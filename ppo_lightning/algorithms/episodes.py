"""Returns and lengths of the episodes that finished in a rollout."""

import torch
from tensordict import TensorDictBase
from torch import Tensor


def finished_episodes(rollout: TensorDictBase) -> Tensor:
    """Return the episodes that finished in a rollout.

    Args:
        rollout: Batch size [N, T].

    Returns:
        Return, length and player of each episode, [E, 3]. The player is 0 outside of games.
    """
    following = rollout["next"]
    done = following["episode_done"]
    player = rollout["player"] if "player" in rollout.keys() else torch.zeros_like(done)  # noqa: SIM118
    columns = (following["episode_reward"], following["step_count"], player)
    return torch.stack([column[done].float() for column in columns], dim=-1)


def episode_means(episodes: Tensor, num_players: int = 1, turn_based: bool = False) -> dict[str, Tensor]:
    """Return the mean return and length of episodes, over all players and by player.

    Args:
        episodes: From :func:`finished_episodes`, [E, 3].
        num_players: Number of players of a game.
        turn_based: Whether the returns are those of player 0 of two-player zero-sum games.

    Returns:
        ``charts/episodic_return``, ``charts/episodic_length`` and, for several players, the same with the
        suffix ``-player0`` and so on. A mean over no episode is left out.

    Example:
        >>> episodes = torch.tensor([[1.0, 5.0, 0.0], [3.0, 7.0, 1.0]])
        >>> episode_means(episodes, num_players=2)["charts/episodic_return-player1"]
        tensor(3.)
    """
    returns, lengths, players = episodes.unbind(-1)
    groups = {"": (returns, lengths)}
    if turn_based:
        groups |= {"-player0": (returns, lengths), "-player1": (-returns, lengths)}
    elif num_players > 1:
        for player in range(num_players):
            rows = players == player
            groups[f"-player{player}"] = returns[rows], lengths[rows]
    means = {}
    for suffix, (group_returns, group_lengths) in groups.items():
        if len(group_returns):
            means[f"charts/episodic_return{suffix}"] = group_returns.mean()
            means[f"charts/episodic_length{suffix}"] = group_lengths.mean()
    return means
