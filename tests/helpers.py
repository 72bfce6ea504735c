"""Settings, recorders and processes that several test modules share."""

import contextlib
import functools
import importlib.util
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import lightning as L
import pytest
import torch
import yaml
from torch import nn

from ppo_lightning import PPO, MLPAgent, __main__

ROOT = Path(__file__).parents[1]

# Short runs. Few iterations: training amplifies differences of rounding.
REACH = {"env_id": "Reach-v0", "num_envs": 2, "num_steps": 32, "total_timesteps": 64 * 3, "eval_episodes": 1}
CARTPOLE = {"num_envs": 2, "num_steps": 32, "total_timesteps": 64 * 3}
MODEL = {"num_minibatches": 2, "update_epochs": 2, "anneal_clip_coef": True, "learning_rate": 1e-3}

RECIPE = str(ROOT / "configs/ppo/classic.yaml")

NO_DM_CONTROL = "dm_control needs labmaze, which has no wheels for Python 3.13 and newer"
NO_PROCGEN = "procgen-mirror has wheels for Python 3.11 and 3.12 on Linux only"
needs_dm_control = pytest.mark.skipif(importlib.util.find_spec("dm_control") is None, reason=NO_DM_CONTROL)


def weights(module):
    """Return a copy of all parameters that the optimizer updates, as one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in module.trainable_parameters()])


def short(recipe=None, rollouts=2, **sizes):
    """Return flags that run a recipe, or the defaults, for some rollouts, at most of the given sizes."""
    data = {"num_envs": 4, "num_steps": 128, "env_id": "CartPole-v1"}
    if recipe is not None:
        data |= yaml.safe_load(Path(recipe).read_text())["data"]
    sizes = {"num_envs": data["num_envs"], "num_steps": min(data["num_steps"], 512)} | sizes
    path, flags = Path(recipe or ""), []
    family = path.stem if path.parent.name == "ppo" else path.parent.name
    if "ALE/" in str(data["env_id"]) or str(data["env_id"]).startswith("atari/"):
        sizes |= {"num_steps": 16, "num_envs": min(sizes["num_envs"], 16)}  # one has 128
        flags += ["--data.env_kwargs.max_episode_frames", "400"]
    if family.startswith("simple_spread"):
        sizes["num_steps"] = 30
    if data.get("backend") == "procgen":
        sizes = {"num_envs": 16, "num_steps": 8}
    if ".make_" in str(data["env_id"]):  # tests/envs/test_jax_env.py and test_isaac_lab.py have these
        sizes = {"num_envs": 64, "num_steps": 16}
        flags += ["--data.env_id", "tests.envs.simulators.StandIn", "--trainer.accelerator", "cpu"]
    long = ("mujoco", "halfcheetah_fast", "dm_control", "rpo")
    of_family = {
        "selfplay": ["--model.rating_games", "2"],
        "rnd": ["--model.num_iterations_obs_norm_init", "1"],
        "ppg": ["--model.n_iteration", "2"],
        **{name: ["--model.learning_starts", "10"] for name in ("dqn", "c51", "ddpg", "td3", "sac")},
        **{name: ["--data.env_kwargs.max_episode_steps", "50"] for name in long},
    }
    sizes["total_timesteps"] = rollouts * sizes["num_envs"] * sizes["num_steps"]
    flags += [part for name, size in sizes.items() for part in (f"--data.{name}", str(size))]
    return ["--data.eval_episodes", "1", *flags, *of_family.get(family, [])]


def require_same(one, other):
    """Require equal weights, statistics, metrics and counters of two runs, to the bit."""
    assert one.rollouts_done == other.rollouts_done == one.data.num_rollouts
    assert one.trainer.global_step == other.trainer.global_step
    for key, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[key]), key
    assert list(one.episode_returns) == list(other.episode_returns)
    expected, found = (dict(run.trainer.callback_metrics) for run in (one, other))
    # A resumed run lacks the metrics of phases and episodes that were over before.
    for key in expected.keys() & found.keys() - {"charts/SPS"}:
        # Without variance of the targets, the explained variance is NaN.
        assert expected[key] == found[key] or (expected[key].isnan() and found[key].isnan()), key


class SaveAfter(L.Callback):
    """Callback that saves after a number of rollouts, as ``ModelCheckpoint`` and ``Preemption`` do."""

    def __init__(self, path, rollouts):
        self.path, self.rollouts = path, rollouts

    def on_train_batch_end(self, trainer, pl_module, *args):
        if pl_module.rollouts_done == self.rollouts:
            trainer.save_checkpoint(self.path)


class Dropout(MLPAgent):
    """Agent whose evaluation differs from its action selection."""

    def __init__(self, observation_spec, action_spec):
        super().__init__(observation_spec, action_spec)
        self.save_hyperparameters(ignore=["observation_spec", "action_spec"])
        self.actor_body = nn.Sequential(self.actor_body, nn.Dropout(0.5))
        self.actor_body.out_features = 64

    def array_policy(self):
        return super(MLPAgent, self).array_policy()


class Recorder:
    """Mixin of PPO that keeps rollouts with advantages, minibatches, metrics and learning rates of a run."""

    def on_train_start(self):
        super().on_train_start()
        self.rollouts, self.epochs, self.metrics, self.learning_rates = [], [], [], []
        self.initial = weights(self)

    @property
    def moved(self):
        """The largest change of a weight in this run."""
        return (weights(self) - self.initial).abs().max().item()

    def training_step(self, rollout, batch_idx):
        self.learning_rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        super().training_step(rollout, batch_idx)

    def advantages(self, rollout):
        rollout = super().advantages(rollout)
        self.rollouts.append(rollout.clone())
        return rollout

    def minibatches(self, rollout):
        self.epochs.append([])
        for minibatch in super().minibatches(rollout):
            self.epochs[-1].append(minibatch)
            yield minibatch

    def update(self, minibatches):
        metrics = super().update(minibatches)
        self.metrics += metrics
        return metrics


class RecordedPPO(Recorder, PPO):
    """PPO that keeps what it did."""


# Ranks of data parallel training

DISTRIBUTED = ROOT / "tests/stories/distributed_run.py"


@functools.cache
def forks():
    """Return the context of a server that imports everything once, which takes five seconds of CPU time."""
    context = multiprocessing.get_context("forkserver")
    imports = ["tests.stories.distributed_run", "ppo_lightning.commands.cli", "torch.utils.tensorboard"]
    context.set_forkserver_preload(imports)
    return context


class Forked:
    """A process that is forked after the imports and runs a function in a folder. It has Popen's methods."""

    def __init__(self, folder, function, *args, **environment):
        name = f"{folder.name}.{time.monotonic_ns()}"
        self.output = [folder.with_name(f"{name}.{stream}") for stream in ("out", "err")]
        for path in self.output:
            path.touch()
        arguments = folder, self.output, environment, function, *args
        self.process = forks().Process(target=run_in, args=arguments)
        self.process.start()
        self.pid, self.kill = self.process.pid, self.process.kill

    def poll(self):
        return self.process.exitcode

    def send_signal(self, number):
        os.kill(self.pid, number)

    def wait_for(self, text, timeout=300):
        """Wait until the process has printed a text; return what the process has printed."""
        end = time.monotonic() + timeout
        while text not in (said := self.output[0].read_text()):
            assert self.poll() is None and time.monotonic() < end, (said, self.output[1].read_text())
            time.sleep(0.02)
        return said

    def communicate(self, timeout=None):
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self.process), timeout)
        self.returncode = self.process.exitcode
        return [path.read_text() for path in self.output]


def run_in(folder, output, environment, function, *args):
    """Run a function in a folder, in a session of its own, with its output in files."""
    os.setsid()
    for stream, path in enumerate(output, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), stream)
    sys.stdout.reconfigure(line_buffering=True)
    os.environ |= {"PYTHONPATH": str(ROOT)} | environment  # of ranks that Lightning starts
    os.chdir(folder)
    try:
        function(*args)
    except KeyboardInterrupt:  # as Python ends a script
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


def command_line(*args):
    """Run ``python -m ppo_lightning``; Lightning starts other ranks by that name."""
    sys.modules["__main__"].__spec__ = importlib.util.find_spec("ppo_lightning.__main__")
    sys.argv = ["ppo-lightning", *args]
    __main__.main()


def script(path, *args):
    """Run ``python PATH``; Lightning starts other ranks by that name."""
    sys.argv = [str(path), *args]
    sys.path.insert(0, str(Path(path).resolve().parent))
    runpy.run_path(str(path), run_name="__main__")


def settings_of(folder, devices, options):
    """Make the folder of a run, and return its settings."""
    folder.mkdir(exist_ok=True)
    return {"folder": str(folder), "devices": devices} | options


def start(folder, devices, launcher=(), **options):
    """Start a run as a script, whose ``devices`` processes Lightning or the launcher starts."""
    return launch([*launcher, DISTRIBUTED], settings_of(folder, devices, options))


def launch(command, settings):
    """Start a script with its settings as argument: forked, or by the launcher that stands before it."""
    *launcher, path = command
    if not launcher:
        return Forked(Path(settings["folder"]), script, ROOT / path, json.dumps(settings))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *launcher, str(path), json.dumps(settings)]
    return subprocess.Popen(command, env=env, start_new_session=True, stderr=subprocess.PIPE, text=True)


def finish(process, timeout=120):
    """Return the exit code and standard error; kill all ranks if one of them hangs."""
    try:
        _, errors = process.communicate(timeout=timeout)
        return process.returncode, errors
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def run(folder, devices, **options):
    """Train in ``devices`` forked processes and return the result of each rank."""
    from tests.stories.distributed_run import train_forked  # which imports this module

    settings = settings_of(folder, devices, options)
    master_port = port()
    ranks = [
        forks().Process(target=train_forked, args=(settings, rank, master_port)) for rank in range(devices)
    ]
    end = time.monotonic() + 300  # compilation on a busy machine
    try:
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(max(0, end - time.monotonic()))
        errors = [path.read_text() for path in sorted(folder.glob("errors*.txt"))]
        assert [rank.exitcode for rank in ranks] == [0] * devices, "\n".join(errors)
    finally:
        for rank in ranks:
            rank.kill()
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(devices)]


def port():
    """Return a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def difference(ranks, one, when="weights"):
    """Return the weight difference of several ranks to one rank, relative to the change by training."""
    return ((ranks[0][when] - one[when]).abs().max() / (one[when] - one["initial"]).abs().max()).item()


# Processes of the command line

RUN = [
    *("--config", RECIPE),
    *("--data.eval_episodes", "1"),
    *("--data.rollouts_per_epoch", "3"),
]


def left_of(group):
    """Return the living processes of a process group: number -> command."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, process_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(process_group) == group and state != "Z":
                found[int(stat.parent.name)] = (stat.parent / "cmdline").read_text()
    return found


def environment_of(number):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{number}/environ").read_text()
    return ""


class Runs:
    """Processes of the command line in one folder: forked, or started by Lightning's launcher for ranks."""

    def __init__(self, folder):
        self.folder, self.processes = folder, []
        folder.mkdir()

    def start(self, *flags, total=15_360, devices=1, **environment):
        flags = ["fit", *RUN, "--data.total_timesteps", str(total), *flags]
        if devices == 1:
            process = Forked(self.folder, command_line, *flags, **environment)
        else:
            command = [sys.executable, "-m", "ppo_lightning", *flags, "--trainer.devices", str(devices)]
            env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | environment
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            command += ["--trainer.strategy", "ddp"]
            process = subprocess.Popen(command, cwd=self.folder, env=env, start_new_session=True, **pipes)
        self.processes.append(process)
        return process

    def wait(self, process, timeout=120):
        """Return exit code and output; require that no process of the run is left."""
        out, errors = process.communicate(timeout=timeout)
        end = time.time() + 10
        while left_of(process.pid) and time.time() < end:
            time.sleep(0.1)
        assert not left_of(process.pid)
        return process.returncode, out + errors

    def newest(self):
        """Return the newest checkpoint; None if there is none."""
        paths = self.folder.glob("runs/*/*/checkpoints/*.ckpt")
        return max(paths, key=lambda path: path.stat().st_mtime, default=None)

    def final(self, steps):
        """Load the newest checkpoint and require that it was saved after ``steps`` steps."""
        checkpoint = torch.load(self.newest(), weights_only=True)
        assert checkpoint["env_steps"] == steps
        return checkpoint


def wait_for_a_checkpoint(runs, process, timeout=120, after=None):
    """Wait until the run has saved a checkpoint ``after`` that one; return whether the process still runs."""
    end = time.time() + timeout
    while time.time() < end and process.poll() is None and runs.newest() == after:
        time.sleep(0.02)
    return process.poll() is None


def require_same_end(whole, broken, steps):
    """Resume the broken run, train the whole one, and require the same weights, to the bit."""
    code, said = broken.wait(broken.start("--auto_resume", total=steps))
    assert code == 0 and "each environment resumes its episode, to the bit" in said, said
    code, said = whole.wait(whole.start(total=steps))
    assert code == 0, said
    one, other = (run.final(steps)["state_dict"] for run in (whole, broken))
    assert all(torch.equal(value, other[key]) for key, value in one.items())
