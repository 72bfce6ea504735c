"""``ppo-lightning play``: a video of a trained agent, from its checkpoint."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ppo_lightning.envs.gymnasium import GymnasiumEnv
from ppo_lightning.errors import ConfigError, first_line, import_extra
from ppo_lightning.models import ActorCritic
from ppo_lightning.models.rebuild import agent_from_plain, check_same_spaces, read_checkpoint
from ppo_lightning.seeding import derive_seed

MAX_FRAMES = 10_000  # of one episode


@torch.no_grad()
def record_video(
    agent: ActorCritic, env_id: str, path: str | Path, episodes: int = 1, seed: int = 1, **env_kwargs: Any
) -> list[float]:
    """Plays episodes with the most probable actions, and writes every frame to a file.

    Args:
        agent: The agent.
        env_id: An environment of Gymnasium; agents trained through another backend play here too.
        path: Ends in ``.mp4`` or ``.gif``.
        episodes: How many, one after the other; each ends after 10 000 steps at the latest.
        seed: Decides the episodes, which are those of an evaluation with this seed.
        **env_kwargs: For ``gymnasium.make``.

    Returns:
        The return of each episode.

    Raises:
        ConfigError: The environment cannot be made or rendered on this machine, the agent is one for other spaces, or what
            writes videos is missing.
    """
    path = Path(path)
    if path.suffix not in (".mp4", ".gif"):
        raise ConfigError(f"--output is {str(path)!r}: it must end in .mp4 or .gif.")
    if episodes < 1:
        raise ConfigError(f"--episodes is {episodes}: it must be at least 1.")
    imageio = import_extra("imageio.v2", extra="video")
    import_extra("imageio_ffmpeg", extra="video")
    if sys.platform == "linux" and "DISPLAY" not in os.environ:
        os.environ.setdefault("MUJOCO_GL", "egl")  # read by mujoco and dm_control when they are imported
    seeds = [derive_seed(seed, "eval", index) for index in range(episodes)]
    env = GymnasiumEnv(env_id, seeds[:1], **{**env_kwargs, "render_mode": "rgb_array"})
    check_same_spaces(agent, env)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        observation, frame = env.reset_arrays(), _render(env)
        with imageio.get_writer(path, fps=_frames_per_second(env), **_options(path)) as video:
            returns = []
            for episode in range(episodes):
                if episode:
                    env.reseed([seeds[episode]])
                    observation, frame = env.reset_arrays(), _render(env)
                video.append_data(frame)
                total = 0.0
                for _ in range(MAX_FRAMES):
                    action = agent.mode(torch.tensor(np.asarray(observation), dtype=torch.float32))
                    observation, reward, terminated, truncated = env.step_arrays(action.numpy(force=True))
                    total += float(reward[0])
                    video.append_data(_render(env))
                    if terminated[0] or truncated[0]:
                        break
                returns.append(total)
    finally:
        env.close()
    return returns


def _render(env: GymnasiumEnv) -> np.ndarray:
    """Returns one frame, [H, W, 3] uint8."""
    try:
        frame = env.envs[0].render()
    except Exception as error:  # whatever a graphics library raises where it finds no display
        raise ConfigError(
            f"The environment cannot be rendered here ({first_line(error)}): install the package that it names, or, for"
            " MuJoCo, libegl1 with MUJOCO_GL=egl, or libosmesa6 with MUJOCO_GL=osmesa."
        ) from error
    if frame is None:
        raise ConfigError("The environment cannot be rendered: it has no picture for render_mode rgb_array.")
    return np.asarray(frame)


def _frames_per_second(env: GymnasiumEnv) -> float:
    """Returns what makes the video as fast as the simulation."""
    one = env.envs[0]
    step = getattr(one.unwrapped, "dt", None)  # seconds; the metadata of dm_control's environments is wrong
    return min(1 / step if step else one.metadata.get("render_fps", 30), 60)


def _options(path: Path) -> dict[str, Any]:
    return {"macro_block_size": 2} if path.suffix == ".mp4" else {"loop": 0}


def main(args: Sequence[str]) -> None:
    """Runs ``ppo-lightning play``.

    Raises:
        ConfigError: The checkpoint cannot be read, or as for :func:`record_video`.
    """
    parser = argparse.ArgumentParser(
        prog="ppo-lightning play", description="Writes a video of a trained agent.", allow_abbrev=False
    )
    parser.add_argument("--ckpt_path", required=True, help="the checkpoint")
    parser.add_argument("--output", default="video.mp4", help="an .mp4 or .gif file (default: video.mp4)")
    parser.add_argument("--episodes", type=int, default=1, help="episodes to play (default: 1)")
    parser.add_argument("--seed", type=int, default=1, help="decides the episodes (default: 1)")
    parser.add_argument("--env_id", help="an environment of Gymnasium (default: the checkpoint's)")
    options = parser.parse_args(args)
    checkpoint = read_checkpoint(options.ckpt_path)
    agent, data = agent_from_plain(checkpoint["agent"]), checkpoint["datamodule_hyper_parameters"]
    state, prefix = checkpoint["state_dict"], "agent."
    agent.load_state_dict({key.removeprefix(prefix): state[key] for key in state if key.startswith(prefix)})
    if options.env_id is None and data["backend"] != "gymnasium":
        print(f"trained through {data['backend']}, played through Gymnasium; --env_id names another environment")
    env_id, env_kwargs = options.env_id or data["env_id"], {} if options.env_id else data["env_kwargs"] or {}
    returns = record_video(agent, env_id, options.output, options.episodes, options.seed, **env_kwargs)
    print(f"returns: {', '.join(f'{value:.1f}' for value in returns)}")
    print(f"video: {Path(options.output).resolve()}")
