"""``ppo-lightning tournament``: a round robin of checkpoints and scripted players."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from ppo_lightning.checkpoints.agent import check_same_spaces
from ppo_lightning.checkpoints.file import read_checkpoint
from ppo_lightning.commands.checkpoint_settings import agent_of, environment_of
from ppo_lightning.commands.options import add_agent_arguments, at_least, parser_of
from ppo_lightning.envs.factory import EnvFactory
from ppo_lightning.errors import ConfigError
from ppo_lightning.games.players import Player, agent_file, agent_player, make_player
from ppo_lightning.games.tournament import Outcomes, Rating, probe_game, rate, round_robin
from ppo_lightning.rollouts.env_ids import maker_of


def main(args: Sequence[str]) -> None:
    """Run ``ppo-lightning tournament``."""
    parser = parser_of("tournament")
    parser.add_argument("players", nargs="+", help="checkpoints, bundled agents, random, minimax:2")
    parser.add_argument("--games", type=at_least(1), default=100, help="games of each pair (default: 100)")
    parser.add_argument("--seed", type=at_least(0), default=1, help="seed of the games (default: 1)")
    parser.add_argument("--deterministic", action="store_true", help="checkpoints choose their best actions")
    parser.add_argument("--env_id", help="the game (default: the checkpoints')")
    add_agent_arguments(parser)
    options = parser.parse_args(args)
    if len(set(options.players)) < 2:
        raise ConfigError("tournament needs two different players at least: name checkpoints or random.")
    factory, players = make_players(options.players, ["tournament", *args], options, options.deterministic)
    outcomes = round_robin(factory, players, options.games, options.seed)
    anchor = "random" if "random" in players else next(iter(players))
    print(result_table(outcomes, rate(outcomes, anchor, options.seed), anchor))


def make_players(
    names: Sequence[str], command: Sequence[str], options: argparse.Namespace, deterministic: bool = False
) -> tuple[EnvFactory, dict[str, Player]]:
    """Return the game of some checkpoints, and all players by name.

    The options may name the game and classes of agents. An error shows the command with them.
    """
    agents = [name for name in names if name.partition(":")[0] not in ("random", "minimax")]
    checkpoints = {name: read_checkpoint(agent_file(name)) for name in agents}
    games = {name: _game(checkpoint, command, options.env_id) for name, checkpoint in checkpoints.items()}
    if len(set(map(str, games.values()))) != 1:
        listed = ", ".join(f"{name} is of {game}" for name, game in games.items()) or "there is none"
        raise ConfigError(f"The checkpoints among the players must be of one game: {listed}.")
    game = games.popitem()[1]
    factory = EnvFactory(**game | {"env_id": maker_of(game["env_id"])})
    env = probe_game(factory)
    players: dict[str, Player] = {}
    for name in names:
        if name in checkpoints:
            agent = agent_of(checkpoints[name], command, options)
            check_same_spaces(agent, env)
            players[name] = agent_player(agent, deterministic)
        else:
            players[name] = make_player(name, game["env_id"], env)
    return factory, players


def _game(checkpoint: dict[str, Any], command: Sequence[str], chosen_id: str | None) -> dict[str, Any]:
    data = checkpoint["datamodule_hyper_parameters"]
    env_kwargs = {key: value for key, value in (data["env_kwargs"] or {}).items() if key != "opening_moves"}
    env_id = environment_of(checkpoint, command, chosen_id)
    return {"env_id": env_id, "backend": data["backend"], "env_kwargs": env_kwargs}


def result_table(
    outcomes: Mapping[tuple[str, str], Outcomes], ratings: Mapping[str, Rating], anchor: str
) -> str:
    """Return ratings, and shares of wins, draws and losses in percent, a line per player, the best first."""
    both_views = {**outcomes, **{pair[::-1]: Outcomes(*result[::-1]) for pair, result in outcomes.items()}}
    names = sorted(ratings, key=lambda name: -ratings[name].elo)
    header = ["", "player", f"Elo ({anchor} = 0)", "95 % interval"]
    rows = [[*header, *(f"%win/draw/loss against {number}" for number, _ in enumerate(names, start=1))]]
    for number, name in enumerate(names, start=1):
        rating = ratings[name]
        interval = "" if name == anchor else f"{rating.low:.0f} to {rating.high:.0f}"
        shares = [
            "/".join(f"{100 * count / result.games:.0f}" for count in result) if result else "-"
            for result in (both_views.get((name, other)) for other in names)
        ]
        rows.append([str(number), name, f"{rating.elo:.0f}", interval, *shares])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
