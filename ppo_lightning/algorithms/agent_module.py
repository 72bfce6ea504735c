"""What every algorithm here needs of Lightning: an agent that is built late, evaluated, asked for actions, and saved."""

import math
import time
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.data import AttributeDict
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import TensorSpec

from ppo_lightning.algorithms.checks import check_trainer
from ppo_lightning.algorithms.inference import InferenceModule
from ppo_lightning.algorithms.manifest import manifest
from ppo_lightning.callbacks.loggers import LoggerGuard
from ppo_lightning.callbacks.preemption import Preemption
from ppo_lightning.callbacks.supported import check_callbacks
from ppo_lightning.checkpoints.agent import agent_to_plain, check_same_agent, check_same_state, trained_agent
from ppo_lightning.checkpoints.file import require_resumable
from ppo_lightning.checkpoints.io import CheckedCheckpointIO
from ppo_lightning.errors import ConfigError, NonFiniteError
from ppo_lightning.models import ActorCritic
from ppo_lightning.models.normalizers import RewardScaler
from ppo_lightning.rollouts.datamodule import RolloutDataModule
from ppo_lightning.utils import collectives
from ppo_lightning.utils.finite import Snapshot, require_finite_state
from ppo_lightning.utils.seeding import derive_seed
from ppo_lightning.utils.threads import has_large_layers
from ppo_lightning.utils.watch import end_with_the_launcher

SAVE_LOGS_EVERY = 10  # seconds
CHECK_RANKS_EVERY = 10  # rollouts


class AgentModule(InferenceModule):
    """Holds an agent, which is built when its environment is known.

    That is from the data module at ``fit``, ``validate`` and ``test``, and from the checkpoint at
    ``load_from_checkpoint(path)`` and ``predict``, without creating an environment.

    A subclass has the hyperparameters ``nonfinite``, ``num_threads``, ``num_minibatches`` and ``microbatch_size``.

    Args:
        agent: Makes the agent from the specs of observations and actions.
    """

    takes_memory: bool
    reward_scaler: RewardScaler | None
    hparams: AttributeDict

    def __init__(self, agent: Callable[[TensorSpec, TensorSpec], ActorCritic]) -> None:
        super().__init__()
        self.make_agent = agent
        self.reward_scaler = None
        self._shuffle = torch.Generator()
        self._threads_before: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the generator, which a started process cannot read; ``setup`` makes another one."""
        return super().__getstate__() | {"_shuffle": None}

    @property
    def data(self) -> RolloutDataModule:
        """Where the rollouts come from."""
        data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, RolloutDataModule):
            raise ConfigError("PPO needs rollouts: call trainer.fit(model, datamodule=RolloutDataModule(...)).")
        return data

    def configure_callbacks(self) -> list[L.Callback]:
        """Refuse Trainer options that PPO cannot honour, before Lightning's own checks; listen to signals."""
        check_trainer(self.trainer)
        if self.trainer.state.fn == TrainerFn.FITTING:
            check_callbacks(self.trainer, self.steps_per_rollout)
        end_with_the_launcher()  # before the ranks meet
        return [Preemption(), LoggerGuard()]

    def setup(self, stage: str) -> None:
        """Starts the counts of a new run, whatever the module did before; sees to it that checkpoints are whole."""
        if type(self.trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            self.trainer.strategy.checkpoint_io = CheckedCheckpointIO()
        if self._compiler_ctx is not None:
            raise ConfigError("torch.compile(model) would compile Lightning's hooks, too: pass PPO(compile=True) instead.")
        if stage == "fit":
            if self.trainer.fast_dev_run:  # type: ignore[attr-defined]
                # Lightning limits the optimizer steps, too, to the number of batches; a rollout has many.
                self.trainer.fit_loop.epoch_loop.max_steps = -1
            self._shuffle = torch.Generator().manual_seed(derive_seed(self.data.seed, "shuffle"))
        if stage == "fit" and self.trainer.ckpt_path is None:
            self.env_steps = 0
            self.episode_returns.clear()
            self._evaluated_at = None

    def configure_model(self) -> None:
        """Builds the agent for the data module's environments, where there are any; otherwise the checkpoint does."""
        data = getattr(self._trainer, "datamodule", None)
        if not isinstance(data, RolloutDataModule) or self.trainer.state.fn == TrainerFn.PREDICTING:
            return
        with torch.device("cpu"):  # Lightning's default in this hook is the GPU, whose generator would draw other weights
            observation_spec, action_spec = data.observation_spec, data.action_spec
            if self.agent is None:
                self.agent = self.make_agent(observation_spec, action_spec)
                self._recipe = agent_to_plain(self.agent, observation_spec, action_spec)
            else:
                check_same_agent(self._recipe, agent_to_plain(self.agent, observation_spec, action_spec))
        if self.takes_memory and self.agent.memory is None:
            raise ConfigError("RecurrentPPO needs an agent with a memory: set model.agent.memory to lstm or gru.")
        if self.agent.memory is not None and not self.takes_memory:
            raise ConfigError("model.agent has a memory: use ppo_lightning.RecurrentPPO, or set memory to null.")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds what Lightning does not know, as plain types.

        Raises:
            NonFiniteError: The weights, the statistics or the optimizer's state are not finite.
        """
        require_finite_state(checkpoint)
        checkpoint["agent"], checkpoint["details"] = self._recipe, manifest(self)
        checkpoint["seed"], checkpoint["evaluation"] = self.data.seed, self._evaluation()
        checkpoint["env_steps"], checkpoint["frames_per_rollout"] = self.env_steps, self.data.frames_per_rollout
        checkpoint["episode_returns"] = list(self.episode_returns)
        checkpoint["shuffle"] = self._shuffle.get_state()

    def _evaluation(self) -> dict[str, float] | None:
        """Return the results of the last evaluation, if it was one of the present weights."""
        if self._evaluated_at != self.env_steps:
            return None
        metrics = self.trainer.callback_metrics
        return {key.removeprefix("eval/"): float(metrics[key]) for key in metrics if key.startswith("eval/")} or None

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Takes it back; builds the agent if there is none, and otherwise demands the same one.

        Raises:
            ConfigError: The checkpoint has other spaces or another agent; or, to resume a run, it holds weights only, or is of
                another environment or of rollouts of another size, which its schedules cannot count.
        """
        if self.agent is None:
            self.agent, self._recipe = trained_agent(checkpoint).train(), checkpoint["agent"]
        check_same_agent(saved=checkpoint["agent"], current=self._recipe)
        check_same_state(saved=checkpoint["state_dict"], current=self.state_dict())
        if self._trainer is not None and self.trainer.state.fn == TrainerFn.FITTING:
            require_resumable(checkpoint)
            source, here = checkpoint["datamodule_hyper_parameters"], self.data.hparams
            if source["backend"] == here["backend"] and source["env_id"] != here["env_id"]:
                raise ConfigError(
                    f"The checkpoint (ckpt_path) is of a run on {source['env_id']} and data.env_id is {here['env_id']}:"
                    " keep it, or start a new run."
                )
            was, now = checkpoint["frames_per_rollout"], self.data.frames_per_rollout
            if was != now:
                raise ConfigError(
                    f"The checkpoint (ckpt_path) is of a run with data.num_envs * data.num_steps = {was}, and now it is {now}:"
                    " keep it, or start a new run."
                )
            self._shuffle.set_state(checkpoint["shuffle"].cpu())
        self.env_steps = checkpoint["env_steps"]
        self.episode_returns.extend(checkpoint["episode_returns"])

    def uniform(self, num_envs: int, *shape: int) -> Tensor:
        """Draws from U(0, 1), [num_envs, *shape]: every rank draws for the environments of all and keeps those of its own."""
        rows = self.trainer.global_rank * num_envs
        return torch.rand(num_envs * self.trainer.world_size, *shape, generator=self._shuffle)[rows : rows + num_envs]

    @property
    def steps_per_rollout(self) -> int | None:
        """Optimizer steps of an iteration; None if they vary."""
        return None

    @property
    def rollouts_done(self) -> int:
        """Iterations completed, resumed ones included."""
        return self.env_steps // self.data.frames_per_rollout

    # Logging

    def on_fit_start(self) -> None:
        """Start the clock, and keep an update of small layers on one thread."""
        self._started = self._logs_saved = time.perf_counter()
        self._steps_before = self.env_steps
        self._threads_before = torch.get_num_threads()
        self._minibatch_rows = self.data.frames_per_rollout // self.trainer.world_size // self.hparams.num_minibatches
        several = has_large_layers(self.agent, min(self._minibatch_rows, self.rows_at_once or self._minibatch_rows))
        torch.set_num_threads(self.hparams.num_threads or (self._threads_before if several else 1))

    def on_fit_end(self) -> None:
        """Gives the threads back.

        Raises:
            ConfigError: The run was to go on, and ``max_epochs`` let it do nothing.
        """
        self._give_threads_back()
        left = self.data.num_rollouts * self.data.frames_per_rollout - self.env_steps
        if self.env_steps == self._steps_before and left > 0:
            raise ConfigError(f"trainer.max_epochs ended the run with {left} steps to go: set it to -1, and they are trained.")
        if left > 0 and 0 <= self.trainer.max_steps <= self.trainer.global_step:
            total = self.env_steps + left
            rank_zero_warn(
                f"trainer.max_steps ({self.trainer.max_steps}) counts optimizer steps: it ended the run after"
                f" {self.env_steps} of {total} environment steps."
            )

    def on_exception(self, exception: BaseException) -> None:
        """Gives the threads back, when a run is interrupted."""
        self._give_threads_back()

    def _give_threads_back(self) -> None:
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)
        self._threads_before = None

    @property
    def rows_at_once(self) -> int | None:
        """How many rows of a minibatch are differentiated at once; None: all."""
        return self.hparams.microbatch_size or (self.agent.rows_in_cache if self.device.type == "cpu" else None)

    @property
    def tolerance(self) -> float:
        """How far two ways to compute the same numbers may be apart: float32 in another order, a GPU's TF32, or bfloat16."""
        if self.trainer.precision != "32-true":
            return 0.1
        return 1e-3 if self.device.type == "cpu" else 1e-2

    @torch.no_grad()
    def check_log_probs(self, rollout: TensorDictBase) -> None:
        """Warns where learning gives the actions of a rollout [N, T] other log-probabilities than acting did."""
        again, stored = self.log_probs_again(rollout)
        drift = (again - stored).abs().max().item()
        if drift > self.tolerance:
            warnings.warn(
                f"The log-probabilities of actions differ by up to {drift:.2g} between acting and learning, so that the first"
                " ratio of an iteration is not 1: does the agent have dropout or batch normalisation?",
                stacklevel=2,
            )

    def log_probs_again(self, rollout: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Returns log-probabilities of some actions of a rollout [N, T], as the agent gives them now and as they are stored."""
        keys = ("observation", "action", "action_log_prob")
        observation, action, stored = (rollout[key].transpose(0, 1).flatten(0, 1)[: self.agent.rows_in_cache] for key in keys)
        return self.agent.evaluate(observation, action)[0], stored

    def agree_on_valid(self, rollout: TensorDictBase) -> TensorDictBase:
        """Adds ``valid`` [N, T], all true, where a rollout [N, T] of another rank has steps that are not."""
        masked = "valid" in rollout.keys()  # noqa: SIM118  (a TensorDict)
        if collectives.gather(torch.tensor(masked)).any() and not masked:
            rollout["valid"] = torch.ones(rollout.batch_size, dtype=torch.bool, device=rollout.device)
        return rollout

    def take_back(self, before: Snapshot) -> list[dict[str, Tensor]]:
        """Undoes an update that gave weights that are not finite; returns what is left of its metrics, which is nothing."""
        before.restore()
        end = self.hparams.nonfinite == "stop"
        self.trainer.should_stop = self.trainer.should_stop or end
        said = f"A weight was NaN or infinite after {self.env_steps + self.data.frames_per_rollout} environment steps"
        warnings.warn(f"{said}: the update is taken back, and the run {'ends' if end else 'goes on'}.", stacklevel=2)
        return []

    def steps_per_second(self) -> float:
        """Returns the environment steps of all ranks a second, since the start of this fit."""
        return (self.env_steps - self._steps_before) / (time.perf_counter() - self._started)

    def log_values(self, values: dict[str, Any]) -> None:
        """Sends the mean of scalars over the ranks to every logger, at the number of environment steps, and to the callbacks.

        ``self.log`` does the same in 3.5 ms an iteration, 7 % of CartPole's, and keeps the x axis in float32.
        """
        if self.rollouts_done % CHECK_RANKS_EVERY == 0:
            collectives.require_same(self.state_dict(), self.env_steps)
        scalars = [torch.as_tensor(value, dtype=torch.float32, device=self.device) for value in values.values()]
        together = collectives.gather(torch.stack(scalars)).mean(dim=0).cpu()  # one transfer
        for name, value in zip(values, together.tolist(), strict=True):
            if name.startswith("losses/") and not math.isfinite(value) and name != "losses/explained_variance":
                raise NonFiniteError(
                    f"{name} is {value} after {self.env_steps} steps: set model.norm_reward to true if rewards are"
                    " large, otherwise lower model.learning_rate."
                )
        step = torch.tensor(self.env_steps)  # ModelCheckpoint names files by it
        self.trainer.callback_metrics.update(zip(values, together, strict=True), step=step)
        if self.rollouts_done % self.trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            for logger in self.loggers:
                logger.log_metrics(dict(zip(values, together.tolist(), strict=True)), step=self.env_steps)
        if time.perf_counter() - self._logs_saved > SAVE_LOGS_EVERY:
            self._logs_saved = time.perf_counter()
            for logger in self.loggers:
                logger.save()  # CSVLogger's own rule, (step + 1) % 100 == 0, does not fit environment steps
