"""Base LightningModule: lazy agent construction, evaluation, prediction and checkpoints."""

import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.data import AttributeDict
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.data import TensorSpec

from ppo_lightning import __version__, private
from ppo_lightning.algorithms.prediction import Predictor
from ppo_lightning.algorithms.run_log import RunLog
from ppo_lightning.callbacks.guards import EqualRanksGuard, LoggerGuard, NonFiniteGuard, RolloutGuard
from ppo_lightning.callbacks.preemption import Preemption
from ppo_lightning.callbacks.summary import RunSummary
from ppo_lightning.callbacks.supported import check_callbacks, check_trainer
from ppo_lightning.callbacks.threads import Threads
from ppo_lightning.checkpoints.agent import (
    LOCAL,
    VERSION,
    agent_to_plain,
    changed_settings,
    check_same_agent,
    check_same_state,
    known_class,
    trained_agent,
)
from ppo_lightning.checkpoints.file import acting_part, read_checkpoint, run_folder
from ppo_lightning.checkpoints.io import CheckedCheckpointIO
from ppo_lightning.checkpoints.settings import MAKERS, module_from_checkpoint
from ppo_lightning.envs.specs import Specs
from ppo_lightning.errors import ConfigError, NonFiniteError
from ppo_lightning.models import ActorCritic
from ppo_lightning.models.agent import make_agent, require_agent_maker
from ppo_lightning.models.foreign import ForeignAgent
from ppo_lightning.models.normalizers import RewardScaler
from ppo_lightning.rollouts.datamodule import RolloutDataModule
from ppo_lightning.rollouts.evaluation import episode_statistics, info_means
from ppo_lightning.spaces.specs import mask_columns, spec_from_plain
from ppo_lightning.utils import collectives
from ppo_lightning.utils.arguments import NamedArguments
from ppo_lightning.utils.finite import first_nonfinite
from ppo_lightning.utils.overrides import warn_of_lost_hooks
from ppo_lightning.utils.seeding import one_thread

RETURNED = "returned"  # key in the state that a started process returns to its parent, beside the weights


class AgentModule(NamedArguments, L.LightningModule):
    """Base LightningModule: lazy agent construction, evaluation, prediction and checkpoints.

    ``fit``, ``validate`` and ``test`` build the agent from the specs of the data module.
    ``load_from_checkpoint(path)`` and ``predict`` build it from the checkpoint, without an environment. A
    subclass adds ``training_step`` and hyperparameters. It calls ``run_log.log`` once per rollout; the steps
    and episodes of the rollout are counted by :meth:`begin_iteration`.

    Args:
        agent: Makes the agent from the specs of observations and actions.

    Example:
        >>> module = PPO.load_from_checkpoint("runs/cartpole/version_0/checkpoints/last.ckpt")
        >>> action = module.predict(observation)  # as `env.step` returned it
    """

    reads_features: ClassVar[bool] = False  # whether the algorithm builds on the features of an agent
    takes_memory: ClassVar[bool] = False  # whether minibatches are whole sequences
    takes_turns: ClassVar[bool] = True  # whether targets change sides where the next move is the opponent's
    precisions: ClassVar[tuple[str, ...]] = ("32-true", "bf16-mixed")  # of the Trainer
    agent: ActorCritic
    hparams: AttributeDict
    reward_scaler: RewardScaler | None

    def __init__(self, agent: Callable[[TensorSpec, TensorSpec], ActorCritic]) -> None:
        require_agent_maker(agent)
        super().__init__()
        self.make_agent = agent
        self.agent = None  # type: ignore[assignment]
        self.reward_scaler = None
        self.env_steps = 0  # of all ranks
        self.extra_steps = 0  # those outside of rollouts
        self.episode_returns: deque[float] = deque(maxlen=100)
        self.episode_lengths: deque[float] = deque(maxlen=100)
        self._recipe: dict[str, Any] = {}  # the agent as plain data, from which a checkpoint rebuilds it
        self.loaded: tuple[dict[str, Any], Path] = {}, Path()  # checkpoint, folder of its run, until `fit`
        self.evaluated_at: int | None = None  # environment steps of the last evaluation in a fit
        self._predictor: Predictor | None = None
        self._returns_agent = False  # whether `state_dict` describes the agent for the parent process

    @property
    def data(self) -> RolloutDataModule:
        """The data module, which supplies rollouts."""
        data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, RolloutDataModule):
            raise ConfigError(
                f"{type(self).__name__} needs rollouts: call"
                " trainer.fit(model, datamodule=RolloutDataModule(...))."
            )
        return data

    @property
    def _class_path(self) -> str:
        return f"{type(self).__module__}.{type(self).__qualname__}"

    @property
    def fitting(self) -> bool:
        """Whether a Trainer runs ``fit``."""
        return private.has_trainer(self) and self.trainer.state.fn == TrainerFn.FITTING

    def trainable_parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters that the optimizer updates. A variant adds those of its own networks."""
        return self.agent.parameters()

    # Construction

    def configure_callbacks(self) -> list[L.Callback]:
        """Add the guards and, for ``fit``, its callbacks, unless the Trainer has one of that class.

        Unsupported options and callbacks of the Trainer are refused here, before Lightning's own checks.
        """
        check_trainer(self.trainer, self)
        kinds: list[type[L.Callback]] = [LoggerGuard]
        if self.fitting:
            check_callbacks(self.trainer, self.steps_per_rollout)
            kinds += [Threads, Preemption, RunSummary, RolloutGuard, NonFiniteGuard, EqualRanksGuard]
        present = self.trainer.callbacks  # type: ignore[attr-defined]
        return [kind() for kind in kinds if not any(isinstance(callback, kind) for callback in present)]

    def setup(self, stage: str) -> None:
        """Prepare the Trainer, and reset the counters for a new run.

        Raises:
            ConfigError: The module is compiled as a whole.
        """
        if private.is_compiled(self):
            raise ConfigError(
                "torch.compile(model) would compile Lightning's hooks, too: pass compile=True instead."
            )
        if type(self.trainer.strategy.checkpoint_io) is TorchCheckpointIO:  # the Trainer has no plugin
            self.trainer.strategy.checkpoint_io = CheckedCheckpointIO()
        if stage != "fit":
            return
        warn_of_lost_hooks(self.data)
        private.replace_defaults(self.trainer)
        if self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            private.remove_step_limit(self.trainer)
        # A checkpoint is loaded later. Until then, `trainer.ckpt_path` is that of an earlier call.
        self.env_steps = self.extra_steps = 0
        self.episode_returns.clear()
        self.episode_lengths.clear()
        self.evaluated_at = None
        self.loaded = {}, Path()

    def configure_model(self) -> None:
        """Build the agent for the data module's environments. ``predict`` builds it from the checkpoint."""
        data = getattr(self.trainer, "datamodule", None) if private.has_trainer(self) else None
        if not isinstance(data, RolloutDataModule) or self.trainer.state.fn == TrainerFn.PREDICTING:
            return
        # Lightning's default device in this hook is the GPU, whose generator would draw other weights.
        with torch.device("cpu"), one_thread():
            if self.agent is None:
                self.agent = make_agent(self.make_agent, *data.specs)
                self._recipe = agent_to_plain(self.agent, *data.specs)
                if name := first_nonfinite({"state_dict": self.agent.state_dict()}):
                    raise ConfigError(
                        f"{type(self.agent).__name__} has the infinite buffer or weight {name}, and"
                        " checkpoints take finite ones: register a constant with persistent=False."
                    )
                self.check_agent()
                self.add_networks(data.specs)
            else:
                check_same_agent(self._recipe, agent_to_plain(self.agent, *data.specs))
                self.check_agent()

    def check_agent(self) -> None:
        """Raise a ConfigError if the algorithm cannot train the agent: by default, one with a memory."""
        if self.reads_features and not self.agent.has_features:
            raise ConfigError(
                f"{type(self).__name__} builds on the features of an agent, and model.actor and model.critic"
                " show none: use ppo_lightning.PPO, or write an ActorCritic for model.agent."
            )
        if self.agent.memory is not None and not self.takes_memory:
            raise ConfigError(
                f"model.agent has a memory, which {type(self).__name__} cannot train: use"
                " ppo_lightning.RecurrentPPO, or set model.agent.memory to null."
            )
        if type(self.agent).normalize is not ActorCritic.normalize:
            raise ConfigError(
                f"{type(self.agent).__name__} overrides normalize, which rollouts do not call: change the"
                " observations in the forward of a body, or in data.transforms."
            )
        mask = mask_columns(self.data.specs.observation)
        if mask and self.agent.mask is None and not isinstance(self.agent, ForeignAgent):
            raise ConfigError(
                f"model.agent is {type(self.agent).__name__}, which would ignore the action_mask of the"
                " observations: pass mask=mask_columns(observation_spec), of ppo_lightning.spaces.specs, to"
                " ActorCritic.__init__."
            )
        if self.fitting and not self.takes_turns and getattr(self.data.env, "turn_based", False):
            raise ConfigError(
                f"data.env_id is {self.data.env_id!r}, whose players take turns, and the targets of"
                f" {type(self).__name__} do not change sides: use ppo_lightning.SelfPlay."
            )

    def add_networks(self, specs: Specs) -> None:
        """Build the networks of a variant, whose parameters it adds to :meth:`trainable_parameters`."""

    def _rebuild(self, checkpoint: dict[str, Any]) -> None:
        """Build the agent that a checkpoint describes, and the networks of the variant."""
        given = getattr(self.make_agent, "keywords", {})
        settings = {key: [*x] if isinstance(x, tuple) else x for key, x in given.items()}
        plain = {key: x for key, x in settings.items() if isinstance(x, str | int | float | list)}
        if changes := changed_settings("model.agent", checkpoint["agent"]["init_args"], plain):
            raise ConfigError(f"{changes}: a checkpoint has the agent of its run, leave the setting out.")
        self.agent = trained_agent(checkpoint, given).train()
        self._recipe = checkpoint["agent"]
        specs = (spec_from_plain(self._recipe[name]) for name in ("observation_spec", "action_spec"))
        self.add_networks(Specs(*specs))

    # Checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add agent, seed, counters and evaluation, as plain types.

        Raises:
            NonFiniteError: The weights, the statistics or the optimizer's state are not finite.
        """
        if name := first_nonfinite(checkpoint):
            raise NonFiniteError(f"No checkpoint was written: {name} is not finite.")
        checkpoint[VERSION] = __version__
        checkpoint["agent"] = self._recipe
        hyperparameters = checkpoint.setdefault("hyper_parameters", {})
        # A subclass may have saved what makes the agent, such as a class or a network, which no reader loads.
        for name in MAKERS:
            hyperparameters.pop(name, None)
        if type(self).__module__ != "__main__" and LOCAL not in self._class_path:
            hyperparameters.setdefault("_class_path", self._class_path)  # as the command line does
        checkpoint["seed"] = self.data.seed
        # Results of the last evaluation, if it evaluated the current weights
        metrics = self.trainer.callback_metrics if self.evaluated_at == self.env_steps else {}
        results = {key.removeprefix("eval/"): float(x) for key, x in metrics.items() if "eval/" in key}
        checkpoint["evaluation"] = results or None
        checkpoint["env_steps"] = self.env_steps
        checkpoint["extra_steps"] = self.extra_steps
        checkpoint["frames_per_rollout"] = self.data.frames_per_rollout
        checkpoint["episode_returns"] = list(self.episode_returns)
        checkpoint["episode_lengths"] = list(self.episode_lengths)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the entries of :meth:`on_save_checkpoint`, and build the agent if there is none.

        Raises:
            ConfigError: The checkpoint does not fit: its spaces, its agent, its settings or, to resume a run,
                its environment or its size of rollouts. Or it holds weights only.
        """
        if self.agent is None:
            self._rebuild(checkpoint)
        check_same_agent(saved=checkpoint["agent"], current=self._recipe)
        settings = checkpoint.get("hyper_parameters", {})
        changes = changed_settings("model", settings, self.hparams)
        writer = known_class(settings.get("_class_path"), AgentModule) or type(self)
        if not isinstance(self, writer):
            changes = f"The checkpoint is of {writer.__name__} and the module of {type(self).__name__}"
        check_same_state(saved=checkpoint["state_dict"], current=self.state_dict(), changes=changes)
        if self.fitting:
            if "optimizer_states" not in checkpoint:
                raise ConfigError(
                    "The checkpoint (ckpt_path) cannot resume a run, because it has no optimizer_states: give"
                    " a checkpoint that was saved without save_weights_only."
                )
            self.data.require_same_rollouts(checkpoint)
            self.data.seed = seed = checkpoint["seed"]  # the random numbers continue
            if (given := os.environ.get("PL_GLOBAL_SEED")) not in (None, str(seed)):
                rank_zero_warn(f"The resumed run keeps its seed, {seed}: {given} has no effect.")
        self.loaded = {}, Path()
        self.env_steps = checkpoint["env_steps"]
        self.extra_steps = checkpoint.get("extra_steps", 0)
        self.episode_returns.clear()
        self.episode_returns.extend(checkpoint["episode_returns"])
        self.episode_lengths.clear()
        self.episode_lengths.extend(checkpoint.get("episode_lengths", ()))  # since version 0.2.0

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls, checkpoint_path: Any, map_location: Any = "cpu", **kwargs: Any
    ) -> Any:
        """Build the module of a checkpoint, with its agent, without executing code from the file.

        Lightning's own method parses the settings as a command line, which imports the named classes.

        Args:
            checkpoint_path: A path, a URL (``s3://...``), or an open file.
            map_location: Device of the module.
            **kwargs: Hyperparameters that override those of the checkpoint. ``weights_only`` is always true.

        Raises:
            ConfigError: The file cannot be read, or the settings in it do not fit the module's class.
        """
        checkpoint = read_checkpoint(checkpoint_path)
        module = module_from_checkpoint(checkpoint, cls, kwargs)
        module.on_load_checkpoint(checkpoint)
        module.load_state_dict(checkpoint["state_dict"])
        module.loaded = acting_part(checkpoint) | {"state_dict": {}}, run_folder(checkpoint_path)
        return module.to(map_location)

    # Hugging Face Hub

    @classmethod
    def from_pretrained(cls, source: str | Path, **kwargs: Any) -> Any:
        """Load the module from a folder of :meth:`save_pretrained`, or from ``"OWNER/NAME"`` on the Hub.

        Or load a bundled agent, for example ``"best/halfcheetah"`` (``zoo/agents.csv`` lists them).
        Only the checkpoint is read, by :meth:`load_from_checkpoint`, which gets the other arguments.
        """
        from ppo_lightning.export.hub import find_model  # few runs need it

        return cls.load_from_checkpoint(find_model(source), **kwargs)

    def save_pretrained(self, folder: str | Path, repo_id: str = "OWNER/NAME") -> None:
        """Write the agent and a model card, with what the folder of its run has: video, curve, settings."""
        _ = self.observation_spec  # requires a trained agent
        checkpoint, run = self.loaded
        checkpoint = checkpoint | {"state_dict": self.state_dict()}
        if not self.loaded[0]:  # the Trainer has trained it, or read its checkpoint
            # Without a logger, `log_dir` is a folder that others may use.
            run = Path((self.trainer.loggers and self.trainer.log_dir) or folder)
            checkpoint["pytorch-lightning_version"] = L.__version__
            checkpoint["hyper_parameters"] = dict(self.hparams)
            checkpoint["datamodule_hyper_parameters"] = dict(self.data.hparams)
            AgentModule.on_save_checkpoint(self, checkpoint)
            if not self.trainer.is_global_zero:
                return
        from ppo_lightning.export.hub import write_folder

        write_folder(checkpoint, Path(folder), run, repo_id, self._class_path)

    def push_to_hub(self, repo_id: str) -> str:
        """Upload the folder of :meth:`save_pretrained` to ``"OWNER/NAME"``, and return its address."""
        from ppo_lightning.export.hub import upload

        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, repo_id)
            return upload(Path(folder), repo_id)

    @property
    def observation_spec(self) -> TensorSpec:
        """Spec of one environment's observations, from training."""
        if self.agent is None:
            name = type(self).__name__
            raise ConfigError(f"There is no trained agent: call fit, or {name}.load_from_checkpoint(path).")
        return spec_from_plain(self._recipe["observation_spec"])

    def to_onnx(self, file_path: str | Path) -> Path:  # type: ignore[override]
        """Export the agent for any batch size, see :func:`ppo_lightning.export.onnx.to_onnx`."""
        from ppo_lightning.export.onnx import to_onnx

        return to_onnx(self.agent, self.observation_spec, file_path)

    # Training

    @property
    def steps_per_rollout(self) -> int | None:
        """Number of optimizer steps per iteration, or None if it varies."""
        return None

    @property
    def minibatch_size(self) -> int:
        """Number of steps of a minibatch on this rank, which a subclass defines."""
        raise NotImplementedError

    @property
    def microbatch_size(self) -> int:
        """Maximum number of rows of a minibatch that are differentiated at once. By default, all."""
        return self.minibatch_size

    @property
    def rollouts_done(self) -> int:
        """Number of rollouts that training has received, including those before a resume."""
        return (self.env_steps - self.extra_steps) // self.data.frames_per_rollout

    @property
    def mean_return(self) -> float | None:
        """Mean return of the last 100 training episodes, None before the first one."""
        returns = self.episode_returns
        return sum(returns) / len(returns) if returns else None

    @property
    def tolerance(self) -> float:
        """Largest accepted difference between two ways to compute the same numbers in the run's precision."""
        if self.trainer.precision != "32-true":
            return 0.1
        return 1e-3 if self.device.type == "cpu" else 1e-2

    # The data module calls these methods, because users override Lightning's hooks without `super()`.

    def begin_run(self) -> None:
        """Start the clock, and check the callbacks again: environments may have invalid steps."""
        check_callbacks(self.trainer, self.steps_per_rollout)
        self.run_log = RunLog(self)

    def begin_iteration(self, rollout: TensorDictBase) -> None:
        """Count the steps and episodes of a rollout [N, T]. The run stops after the last rollout."""
        self.run_log.count(rollout)
        if self.rollouts_done >= self.data.num_rollouts:
            self.trainer.should_stop = True  # for any `max_epochs`; Lightning validates before it stops

    def on_train_start(self) -> None:
        """Stop a resumed run that is already complete."""
        if self.rollouts_done >= self.data.num_rollouts:
            self.trainer.should_stop = True

    def on_train_end(self) -> None:
        """Release what the run held."""
        self.release()

    def release(self) -> None:
        """Release what a run holds, also after an error. By default, this is nothing."""

    def on_fit_end(self) -> None:
        """Explain why a run ended early, and name infos that never had a number.

        Raises:
            ConfigError: A limit of the Trainer ended a resumed run before its first rollout.
        """
        left = (self.data.num_rollouts - self.rollouts_done) * self.data.frames_per_rollout
        if self.env_steps == self.run_log.steps_before and left > 0:
            counts = {"max_epochs": self.trainer.current_epoch, "max_steps": self.trainer.global_step}
            ended = (name for name, count in counts.items() if 0 <= getattr(self.trainer, name) <= count)
            limit = next(ended, "max_time, of all attempts together,")
            raise ConfigError(f"trainer.{limit} ended the run with {left} steps left: raise it to continue.")
        if left > 0 and 0 <= self.trainer.max_steps <= self.trainer.global_step:
            total = self.env_steps + left
            rank_zero_warn(
                f"trainer.max_steps ({self.trainer.max_steps}) counts"
                f" {'batches' if self.steps_per_rollout == 1 else 'optimizer steps'}: it ended the run after"
                f" {self.env_steps} of {total} environment steps."
            )
        if names := self.run_log.missing_infos:
            rank_zero_warn(f"data.log_info: no episode ended with a number called {' or '.join(names)}.")

    # Evaluation and prediction

    def on_validation_start(self) -> None:
        """Let a pending rollout finish: both would use PyTorch's generators and the watchdog of steps."""
        self.data.wait()

    def validation_step(self, episodes: TensorDictBase, batch_idx: int) -> None:
        """Log statistics of the episodes of all ranks. ``episodes`` are those of this rank, [E]."""
        if self.fitting:
            self.evaluated_at = self.env_steps
        names = self.data.factory.log_info
        no_info = episodes["episode_reward"].new_full((len(episodes), len(names)), torch.nan)
        episodes.setdefault("info", no_info)  # the same keys on all ranks
        played = {key: collectives.concatenate(value) for key, value in episodes.items()}
        prefix = "test" if self.trainer.testing else "eval"
        results = episode_statistics(prefix, played)  # on the CPU: MPS has no float64
        results |= info_means(prefix, played["info"], names)
        # The results are equal on all ranks. Without `sync_dist`, Lightning warns that they might differ.
        self.log_dict(
            results,
            batch_size=len(played["episode_reward"]),
            sync_dist=True,
            sync_dist_group=collectives.cpu_group(),
        )

    def test_step(self, episodes: TensorDictBase, batch_idx: int) -> None:
        """Log statistics as :meth:`validation_step`."""
        self.validation_step(episodes, batch_idx)

    def forward(self, observation: Tensor) -> Tensor:
        """Return the most probable actions [B, ...], within their bounds, for raw observations [B, ...].

        ``torch.export.export(module, (observation,))`` exports this method, including the statistics.
        """
        return self.agent.mode(observation)

    @torch.no_grad()
    def predict(
        self, observation: Any, deterministic: bool = True, memory: Tensor | None = None, first: Any = None
    ) -> Any:
        """Return the action for an observation, as ``env.step`` takes it.

        Args:
            observation: One observation or a batch, as the environment returns it. An action mask outside of
                the observation joins it: ``{"observation": observation, "action_mask": mask}``. A tensor has
                rows, as rollouts do, [B, ...].
            deterministic: Return the most probable action. False: sample it with PyTorch's generator.
            memory: For agents with a memory: the hidden state [B, M] of the last call, None at the start.
            first: For agents with a memory: True where an episode begins, one flag or [B].

        Returns:
            The action within its bounds. A batch has a leading axis. Tensors give tensors. An agent with a
            memory returns ``(action, memory)``.

        Raises:
            ConfigError: There is no trained agent, or the observation has other entries, another shape or
                another type than in training, or is non-finite.
        """
        if self.agent is None:
            raise ConfigError(
                "predict needs a trained agent: give ckpt_path, or use"
                f" {type(self).__name__}.load_from_checkpoint(path)."
            )
        if self._predictor is None or self._predictor.recipe is not self._recipe:
            self._predictor = Predictor(self._recipe)
        action, memory = self._predictor(self.agent, observation, deterministic, memory, first)
        return action if memory is None else (action, memory)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the most probable actions [B, ...] for rows of observations, for agents without a memory."""
        if self.agent is not None and self.agent.memory is not None:
            raise ConfigError(
                "The agent has a memory: call module.predict in a loop over the steps of an episode."
            )
        return self.predict(batch)

    # ddp_spawn and ddp_notebook: Lightning pickles the module for the processes that it starts. From the
    # processes it returns the weights only.

    def teardown(self, stage: str) -> None:
        """In a process that Lightning started, let :meth:`state_dict` describe the agent."""
        self._returns_agent = stage == "fit" and private.starts_processes(self.trainer)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return weights and statistics."""
        state = super().state_dict(*args, **kwargs)
        if self._returns_agent:
            state[RETURNED] = [self._recipe, self.env_steps, list(self.episode_returns)]
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load weights and statistics, after building the agent that another process described."""
        state = dict(state_dict)
        if RETURNED in state:
            recipe, self.env_steps, returns = state.pop(RETURNED)
            self._rebuild({"agent": recipe, "state_dict": state})
            self.episode_returns.clear()
            self.episode_returns.extend(returns)
            self.loaded = {}, Path()
        return super().load_state_dict(state, *args, **kwargs)
