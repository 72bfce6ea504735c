"""Self-play: PPO with ratings against fixed opponents."""

from collections.abc import Sequence
from typing import Annotated, Any

from tensordict import TensorDictBase

from ppo_lightning.algorithms.defaults import CLEANRL
from ppo_lightning.algorithms.ppo import PPO
from ppo_lightning.games.players import Player, agent_player, make_player
from ppo_lightning.games.tournament import probe_game, rate, round_robin
from ppo_lightning.rollouts.datamodule import DEFAULT_NUM_ENVS
from ppo_lightning.utils import collectives
from ppo_lightning.utils.arguments import Range, check_arguments

AGENT = "agent"  # name of the agent among the players of a round robin


class SelfPlay(PPO):
    """PPO for games of two players: the current policy plays both sides, and each validation rates it.

    ``charts/elo`` is the rating of the agent, anchored at random play = 0, from a round robin with random
    play and ``rating_opponents``, in which the agent samples its actions.

    Args:
        rating_games: Games of each pair of players in a validation. 0: no ratings.
        rating_opponents: Opponents beside ``random``: ``minimax:2`` (the depth) or files of checkpoints, see
            :func:`~ppo_lightning.games.players.make_player`.
        **hyperparameters: Those of :class:`~ppo_lightning.PPO`.

    Raises:
        ConfigError: There are ratings, and the environment is not a game of two players, an opponent does
            not exist, or the agent has a memory.

    Example:
        >>> data = RolloutDataModule("ConnectFour-v1", "envpool", num_envs=64, total_timesteps=2_000_000)
        >>> L.Trainer(accelerator="cpu").fit(SelfPlay(gamma=1.0), data)
    """

    defaults = CLEANRL
    default_num_envs = DEFAULT_NUM_ENVS

    def __init__(
        self,
        rating_games: Annotated[int, Range(0)] = 100,
        rating_opponents: Sequence[str] = (),
        **hyperparameters: Any,
    ) -> None:
        check_arguments(SelfPlay.__init__, locals(), "model")
        super().__init__(**hyperparameters)

    def configure_model(self) -> None:
        """Build the agent, and refuse opponents that cannot play before the training."""
        super().configure_model()
        if self.agent is not None and self.hparams.rating_games and getattr(self.trainer, "datamodule", None):
            self._players()

    def validation_step(self, episodes: TensorDictBase, batch_idx: int) -> None:
        """Log the episodes of the agent against itself, and the ratings."""
        super().validation_step(episodes, batch_idx)
        if self.hparams.rating_games:
            ratings = self.rate_agent()
            self.log_dict(ratings, batch_size=1, sync_dist=True, sync_dist_group=collectives.cpu_group())

    def rate_agent(self) -> dict[str, float]:
        """Play the round robin of a validation, whose pairs the ranks share, and return its metrics."""
        ranks = self.global_rank, self.trainer.world_size
        games = self.hparams.rating_games
        played = round_robin(self.data.factory, self._players(), games, self.data.seed, *ranks)
        outcomes = dict(collectives.chain(list(played.items())))
        rating = rate(outcomes, anchor="random", seed=self.data.seed)[AGENT]
        metrics = {"charts/elo": rating.elo, "charts/elo_low": rating.low, "charts/elo_high": rating.high}
        for (first, opponent), result in outcomes.items():
            if first == AGENT:
                for name, count in zip(("win", "draw", "loss"), result, strict=True):
                    metrics[f"charts/{name}-{opponent}"] = count / result.games
        return metrics

    def _players(self) -> dict[str, Player]:
        env = probe_game(self.data.factory)
        names = dict.fromkeys(["random", *self.hparams.rating_opponents])
        opponents = {name: make_player(name, str(self.data.env_id), env) for name in names}
        return {AGENT: agent_player(self.agent)} | opponents
