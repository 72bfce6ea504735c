"""Returns and lengths of the episodes that finished in a rollout."""

import torch
from tensordict import TensorDictBase
from torch import Tensor


def finished_episodes(rollout: TensorDictBase) -> Tensor:
    """Return the episodes that finished in a rollout.

    Args:
        rollout: Batch size [N, T].

    Returns:
        Return, length and player of each episode, [E, 3]. The player is -1 unless each row is a player.
    """
    following = rollout["next"]
    done = following["episode_done"]
    player = rollout.get("player", -torch.ones_like(following["step_count"]))
    columns = (following["episode_reward"], following["step_count"], player)
    return torch.stack([column[done].float() for column in columns], dim=-1)


def episode_means(episodes: Tensor, zero_sum: bool = False) -> dict[str, Tensor]:
    """Return the mean return and length of episodes, over all players and by player.

    Args:
        episodes: From :func:`finished_episodes`, [E, 3].
        zero_sum: Whether the returns are those of player 0 of two-player zero-sum games.

    Returns:
        ``charts/episodic_return``, ``charts/episodic_length`` and, for several players, the same with the
        suffix ``-player0`` and so on. A mean over no episode is left out.

    Example:
        >>> episodes = torch.tensor([[1.0, 5.0, 0.0], [3.0, 7.0, 1.0]])
        >>> episode_means(episodes)["charts/episodic_return-player1"]
        tensor(3.)
    """
    returns, lengths, players = episodes.unbind(-1)
    groups = {"": (returns, lengths)}
    if zero_sum:
        groups |= {"-player0": (returns, lengths), "-player1": (-returns, lengths)}
    for player in players[players >= 0].unique():
        rows = players == player
        groups[f"-player{player:.0f}"] = returns[rows], lengths[rows]
    means = {}
    for suffix, (group_returns, group_lengths) in groups.items():
        if len(group_returns):
            means[f"charts/episodic_return{suffix}"] = group_returns.mean()
            means[f"charts/episodic_length{suffix}"] = group_lengths.mean()
    return means
