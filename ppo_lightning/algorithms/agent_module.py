"""Base LightningModule: lazy agent construction, evaluation, prediction and checkpoints."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.data import AttributeDict
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.data import TensorSpec

from ppo_lightning.algorithms.checks import check_trainer
from ppo_lightning.algorithms.manifest import manifest
from ppo_lightning.algorithms.run_log import RunLog
from ppo_lightning.callbacks.guards import ExceptionGuard
from ppo_lightning.callbacks.loggers import LoggerGuard
from ppo_lightning.callbacks.supported import check_callbacks
from ppo_lightning.checkpoints.agent import (
    agent_to_plain,
    check_same_agent,
    check_same_state,
    trained_agent,
)
from ppo_lightning.checkpoints.file import read_checkpoint, require_resumable
from ppo_lightning.checkpoints.module import module_from_checkpoint
from ppo_lightning.errors import ConfigError
from ppo_lightning.models import ActorCritic
from ppo_lightning.models.normalizers import RewardScaler
from ppo_lightning.rollouts.datamodule import CollectorInputs, RolloutDataModule
from ppo_lightning.rollouts.evaluation import episode_statistics
from ppo_lightning.spaces.specs import spec_from_plain, stored
from ppo_lightning.utils import collectives, lightning_private
from ppo_lightning.utils.finite import require_finite_state

RETURNED = "returned"  # key of what a started process sends back beside the weights


class AgentModule(L.LightningModule):
    """Hold an agent that is built when its environment is known.

    The agent is built from the data module at ``fit``, ``validate`` and ``test``, and from the checkpoint at
    ``load_from_checkpoint(path)`` and ``predict``, without creating an environment. A subclass adds
    ``training_step`` and its hyperparameters; it calls :meth:`count_episodes` and ``run_log.log`` once a
    rollout.

    Args:
        agent: Makes the agent from the specs of observations and actions.

    Example:
        >>> module = PPO.load_from_checkpoint("runs/cartpole/version_0/checkpoints/last.ckpt")
        >>> actions = module.predict(torch.zeros(1, 4))
    """

    agent: ActorCritic
    hparams: AttributeDict
    reward_scaler: RewardScaler | None

    def __init__(self, agent: Callable[[TensorSpec, TensorSpec], ActorCritic]) -> None:
        super().__init__()
        self.make_agent = agent
        self.agent = None  # type: ignore[assignment]
        self.reward_scaler = None
        self.env_steps = 0  # of all ranks
        self.episode_returns: deque[float] = deque(maxlen=100)
        self._recipe: dict[str, Any] = {}  # how to build the agent again
        self._details: dict[str, Any] = {}  # the implementation details of the run
        self._evaluated_at: int | None = None  # environment steps of the last evaluation in a fit
        self._returns_agent = False  # to the process that started this one

    @property
    def data(self) -> RolloutDataModule:
        """The data module, which supplies rollouts."""
        data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, RolloutDataModule):
            raise ConfigError(
                "PPO needs rollouts: call trainer.fit(model, datamodule=RolloutDataModule(...))."
            )
        return data

    @property
    def fitting(self) -> bool:
        """Whether a Trainer runs ``fit``."""
        return lightning_private.has_trainer(self) and self.trainer.state.fn == TrainerFn.FITTING

    def trainable_parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters that the optimizer updates; a variant with other networks adds theirs."""
        return self.agent.parameters()

    def collector_inputs(self) -> CollectorInputs:
        """Return what the data module needs of this module to collect rollouts."""
        return CollectorInputs(self.agent, self.reward_scaler)

    # Construction

    def configure_callbacks(self) -> list[L.Callback]:
        """Add the guards of loggers and exceptions.

        Trainer options and callbacks that cannot work are refused here, before Lightning's own checks.
        """
        check_trainer(self.trainer)
        if self.fitting:
            check_callbacks(self.trainer, self.steps_per_rollout)
        return [LoggerGuard(), ExceptionGuard()]

    def setup(self, stage: str) -> None:
        """Start the counts of a new run.

        Raises:
            ConfigError: The module is compiled as a whole.
        """
        if lightning_private.is_compiled(self):
            raise ConfigError(
                "torch.compile(model) would compile Lightning's hooks, too: pass PPO(compile=True) instead."
            )
        if stage != "fit":
            return
        if self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            lightning_private.remove_step_limit(self.trainer)
        if self.trainer.ckpt_path is None:
            self.env_steps = 0
            self.episode_returns.clear()
            self._evaluated_at = None

    def configure_model(self) -> None:
        """Build the agent for the data module's environments; without a data module, the checkpoint does."""
        data = getattr(self.trainer, "datamodule", None) if lightning_private.has_trainer(self) else None
        if not isinstance(data, RolloutDataModule) or self.trainer.state.fn == TrainerFn.PREDICTING:
            return
        # Lightning's default device in this hook is the GPU, whose generator would draw other weights.
        with torch.device("cpu"):
            observation_spec, action_spec = data.specs
            if self.agent is None:
                self.agent = self.make_agent(observation_spec, action_spec)
                self._recipe = agent_to_plain(self.agent, observation_spec, action_spec)
            else:
                check_same_agent(self._recipe, agent_to_plain(self.agent, observation_spec, action_spec))

    # Checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what Lightning does not know, as plain types.

        Raises:
            NonFiniteError: The weights, the statistics or the optimizer's state are not finite.
        """
        require_finite_state(checkpoint)
        checkpoint["agent"], checkpoint["details"] = self._recipe, self._details
        checkpoint["seed"], checkpoint["evaluation"] = self.data.seed, self._evaluation()
        checkpoint["env_steps"], checkpoint["frames_per_rollout"] = (
            self.env_steps,
            self.data.frames_per_rollout,
        )
        checkpoint["episode_returns"] = list(self.episode_returns)

    def _evaluation(self) -> dict[str, float] | None:
        """Return the results of the last evaluation, if it was one of the present weights."""
        if self._evaluated_at != self.env_steps:
            return None
        metrics = self.trainer.callback_metrics
        return {
            key.removeprefix("eval/"): float(metrics[key]) for key in metrics if key.startswith("eval/")
        } or None

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore these; build the agent if there is none, and otherwise demand the same one.

        Raises:
            ConfigError: The checkpoint has other spaces or another agent; or, to resume a run, it holds
                weights only, or is of another environment or of rollouts of another size, which its schedules
                cannot count.
        """
        if self.agent is None:
            self.agent, self._recipe = trained_agent(checkpoint).train(), checkpoint["agent"]
        check_same_agent(saved=checkpoint["agent"], current=self._recipe)
        check_same_state(saved=checkpoint["state_dict"], current=self.state_dict())
        if self.fitting:
            require_resumable(checkpoint)
            self.data.require_same_rollouts(checkpoint)
        self._details = checkpoint["details"]  # `fit` replaces them by those of its own run
        self.env_steps = checkpoint["env_steps"]
        self.episode_returns.extend(checkpoint["episode_returns"])

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls, checkpoint_path: Any, map_location: Any = "cpu", **kwargs: Any
    ) -> Any:
        """Build the module of a checkpoint, with its agent, without executing code from the file.

        Lightning's own method parses the settings as a command line, which imports the named classes.

        Args:
            checkpoint_path: A path, an address (``s3://...``), or an open file.
            map_location: Device of the module.
            **kwargs: Hyperparameters that replace those of the checkpoint; ``weights_only`` is always true.

        Raises:
            ConfigError: The file cannot be read, or its settings do not fit the module's class.
        """
        checkpoint = read_checkpoint(checkpoint_path)
        module = module_from_checkpoint(checkpoint, cls, kwargs)
        module.on_load_checkpoint(checkpoint)
        module.load_state_dict(checkpoint["state_dict"])
        return module.to(map_location)

    # Training

    @property
    def steps_per_rollout(self) -> int | None:
        """Optimizer steps of an iteration; None if they vary."""
        return None

    @property
    def rollouts_done(self) -> int:
        """Iterations completed, resumed ones included."""
        return self.env_steps // self.data.frames_per_rollout

    @property
    def tolerance(self) -> float:
        """Largest accepted difference between two ways to compute the same numbers.

        The ways differ in the order of float32 operations, in TF32 on a GPU, or in bfloat16.
        """
        if self.trainer.precision != "32-true":
            return 0.1
        return 1e-3 if self.device.type == "cpu" else 1e-2

    def on_fit_start(self) -> None:
        """Start the clock; note the implementation details of the run."""
        self.run_log = RunLog(self)
        self._details = manifest(self)

    def on_train_start(self) -> None:
        """Stop a resumed run that is complete: Lightning's own count of epochs may be behind."""
        # Only now the environments exist, which may have invalid steps.
        check_callbacks(self.trainer, self.steps_per_rollout)
        if self.rollouts_done >= self.data.num_rollouts:
            self.trainer.should_stop = True

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Stop after the last rollout, whatever ``max_epochs`` says.

        Lightning validates once more before it stops.
        """
        if self.rollouts_done >= self.data.num_rollouts:
            self.trainer.should_stop = True

    def on_fit_end(self) -> None:
        """Explain why a run ended early.

        Raises:
            ConfigError: ``max_epochs`` let a resumed run do nothing.
        """
        left = self.data.num_rollouts * self.data.frames_per_rollout - self.env_steps
        if self.env_steps == self.run_log.steps_before and left > 0:
            raise ConfigError(
                f"trainer.max_epochs ended the run with {left} steps left: set it to -1 to train them."
            )
        if left > 0 and 0 <= self.trainer.max_steps <= self.trainer.global_step:
            total = self.env_steps + left
            rank_zero_warn(
                f"trainer.max_steps ({self.trainer.max_steps}) counts optimizer steps: it ended the run after"
                f" {self.env_steps} of {total} environment steps."
            )

    def count_episodes(self, rollout: TensorDictBase) -> dict[str, Tensor]:
        """Count a rollout's environment steps and episodes, of all ranks.

        Args:
            rollout: Batch size [N, T].

        Returns:
            Mean return and length of the episodes that ended, as metrics; nothing if none ended.
        """
        following = rollout["next"]
        done = following["episode_done"]
        episodes = torch.stack(
            [following[key][done].float() for key in ("episode_reward", "step_count")], dim=-1
        )
        returns, lengths = collectives.concatenate(episodes).unbind(-1)
        self.episode_returns.extend(returns.tolist())
        self.env_steps += self.data.frames_per_rollout
        if not len(returns):
            return {}
        return {"charts/episodic_return": returns.mean(), "charts/episodic_length": lengths.mean()}

    # Evaluation and prediction

    def validation_step(self, episodes: TensorDictBase, batch_idx: int) -> None:
        """Log mean, std, min and max of return and length of the episodes of all ranks, [E] of this rank."""
        self._log_episodes("eval", episodes)

    def test_step(self, episodes: TensorDictBase, batch_idx: int) -> None:
        """Log the same as :meth:`validation_step`."""
        self._log_episodes("test", episodes)

    def _log_episodes(self, prefix: str, episodes: TensorDictBase) -> None:
        if self.trainer.state.fn == TrainerFn.FITTING:
            self._evaluated_at = self.env_steps
        played = {key: collectives.concatenate(value) for key, value in episodes.items()}
        results = episode_statistics(prefix, played)  # on the CPU: MPS has no float64
        # The same on all ranks; without `sync_dist` Lightning warns that they might differ.
        self.log_dict(
            results,
            batch_size=len(played["episode_reward"]),
            sync_dist=True,
            sync_dist_group=collectives.cpu_group(),
        )

    def forward(self, observation: Tensor) -> Tensor:
        """Return the most probable actions [B, ...], within their bounds, for raw observations [B, ...].

        This is what ``torch.export.export(module, (observation,))`` and Lightning's ``to_onnx`` write,
        statistics included.
        """
        return self.agent.mode(observation)

    @torch.no_grad()
    def predict(self, observation: Tensor) -> Tensor:
        """Return the same as :meth:`forward`, after a check of the observations.

        Raises:
            ConfigError: There is no trained agent, or the observations have another shape than those it was
                trained on, or are not finite.
        """
        if self.agent is None:
            raise ConfigError(
                "predict needs a trained agent: give ckpt_path, or use PPO.load_from_checkpoint(path)."
            )
        spec = stored(spec_from_plain(self._recipe["observation_spec"]))
        if observation.shape[1:] != spec.shape:
            shapes = f"[B, {', '.join(map(str, spec.shape))}], not {list(observation.shape)}"
            raise ConfigError(f"predict takes observations of shape {shapes}.")
        if spec.dtype == torch.uint8 and observation.dtype != torch.uint8:
            raise ConfigError(f"predict takes pictures of bytes (uint8, 0 to 255), not {observation.dtype}.")
        if not observation.isfinite().all():
            raise ConfigError(
                "predict takes finite observations, and there is a NaN or an infinity among these."
            )
        return self(observation.to(self.device, spec.dtype))

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the most probable actions for a batch of raw observations."""
        return self.predict(batch)

    # ddp_spawn and ddp_notebook: Lightning copies the module to the processes that it starts, and the weights
    # back.

    def teardown(self, stage: str) -> None:
        """Let :meth:`state_dict` describe the agent, in a process that Lightning's launcher has started."""
        self._returns_agent = stage == "fit" and lightning_private.starts_processes(self.trainer)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return weights and statistics."""
        state = super().state_dict(*args, **kwargs)
        if self._returns_agent:
            state[RETURNED] = [self._recipe, self._details, self.env_steps, list(self.episode_returns)]
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load weights and statistics; build the agent first where another process describes one."""
        state = dict(state_dict)
        if RETURNED in state:
            self._recipe, self._details, self.env_steps, returns = state.pop(RETURNED)
            self.agent = trained_agent({"agent": self._recipe, "state_dict": state}).train()
            self.episode_returns.extend(returns)
        return super().load_state_dict(state, *args, **kwargs)
