"""Videos of an agent that plays."""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ppo_lightning.checkpoints.agent import check_same_spaces
from ppo_lightning.envs import BatchedEnv, EnvFactory
from ppo_lightning.errors import ConfigError, first_line, import_extra
from ppo_lightning.models import ActorCritic
from ppo_lightning.models.heads import CategoricalHead
from ppo_lightning.utils.seeding import derive_seed
from ppo_lightning.video.overlay import draw


@torch.no_grad()
def record_video(
    agent: ActorCritic,
    factory: EnvFactory,
    path: str | Path,
    episodes: int = 1,
    seed: int = 1,
    overlay: bool = False,
    max_frames: int = 10_000,
) -> list[float]:
    """Play episodes with the most probable actions, and write every frame to a file.

    Args:
        agent: The agent.
        factory: Makes the environment; the one of the same id that its backend renders with.
        path: Ends in ``.mp4`` or ``.gif``.
        episodes: How many, one after the other.
        seed: Decides the episodes, which (but for Procgen) are those of an evaluation with this seed.
        overlay: Draw the probabilities of the actions (of continuous actions: their means), the value and the return so far
            beside the picture.
        max_frames: Ends an episode that has not ended by itself.

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
    env = factory.make(1, seed, stream="eval", render=True)
    if not isinstance(env, BatchedEnv):
        raise ConfigError(
            "Only environments of Gymnasium, EnvPool, ALE and Procgen can be recorded, without data.transforms."
        )
    check_same_spaces(agent, env)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        observation, memory, returns = env.reset_arrays(), agent.initial_memory(1), []
        frame = _frame(env, agent, observation, memory, 0.0, overlay)
        with imageio.get_writer(path, fps=env.render_fps, **_options(path)) as video:
            for episode in range(episodes):
                if episode:
                    env.reseed([derive_seed(seed, "eval", episode)])
                    observation, memory = env.reset_arrays(), agent.initial_memory(1)
                    frame = _frame(env, agent, observation, memory, 0.0, overlay)
                video.append_data(frame)
                total = 0.0
                for _ in range(max_frames):
                    seen = torch.tensor(observation, device=agent.device)
                    action, _, memory = agent.play(seen, memory)
                    observation, reward, terminated, truncated = env.step_arrays(action.numpy(force=True))
                    total += float(reward[0])
                    video.append_data(_frame(env, agent, observation, memory, total, overlay))
                    done = terminated | truncated
                    if env.episodes_over(done)[0]:
                        break
                    if done[0]:
                        observation, memory = env.reset_arrays(done), agent.initial_memory(1)  # the next life
                returns.append(total)
    finally:
        env.close()
    return returns


def _frame(
    env: BatchedEnv,
    agent: ActorCritic,
    observation: np.ndarray,
    memory: torch.Tensor | None,
    total: float,
    overlay: bool,
) -> np.ndarray:
    """Returns one frame, [H, W, 3] uint8."""
    try:
        picture = env.render()
    except Exception as error:  # whatever a graphics library raises where it finds no display
        raise ConfigError(
            f"The environment cannot be rendered here ({first_line(error)}): install the package that it names, or, for"
            " MuJoCo, libegl1 with MUJOCO_GL=egl, or libosmesa6 with MUJOCO_GL=osmesa."
        ) from error
    if picture is None:
        raise ConfigError("The environment cannot be rendered: it has no picture for render_mode rgb_array.")
    if not overlay:
        return picture
    value, numbers, lengths = (
        each[0].numpy(force=True)
        for each in agent.explain(torch.tensor(observation, device=agent.device), memory)
    )
    names = env.action_names or [f"action {index}" for index in range(len(numbers))]
    chosen = int(numbers.argmax()) if isinstance(agent.head, CategoricalHead) else None
    texts = [f"{number:.2f}" for number in numbers]
    return draw(picture, [f"value   {float(value):.2f}", f"return  {total:g}"], names, lengths, texts, chosen)


def _options(path: Path) -> dict[str, Any]:
    return {"macro_block_size": 2} if path.suffix == ".mp4" else {"loop": 0}
