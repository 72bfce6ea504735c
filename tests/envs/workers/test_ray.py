"""Workers on a Ray cluster of two nodes: one episode for any placement, lost actors, nodes and drivers."""

import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from ppo_lightning import ConfigError
from ppo_lightning.envs.factory import EnvFactory
from tests.envs.workers.test_processes import DATA, MODEL, Paid, hang, lose_worker
from tests.helpers import ROOT, RUN, SaveAfter, require_same, require_same_end, wait_for_a_checkpoint

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
RAY = {"num_workers": 2, "worker_backend": "ray"}
# With Ray's own settings, 20 seconds pass until a dead node is known.
QUICK = {f"health_check_{key}": value for key, value in (("period_ms", 300), ("failure_threshold", 3))}


@pytest.fixture(scope="module")
def cluster():
    """A cluster on the loopback address: otherwise Ray replaces 127.0.0.1 by this machine's address."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # of other processes
        patch.setattr(ray._private.ray_constants, "ENABLE_RAY_CLUSTER", False)
        # Python 3.13 drops these in a forked process, where freeing Ray's clients is a segmentation fault.
        patch.setattr("atexit.register", lambda function, *args, **kwargs: function)
        system = QUICK | {"health_check_initial_delay_ms": 0}
        two = Cluster(
            True, head_node_args={"num_cpus": 4, "include_dashboard": False, "_system_config": system}
        )
        two.add_node(num_cpus=4)
        patch.setenv("RAY_ADDRESS", two.address)
        ray.init(logging_level="ERROR")
        yield two
        ray.shutdown()
        two.shutdown()


@pytest.fixture
def make(cluster):
    """Return a function that makes environments on the cluster."""
    made = []

    def make_env(env_id, step_timeout=None, **env_kwargs):
        factory = EnvFactory(env_id, env_kwargs=env_kwargs, step_timeout=step_timeout, **RAY)
        made.append(factory.make(4, seed=3, first_env=5))
        return made[-1]

    yield make_env
    for env in made:
        env.close()
    assert wait_for_no_actor(), "a closed environment leaves no actor"


def actors():
    """Return the living actors: process, and node."""
    from ray._private import state

    living = [actor for actor in state.actors().values() if actor["State"] != "DEAD"]
    return {actor["ActorID"]: (actor["Pid"], actor["Address"]["NodeID"]) for actor in living}


def wait_for_no_actor():
    end = time.monotonic() + 30
    while (left := actors()) and time.monotonic() < end:
        time.sleep(0.1)
    return not left


def id_of(worker):
    return worker._actor._actor_id.hex()


def process_of(worker):
    return actors()[id_of(worker)][0]


def kill_actor(cluster, process):
    os.kill(random.choice(list(actors().values()))[0], signal.SIGKILL)


def kill_node(cluster, process):
    (node,) = cluster.worker_nodes
    node.kill_raylet()
    cluster.remove_node(node)
    cluster.add_node(num_cpus=4)


@pytest.mark.integration
def test_a_run_equals_one_in_one_process_and_resumes_to_the_bit(cluster, fit, tmp_path, capfd):
    path = tmp_path / "middle.ckpt"
    options = {"limit_val_batches": 1, "check_val_every_n_epoch": None, "val_check_interval": 4}
    whole = fit(DATA, MODEL, callbacks=[SaveAfter(path, 2)], **options)
    capfd.readouterr()
    on_ray = fit(DATA | RAY, MODEL, **options)
    assert capfd.readouterr().err == "", "Ray is silent"
    resumed = fit(DATA | RAY, MODEL, ckpt_path=path)
    assert "each environment resumes its episode, to the bit" in capfd.readouterr().out
    for other in (on_ray, resumed):
        require_same(whole, other)
    assert wait_for_no_actor()


@pytest.mark.integration
def test_lost_actors_and_nodes_are_made_anew(make, cluster):
    env = make(Paid, step_timeout=60.0, max_restarts=2)
    (node,) = cluster.worker_nodes
    on_the_node = [actors()[id_of(worker)][1] == node.node_id for worker in env.workers].index(True)
    lose_worker(env, on_the_node, lambda env, worker: kill_node(cluster, None))
    lose_worker(env, 1, lambda env, worker: os.kill(process_of(worker), signal.SIGKILL))
    lose_worker(env, 0, hang, step_timeout=1.5)
    env._max_restarts = 0
    os.kill(process_of(env.workers[1]), signal.SIGKILL)
    message = r"Worker 1 of 2 \(environments 7, 8\) was lost \(The actor .* has died\): resume .*max_restarts"
    with pytest.raises(RuntimeError, match=message):
        env.step_arrays(np.zeros(4, int))


def test_without_ray_one_sentence_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "ppo_lightning.envs.workers.ray", raising=False)
    with pytest.raises(ConfigError, match=r"'ray' is missing: run pip install 'ppo-lightning\[ray\]'"):
        EnvFactory("CartPole-v1", num_workers=2, worker_backend="ray").make(2)


# Processes of the command line


def drive(runs, *flags, total, **environment):
    """Start a run with Ray in a process that imports Ray for itself."""
    options = [f"--data.{name}={value}" for name, value in RAY.items()]
    command = [sys.executable, "-m", "ppo_lightning", "fit", *RUN, *options, *flags]
    command += ["--data.total_timesteps", str(total)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | environment
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    runs.processes.append(
        subprocess.Popen(command, cwd=runs.folder, env=env, start_new_session=True, **pipes)
    )
    return runs.processes[-1]


VICTIMS = {"actor": kill_actor, "node": kill_node, "driver": lambda cluster, process: process.kill()}


@pytest.mark.parametrize(
    ("victim", "kills"),
    [
        pytest.param("driver", 1, marks=pytest.mark.integration),
        *(pytest.param(victim, 10, marks=pytest.mark.slow) for victim in VICTIMS),
    ],
)
def test_kills_leave_no_actor_and_the_run_resumes_to_the_bit(victim, kills, runs, cluster):
    whole, broken = runs("whole"), runs("broken")
    steps = 4 * 128 * 3 * 4 * (kills + 2)
    for number in range(kills):
        newest = broken.newest()
        process = drive(broken, "--auto_resume", total=steps)
        assert wait_for_a_checkpoint(broken, process, after=newest), process.communicate()
        time.sleep(random.Random(number).uniform(0, 0.3))
        VICTIMS[victim](cluster, process)
        code, said = broken.wait(process, timeout=60)
        if victim == "driver":
            assert code == -signal.SIGKILL
        else:
            assert code == 1 and "was lost (The actor" in said, said
        assert wait_for_no_actor()
    if kills == 1:  # the rest is slow
        return
    require_same_end(whole, broken, steps)


KILL = """
class Kill(L.Callback):
    def on_train_batch_start(self, trainer, *args):
        if trainer.global_rank == 1 and trainer.current_epoch == 2 and trainer.ckpt_path is None:
            os.kill(os.getpid(), 9)

def train"""


@pytest.mark.slow
def test_ray_train_resumes_after_a_lost_rank_and_ends_as_one_process(cluster, fit, tmp_path):
    sizes = {"num_envs": 4, "total_timesteps": 4 * 128 * 3, "rollouts_per_epoch": 1, "eval_episodes": 1}
    text = (ROOT / "docs/cluster/ray_train.py").read_text()
    for old, new in {
        "num_envs=4, total_timesteps=500_000": f"**{sizes}",
        "[rl.RayTrainReportCallback()]": "[rl.RayTrainReportCallback(), Kill()]",
        "\ndef train": KILL,
    }.items():
        assert old in text
        text = text.replace(old, new)
    script = tmp_path / "ray_train.py"
    script.write_text(text)
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "each environment resumes its episode, to the bit" in done.stdout + done.stderr
    newest = max(
        tmp_path.glob("runs/ppo/checkpoint_*/checkpoint.ckpt"), key=lambda path: path.stat().st_mtime
    )
    checkpoint = torch.load(newest, weights_only=True)
    assert checkpoint["env_steps"] == sizes["total_timesteps"]
    one = fit({"env_id": "CartPole-v1"} | sizes, max_epochs=-1)
    untrained = fit({"env_id": "CartPole-v1"} | sizes, {"learning_rate": 1e-15}).state_dict()
    changes = [
        [(value - untrained[key]).abs().max(), (value - checkpoint["state_dict"][key]).abs().max()]
        for key, value in one.state_dict().items()
    ]
    learned, different = torch.tensor(changes).max(dim=0).values.tolist()
    assert different < 0.01 * learned, (different, learned)
