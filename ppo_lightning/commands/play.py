"""``ppo-lightning play``: record a video of a trained agent."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from ppo_lightning.checkpoints.file import read_checkpoint
from ppo_lightning.commands.checkpoint_settings import agent_of, environment_of
from ppo_lightning.commands.options import add_agent_arguments, at_least, parser_of
from ppo_lightning.commands.tournament import make_players
from ppo_lightning.envs.atari import ATARI_ID
from ppo_lightning.envs.factory import EnvFactory
from ppo_lightning.errors import ConfigError
from ppo_lightning.export.hub import find_model
from ppo_lightning.games.tournament import play_games, probe_game
from ppo_lightning.rollouts.env_ids import maker_of
from ppo_lightning.utils.rounding import decimals
from ppo_lightning.video.record import open_video, picture_of, record_video


def main(args: Sequence[str]) -> None:
    """Run ``ppo-lightning play``."""
    parser = parser_of("play")
    source = parser.add_mutually_exclusive_group(required=True)
    agent = "a bundled agent (see ppo-lightning recipes), a folder, or OWNER/NAME of the Hub"
    source.add_argument("agent", nargs="?", help=agent)
    source.add_argument("--ckpt_path", help="checkpoint of the agent")
    parser.add_argument("--output", default="video.mp4", help=".mp4 or .gif file (default: video.mp4)")
    parser.add_argument("--episodes", type=at_least(1), default=1, help="number of episodes (default: 1)")
    parser.add_argument("--seed", type=at_least(0), default=1, help="seed of the episodes (default: 1)")
    parser.add_argument("--max_frames", type=at_least(1), default=10_000, help="steps (default: 10000)")
    parser.add_argument("--overlay", action="store_true", help="draw probabilities, value and return, too")
    parser.add_argument("--opponent", help="second player of a game: an agent, random or minimax:2")
    parser.add_argument("--env_id", help="environment of Gymnasium (default: the checkpoint's)")
    add_agent_arguments(parser)
    options = parser.parse_args(args)
    if options.agent is not None:
        options.ckpt_path = str(find_model(options.agent))
    of_agent = ("episodes", "max_frames", "overlay", "env_id")
    if options.opponent and (given := [x for x in of_agent if getattr(options, x) != parser.get_default(x)]):
        raise ConfigError(f"--opponent records one whole game of the agent's environment: omit --{given[0]}.")
    command = ["play", *args]
    if options.opponent is None:
        _record_agent(options, command)
    else:
        _record_match(options, command)
    print(f"video: {Path(options.output).resolve()}")


def _record_agent(options: argparse.Namespace, command: Sequence[str]) -> None:
    checkpoint = read_checkpoint(options.ckpt_path)
    env_id = environment_of(checkpoint, command, options.env_id)
    agent = agent_of(checkpoint, command, options)
    data = checkpoint["datamodule_hyper_parameters"]
    backend = data["backend"]
    if options.env_id is None and backend in ("torch", "envpool"):  # which do not render
        print(f"trained through {backend}, played through Gymnasium; --env_id selects another environment")
    if data["transforms"]:
        print("trained with data.transforms, played without them: the agent may see other observations")
    same_family = backend == "procgen" or all(
        ATARI_ID.fullmatch(str(name)) for name in (env_id, data["env_id"])
    )
    env_kwargs = data["env_kwargs"] or {} if env_id == data["env_id"] or same_family else {}
    settings = {key: getattr(options, key) for key in ("episodes", "seed", "overlay", "max_frames")}
    factory = EnvFactory(maker_of(env_id), backend, env_kwargs)
    returns = record_video(agent, factory, options.output, **settings)
    print(f"returns: {', '.join(f'{value:{decimals(value)}}' for value in returns)}")


def _record_match(options: argparse.Namespace, command: Sequence[str]) -> None:
    """Record one game between two players, and print who won."""
    factory, players = make_players([options.ckpt_path, options.opponent], command, options)
    pair = players[options.ckpt_path], players[options.opponent]
    with open_video(options.output, probe_game(factory)) as video:
        result = play_games(
            factory, *pair, 1, options.seed, lambda env: video.append_data(picture_of(env)), render=True
        )
    print(f"the agent {'won' if result.wins else 'lost' if result.losses else 'drew'}")
