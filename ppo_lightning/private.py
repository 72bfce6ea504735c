"""Private names of other libraries that have no public equivalent; a test finds them elsewhere."""

import functools
import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch._dynamo import mark_static_address as mark_static_address
from torch._dynamo.exc import FailOnRecompileLimitHit as FailOnRecompileLimitHit
from torch._dynamo.exc import Unsupported
from torch._guards import CompileContext as CompileContext
from torch._higher_order_ops.scan import scan as scan_in_graph  # noqa: F401
from torch._inductor.exc import GPUTooOldForTriton, InductorError, TritonMissing
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map

if TYPE_CHECKING:  # worker processes import this file, and the import of Lightning takes seconds
    from lightning import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

CHECKED_VERSIONS = ("2.6.0", "2.6.1", "2.6.6")  # of Lightning, with which the tests were run
COMPILER_ERRORS = InductorError, TritonMissing, GPUTooOldForTriton, Unsupported
# PyTorch stores no scan unless told to. The key of a stored graph includes the step of the scan (tested).
STORE_SCAN = {"unsafe_marked_cacheable_functions": {"torch.ops.higher_order.scan": torch.__version__}}
ONNX_REGISTRATION = "torch.onnx._internal.exporter._registration"  # logger
WRAPPER_ATTRIBUTES = {"_elapsed_steps", "_has_reset"}  # counters and flags of Gymnasium's wrappers
INTERACTIVE = hasattr(sys, "ps1")  # a notebook or a Python prompt
OF_EPISODES = re.compile(r"charts/((avg_)?episodic_(return|length)|success_rate)$")  # training metrics
LOG_EVERY_N_STEPS, MAX_EPOCHS, NUM_SANITY_VAL_STEPS = 50, 1000, 2  # defaults of the Trainer

InferenceMode: Any = torch._C._InferenceMode  # takes a fifth of the time of torch.inference_mode
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_div_ = torch._foreach_div_


class EnvSteps(Tensor):
    """Number of environment steps, which Lightning makes an int32 for the names of checkpoints."""

    def int(self) -> Tensor:
        """Return all bits."""
        return self.as_subclass(Tensor)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:  # files and other processes get a plain tensor
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


def trace_gradients() -> None:
    """Let graphs contain ``torch.autograd.grad``, so that a loss and its Adam step are one graph."""
    torch._dynamo.config.trace_autograd_ops = True
    torch._dynamo.config.optimize_ddp = False  # it cuts a graph in which DDP's hooks never run


def given_hyperparameters() -> dict[str, Any]:
    """Return the arguments as the command line read them, while it makes an object; otherwise nothing."""
    from lightning.pytorch.core.mixins.hparams_mixin import _given_hyperparameters

    return _given_hyperparameters.get() or {}


def set_hyperparameters(module: "LightningModule", values: Mapping[str, Any]) -> None:
    """Set hyperparameters, also as loggers write them.

    ``save_hyperparameters`` compares the values with all arguments of the constructor, also with arrays.
    """
    initial: Any = module._hparams_initial
    initial.update(values)
    module.hparams.update(values)


def has_trainer(module: "LightningModule") -> bool:
    """Return whether the module has a Trainer; ``module.trainer`` raises an error without one."""
    return module._trainer is not None


def is_compiled(module: "LightningModule") -> bool:
    """Return whether ``torch.compile`` was applied to the whole module."""
    return module._compiler_ctx is not None


def averages_gradients(trainer: "Trainer") -> bool:
    """Return whether the strategy is DDP, which averages gradients, without a communication hook."""
    model = trainer.model
    return isinstance(model, DistributedDataParallel) and not model._comm_hooks


@contextmanager
def counted_step(optimizer: Any) -> Iterator[None]:
    """Count an optimizer step in ``trainer.global_step`` without calling ``LightningOptimizer.step``."""
    optimizer._on_before_step()
    optimizer.optimizer._opt_called = True  # otherwise the first step of a schedule warns
    yield
    optimizer._on_after_step()


def publish_metrics(trainer: "Trainer", metrics: Mapping[str, Tensor], shown: Mapping[str, str]) -> None:
    """Publish metrics to callbacks, and text to bars: ``self.log`` takes 3.5 ms (7 % of an iteration)."""
    trainer.callback_metrics.update(metrics)
    trainer._logger_connector._progress_bar_metrics.update(shown)  # type: ignore[arg-type]


def replace_defaults(trainer: "Trainer") -> None:
    """Replace defaults of the Trainer that were made for many short batches.

    Every rollout is logged, ``data.total_timesteps`` ends the run, no episodes are played before it, and a
    monitor of training episodes waits for the first one. The Trainer does not tell whether a value was given:
    a user's 50, 1000 or 2 counts as the default.
    """
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, WeightAveraging

    if trainer.log_every_n_steps in (0, LOG_EVERY_N_STEPS):  # type: ignore[attr-defined]  # 0: barebones
        trainer.log_every_n_steps = 1  # type: ignore[attr-defined]
    if trainer.max_epochs == MAX_EPOCHS:
        trainer.fit_loop.max_epochs = -1
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        trainer.fit_loop.epoch_loop.max_steps = -1  # whole iterations
    if trainer.num_sanity_val_steps == NUM_SANITY_VAL_STEPS:
        trainer.num_sanity_val_steps = 0
    if (trainer.check_val_every_n_epoch or 1) > 1:  # the last epochs may have no validation, which saves
        checkpoint: Any
        for checkpoint in trainer.checkpoint_callbacks:
            if checkpoint.monitor is None and checkpoint._save_on_train_epoch_end is None:
                checkpoint._save_on_train_epoch_end = True
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, WeightAveraging):
            # An average has the newest buffers: means of statistics, indices and choices are none of these.
            callback._use_buffers = False
        if OF_EPISODES.match(str(getattr(callback, "monitor", None))):  # not before an episode has ended
            if isinstance(callback, EarlyStopping):
                callback.strict = False
            if isinstance(callback, ModelCheckpoint):
                waiting = functools.partial(_save_if_known, callback)
                callback._save_topk_checkpoint = waiting  # type: ignore[method-assign]


def _save_if_known(checkpoint: Any, trainer: "Trainer", metrics: Mapping[str, Tensor]) -> None:
    if checkpoint.monitor in metrics:
        type(checkpoint)._save_topk_checkpoint(checkpoint, trainer, metrics)


def fix_folders(trainer: "Trainer") -> None:
    """Make the folders of a run absolute, with ``~``, before an environment changes the working directory."""
    for owner in (trainer, *trainer.loggers):
        for name in ("_default_root_dir", "_save_dir", "_root_dir"):
            folder = vars(owner).get(name)
            if isinstance(folder, str) and "://" not in folder:
                setattr(owner, name, os.path.abspath(os.path.expanduser(folder)))


def requeue_signal(trainer: "Trainer") -> int | None:
    """Return the signal at which Lightning requeues the job, None without SLURM and auto-requeue."""
    from lightning.fabric.plugins.environments import SLURMEnvironment

    cluster = trainer._accelerator_connector.cluster_environment
    if isinstance(cluster, SLURMEnvironment) and cluster.auto_requeue:
        return cluster.requeue_signal or signal.SIGUSR1
    return None


def save_and_requeue(trainer: "Trainer", number: int) -> None:
    """Save the checkpoint that Lightning finds after a requeue, and call ``scontrol``. A collective."""
    trainer._signal_connector._slurm_sigusr_handler_fn(number, None)  # type: ignore[arg-type]


def leave_evaluation(trainer: "Trainer") -> None:
    """Restore the modes of layers after an evaluation that did not end, and let the next fit evaluate again.

    Lightning restores them at the end, and takes the evaluation before for the one that did not end.
    """
    if trainer.evaluating or trainer.sanity_checking:
        trainer._evaluation_loop._module_mode.restore(trainer.lightning_module)
    trainer.fit_loop.epoch_loop.val_loop._has_run = False


def postpone_evaluation(trainer: "Trainer") -> None:
    """Let a checkpoint be one from the middle of an evaluation: a run that ends here resumes with all of it.

    This is called after an evaluation without results, or after a batch, which an evaluation may follow.
    """
    loop = trainer.fit_loop.epoch_loop
    progress = loop.val_loop.batch_progress
    if trainer.validating:
        count: Any
        for count in (progress.current, progress.total):
            count.processed -= 1
            count.completed -= 1
    elif loop._should_check_val_fx(trainer.fit_loop._data_fetcher):  # type: ignore[arg-type]
        loop.batch_progress.increment_completed()
        progress.increment_ready()
        progress.increment_started()


def begins_with_evaluation(trainer: "Trainer") -> bool:
    """Return whether a resumed run begins with the evaluation that a signal has prevented."""
    return trainer.fit_loop.epoch_loop.val_loop.restarted_mid_evaluation


def has_evaluated(checkpoint: Mapping[str, Any]) -> bool:
    """Return whether no evaluation was due, or under way, when the checkpoint was saved."""
    total: dict[str, int] = checkpoint["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"]["total"]
    return total["processed"] == total["started"]


def end_interrupted(trainer: "Trainer", end: BaseException) -> NoReturn:
    """Clean up after SIGINT as Lightning does, and raise another end, which a notebook shows in one line."""
    end._render_traceback_ = lambda: [f"{type(end).__name__}: {end}"]  # type: ignore[attr-defined]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Lightning ignores it from here on
    for logger in trainer.loggers:
        logger.finalize("failed")
    trainer._teardown()
    trainer.state.stage = None
    raise end from None


def set_sigterm_handler(trainer: "Trainer", handler: Callable[..., Any]) -> None:
    """Replace the handler that Lightning registers for SIGTERM before training."""
    trainer._signal_connector._sigterm_notifier_fn = handler  # type: ignore[method-assign]


def saves_by_time(checkpoint: "ModelCheckpoint") -> bool:
    """Return whether the callback has a ``train_time_interval``."""
    return checkpoint._train_time_interval is not None


def steps_between_saves(checkpoint: "ModelCheckpoint") -> int:
    """Return ``every_n_train_steps`` of the callback."""
    return checkpoint._every_n_train_steps


def keep_flags(cli: type) -> type:
    """Keep hyperparameters of a checkpoint from overriding flags (pytorch-lightning#20801 and #21116)."""
    cli._parse_ckpt_path = lambda self: None  # type: ignore[attr-defined]
    return cli


def convert_integers(convert: Callable[[Any], Any]) -> None:
    """Convert values of options of jsonargparse that are integers, in flags and YAML."""
    from jsonargparse._typehints import ActionTypeHint

    check_type = ActionTypeHint._check_type

    @functools.wraps(check_type)
    def check_integer(option: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if value == "None":  # the null of a setting of the agent, which jsonargparse writes as text
            value = None
        integer = convert(value)
        if integer is not value:
            kinds = set(re.findall(r"\w+", str(option._typehint)))
            value = integer if "int" in kinds and not kinds & {"float", "str"} else value
        return check_type(option, value, *args, **kwargs)

    ActionTypeHint._check_type = check_integer


def keep_texts() -> None:
    """Let jsonargparse write a text where a class is possible, as in the keys of TorchRL's transforms."""
    import yaml
    from jsonargparse import _typehints

    as_path = _typehints.serialize_as_import_path
    _typehints.serialize_as_import_path = lambda value: value if isinstance(value, str) else as_path(value)
    # Enums of texts, as the default of Lightning's Timer.
    yaml.SafeDumper.add_multi_representer(str, lambda dumper, text: dumper.represent_str(str.__str__(text)))


def find_short_names(paths: Mapping[str, str]) -> None:
    """Let jsonargparse find classes by short names, in lower case, before anything has imported them."""
    from jsonargparse import _typehints

    resolve = _typehints.resolve_class_path_by_name
    _typehints.resolve_class_path_by_name = lambda cls, name: resolve(cls, paths.get(name.lower(), name))


def forget_writer(logger: Any) -> None:
    """Let a ``TensorBoardLogger`` open a new file."""
    logger._experiment = None


def timeout_of(group: Any) -> Any:
    """Return the timeout of a process group, None for the default."""
    options = group._get_backend(group._device_types[0]).options
    return getattr(options, "_timeout", None)


def prepare_close(games: Any) -> None:
    """Let cffi take its lock for the function that closes Procgen's environments.

    The lock is taken at the first use of a function. If that were in gym3's ``__del__``, the garbage
    collector could run it while the constructor of another environment holds the lock, and deadlock.
    """
    _ = games._c_lib.libenv_close


def copies_in(envs: Any) -> list[Any]:
    """Return the environments in a ``SerialEnv``, which makes them at its first use."""
    if envs.is_closed:
        envs.start()
    return envs._envs


def wrapped(env: Any) -> Any:
    """Return the environment of another library in TorchRL's wrapper of it."""
    return env._env


@contextmanager
def may_have_children() -> Iterator[None]:
    """Let this process start others, also if it is a daemon, as those of a ``multiprocessing.Pool`` are."""
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    is_daemon = config.get("daemon", False)
    config["daemon"] = False
    try:
        yield
    finally:
        config["daemon"] = is_daemon
