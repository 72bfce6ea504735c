"""What a trained agent does for Lightning: ``validate``, ``test`` and ``predict``."""

from typing import Any

import lightning as L
import torch
from tensordict import TensorDictBase
from torch import Tensor

from ppo_lightning import ranks
from ppo_lightning.envs.specs import spec_from_plain, stored
from ppo_lightning.errors import ConfigError
from ppo_lightning.evaluation import episode_statistics
from ppo_lightning.models import ActorCritic


class InferenceModule(L.LightningModule):
    """Holds an agent, logs the episodes that it plays, and gives its actions."""

    agent: ActorCritic

    def __init__(self) -> None:
        super().__init__()
        self.agent = None  # type: ignore[assignment]
        self.env_steps = 0  # of all ranks
        self._recipe: dict[str, Any] = {}  # how to build the agent again

    def validation_step(self, episodes: TensorDictBase, batch_idx: int) -> None:
        """Logs mean, std, min and max of return and length of the episodes [E] that were played."""
        self._log_episodes("eval", episodes)

    def test_step(self, episodes: TensorDictBase, batch_idx: int) -> None:
        """Logs the same as :meth:`validation_step`."""
        self._log_episodes("test", episodes)

    def _log_episodes(self, prefix: str, episodes: TensorDictBase) -> None:
        results = episode_statistics(prefix, episodes)
        # On the CPU: the default group of several GPUs does not exchange these, and MPS has no float64.
        self.log_dict(results, batch_size=len(episodes), sync_dist=True, sync_dist_group=ranks.cpu_group())

    def forward(self, observation: Tensor) -> Tensor:
        """Returns the most probable actions [B, ...], within their bounds, for raw observations [B, ...].

        This is what ``torch.export.export(module, (observation,))`` and Lightning's ``to_onnx`` write, statistics included.
        """
        return self.agent.mode(observation)

    @torch.no_grad()
    def predict(self, observation: Tensor) -> Tensor:
        """Does what :meth:`forward` does, after checking the observations.

        Raises:
            ConfigError: There is no trained agent, or the observations have another shape than those it was trained on, or are
                not finite.
        """
        if self.agent is None:
            raise ConfigError("predict needs a trained agent: give ckpt_path, or use PPO.load_from_checkpoint(path).")
        spec = stored(spec_from_plain(self._recipe["observation_spec"]))
        if observation.shape[1:] != spec.shape:
            shapes = f"[B, {', '.join(map(str, spec.shape))}], not {list(observation.shape)}"
            raise ConfigError(f"predict takes observations of shape {shapes}.")
        if spec.dtype == torch.uint8 and observation.dtype != torch.uint8:
            raise ConfigError(f"predict takes pictures of bytes (uint8, 0 to 255), not {observation.dtype}.")
        if not observation.isfinite().all():
            raise ConfigError("predict takes finite observations, and there is a NaN or an infinity among these.")
        return self(observation.to(self.device, spec.dtype))

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Returns the most probable actions for a batch of raw observations."""
        return self.predict(batch)
