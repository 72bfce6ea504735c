"""``ppo-lightning tournament``: a round robin of checkpoints and scripted players."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ppo_lightning.checkpoints.agent import check_same_spaces
from ppo_lightning.checkpoints.file import read_checkpoint
from ppo_lightning.commands.checkpoint_settings import agent_of, environment_of
from ppo_lightning.commands.options import FLAGS, TRUST
from ppo_lightning.envs.factory import EnvFactory
from ppo_lightning.errors import ConfigError
from ppo_lightning.rollouts.players import AgentPlayer, Player, make_player
from ppo_lightning.rollouts.tournament import require_two_players, round_robin
from ppo_lightning.utils.ratings import Outcomes, Rating, rate


def main(args: Sequence[str]) -> None:
    """Run ``ppo-lightning tournament``.

    Args:
        args: Arguments of the command.

    Raises:
        ConfigError: There are fewer than two players, a checkpoint cannot be read, or the checkpoints are of
            different games.
    """
    parser = argparse.ArgumentParser(
        prog="ppo-lightning tournament",
        description="Let checkpoints and scripted players play each other, and rate them.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "players",
        nargs="+",
        help="checkpoints (.ckpt), random, minimax:2, perfect (TicTacToe), or import paths of functions",
    )
    parser.add_argument("--games", type=int, default=100, help="games of each pair (default: 100)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the games (default: 1)")
    parser.add_argument(
        "--deterministic", action="store_true", help="checkpoints choose their most probable actions"
    )
    parser.add_argument(TRUST, action="store_true", help=FLAGS[TRUST])
    options = parser.parse_args(args)
    if len(set(options.players)) < 2:
        raise ConfigError("tournament needs two different players at least: name checkpoints or random.")
    if options.games < 1:
        raise ConfigError(f"--games is {options.games}: it must be at least 1.")
    factory, players = make_players(options.players, args, options.deterministic)
    outcomes = round_robin(factory, players, options.games, options.seed)
    anchor = "random" if "random" in players else next(iter(players))
    print(cross_table(outcomes, list(players)))
    print()
    print(rating_table(rate(outcomes, anchor, options.seed), anchor))


def make_players(
    names: Sequence[str], args: Sequence[str], deterministic: bool = False
) -> tuple[EnvFactory, dict[str, Player]]:
    """Return the game of some checkpoints, and all players by a short name.

    Args:
        names: Paths of checkpoints, and names of scripted players.
        args: Arguments of the command, which may trust the checkpoints.
        deterministic: Whether agents choose their most probable actions.

    Raises:
        ConfigError: No name is a checkpoint, or the checkpoints are of different games.
    """
    checkpoints = {name: read_checkpoint(name) for name in names if name.endswith(".ckpt")}
    if not checkpoints:
        raise ConfigError("No player is a checkpoint (.ckpt), which defines the game.")
    games = {name: _game(checkpoint, args) for name, checkpoint in checkpoints.items()}
    first, (env_id, backend, env_kwargs) = next(iter(games.items()))
    for name, game in games.items():
        if game != (env_id, backend, env_kwargs):
            raise ConfigError(
                f"{name} is a checkpoint of {game[0]} ({game[1]}, {game[2]}) and {first} of {env_id}"
                f" ({backend}, {env_kwargs}): the players of a tournament need one game."
            )
    factory = EnvFactory(env_id, backend, env_kwargs)
    env = require_two_players(factory.make(2, stream="eval"))
    env.close()
    specs = factory.specs()
    players: dict[str, Player] = {}
    for name, short in zip(names, short_names(names), strict=True):
        if name in checkpoints:
            agent = agent_of(checkpoints[name], args)
            check_same_spaces(agent, env)
            players[short] = AgentPlayer(agent, deterministic)
        else:
            players[short] = make_player(name, env_id, specs)
    return factory, players


def _game(checkpoint: dict[str, Any], args: Sequence[str]) -> tuple[str, Any, dict[str, Any]]:
    data = checkpoint["datamodule_hyper_parameters"]
    return environment_of(checkpoint, args, None), data["backend"], data["env_kwargs"] or {}


def short_names(names: Sequence[str]) -> list[str]:
    """Return the shortest ends of paths that differ, without the suffix ``.ckpt``.

    Example:
        >>> short_names(["runs/a/last.ckpt", "runs/b/last.ckpt", "random"])
        ['a/last', 'b/last', 'random']
    """
    parts = [Path(name).with_suffix("").parts if name.endswith(".ckpt") else (name,) for name in names]
    for count in range(1, max(map(len, parts)) + 1):
        short = ["/".join(part[-count:]) for part in parts]
        if len(set(short)) == len(set(names)):
            return short
    return list(names)


def cross_table(outcomes: Mapping[tuple[str, str], Outcomes], names: Sequence[str]) -> str:
    """Return wins, draws and losses of each row's player against each column's, in percent."""
    cells = []
    for row in names:
        line = [row]
        for column in names:
            result = outcomes.get((row, column))
            if result is None and (column, row) in outcomes:
                result = Outcomes(*reversed(outcomes[column, row]))
            line.append("-" if result is None else "/".join(f"{100 * n / result.games:.0f}" for n in result))
        cells.append(line)
    return _aligned([["win/draw/loss %", *names], *cells])


def rating_table(ratings: Mapping[str, Rating], anchor: str) -> str:
    """Return the ratings, the highest first."""
    rows = [["player", f"Elo ({anchor} = 0)", "95 % interval"]]
    for name, rating in sorted(ratings.items(), key=lambda item: -item[1].elo):
        interval = "" if name == anchor else f"{rating.low:.0f} to {rating.high:.0f}"
        rows.append([name, f"{rating.elo:.0f}", interval])
    return _aligned(rows)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
