"""Environments and collectors behind Lightning's data interface."""

import copy
import functools
import math
import pkgutil
import re
import signal
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import gymnasium
import lightning as L
import numpy as np
import torch
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.trainer.states import TrainerFn
from tensordict import TensorDictBase
from torchrl.envs import EnvBase, Transform

from ppo_lightning import private
from ppo_lightning.checkpoints.file import read_checkpoint
from ppo_lightning.checkpoints.settings import data_settings, require_known
from ppo_lightning.envs.batched import BatchedEnv, set_attribute, untransformed
from ppo_lightning.envs.factory import SUCCESS, Backend, EnvFactory, Specs, require_maker, specs_of
from ppo_lightning.envs.state import from_plain, is_plain, to_columns, to_plain, to_rows
from ppo_lightning.errors import ConfigError, first_line
from ppo_lightning.rollouts.base import Collector
from ppo_lightning.rollouts.evaluation import STEPS_AT_ONCE, EvaluationLoader
from ppo_lightning.rollouts.make_collector import make_collector
from ppo_lightning.rollouts.overlap import OverlappedCollector
from ppo_lightning.utils import collectives
from ppo_lightning.utils.arguments import NamedArguments, Range, check_arguments
from ppo_lightning.utils.overrides import warn_of_lost_hooks
from ppo_lightning.utils.seeding import Shard, derive_seed, seed_globally

EPOCHS = 20  # of a run, by default
EVAL_EPISODES, FEWEST_EPISODES = 10, 2  # of an evaluation, by default
UNKNOWN_TIME_LIMIT = 1000  # steps; that of most tasks of MuJoCo and dm_control
IMPORT_PATH = re.compile(r"\w+(\.[\w<>]+)+")  # no id of an environment looks like this


class RolloutLoader:
    """Loader of a run's rollouts, one epoch after the other. Episodes continue from one to the next.

    The length keeps Lightning from prefetching, which would collect rollout t + 1 with the policy before
    update t. The last epoch may be shorter: the run stops after its last rollout. The profiler records
    ``collect``: the collection of a rollout, or the wait for it. ``begin_iteration`` gets each rollout.
    """

    def __init__(
        self,
        collector: Collector | OverlappedCollector,
        rollouts_per_epoch: int,
        profiler: Profiler,
        begin_iteration: Callable[[TensorDictBase], None],
    ) -> None:
        self.profiler = profiler
        self.begin_iteration = begin_iteration
        self.collector = collector
        self._rollouts = iter(collector)
        self._length = min(rollouts_per_epoch, len(collector))

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[TensorDictBase]:
        for _ in range(self._length):
            with self.profiler.profile("collect"):
                rollout = next(self._rollouts, None)
            if rollout is None:  # the end of the run
                return
            self.begin_iteration(rollout)
            yield rollout

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the data module saves the collector. Without this method, Lightning warns."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing, see :meth:`state_dict`."""


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
            Pendulum as functions of tensors, ``procgen`` Procgen, ``pettingzoo`` games of several players.
        num_envs: Number of environments, of all ranks together.
        num_steps: Steps of each environment in a rollout.
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
            ``is_success`` needs no name: it is ``success_rate``.

    Raises:
        ConfigError: A number is out of its range.

    Example:
        >>> data = RolloutDataModule("CartPole-v1", total_timesteps=500_000)
    """

    _trainer: Any

    def __init__(
        self,
        env_id: str | Callable[..., EnvBase | gymnasium.Env | gymnasium.vector.VectorEnv] = "CartPole-v1",
        backend: Backend = "gymnasium",
        num_envs: Annotated[int, Range(1)] = 4,
        num_steps: Annotated[int, Range(1)] = 128,
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
        check_arguments(RolloutDataModule.__init__, locals(), "data")
        require_maker(env_id)
        super().__init__()
        self.save_hyperparameters(ignore=["transforms"])  # whose lazy buffers cannot be copied
        self.hparams["transforms"] = private.given_hyperparameters().get("transforms", transforms)
        # A checkpoint holds plain data, as the command line gives it, and no objects.
        self.hparams.update({key: _plain(value) for key, value in self.hparams.items()})
        if isinstance(env_id, functools.partial):
            self.hparams["env_kwargs"] = _plain(env_id.keywords | (env_kwargs or {}))
        self.env_id = maker_of(env_id)
        if worker_backend != "process" and not num_workers:
            raise ConfigError(
                f"data.worker_backend is {worker_backend!r} and data.num_workers is 0: set the number of"
                " workers."
            )
        self.factory = EnvFactory(
            self.env_id,
            backend,
            env_kwargs or {},
            tuple(transforms or ()),
            num_workers,
            step_timeout,
            log_info=tuple(dict.fromkeys([SUCCESS, *(log_info or ())])),
            worker_backend=worker_backend,
        )
        self.backend = backend
        self.num_steps = num_steps
        self.total_timesteps = total_timesteps
        self.step_timeout = step_timeout
        self.overlap = overlap
        self.num_envs = num_envs
        self.frames_per_rollout = num_envs * num_steps  # of all ranks together
        if not self.num_rollouts:
            raise ConfigError(
                f"data.total_timesteps is {total_timesteps}, less than one rollout of num_envs * num_steps ="
                f" {self.frames_per_rollout}: raise it, or shorten the rollout."
            )
        self.seed = 1
        self.collector: Collector | OverlappedCollector | None = None
        self._env: EnvBase | None = None
        self._specs: Specs | None = None
        self._rollouts_per_epoch = rollouts_per_epoch
        self._attributes: dict[str, Any] = {}  # of the training environments, as plain types
        self._saved: dict[str, Any] = {}  # state of a resumed run's collector

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Build the data module of a checkpoint. Settings that name code must be among ``kwargs``."""
        data = data_settings(read_checkpoint(checkpoint_path), cls, given=kwargs)
        return cls(**data | kwargs)

    @property
    def trainer(self) -> Any:
        """The Trainer of the last run, set by Lightning.

        Raises:
            ConfigError: There was no run yet.
        """
        if self._trainer is None:
            raise ConfigError(
                "RolloutDataModule collects with the policy of a run: pass it to fit of a Trainer, whose"
                " callbacks get each rollout as the batch, or make the environments with make_env."
            )
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Any) -> None:
        self._trainer = trainer

    def setup(self, stage: str) -> None:
        """Share rank 0's seed, from which every rank draws the noise of all ranks."""
        self._close()  # after an interrupted run
        if self.trainer.state.fn == TrainerFn.FITTING:
            warn_of_lost_hooks(self.trainer.lightning_module)
        self._rollouts_per_epoch = self.hparams["rollouts_per_epoch"]
        self.seed = self.trainer.strategy.broadcast(torch.initial_seed() % 2**32)

    @property
    def num_rollouts(self) -> int:
        """Rollouts of the whole run."""
        return self.total_timesteps // self.frames_per_rollout  # a second fit may set other timesteps

    @property
    def rollouts_per_epoch(self) -> int:
        """Rollouts in an epoch of this fit."""
        if self._rollouts_per_epoch is None:
            epochs = EPOCHS
            if self.hparams["eval_episodes"] is None:
                epochs = min(epochs, max(self._affordable_episodes // FEWEST_EPISODES, 1))
            self._rollouts_per_epoch = math.ceil(self.num_rollouts / epochs)
        return self._rollouts_per_epoch

    @property
    def eval_episodes(self) -> int:
        """Episodes in each evaluation, of all ranks together."""
        episodes = self.hparams["eval_episodes"]
        if episodes is not None or self.trainer.state.fn != TrainerFn.FITTING:
            return episodes or EVAL_EPISODES
        epochs = math.ceil(self.num_rollouts / self.rollouts_per_epoch)
        return min(max(self._affordable_episodes // epochs, FEWEST_EPISODES), EVAL_EPISODES)

    @property
    def _affordable_episodes(self) -> int:
        """Episodes of evaluation that take a tenth of the steps of a fit, if all reach their time limit."""
        limit = self.factory.time_limit(self.env) or UNKNOWN_TIME_LIMIT
        steps = STEPS_AT_ONCE * math.ceil(limit / STEPS_AT_ONCE)
        return self.num_rollouts * self.frames_per_rollout // (10 * steps)

    @property
    def env(self) -> EnvBase:
        """This rank's training environments, created at first use.

        Raises:
            ConfigError: ``num_envs`` cannot be divided among the ranks.
        """
        if self._env is None:
            shard = self.shard
            self._env = self.factory.make(shard.count, shard.seed, shard.first)
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
        env = untransformed(self._env)
        for name, value in self._attributes.items() if env is not None else ():
            setter = env.set_attr if isinstance(env, BatchedEnv) else functools.partial(set_attribute, env)
            setter(name, from_plain(value))

    @property
    def has_weights(self) -> bool:
        """Whether the environments, once they exist, have steps that do not count."""
        return isinstance(self._env, BatchedEnv) and self._env.valid is not None

    @property
    def shard(self) -> Shard:
        """The environments of this rank.

        Raises:
            ConfigError: ``num_envs`` cannot be divided among the ranks.
        """
        count, rest = divmod(self.num_envs, self.trainer.world_size)
        if rest:
            raise ConfigError(
                f"data.num_envs is {self.num_envs} and must be a multiple of the"
                f" {self.trainer.world_size} ranks."
            )
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
            module.begin_run()
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
                step_timeout=self.step_timeout,
            )
            self.collector = OverlappedCollector(collector, *learned) if self.overlap else collector
            if self.trainer.ckpt_path is not None:
                self._resume()
            done, first = module.rollouts_done, self.shard.first
            if done or first:  # otherwise ranks and resumed runs would draw the same numbers again
                seed_globally(derive_seed(self.seed, "global", done * self.num_envs + first))
        return RolloutLoader(
            self.collector, self.rollouts_per_epoch, self.trainer.profiler, module.begin_iteration
        )

    def wait(self) -> None:
        """Wait until no thread steps the training environments or draws from PyTorch's generators."""
        if isinstance(self.collector, OverlappedCollector):
            self.collector.wait()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the collector, with the running episodes of all ranks. This is a collective."""
        state: dict[str, Any] = {"backend": self.backend, "rollouts_per_epoch": self._rollouts_per_epoch}
        state["attributes"] = dict(self._attributes)
        if self.collector is None:  # before or after a fit
            return state | {"collector": None}
        collector = self.collector.state_dict()
        collector["running"] = to_columns(collectives.chain(collector["running"]))
        return state | {"collector": collector}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the length of epochs, and the state for the collector, which does not exist yet."""
        self._saved = state_dict
        if self._rollouts_per_epoch is None:
            self._rollouts_per_epoch = state_dict.get("rollouts_per_epoch")

    def _resume(self) -> None:
        assert self.collector is not None
        saved = self._saved
        self._saved = {}
        # Without a state, of a checkpoint saved after a fit, the noise continues all the same.
        state: Any = saved.get("collector") or {"rollouts": self.trainer.lightning_module.rollouts_done}
        rows = to_rows(state.get("running", {})) if saved.get("backend") == self.backend else []
        outcome = "each environment resumes its episode, to the bit."
        if not (self.collector.can_resume and len(rows) == self.num_envs):
            rows = []
            outcome = "the environments start fresh episodes: the checkpoint does not hold the running ones."
        if not rows and state["rollouts"]:  # other episodes than those at the start of the run
            index = state["rollouts"] * self.num_envs + self.shard.first
            self.env.set_seed(derive_seed(self.seed, "train", index))
        self.collector.load_state_dict(state | {"running": rows[self.shard.rows]})
        self._attributes |= saved.get("attributes", {})
        self._set_attributes()
        if self.trainer.is_global_zero:
            print(f"Resumed from {self.trainer.ckpt_path}: {outcome}")

    def require_same_rollouts(self, checkpoint: dict[str, Any]) -> None:
        """Check that the run of a checkpoint can be resumed with these settings.

        Raises:
            ConfigError: The environment or the size of a rollout differs (the schedules count rollouts), or
                a setting of that run does not exist.
        """
        source = checkpoint["datamodule_hyper_parameters"]
        require_known(checkpoint, type(self))
        if source["backend"] == self.hparams["backend"] and source["env_id"] != self.hparams["env_id"]:
            raise ConfigError(
                f"The checkpoint (ckpt_path) is of a run on {source['env_id']} and data.env_id is"
                f" {self.hparams['env_id']}: keep it, or start a new run."
            )
        saved = checkpoint["frames_per_rollout"]
        if saved != self.frames_per_rollout:
            raise ConfigError(
                f"The checkpoint (ckpt_path) is of a run with data.num_envs * data.num_steps = {saved}, and"
                f" now it is {self.frames_per_rollout}: keep it, or start a new run."
            )

    def val_dataloader(self) -> EvaluationLoader:
        """Return a loader of one batch: this rank's share of ``eval_episodes`` whole episodes."""
        shares = np.array_split(np.arange(self.eval_episodes), self.trainer.world_size)
        mine = shares[self.trainer.global_rank]
        shard = Shard(self.seed, int(mine[0]) if len(mine) else 0, len(mine), self.eval_episodes)
        agent = self.trainer.lightning_module.agent
        return EvaluationLoader(self.factory, agent, shard, self.step_timeout, self.trainer.profiler)

    test_dataloader = val_dataloader

    def teardown(self, stage: str) -> None:
        """Close the training environments."""
        self._close()

    def on_exception(self, exception: BaseException) -> None:
        """Let the module release what it holds, and close the training environments, after an error."""
        self.trainer.lightning_module.release()
        self._close()
        # Lightning calls this hook after those of all callbacks, and then `sys.exit(1)` for an interrupt.
        if isinstance(exception, KeyboardInterrupt):
            end = exception if private.INTERACTIVE else SystemExit(128 + signal.SIGINT)
            private.end_interrupted(self.trainer, end)

    def _close(self) -> None:
        if self.collector is not None:
            self.collector.shutdown()
        if self._env is not None and not self._env.is_closed:
            self._env.close()
        self.collector = self._env = self._specs = None


def maker_of(env_id: Any) -> Any:
    """Import what an import path names, and return anything else as it is."""
    if not (isinstance(env_id, str) and IMPORT_PATH.fullmatch(env_id)):
        return env_id
    try:
        return pkgutil.resolve_name(env_id)
    except (ImportError, AttributeError, ValueError) as error:
        reason = "only the program that defined it has it" if "<" in env_id else first_line(error)
        give = "give data.env_id, an environment's id or a function's import path"
        raise ConfigError(f"data.env_id {env_id!r} cannot be imported ({reason}): {give}.") from error


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, functools.partial):  # with positional arguments, a name that cannot be imported
        return _plain(value.func) + (".<arguments>" if value.args else "")
    if callable(value) and type(value).__repr__ is object.__repr__:  # shows an address, which changes
        value = type(value)
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, np.generic):
        return value.item()
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)
