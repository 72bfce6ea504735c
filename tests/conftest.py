import contextlib
import functools
import os
import re
import signal
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")
# g++ compiles a graph in 8 instead of 35 seconds of CPU time with -O0; 0 takes PyTorch's own flags.
os.environ.setdefault("TORCHINDUCTOR_DEBUG_COMPILE", "1")

import lightning as L
import pytest
import torch
from lightning.fabric.utilities import registry

import tests.environments  # noqa: F401  (registers them)
from ppo_lightning import PPO, RolloutDataModule, make_env
from ppo_lightning.algorithms.defaults import CLEANRL, SHORT_RUNS
from ppo_lightning.rollouts.datamodule import DEFAULT_NUM_ENVS
from tests.helpers import Runs, SaveAfter, require_same

torch.set_num_threads(1)
# Most tests have rollouts of a few steps, which few minibatches can split.
OWN_NUM_ENVS, PPO.default_num_envs, PPO.defaults = PPO.default_num_envs, DEFAULT_NUM_ENVS, CLEANRL
# Each Trainer looks for callbacks in the metadata of all installed packages: a sixth of a short run.
registry.entry_points = functools.cache(registry.entry_points)
with contextlib.suppress(ImportError):  # the extra "export"
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    # Each export to ONNX parses the source of all operators: half of its time.
    ONNXRegistry.from_torchlib = staticmethod(functools.cache(ONNXRegistry.from_torchlib))


def pytest_addoption(parser):
    parser.addoption("--skip-missing", action="store_true", help="skip tests whose package is not installed")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Skip a test that ends because a package is not installed, with ``--skip-missing`` only.

    ``make quick`` has no extras. Everywhere else a missing package is a failure.
    """
    try:
        return (yield)
    except Exception as error:
        cause = error
        while cause is not None and not isinstance(cause, ModuleNotFoundError):
            cause = cause.__cause__ or cause.__context__
        if cause is None or not item.config.getoption("--skip-missing"):
            raise
        if str(cause.name).partition(".")[0] in ("ppo_lightning", "tests"):  # a fault of ours
            raise
        pytest.skip(f"the package {cause.name} is not installed")


def trainers_in(folder):
    """Return a function that makes quiet Trainers in a folder."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options = {"accelerator": "cpu", "enable_checkpointing": False, "limit_val_batches": 0} | quiet
    return lambda **own: L.Trainer(**options | {"default_root_dir": folder} | own)


def train(make_trainer, data=None, model=None, seed=1, ppo=PPO, ckpt_path=None, **options):
    L.seed_everything(seed, verbose=False)
    module, datamodule = ppo(**model or {}), RolloutDataModule(**data or {})
    make_trainer(**options).fit(module, datamodule, ckpt_path=ckpt_path)
    return module


@pytest.fixture
def own_defaults(monkeypatch):
    """Give PPO the defaults that users get."""
    monkeypatch.setattr(PPO, "defaults", SHORT_RUNS)
    monkeypatch.setattr(PPO, "default_num_envs", OWN_NUM_ENVS)


@pytest.fixture
def make_trainer(tmp_path):
    """Return a function that makes quiet Trainers in a folder of the test."""
    return trainers_in(tmp_path)


@pytest.fixture
def fit(make_trainer):
    """Return a function that trains a module and returns it.

    ``fit({data options}, {model options}, seed=1, **trainer options)``.
    """
    return functools.partial(train, make_trainer)


@pytest.fixture(scope="module")
def fit_once(tmp_path_factory):
    """Return the function of ``fit`` for a run that several tests of a module read."""
    return functools.partial(train, trainers_in(tmp_path_factory.mktemp("run")))


@pytest.fixture
def fit_and_resume(fit, tmp_path):
    """Return a function that trains a run and resumes it, and requires the same end of both, to the bit.

    ``fit_and_resume(rollouts, {data options}, {model options}, **options of fit)``. The checkpoint after
    ``rollouts`` rollouts is ``middle.ckpt``.
    """

    def run(rollouts, data=None, model=None, **options):
        path = tmp_path / "middle.ckpt"
        whole = fit(data, model, callbacks=[SaveAfter(path, rollouts)], **options)
        resumed = fit(data, model, ckpt_path=path, **options)
        require_same(whole, resumed)
        return whole, resumed

    return run


@pytest.fixture
def runs(tmp_path):
    """Return a function that makes a folder for runs in processes, which end with the test."""
    made = []

    def make(name):
        made.append(Runs(tmp_path / name))
        return made[-1]

    yield make
    for folder_runs in made:
        for process in folder_runs.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def env():
    """Return ``make_env``; the fixture closes the environments after the test."""
    made = []

    def make(*args, **kwargs):
        made.append(make_env(*args, **kwargs))
        return made[-1]

    yield make
    for environment in made:
        environment.close()


@pytest.fixture
def run_cli(tmp_path, monkeypatch, capsys):
    """Return a function that runs the command line in a folder of the test: exit code, output and errors."""
    from ppo_lightning.commands import cli  # few tests need it

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ppo-lightning"])

    def run(*args):
        code = 0
        capsys.readouterr()
        try:
            cli.main([str(arg) for arg in args])
        except SystemExit as end:
            code = end.code or 0
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def output_of(run_cli):
    """Return a function that runs a command, which must succeed, and returns its output."""

    def run(*args):
        code, output, errors = run_cli(*args)
        assert code == 0, errors
        return output

    return run


@pytest.fixture
def refusal_of(run_cli):
    """Return a function that runs a command, which must end with code 2 and one sentence: the sentence."""

    def run(*args):
        code, _, errors = run_cli(*args)
        assert code == 2
        *others, sentence = errors.strip().splitlines()
        assert re.match(r"(ppo-lightning \w+: )?error: ", sentence)  # argparse names the command
        assert not any("Traceback" in line or "error: " in line for line in others), errors
        return sentence

    return run
