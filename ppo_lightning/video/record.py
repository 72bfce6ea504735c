"""Recording of videos of an agent."""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ppo_lightning.checkpoints.agent import check_same_spaces
from ppo_lightning.checkpoints.file import user_path
from ppo_lightning.envs import BatchedEnv, EnvFactory
from ppo_lightning.envs.batched import metadata_of
from ppo_lightning.errors import ConfigError, first_line, import_extra
from ppo_lightning.models import Actor
from ppo_lightning.models.actor import evaluating
from ppo_lightning.utils.seeding import derive_seed
from ppo_lightning.video.overlay import draw


def record_video(
    agent: Actor,
    factory: EnvFactory,
    path: str | Path,
    episodes: int = 1,
    seed: int = 1,
    overlay: bool = False,
    max_frames: int = 10_000,
) -> list[float]:
    """Play episodes with the most probable actions, write all frames to a file, and return their returns.

    In a game, returns and values are those of player 0, and the episode ends with the game.

    Args:
        agent: The agent.
        factory: Factory of the environment. A backend without rendering is replaced by one with the same ids.
        path: Output file, ``.mp4`` or ``.gif``.
        episodes: Number of episodes.
        seed: Seed of the episodes. Except for Procgen, an evaluation with this seed plays the same episodes.
        overlay: Draw the action probabilities (for continuous actions: the means), the value with its curve
            and the return so far beside the picture.
        max_frames: Maximum number of steps per episode.

    Raises:
        ConfigError: The environment cannot be created or rendered on this machine, the agent was built for
            other spaces, or a video package is missing.
    """
    if sys.platform == "linux" and "DISPLAY" not in os.environ:
        os.environ.setdefault("MUJOCO_GL", "egl")  # mujoco and dm_control read it at import
    env = factory.make(1, seed, stream="eval", render=True)
    if not isinstance(env, BatchedEnv):
        env.close()
        raise ConfigError("Only environments of arrays can be recorded, without data.transforms.")
    play = torch.no_grad()(agent.play)

    def frame() -> np.ndarray:  # [H, W, 3] uint8; its value becomes part of the curve
        picture = picture_of(env)
        if picture.shape != first.shape:  # a video has one size
            rows, cols = (np.arange(n) * m // n for n, m in zip(first.shape, picture.shape[:2], strict=False))
            picture = picture[rows][:, cols]
        if not overlay:
            return picture
        inputs = torch.tensor(observation, device=agent.device)
        played = play(inputs, memory)
        numbers, lengths = (output[0].numpy(force=True) for output in agent.explain(inputs, memory))
        names = env.action_names or [f"action {index}" for index in range(len(numbers))]
        names = names[: len(numbers)]  # none for a head without bars
        # The bar of a single discrete action is highlighted.
        chosen = int(played["action"][0]) if played["action"].ndim == 1 else None
        texts = [f"{number:.2f}" for number in numbers]
        lines = [f"return  {total:g}"]
        if "state_value" in played:
            values.append(of_player_0(env, played["state_value"].numpy(force=True), mover_of(env)))
            lines.insert(0, f"value   {values[-1]:.2f}")
        return draw(picture, lines, names, lengths, texts, chosen, values)

    try:
        check_same_spaces(agent, env)
        returns = []
        observation = env.reset_arrays()
        first = picture_of(env)  # an environment that cannot be rendered leaves no file
        with evaluating(agent), open_video(path, env) as video:
            for episode in range(episodes):
                if episode:
                    env.reseed([derive_seed(seed, "eval", episode)])
                    observation = env.reset_arrays()
                memory = agent.initial_memory(env.num_envs)
                values: list[float] = []  # of the running episode
                total = 0.0
                over = np.zeros(env.num_envs, bool)
                video.append_data(frame())
                for _ in range(max_frames):
                    inputs = torch.tensor(observation, device=agent.device)
                    played = play(inputs, memory)
                    memory = played.get("next_memory")
                    mover = mover_of(env)
                    step = env.step_arrays(played["action"].numpy(force=True))
                    observation = step.observation
                    total += of_player_0(env, step.reward, mover)
                    video.append_data(frame())
                    over |= step.over
                    if over.all():
                        break
                    done = step.terminated | step.truncated
                    if done.any():  # of a life, or of a player
                        observation = env.reset_arrays(done)
                        if memory is not None:
                            memory[torch.from_numpy(done)] = 0
                returns.append(total)
    finally:
        env.close()
    return returns


def mover_of(env: BatchedEnv) -> np.ndarray:
    """Return the players who act next in the rows of a game, [N]; zeros without players."""
    return np.array(getattr(env, "mover", np.zeros(env.num_envs, int)))


def of_player_0(env: BatchedEnv, values: np.ndarray, mover: np.ndarray) -> float:
    """Return the number of the first row, of rewards or values [N] of the players who act."""
    view = getattr(env, "row_rewards", None)  # of a game
    return float((values if view is None else view(values, mover))[0])


def picture_of(env: BatchedEnv) -> np.ndarray:
    """Return a picture of the first environment, [H, W, 3] uint8, or raise a ConfigError if there is none."""
    try:
        picture = env.render()
    except Exception as error:  # graphics libraries raise many types without a display
        raise ConfigError(
            f"The environment cannot be rendered here ({first_line(error)}): install the package it names,"
            " or, for MuJoCo, libegl1 with MUJOCO_GL=egl, or libosmesa6 with MUJOCO_GL=osmesa."
        ) from error
    if picture is not None and picture.ndim == 2:
        picture = picture[..., None]
    shape = () if picture is None or picture.dtype != np.uint8 or not picture.size else picture.shape
    if picture is None or len(shape) != 3 or shape[2] not in (1, 3, 4):
        what = "None" if picture is None else f"{picture.dtype} of shape {list(picture.shape)}"
        needed = "with render_mode rgb_array it must return uint8 of shape [height, width, 3]"
        raise ConfigError(f"The environment's render() returns {what}: {needed}.")
    return picture[..., :3] if picture.shape[2] >= 3 else picture.repeat(3, axis=2)


def frame_rate(env: BatchedEnv) -> float:
    """Return the frame rate of a video in real time, at most 60 frames per second."""
    if env.render_fps is not None:
        return env.render_fps
    single = env.envs[0] if isinstance(env.envs, list) else env.envs
    # Seconds per step. The metadata of dm_control environments is wrong.
    dt = getattr(single.unwrapped, "dt", None)
    return min(float(1 / dt if dt else metadata_of(single).get("render_fps") or 30), 60.0)


def open_video(path: str | Path, env: BatchedEnv) -> Any:
    """Return a writer with ``append_data`` for pictures of an environment, as a context."""
    path = user_path(path)
    if path.suffix not in (".mp4", ".gif"):
        raise ConfigError(f"--output is {str(path)!r}: it must end in .mp4 or .gif.")
    import_extra("imageio_ffmpeg", extra="video")
    path.parent.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {"macro_block_size": 2} if path.suffix == ".mp4" else {"loop": 0}
    return import_extra("imageio.v2", extra="video").get_writer(path, fps=frame_rate(env), **options)
