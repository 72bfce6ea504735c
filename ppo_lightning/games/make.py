"""Choice of the adapter for a game."""

import functools
import importlib
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ppo_lightning.envs.batched import Copies, begin_with, metadata_of
from ppo_lightning.envs.contract import fitting
from ppo_lightning.errors import ConfigError, first_line
from ppo_lightning.games.env import GameEnv
from ppo_lightning.games.pettingzoo import ParallelGamesEnv, import_pettingzoo
from ppo_lightning.games.pettingzoo_atari import PettingZooAtari
from ppo_lightning.games.turn_based import BoardGameEnv, TurnBasedGamesEnv
from ppo_lightning.utils.arguments import copying, require_options


def make_board_game(env_id: str, copies: Copies, /, **env_kwargs: Any) -> BoardGameEnv:
    """Make copies of a game of EnvPool, see :class:`BoardGameEnv`."""
    return BoardGameEnv(env_id, copies.seeds, **_of_stream(copies, env_kwargs))


def _of_stream(copies: Copies, env_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Leave out random openings in an evaluation: its matches begin at the first position."""
    if copies.stream == "eval":
        env_kwargs.pop("opening_moves", None)
    return env_kwargs


def make(env_id: str | Callable[..., Any] | ModuleType, copies: Copies, /, **env_kwargs: Any) -> GameEnv:
    """Make copies of a game of PettingZoo, with one seed per row.

    Args:
        env_id: An id of PettingZoo's registry, such as ``atari/pong_v3`` or ``pong_v3``, a module with
            ``parallel_env`` or ``env`` or its import path, such as ``mpe2.simple_spread_v3``, or a function
            that makes a new game at each call.
        copies: What is asked for.
        **env_kwargs: ``state`` or ``opening_moves`` and arguments of the game, or options of
            :class:`~ppo_lightning.games.pettingzoo_atari.PettingZooAtari`.

    Example:
        >>> from ppo_lightning import make_env
        >>> make_env("mpe2/simple_spread_v3", 3, "pettingzoo", env_kwargs={"N": 3}).num_players
        3
    """
    env_kwargs = _of_stream(copies, env_kwargs)
    if isinstance(env_id, ModuleType):
        env_id = env_id.__name__
    function: Any = env_id
    if isinstance(env_id, str):
        found = registered(env_id)
        known = found[1] if found else env_id
        if known.startswith("atari/"):
            return PettingZooAtari(known, copies.seeds, **env_kwargs)
        function = functools.partial(import_pettingzoo().make, *found) if found else find_maker(env_id)
        if copies.render:
            env_kwargs["render_mode"] = "rgb_array"
    options: dict[str, Any] = {
        name: env_kwargs.pop(name) for name in ("state", "opening_moves") if name in env_kwargs
    }
    make_one = copying(functools.partial(_make_game, function, str(env_id)), env_kwargs)
    first = make_one()  # reveals the type
    takes_turns = isinstance(first, import_pettingzoo().AECEnv)
    kind: Callable[..., GameEnv] = TurnBasedGamesEnv if takes_turns else ParallelGamesEnv
    require_options(kind, str(env_id), options)
    return kind(begin_with(first, make_one), copies.seeds, **options)


def is_game(env: Any) -> bool:
    """Return whether an object is a game of PettingZoo."""
    pettingzoo = import_pettingzoo()
    return isinstance(env, pettingzoo.AECEnv | pettingzoo.ParallelEnv)


def registered(env_id: str) -> tuple[str, str] | None:
    """Find a game in PettingZoo's registry: ``parallel``, or ``aec`` if the players take turns, and its id.

    The registry is empty before PettingZoo 1.27.

    Example:
        >>> registered("pettingzoo.atari.pong_v3"), registered("tictactoe_v3")
        (('parallel', 'atari/pong-v3'), ('aec', 'classic/tictactoe-v3'))
    """
    name = re.sub(r"_v(?=\d+$)", "-v", env_id.replace(".", "/").removeprefix("pettingzoo/"))
    for kind in ("parallel", "aec"):
        for known in getattr(import_pettingzoo(), f"{kind}_registry", ()):
            if name in (known, known.partition("/")[2]):
                return kind, known
    return None


def find_maker(env_id: str) -> Callable[..., Any]:
    """Return the function ``parallel_env`` of a module, or ``env`` if its game is turn-based."""
    path = env_id.replace("/", ".")
    import_pettingzoo("mpe2" if path.startswith("mpe2.") else "pettingzoo")
    try:
        module = importlib.import_module(path)
    except ImportError as error:
        said = f"env_id {env_id!r} cannot be imported ({first_line(error)})"
        raise ConfigError(f"{said}: write atari/pong_v3, mpe2/simple_spread_v3 or another module.") from error
    maker = getattr(module, "parallel_env", None) or getattr(module, "env", None)
    if maker is None:
        raise ConfigError(f"env_id {env_id!r} is a module without parallel_env and env.")
    return maker


def _make_game(function: Callable[..., Any], name: str, /, **env_kwargs: Any) -> Any:
    """Return a new game: an ``AECEnv`` if its players take turns, otherwise a ``ParallelEnv``."""
    with fitting(name, env_kwargs, TypeError, AssertionError):
        game = function(**env_kwargs)
    if not is_game(game):
        raise ConfigError(f"env_id makes a {type(game).__name__}: it must make a game of PettingZoo.")
    is_aec = isinstance(game, import_pettingzoo().AECEnv)
    if is_aec and metadata_of(game).get("is_parallelizable", False):
        return import_pettingzoo("pettingzoo.utils.conversions").aec_to_parallel(game)
    return game
