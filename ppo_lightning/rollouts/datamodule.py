"""Environments and collectors behind Lightning's data interface."""

import copy
import functools
import signal
from collections.abc import Callable
from typing import Annotated, Any, Literal

import gymnasium
import lightning as L
import numpy as np
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torchrl.envs import EnvBase, Transform

from ppo_lightning import private
from ppo_lightning.checkpoints.file import read_checkpoint
from ppo_lightning.checkpoints.settings import data_settings, facts_of
from ppo_lightning.envs.batched import BatchedEnv
from ppo_lightning.envs.contract import SUCCESS
from ppo_lightning.envs.factory import Backend, EnvFactory, Specs, require_maker, specs_of
from ppo_lightning.envs.state import from_plain, is_plain, to_columns, to_plain, to_rows
from ppo_lightning.envs.torchrl import AnyEnv, as_torchrl, set_everywhere
from ppo_lightning.errors import ConfigError
from ppo_lightning.rollouts.base import Collector
from ppo_lightning.rollouts.env_ids import maker_of, plain
from ppo_lightning.rollouts.evaluation import EvaluationLoader
from ppo_lightning.rollouts.loader import RolloutLoader
from ppo_lightning.rollouts.make_collector import make_collector
from ppo_lightning.rollouts.overlap import OverlappedCollector
from ppo_lightning.rollouts.plan import EVAL_EPISODES, Plan
from ppo_lightning.rollouts.progress import Progress
from ppo_lightning.utils import collectives
from ppo_lightning.utils.arguments import NamedArguments, Range, as_integer, check_arguments, copied
from ppo_lightning.utils.seeding import Shard, derive_seed, seed_globally

DEFAULT_NUM_ENVS, DEFAULT_NUM_STEPS = 4, 128  # of algorithms that do not state others


class RolloutDataModule(NamedArguments, L.LightningDataModule):
    """Data module: rollouts for training and whole episodes for evaluation.

    One rollout is one batch is one PPO iteration. The seed is that of ``lightning.seed_everything``.
    Environments start when a stage first needs them.

    Args:
        env_id: The environment's id as the backend spells it, or a function that makes a new Gymnasium or
            TorchRL environment, or a new ``gymnasium.vector.VectorEnv``, at each call (in YAML: its import
            path, as in ``my_package.make``, or a ``class_path``). The function gets ``num_envs``,
            ``seed``, ``seeds`` and ``first_env`` if it has such parameters.
        backend: ``gymnasium`` is best for a few cheap environments, ``envpool`` for many or slow ones.
            ``vectorized`` has Gymnasium's vectorized environments, such as CartPole, ``torch`` CartPole and
            Pendulum as functions of tensors, ``procgen`` Procgen, ``pettingzoo`` those of PettingZoo.
        num_envs: Number of environments, of all ranks together. None: 8 (off-policy 1, some variants 4).
        num_steps: Steps of each environment in a rollout. None: 128 (off-policy 10).
        total_timesteps: Environment steps of the whole run, of all ranks together; whole rollouts only.
        rollouts_per_epoch: Rollouts in an epoch, at whose end Lightning validates, saves and may stop early.
            None: a twentieth of the run; more if ``eval_episodes`` is None and evaluations of two episodes
            could take more than a tenth of the steps. A resumed run keeps the number.
        env_kwargs: Passed to the backend's own ``make``, for example ``max_episode_steps``, or to the
            function.
        transforms: TorchRL transforms to apply. Each step then takes longer, see ``TensorCollector``.
        eval_episodes: Episodes to play in each validation or test. None: 10, in ``fit`` only as many as take
            a tenth of the run's steps if all reach their time limit (1000 steps if unknown), at least 2. An
            environment of a fixed batch size [N] (TorchRL, VectorEnv) plays N on each rank.
        step_timeout: Seconds after which a hung environment step terminates the process, with a traceback;
            None: never. Time during which the process is stopped does not count. A step that holds the
            interpreter lock (GIL) terminates the process after ten times this time.
        num_workers: Number of workers of each rank that step the environments of ``backend: gymnasium``; 0:
            this process. The episodes do not depend on it.
        worker_backend: ``process``: workers are processes of this machine. ``ray``: they are actors on a Ray
            cluster, for slow simulators.
        overlap: Collect the next rollout in a thread during the update, with the weights before this update.
            See :class:`~ppo_lightning.rollouts.overlap.OverlappedCollector`.
        log_info: Names of numbers in the ``info`` at the end of an episode. Their means over the episodes of
            a rollout are the metrics ``charts/NAME``, over those of an evaluation ``eval/NAME``.
            ``is_success``, or ``success``, needs no name: it is ``success_rate``.

    Raises:
        ConfigError: A number is out of its range.

    Example:
        >>> data = RolloutDataModule("CartPole-v1", total_timesteps=100_000)
    """

    _trainer: Any

    def __init__(
        self,
        env_id: str | Callable[..., EnvBase | gymnasium.Env | gymnasium.vector.VectorEnv] = "CartPole-v1",
        backend: Backend = "gymnasium",
        num_envs: Annotated[int | None, Range(1)] = None,
        num_steps: Annotated[int | None, Range(1)] = None,
        total_timesteps: Annotated[int, Range(1)] = 500_000,
        rollouts_per_epoch: Annotated[int | None, Range(1)] = None,
        env_kwargs: dict[str, Any] | None = None,
        transforms: list[Transform] | None = None,
        eval_episodes: Annotated[int | None, Range(1)] = None,
        step_timeout: Annotated[float | None, Range(0.001, 1e9)] = 600.0,
        num_workers: Annotated[int, Range(0)] = 0,
        worker_backend: Literal["process", "ray"] = "process",
        overlap: bool = False,
        log_info: list[str] | None = None,
    ) -> None:
        total_timesteps = as_integer(total_timesteps)  # 1e6
        check_arguments(RolloutDataModule.__init__, locals(), "data")
        require_maker(env_id)
        super().__init__()
        arguments, env_kwargs = copied(env_kwargs or {}), plain(env_kwargs)
        self.save_hyperparameters(ignore=["transforms"])  # whose lazy buffers cannot be copied
        self.hparams["transforms"] = private.given_hyperparameters().get("transforms", transforms)
        # A checkpoint holds plain data, as the command line gives it, and no objects.
        self.hparams.update({key: plain(value) for key, value in self.hparams.items()})
        if isinstance(env_id, functools.partial):
            self.hparams["env_kwargs"] = plain(env_id.keywords | arguments)
        self.env_id = maker_of(env_id)
        self.factory = EnvFactory(
            self.env_id,
            backend,
            arguments,
            tuple(transforms or ()),
            num_workers,
            step_timeout,
            log_info=tuple(dict.fromkeys([SUCCESS, *(log_info or ())])),
            worker_backend=worker_backend,
        )
        self.backend = backend
        self.total_timesteps = total_timesteps
        self.overlap = overlap
        self.progress = Progress()  # that of the module, from the first stage on
        self._rollouts_per_epoch = rollouts_per_epoch
        self._time_limit: int | None = None  # of the environments, once they exist
        self.seed = 1
        self.collector: Collector | OverlappedCollector | None = None
        self._env: AnyEnv | None = None
        self._specs: Specs | None = None
        self._attributes: dict[str, Any] = {}  # of the training environments, as plain types
        self._saved: dict[str, Any] = {}  # state of a resumed run's collector

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Build the data module of a checkpoint. Settings that name code must be among ``kwargs``."""
        data = data_settings(read_checkpoint(checkpoint_path), cls, given=kwargs)
        return cls(**data | kwargs)

    @property
    def trainer(self) -> Any:
        """The Trainer of the last run, set by Lightning."""
        assert self._trainer is not None, (
            "RolloutDataModule collects with the policy of a run: pass it to fit"
        )
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Any) -> None:
        self._trainer = trainer

    def setup(self, stage: str) -> None:
        """Begin a run, and share rank 0's seed, from which all ranks draw all noise."""
        self._close()  # after an interrupted run
        self.progress = self.trainer.lightning_module.progress
        if stage == "fit":
            private.replace_defaults(self.trainer)
            self.progress.reset()
        self._rollouts_per_epoch = int(self.trainer.fast_dev_run) or self.hparams["rollouts_per_epoch"]
        self.seed = self.trainer.strategy.broadcast(torch.initial_seed() % 2**32)

    @property
    def num_envs(self) -> int:
        """Number of environments, of all ranks: as given, or as the algorithm has it."""
        module = getattr(self._trainer, "lightning_module", None)
        return self.hparams["num_envs"] or getattr(module, "default_num_envs", DEFAULT_NUM_ENVS)

    @property
    def num_steps(self) -> int:
        """Steps of each environment in a rollout: as given, or as the algorithm has it."""
        module = getattr(self._trainer, "lightning_module", None)
        return self.hparams["num_steps"] or getattr(module, "default_num_steps", DEFAULT_NUM_STEPS)

    @property
    def plan(self) -> Plan:
        """Numbers of the run that follow from the settings, which a second fit may change."""
        sizes = self.num_envs, self.num_steps, self.total_timesteps
        return Plan(*sizes, self._rollouts_per_epoch, self.hparams["eval_episodes"], self._time_limit)

    @property
    def num_rollouts(self) -> int:
        """Rollouts of the whole run."""
        return self.plan.num_rollouts

    @property
    def frames_per_rollout(self) -> int:
        """Environment steps of a rollout, of all ranks together."""
        return self.plan.frames_per_rollout

    @property
    def rollouts_done(self) -> int:
        """Number of rollouts that the run has handed out, including those before a resume."""
        return self.progress.rollout_steps // self.plan.frames_per_rollout

    @property
    def env(self) -> AnyEnv:
        """This rank's training environments, created at first use."""
        if self._env is None:
            shard = self.shard
            self._env = self.factory.make(shard.count, shard.seed, shard.first)
            self._time_limit = self.factory.time_limit(self._env)
            self._set_attributes()
        return self._env

    def set_attr(self, name: str, value: Any) -> None:
        """Set an attribute of all training environments from the next rollout on, also of a resumed run.

        The value is a number, text, array or tuple. It stays for the next ``fit``. The pending rollout of
        ``overlap`` has the former value, but the new one when a resumed run collects it again.
        """
        if not (isinstance(value, str) or is_plain(value)):
            raise ConfigError(f"data.set_attr({name!r}) got a {type(value).__name__}, not a number or array.")
        self._attributes[name] = to_plain(value)
        self.wait()
        self._set_attributes()

    def _set_attributes(self) -> None:
        for name, value in self._attributes.items() if self._env is not None else ():
            set_everywhere(self._env, name, from_plain(value))

    @property
    def has_weights(self) -> bool:
        """Whether the environments, once they exist, have steps that do not count."""
        return isinstance(self._env, BatchedEnv) and self._env.valid is not None

    @property
    def shard(self) -> Shard:
        """The environments of this rank."""
        count = self.num_envs // self.trainer.world_size
        return Shard(self.seed, self.trainer.global_rank * count, count, self.num_envs)

    @property
    def specs(self) -> Specs:
        """Specs of one environment: of the training environments in ``fit``, otherwise of a temporary one."""
        if self._specs is None:
            self._specs = specs_of(self.env) if self.trainer.training else self.factory.specs()
        return self._specs

    def train_dataloader(self) -> RolloutLoader:
        """Return the loader of the run, which collects each rollout on demand."""
        module = self.trainer.lightning_module
        if self.collector is None:  # otherwise Lightning reloads the loader in the middle of the run
            self.progress.start(facts_of(self))
            self._rollouts_per_epoch = self.plan.rollouts_per_epoch
            learned = module.agent, module.reward_scaler
            agent, reward_scaler = copy.deepcopy(learned) if self.overlap else learned
            collector = make_collector(
                self.env,
                agent,
                self.num_steps,
                self.num_rollouts,
                module.hparams.get("compile", False),
                shard=self.shard,
                reward_scaler=reward_scaler,
                precision=self.trainer.precision_plugin.forward_context,
                step_timeout=self.factory.step_timeout,
            )
            self.collector = OverlappedCollector(collector, *learned) if self.overlap else collector
            if self.trainer.ckpt_path is not None:
                self._resume()
            done, first = self.rollouts_done, self.shard.first
            if done or first:  # otherwise ranks and resumed runs would draw the same numbers again
                seed_globally(derive_seed(self.seed, "global", done * self.num_envs + first))
        num_infos = len(self.factory.log_info)
        return RolloutLoader(self.collector, self.plan, self.progress, self.trainer, num_infos)

    def wait(self) -> None:
        """Wait until no thread steps the training environments or draws from PyTorch's generators."""
        if isinstance(self.collector, OverlappedCollector):
            self.collector.wait()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the collector, with the running episodes of all ranks. This is a collective."""
        state: dict[str, Any] = {"backend": self.backend, "rollouts_per_epoch": self._rollouts_per_epoch}
        state["progress"] = self.progress.state_dict()
        state["attributes"] = dict(self._attributes)
        if self.collector is None:  # before or after a fit
            return state | {"collector": None}
        collector = self.collector.state_dict()
        collector["running"] = to_columns(collectives.chain(collector["running"]))
        return state | {"collector": collector}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the progress and the length of epochs, and keep the state for the collector to come."""
        self._saved = state_dict
        if "progress" in state_dict:  # otherwise the module has restored it, of an older version
            self.progress.load_state_dict(state_dict["progress"])
        if self._rollouts_per_epoch is None:
            self._rollouts_per_epoch = state_dict.get("rollouts_per_epoch")

    def _resume(self) -> None:
        assert self.collector is not None
        saved = self._saved
        self._saved = {}
        # Without a state, of a checkpoint saved after a fit, the noise continues all the same.
        state: Any = saved.get("collector") or {"rollouts": self.rollouts_done}
        rows = to_rows(state.get("running", {})) if saved.get("backend") == self.backend else []
        outcome = "each environment resumes its episode, to the bit."
        if not (self.collector.can_resume and len(rows) == self.num_envs):
            rows = []
            outcome = "the environments start fresh episodes: the checkpoint does not hold the running ones."
        if not rows and state["rollouts"]:  # other episodes than those at the start of the run
            index = state["rollouts"] * self.num_envs + self.shard.first
            as_torchrl(self.env).set_seed(derive_seed(self.seed, "train", index))
        self.collector.load_state_dict(state | {"running": rows[self.shard.rows]})
        self._attributes |= saved.get("attributes", {})
        self.trainer.callback_metrics.update(self.progress.metrics)
        self._set_attributes()
        if self.trainer.is_global_zero:
            print(f"Resumed from {self.trainer.ckpt_path}: {outcome}")

    def val_dataloader(self) -> EvaluationLoader:
        """Return a loader of one batch: this rank's share of ``eval_episodes`` whole episodes."""
        episodes = self.hparams["eval_episodes"] or EVAL_EPISODES
        if self.trainer.state.fn == TrainerFn.FITTING:
            episodes = self.plan.eval_episodes
        mine = np.array_split(np.arange(episodes), self.trainer.world_size)[self.trainer.global_rank]
        shard = Shard(self.seed, int(mine[0]) if len(mine) else 0, len(mine), episodes)
        agent = self.trainer.lightning_module.agent
        return EvaluationLoader(self.factory, agent, shard, self.trainer.profiler, self.wait)

    test_dataloader = val_dataloader

    def teardown(self, stage: str) -> None:
        """Close the training environments, and let the module release what it holds."""
        self._close()

    def on_exception(self, exception: BaseException) -> None:
        """Close the training environments, and let the module release what it holds, after an error."""
        self._close()
        private.leave_evaluation(self.trainer)
        # Lightning calls this hook after those of all callbacks, and then `sys.exit(1)` for an interrupt.
        if isinstance(exception, KeyboardInterrupt):
            end = exception if private.INTERACTIVE else SystemExit(128 + signal.SIGINT)
            private.end_interrupted(self.trainer, end)

    def _close(self) -> None:
        self.trainer.lightning_module.release()
        if self.collector is not None:
            self.collector.shutdown()
        if self._env is not None and not self._env.is_closed:
            self._env.close()
        self.collector = self._env = self._specs = None
