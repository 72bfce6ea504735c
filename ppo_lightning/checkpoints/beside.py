"""Large state of a run, such as a replay buffer, in a file of its own beside a checkpoint."""

import re
from pathlib import Path
from typing import Any

import torch

from ppo_lightning.checkpoints.file import require_intact, write_atomically
from ppo_lightning.errors import ConfigError

BESIDE = "beside"  # entry of a checkpoint: the large state until it is written, then the name of its file


def write_beside(checkpoint: dict[str, Any], path: Path) -> None:
    """Write the large state of a checkpoint before the checkpoint, which then names the file.

    The name has the number of environment steps, so that a kill between the two files leaves the former pair.
    """
    if BESIDE not in checkpoint:
        return
    name = f"{path.stem}.{checkpoint['env_steps']}.replay"
    write_atomically(checkpoint[BESIDE], path.with_name(name))
    checkpoint[BESIDE] = name


def remove_beside(path: Path, keep: Any = None) -> None:
    """Remove the files beside a checkpoint except one."""
    pattern = re.compile(re.escape(path.stem) + r"\.\d+\.replay")
    for file in path.parent.glob("*.replay"):
        if pattern.fullmatch(file.name) and file.name != keep:
            file.unlink(missing_ok=True)


def read_beside(checkpoint: dict[str, Any], path: str | Path) -> Any:
    """Return the large state of a checkpoint, None if it has none.

    Raises:
        ConfigError: The file is missing or damaged.
    """
    state = checkpoint.get(BESIDE)
    if isinstance(state, str):
        file = Path(path).resolve().with_name(Path(state).name)
        try:
            require_intact(file)
            # A buffer may take most of the memory: each rank copies its own.
            state = torch.load(file, "cpu", weights_only=True, mmap=True)
        except Exception as error:  # a damaged file may raise anything
            reason = "is missing" if isinstance(error, FileNotFoundError) else "is damaged"
            raise ConfigError(
                f"ckpt_path {str(path)!r} cannot resume its run: {file.name} {reason}. Copy this file beside"
                " the checkpoint, or choose another checkpoint."
            ) from error
    return state
