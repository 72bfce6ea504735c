"""Numbers of the infos at the ends of episodes."""

from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from ppo_lightning.envs.batched import BatchedEnv
from ppo_lightning.envs.contract import numbers_of
from ppo_lightning.envs.torchrl import untransformed


class EpisodeInfos:
    """Numbers of ``data.log_info`` in the infos of the episodes that end in a rollout.

    Args:
        env: The environments, batch size [N]. Those without infos, as on a device, have no numbers.
    """

    def __init__(self, env: Any) -> None:
        base = untransformed(env)
        self._env = base if isinstance(base, BatchedEnv) and base.info_names else None
        self.exist = self._env is not None
        self._found: list[tuple[int, np.ndarray, np.ndarray]] = []  # step of the rollout, rows, numbers

    def read(self, step: int, done: np.ndarray) -> None:
        """Keep the numbers of the episodes [N] that a step of the rollout ended."""
        if self._env is not None and self._env.infos:
            numbers = final_infos(self._env, done)
            if not np.isnan(numbers).all():
                self._found.append((step, done, numbers))

    def add_to(self, following: TensorDictBase) -> None:
        """Add the numbers [N, T, names] to ``next`` as ``info``, if there is one."""
        found, self._found = self._found, []
        if found:
            info = torch.full((*following.shape, found[0][2].shape[1]), torch.nan, dtype=torch.float32)
            for step, done, numbers in found:
                info[torch.from_numpy(done), step] = torch.from_numpy(numbers).float()
            following["info"] = info.to(following["done"].device)


def final_infos(env: BatchedEnv, done: np.ndarray) -> np.ndarray:
    """Return numbers of the infos of the K episodes that the last step ended, [K, names], maybe NaN."""
    names, info = env.info_names or (), env.infos.get("all")
    if info is not None:
        return numbers_of(info, names, env.num_envs)[done]
    rows = np.flatnonzero(done).tolist()
    return np.concatenate([numbers_of(env.infos.pop(row, {}), names, 1) for row in rows])
