"""Self-play: PPO against past selves, with ratings."""

import inspect
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from tensordict import TensorDictBase
from torch import Tensor

from ppo_lightning.algorithms.ppo import PPO
from ppo_lightning.errors import ConfigError
from ppo_lightning.models.heads import CategoricalHead
from ppo_lightning.rollouts.make_collector import CollectorInputs
from ppo_lightning.rollouts.opponents import Opponents, Snapshot, frozen_copy
from ppo_lightning.rollouts.players import AgentPlayer, Player, make_player
from ppo_lightning.rollouts.tournament import round_robin
from ppo_lightning.utils import collectives
from ppo_lightning.utils.arguments import Range, check_arguments
from ppo_lightning.utils.ratings import Outcomes, rate

AGENT = "agent"  # name of the agent among the players of a round robin
SNAPSHOT = "step="  # start of the names of snapshots


class SelfPlay(PPO):
    """PPO for games of two players, whose opponents are its present and past selves.

    The agent plays both players of most games. In a share of the games, a snapshot of the agent from a pool
    plays one of them, and the steps of the snapshot have weight 0. The pool is a part of each checkpoint.

    Each validation rates the agent, snapshots of the pool and ``rating_opponents`` by a round robin.
    ``charts/elo`` is the rating of the agent, anchored at random play = 0.

    Args:
        past_share: Share of the games against snapshots. 0: the agent always plays itself.
        opening_moves: Each game of the training starts with 0 to this number of random legal moves, drawn
            anew, whose steps have weight 0. Without them, both players settle on a few lines of play and
            know little of other positions. Needs discrete actions.
        snapshot_every: Rollouts between two snapshots.
        snapshot_win_rate: Add a snapshot only if the agent's win rate against the latest one exceeds this
            value, draws counted as half a win. None: always.
        pool_size: Number of snapshots. The oldest one is dropped.
        rating_games: Games of each pair of players in a validation. 0: no ratings.
        rating_opponents: Scripted players of the round robin beside ``random``, see
            :func:`~ppo_lightning.rollouts.players.make_player`.
        rated_snapshots: Number of snapshots in the round robin, evenly spread over the pool.
        **hyperparameters: Those of :class:`~ppo_lightning.PPO`.

    Raises:
        ConfigError: The environment is not a game of two players, the agent has a memory or running
            statistics, or a number is out of its range.

    Example:
        >>> data = RolloutDataModule("ConnectFour-v1", "envpool", num_envs=64, total_timesteps=2_000_000)
        >>> L.Trainer(accelerator="cpu").fit(SelfPlay(gamma=1.0), data)
    """

    def __init__(
        self,
        past_share: Annotated[float, Range(0, 1)] = 0.2,
        opening_moves: Annotated[int, Range(0, 10_000)] = 0,
        snapshot_every: Annotated[int, Range(1)] = 50,
        snapshot_win_rate: Annotated[float | None, Range(0, 1)] = None,
        pool_size: Annotated[int, Range(1, 1000)] = 10,
        rating_games: Annotated[int, Range(0, 100_000)] = 100,
        rating_opponents: Sequence[str] = (),
        rated_snapshots: Annotated[int, Range(0, 1000)] = 3,
        **hyperparameters: Any,
    ) -> None:
        check_arguments(SelfPlay.__init__, locals(), "model")
        super().__init__(**hyperparameters)
        names = inspect.signature(SelfPlay.__init__).parameters
        self.save_hyperparameters(*(name for name in names if name not in ("self", "hyperparameters")))
        self.pool: list[Snapshot] = []
        self._opponents: Opponents | None = None
        self._draws: dict[str, Any] | None = None  # state of the draws of a resumed run
        self._latest: Counter[str] = Counter()  # results against the latest snapshot
        self._outcomes: dict[tuple[str, str], Outcomes] = {}  # of players that do not change

    def setup(self, stage: str) -> None:
        """Empty the pool for a new run, and warn of a run that ends before its first snapshot."""
        super().setup(stage)
        if stage == "fit":
            self._opponents = None
            if self.hparams.past_share and self.data.num_rollouts < self.hparams.snapshot_every:
                rank_zero_warn(
                    f"model.snapshot_every ({self.hparams.snapshot_every}) is more than the"
                    f" {self.data.num_rollouts} rollouts of the run: the agent plays itself only. Lower it"
                    " for games against past selves."
                )
            if self.trainer.ckpt_path is None:
                self.pool.clear()
                self._latest.clear()
                self._outcomes.clear()
                self._draws = None

    def configure_model(self) -> None:
        """Build the agent.

        Raises:
            ConfigError: See the class.
        """
        super().configure_model()
        if self.agent is None or not self.fitting:
            return
        if self.data.num_players != 2:
            raise ConfigError(
                f"data.env_id is {self.data.env_id!r}, which has {self.data.num_players} players: SelfPlay"
                " needs a game of two. Use ppo_lightning.PPO."
            )
        if self.hparams.rating_games:
            self._players()  # refuse unknown opponents now
        if self.hparams.past_share and self.agent.normalizer is not None:
            raise ConfigError(
                "model.agent.norm_obs changes what snapshots would see: set it to false, or"
                " model.past_share to 0."
            )
        if self.hparams.opening_moves and not isinstance(self.agent.head, CategoricalHead):
            raise ConfigError(
                f"model.opening_moves is {self.hparams.opening_moves}, and the game has no single discrete"
                " action: set it to 0."
            )

    def collector_inputs(self) -> CollectorInputs:
        """Return the inputs of the collector, in a fit with opponents."""
        inputs = super().collector_inputs()
        if not self.fitting or not (self.hparams.past_share or self.hparams.opening_moves):
            return inputs
        if self._opponents is None:
            data = self.data
            env: Any = data.env
            self._opponents = Opponents(
                self.agent,
                self.pool,
                self.hparams.past_share,
                self.hparams.opening_moves,
                env.num_envs,
                data.num_players,
                data.turn_based,
                data.seed,
                data.shard.first,
                data.num_envs,
            )
            if self._draws is not None:
                self._opponents.load_state_dict(self._draws)
        return inputs._replace(opponents=self._opponents)

    def training_step(self, rollout: TensorDictBase, batch_idx: int) -> None:
        """Run one PPO iteration, and add a snapshot to the pool when it is due."""
        super().training_step(rollout, batch_idx)
        if self.hparams.past_share and self.rollouts_done % self.hparams.snapshot_every == 0:
            self.add_snapshot()

    def add_snapshot(self) -> None:
        """Add the agent to the pool, unless it does not beat the latest snapshot often enough."""
        threshold = self.hparams.snapshot_win_rate
        if self.pool and threshold is not None and not score(self._latest) > threshold:
            return
        weights = {name: tensor.detach().cpu().clone() for name, tensor in self.agent.state_dict().items()}
        self.pool.append(Snapshot(self.env_steps, weights))
        del self.pool[: -self.hparams.pool_size]
        self._latest.clear()

    def count_episodes(self, rollout: TensorDictBase) -> dict[str, Tensor]:
        """Count episodes, and the results against snapshots.

        Adds ``charts/score-past``, the mean result of the games against snapshots: 1 for a win, 1/2 for a
        draw.
        """
        metrics = super().count_episodes(rollout)
        if self._opponents is None:
            return metrics
        results = collectives.chain(list(self._opponents.take_results().items()))
        latest = self.pool[-1].step if self.pool else None
        total: Counter[str] = Counter()
        for (step, outcome), count in results:
            total[outcome] += count
            if step == latest:
                self._latest[outcome] += count
        if total:
            metrics["charts/score-past"] = torch.tensor(score(total))
        return metrics

    # Ratings

    def validation_step(self, episodes: TensorDictBase, batch_idx: int) -> None:
        """Log the episodes of the agent against itself, and the ratings."""
        super().validation_step(episodes, batch_idx)
        self._log_ratings()

    def test_step(self, episodes: TensorDictBase, batch_idx: int) -> None:
        """Log statistics as :meth:`validation_step`."""
        super().test_step(episodes, batch_idx)
        self._log_ratings()

    def _log_ratings(self) -> None:
        if self.hparams.rating_games:
            ratings = self.rate_players()
            self.log_dict(ratings, batch_size=1, sync_dist=True, sync_dist_group=collectives.cpu_group())

    def rate_players(self) -> dict[str, float]:
        """Play the round robin of a validation. All ranks share the pairs.

        Returns:
            ``charts/elo`` of the agent with the ends of its 95 % interval, ``charts/elo_low`` and
            ``charts/elo_high``, and its shares of wins, draws and losses against each scripted opponent, as
            in ``charts/win-random``, and against all snapshots, as in ``charts/win-snapshots``.
        """
        data = self.data
        players = self._players()
        frozen = {pair: result for pair, result in self._outcomes.items() if set(pair) <= players.keys()}
        played = round_robin(
            data.factory,
            players,
            self.hparams.rating_games,
            data.seed,
            self.global_rank,
            self.trainer.world_size,
            frozen,
        )
        outcomes = frozen | dict(collectives.chain(list(played.items())))
        self._outcomes = {pair: result for pair, result in outcomes.items() if AGENT not in pair}
        rating = rate(outcomes, anchor="random", seed=data.seed)[AGENT]
        metrics = {
            "charts/elo": rating.elo,
            "charts/elo_low": rating.low,
            "charts/elo_high": rating.high,
        }
        against: dict[str, np.ndarray] = {}
        for (first, second), result in outcomes.items():
            if first == AGENT:
                name = "snapshots" if second.startswith(SNAPSHOT) else second
                against[name] = against.get(name, 0) + np.array(result)
        for opponent, counts in against.items():
            for name, count in zip(("win", "draw", "loss"), counts, strict=True):
                metrics[f"charts/{name}-{opponent}"] = float(count / counts.sum())
        return metrics

    def _players(self) -> dict[str, Player]:
        """Return the players of the round robin, the agent first."""
        players: dict[str, Player] = {AGENT: AgentPlayer(self.agent)}
        for name in dict.fromkeys(["random", *self.hparams.rating_opponents]):
            players[name] = make_player(name, str(self.data.env_id), self.data.specs)
        count = min(self.hparams.rated_snapshots, len(self.pool))
        for index in np.linspace(0, len(self.pool) - 1, count).round().astype(int):
            snapshot = self.pool[index]
            agent = frozen_copy(self.agent, snapshot.weights)
            players[f"{SNAPSHOT}{snapshot.step}"] = AgentPlayer(agent)
        return players

    # Checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the pool, its results, and the state of the draws."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["pool"] = [{"step": snapshot.step, "weights": snapshot.weights} for snapshot in self.pool]
        checkpoint["latest"] = dict(self._latest)
        checkpoint["outcomes"] = [[*pair, *result] for pair, result in self._outcomes.items()]
        checkpoint["draws"] = None if self._opponents is None else self._opponents.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the pool.

        Raises:
            ConfigError: As for PPO, or the checkpoint is not of a self-play run.
        """
        super().on_load_checkpoint(checkpoint)
        if "pool" not in checkpoint:
            raise ConfigError(
                "The checkpoint (ckpt_path) has no pool of snapshots: it is not of a SelfPlay run."
                " Use the algorithm of its run."
            )
        self.pool[:] = [Snapshot(entry["step"], entry["weights"]) for entry in checkpoint["pool"]]
        self._latest = Counter(checkpoint["latest"])
        self._outcomes = {
            (first, second): Outcomes(*counts) for first, second, *counts in checkpoint["outcomes"]
        }
        self._draws = checkpoint["draws"]


def score(results: Counter[str]) -> float:
    """Return the mean result of games: 1 for a win, 1/2 for a draw; NaN without games.

    Args:
        results: Number of games by ``win``, ``draw`` and ``loss``.

    Example:
        >>> score(Counter(win=3, loss=1))
        0.75
    """
    games = results.total()
    return (results["win"] + 0.5 * results["draw"]) / games if games else np.nan
