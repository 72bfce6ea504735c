"""Base LightningModule: lazy agent construction, evaluation, prediction and checkpoints."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.fabric.utilities.data import AttributeDict
from lightning.pytorch.trainer.states import TrainerFn
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.data import TensorSpec

from ppo_lightning import private
from ppo_lightning.algorithms.checks import preflight
from ppo_lightning.algorithms.prediction import Predictor
from ppo_lightning.algorithms.run_log import RunLog
from ppo_lightning.callbacks.standard import missing_callbacks
from ppo_lightning.checkpoints import run
from ppo_lightning.checkpoints.agent import agent_to_plain, check_same_agent
from ppo_lightning.checkpoints.file import acting_part, read_checkpoint, run_folder
from ppo_lightning.checkpoints.io import use_checked_files
from ppo_lightning.checkpoints.settings import module_from_checkpoint
from ppo_lightning.envs.specs import Specs
from ppo_lightning.errors import ConfigError
from ppo_lightning.export.pretrained import Pretrained, require_trained
from ppo_lightning.models.actor import Actor, evaluating
from ppo_lightning.models.makers import make_agent, require_agent_maker
from ppo_lightning.models.normalizers import RewardScaler
from ppo_lightning.rollouts.datamodule import DEFAULT_NUM_ENVS, DEFAULT_NUM_STEPS, RolloutDataModule
from ppo_lightning.rollouts.evaluation import pooled_statistics
from ppo_lightning.rollouts.progress import Progress
from ppo_lightning.utils import collectives
from ppo_lightning.utils.arguments import NamedArguments
from ppo_lightning.utils.seeding import initial_weights


class AgentModule(NamedArguments, Pretrained, L.LightningModule):  # type: ignore[misc]
    """Base LightningModule: lazy agent construction, evaluation, prediction and checkpoints.

    ``fit``, ``validate`` and ``test`` build the agent from the specs of the data module.
    ``load_from_checkpoint(path)`` and ``predict`` build it from the checkpoint, without an environment. A
    subclass adds ``training_step`` and hyperparameters, and calls ``run_log.log`` once per rollout. The
    loader of the data module counts environment steps and episodes into ``progress``.

    Args:
        agent: Makes the agent from the specs of observations and actions.

    Example:
        >>> module = PPO.load_from_checkpoint("runs/cartpole/version_0/checkpoints/last.ckpt")
        >>> action = module.predict(observation)  # as `env.step` returned it
    """

    agent_kind: ClassVar[type[Actor]] = Actor  # what the algorithm trains
    default_num_envs: ClassVar[int] = DEFAULT_NUM_ENVS  # for `data.num_envs`
    default_num_steps: ClassVar[int] = DEFAULT_NUM_STEPS  # for `data.num_steps`
    splits_sequences: ClassVar[bool] = False  # whether minibatches are whole environments
    agent: Actor
    hparams: AttributeDict
    reward_scaler: RewardScaler | None

    def __init__(self, agent: Callable[[TensorSpec, TensorSpec], Actor]) -> None:
        require_agent_maker(agent, self.agent_kind)
        super().__init__()
        self.make_agent = agent
        self.agent = None  # type: ignore[assignment]
        self.recipe: dict[str, Any] = {}  # the agent as plain data, from which a checkpoint rebuilds it
        self.observation_spec: TensorSpec | None = None  # of one environment, from training
        self.reward_scaler = None
        self.progress = Progress()
        self.episode_returns = self.progress.episode_returns
        self.episode_lengths = self.progress.episode_lengths
        self.run_log = RunLog(self)
        self.loaded: tuple[dict[str, Any], Path] = {}, Path()  # checkpoint, folder of its run, until `fit`
        self._predictor: Predictor | None = None

    @property
    def data(self) -> RolloutDataModule:
        """The data module, which supplies rollouts."""
        return self.trainer.datamodule  # type: ignore[attr-defined]

    @property
    def fitting(self) -> bool:
        """Whether a Trainer runs ``fit``."""
        return private.has_trainer(self) and self.trainer.state.fn == TrainerFn.FITTING

    @property
    def env_steps(self) -> int:
        """Environment steps of the run, of all ranks."""
        return self.progress.env_steps

    @property
    def rollouts_done(self) -> int:
        """Number of rollouts that training has received, including those before a resume."""
        return self.data.rollouts_done

    @property
    def mean_return(self) -> float | None:
        """Mean return of the last 100 training episodes, None before the first one."""
        return self.progress.mean_return

    # For algorithms

    def trainable_parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters that the optimizer updates. A variant adds those of its own networks."""
        return self.agent.parameters()

    def add_networks(self, specs: Specs) -> None:
        """Build the networks of a variant, whose parameters it adds to :meth:`trainable_parameters`."""

    def refusals(self) -> Iterator[str]:
        """Yield a sentence for each setting that the algorithm cannot train with, and for such an agent.

        :func:`~ppo_lightning.algorithms.checks.preflight` asks before a fit, when ``agent`` is None, and
        again when the agent exists.
        """
        yield from ()

    @property
    def steps_per_rollout(self) -> int | None:
        """Number of optimizer steps per iteration, or None if it varies."""
        return None

    def release(self) -> None:
        """Release what a run holds, also after an error. By default, this is nothing."""

    # Construction

    def configure_callbacks(self) -> list[L.Callback]:
        """Add the guards and, for ``fit``, its callbacks, unless the Trainer has one of that class."""
        trainer: Any = self.trainer
        private.fix_folders(trainer)
        preflight(trainer, self, trainer.datamodule)  # before Lightning's own checks
        return missing_callbacks(trainer.callbacks, self.fitting)

    def configure_model(self) -> None:
        """Build the agent for the data module's environments. ``predict`` builds it from the checkpoint."""
        use_checked_files(self.trainer)  # no run goes on without this hook
        if self.trainer.state.fn == TrainerFn.PREDICTING:
            return
        with torch.device("cpu"):
            specs = self.data.specs
        # Lightning's default device in this hook is the GPU, whose generator would draw other weights.
        with initial_weights(self.data.seed):
            is_new = self.observation_spec is None  # also after a refusal, which leaves an agent behind
            if is_new:
                self.agent = make_agent(self.make_agent, *specs, self.agent_kind)
                self.recipe = agent_to_plain(self.agent, *specs)
            check_same_agent(self.recipe, agent_to_plain(self.agent, *specs))
            preflight(self.trainer, self, self.data)
            if is_new:
                self.observation_spec = specs.observation
                self.add_networks(specs)
        if self.fitting:
            self.run_log = RunLog(self)
            self.loaded = {}, Path()

    # Checkpoints

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the counters of a checkpoint, and build its agent if there is none."""
        run.restore(self, checkpoint)

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
        # Without the weights, which the module has and a user may change.
        module.loaded = acting_part(checkpoint) | {"state_dict": {}}, run_folder(checkpoint_path)
        return module.to(map_location)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load weights and statistics, also those that come back from another process with their run."""
        return super().load_state_dict(run.receive(self, dict(state_dict)), *args, **kwargs)

    # Evaluation and prediction

    def validation_step(self, episodes: TensorDictBase, batch_idx: int) -> None:
        """Log statistics of the episodes of all ranks. ``episodes`` are those of this rank, [E]."""
        prefix = "test" if self.trainer.testing else "eval"
        results = pooled_statistics(prefix, episodes, self.data.factory.log_info)
        if self.fitting and results:  # none of an evaluation that was cut short
            self.progress.evaluated(results)
        # The results are equal on all ranks. Without `sync_dist`, Lightning warns that they might differ.
        self.log_dict(results, batch_size=1, sync_dist=True, sync_dist_group=collectives.cpu_group())

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
        require_trained(self)
        if self._predictor is None or self._predictor.recipe is not self.recipe:
            self._predictor = Predictor(self.recipe)
        with evaluating(self.agent):
            action, memory = self._predictor(self.agent, observation, deterministic, memory, first)
        return action if memory is None else (action, memory)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the most probable actions [B, ...] for rows of observations, for agents without a memory."""
        if self.agent is not None and self.agent.memory is not None:
            raise ConfigError(
                "The agent has a memory: call module.predict in a loop over the steps of an episode."
            )
        return self.predict(batch)
