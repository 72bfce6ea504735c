"""What a trained agent does for Lightning: ``validate``, ``test`` and ``predict``."""

import inspect
from collections import deque
from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.trainer.states import TrainerFn
from tensordict import TensorDictBase
from torch import Tensor

from ppo_lightning.checkpoints.agent import known_class, trained_agent
from ppo_lightning.checkpoints.file import read_checkpoint
from ppo_lightning.errors import ConfigError, first_line
from ppo_lightning.models import ActorCritic
from ppo_lightning.rollouts.evaluation import episode_statistics
from ppo_lightning.spaces.specs import spec_from_plain, stored
from ppo_lightning.utils import collectives

RETURNED = "returned"  # beside the weights: what else a started process sends back


class InferenceModule(L.LightningModule):
    """Holds an agent, logs the episodes that it plays, and gives its actions."""

    agent: ActorCritic

    def __init__(self) -> None:
        super().__init__()
        self.agent = None  # type: ignore[assignment]
        self.env_steps = 0  # of all ranks
        self._recipe: dict[str, Any] = {}  # how to build the agent again
        self.episode_returns: deque[float] = deque(maxlen=100)
        self._returns_agent = False  # to the process that started this one
        self._evaluated_at: int | None = None  # environment steps of the last evaluation in a fit

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls, checkpoint_path: Any, map_location: Any = "cpu", **kwargs: Any
    ) -> Any:
        """Build the module of a checkpoint, with its agent, without executing code from the file.

        Lightning's own method parses the settings as a command line, which imports the classes that they name.

        Args:
            checkpoint_path: A path, an address (``s3://...``), or an open file.
            map_location: Device of the module.
            **kwargs: Hyperparameters in the place of the checkpoint's; ``weights_only`` is always true.

        Raises:
            ConfigError: The file cannot be read, or its settings do not fit the module's class.
        """
        checkpoint = read_checkpoint(checkpoint_path)
        saved = checkpoint["hyper_parameters"]
        module_class = known_class(saved.get("_class_path"), cls) or cls
        parameters = inspect.signature(module_class).parameters
        every = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values())
        accepted = {key for key in saved if (every or key in parameters) and key != "agent" and key[0] != "_"}
        given = {key: value for key, value in kwargs.items() if key != "weights_only"}
        try:
            module = module_class(**{key: saved[key] for key in accepted} | given)
        except (TypeError, AttributeError) as error:
            raise ConfigError(f"The checkpoint's hyperparameters do not fit {cls.__name__}: {first_line(error)}.") from error
        module.on_load_checkpoint(checkpoint)
        module.load_state_dict(checkpoint["state_dict"])
        return module.to(map_location)

    def validation_step(self, episodes: TensorDictBase, batch_idx: int) -> None:
        """Logs mean, std, min and max of return and length of the episodes [E] that were played."""
        self._log_episodes("eval", episodes)

    def test_step(self, episodes: TensorDictBase, batch_idx: int) -> None:
        """Logs the same as :meth:`validation_step`."""
        self._log_episodes("test", episodes)

    def _log_episodes(self, prefix: str, episodes: TensorDictBase) -> None:
        results = episode_statistics(prefix, episodes)
        if self.trainer.state.fn == TrainerFn.FITTING:
            self._evaluated_at = self.env_steps
        # On the CPU: the default group of several GPUs does not exchange these, and MPS has no float64.
        self.log_dict(results, batch_size=len(episodes), sync_dist=True, sync_dist_group=collectives.cpu_group())

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

    # ddp_spawn and ddp_notebook: Lightning copies the module to the processes that it starts, and the weights back.

    def teardown(self, stage: str) -> None:
        """Lets :meth:`state_dict` describe the agent, in a process that Lightning's launcher has started."""
        self._returns_agent = stage == "fit" and isinstance(self.trainer.strategy.launcher, _MultiProcessingLauncher)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Returns weights and statistics."""
        state = super().state_dict(*args, **kwargs)
        return state | {RETURNED: [self._recipe, self.env_steps, list(self.episode_returns)]} if self._returns_agent else state

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Loads weights and statistics; builds the agent first where another process describes one."""
        state = dict(state_dict)
        if RETURNED in state:
            self._recipe, self.env_steps, returns = state.pop(RETURNED)
            self.agent = trained_agent({"agent": self._recipe, "state_dict": state}).train()
            self.episode_returns.extend(returns)
        return super().load_state_dict(state, *args, **kwargs)
