"""Two machines with two ranks each, on loopback: torchrun, and the examples for SLURM and Kubernetes."""

import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from torch.distributed import run as torchrun

from ppo_lightning.experiments.report import read_csv
from tests.documented import blocks, commands
from tests.helpers import ROOT, RUN, Runs, environment_of, wait_for_a_checkpoint
from tests.helpers import port as free_port

PAGE = ROOT / "docs/machines.md"
JOB = ROOT / "docs/cluster/slurm.sh"
MANIFEST = ROOT / "docs/cluster/pytorchjob.yaml"
STEPS = 15_360  # 30 rollouts; RUN saves a checkpoint after every third
BUDGET = [*RUN, "--data.total_timesteps", str(STEPS)]
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def variables(**more):
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | more


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return an uninterrupted run on four ranks of one machine."""
    runs = Runs(tmp_path_factory.mktemp("whole") / "run")
    code, said = runs.wait(runs.start(total=STEPS, devices=4), timeout=240)
    assert code == 0, said
    return runs


def is_a_rank(process):
    """Tell a rank from Python's resource tracker, which inherits the rank's variables."""
    with contextlib.suppress(OSError):
        return "ppo_lightning" in (process / "cmdline").read_text().split("\0")
    return False


class Machines:
    """Launchers in one shared folder, each of which stands for a machine."""

    def __init__(self, folder):
        self.runs = Runs(folder)
        self.folder, self.processes, self.mark = folder, [], f"MACHINES={folder}"

    def start(self, command, folder=None, **environment):
        """Start a launcher; the output is a file, because nobody reads a pipe meanwhile."""
        name, _, value = self.mark.partition("=")
        with open(self.folder / f"{len(self.processes)}.log", "w") as log:
            self.processes.append(
                subprocess.Popen(
                    command,
                    cwd=folder or self.folder,
                    env=variables(**{name: value, "PYTHONUNBUFFERED": "1"} | environment),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
        return self.processes[-1]

    def ranks(self, variable="RANK"):
        """Return the living ranks: rank -> number of the process."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            entries = environment_of(folder.name).split("\0")
            rank = [entry.split("=")[1] for entry in entries if entry.startswith(f"{variable}=")]
            if rank and self.mark in entries and is_a_rank(folder):
                found[int(rank[0])] = int(folder.name)
        return found

    def output(self):
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.log")))

    def wait(self, timeout=240):
        """Return the exit codes of the launchers; require that no rank is left."""
        end = time.time() + timeout
        codes = [process.wait(max(0.1, end - time.time())) for process in self.processes]
        assert not self.ranks(), self.output()
        return codes


@pytest.fixture
def machines(tmp_path):
    started = Machines(tmp_path / "run")
    yield started
    for process in started.processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in started.ranks().values():  # torchrun's ranks have sessions of their own
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def documented(program):
    """Return the first command of a program on the page."""
    found = [command for block in blocks(PAGE) for command in commands(block)]
    return next(command for command in found if program in command.split())


def on_loopback(command, port):
    """Let a documented command of torchrun train CartPole on loopback."""
    command = re.sub(r"--config \S+", shlex.join(BUDGET), command.replace("HOST:29400", f"127.0.0.1:{port}"))
    variable, program, *args = shlex.split(command)
    assert program == "torchrun"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--local-addr", "127.0.0.1"]
    return ["env", variable, *launcher, *args]


def steps_logged(folder):
    """Return the environment steps in each version's table of losses."""
    found = []
    for path in sorted(folder.glob("runs/ppo_classic/version_*/metrics.csv")):
        found.append([int(row["step"]) for row in read_csv(path) if row.get("losses/value_loss")])
    return found


def require_same_end(runs, whole):
    checkpoint, whole = runs.final(STEPS), whole.final(STEPS)
    for part in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(checkpoint[part], whole[part], rtol=1e-4, atol=1e-6)
    assert checkpoint["episode_returns"] == whole["episode_returns"]
    assert checkpoint["global_step"] == whole["global_step"]


@linux
@pytest.mark.slow
@pytest.mark.parametrize("rank", [3, 0])
def test_a_run_whose_rank_is_killed_ends_by_itself_as_the_uninterrupted_one(machines, whole, rank):
    """Rank 0 has the store of the process group; rank 3 is on the other machine."""
    port = free_port()
    for _ in range(2):
        machines.start(on_loopback(documented("torchrun"), port))
    assert wait_for_a_checkpoint(machines.runs, machines.processes[0]), machines.output()
    killed = time.time()
    os.kill(machines.ranks()[rank], signal.SIGKILL)
    while machines.output().count("Resumed from") < 1 and time.time() < killed + 120:
        time.sleep(0.1)
    print(f"{time.time() - killed:.1f} s from SIGKILL to the first iteration after the restart")
    assert machines.wait() == [0, 0], machines.output()
    assert machines.output().count("each environment resumes its episode, to the bit") == 1
    assert "in vain" not in machines.output(), "EqualRanksGuard warns of the launcher's variables"
    require_same_end(machines.runs, whole)
    before, after = steps_logged(machines.folder)
    assert after == list(range(after[0], STEPS + 1, 512))
    assert before[0] == 512 and before[-1] >= after[0] - 512, "or an iteration is in neither table"


@linux
@pytest.mark.slow
def test_a_run_waits_for_a_machine_that_comes_back(machines, whole):
    """The launcher is killed, and its ranks with it; the machine of the rendezvous stays."""
    port = free_port()
    command = on_loopback(documented("torchrun"), port)
    host = machines.start(command)
    while host.poll() is None:  # until it has the store of the rendezvous
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port)).close()
            break
        time.sleep(0.1)
    lost = machines.start(command)
    assert wait_for_a_checkpoint(machines.runs, host), machines.output()
    lost.kill()
    lost.wait()
    time.sleep(1)
    machines.start(command)
    assert machines.wait() == [0, -signal.SIGKILL, 0], machines.output()
    require_same_end(machines.runs, whole)


@linux
@pytest.mark.slow
def test_machines_that_see_different_folders_are_told(machines, whole, tmp_path):
    port = free_port()
    command = documented("torchrun").replace("--max-restarts 3", "--max-restarts 0")
    command = on_loopback(f"{command} --data.total_timesteps {2 * STEPS}", port)
    (tmp_path / "other").mkdir()
    shutil.copytree(whole.folder, machines.folder, dirs_exist_ok=True)
    machines.start(command)
    machines.start(command, folder=tmp_path / "other")
    assert 0 not in machines.wait(), machines.output()
    steps = r"\[(15360, 15360, 0, 0|0, 0, 15360, 15360)\]"
    assert re.search(f"they resume at steps {steps}", machines.output())


STAND_IN = """#!{python}
import os, signal, subprocess, sys
job = {job}
command = sys.argv[1:]
while command[0].startswith("--"):
    command.pop(0)
tasks = []
for node in range(job["nodes"]):
    for local in range(job["ntasks-per-node"]):
        rank = {{"SLURM_PROCID": len(tasks), "SLURM_LOCALID": local, "SLURM_NODEID": node}}
        tasks.append(subprocess.Popen(command, env=os.environ | {{k: str(v) for k, v in rank.items()}}))
codes = [task.wait() for task in tasks]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""


def executable(path, text):
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def cluster(folder):
    """Write stand-ins for SLURM's programs; return the variables that sbatch sets for the job."""
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(\S*)$", JOB.read_text(), re.MULTILINE))
    job = {name: int(options[name]) for name in ("nodes", "ntasks-per-node")}
    tasks = job["nodes"] * job["ntasks-per-node"]
    assert options["signal"].startswith("TERM@") and "requeue" in options
    folder.mkdir()
    executable(folder / "srun", STAND_IN.format(python=sys.executable, job=job))
    executable(folder / "scontrol", '#!/bin/bash\necho "scontrol $@"\n')
    executable(folder / "ppo-lightning", f'#!/bin/bash\nexec {sys.executable} -m ppo_lightning "$@"\n')
    return {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "MASTER_PORT": str(free_port()),  # the default, 15000 and the end of the job's id, may be taken here
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": options["job-name"],
        "SLURM_NNODES": str(job["nodes"]),
        "SLURM_NTASKS": str(tasks),
        "SLURM_NTASKS_PER_NODE": str(job["ntasks-per-node"]),
        "SLURM_NODELIST": "127.0.0.1",
    }


@linux
@pytest.mark.slow
def test_a_job_of_slurm_is_requeued_at_sigterm_and_ends_as_the_uninterrupted_run(machines, whole, tmp_path):
    variables_of_job = cluster(tmp_path / "bin")
    job = machines.start(["bash", str(JOB), *BUDGET], **variables_of_job)
    assert wait_for_a_checkpoint(machines.runs, job), machines.output()
    for process in machines.ranks("SLURM_PROCID").values():  # as SLURM does with `--signal=TERM@120`
        os.kill(process, signal.SIGTERM)
    assert machines.wait() == [143], machines.output()
    assert machines.output().count("Preempted after") == 1
    assert machines.output().count("scontrol requeue 4711") == 1
    machines.start(["bash", str(JOB), *BUDGET], **variables_of_job, SLURM_RESTART_COUNT="1")
    assert machines.wait() == [143, 0], machines.output()
    assert "preempted.ckpt: each environment resumes its episode, to the bit" in machines.output()
    assert machines.output().count("scontrol requeue 4711") == 1
    require_same_end(machines.runs, whole)
    before, after = steps_logged(machines.folder)
    assert before + after == list(range(512, STEPS + 1, 512))


@pytest.mark.skipif(sys.platform == "win32", reason="needs bash")
@pytest.mark.parametrize(
    ("code", "restarts", "requeued"), [(0, 0, 0), (2, 0, 0), (1, 0, 1), (137, 2, 1), (137, 3, 0), (143, 9, 1)]
)
def test_slurm_requeues_preempted_jobs_always_and_failed_ones_three_times(tmp_path, code, restarts, requeued):
    """An invalid setting (2) would fail at each start."""
    environment = cluster(tmp_path / "bin")
    executable(tmp_path / "bin/srun", f"#!/bin/bash\nexit {code}\n")
    command = ["bash", str(JOB), "--config", "classic/cartpole"]
    environment = variables(**environment, SLURM_RESTART_COUNT=str(restarts))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert done.stdout.count("scontrol requeue 4711") == requeued


def test_the_manifest_starts_as_many_ranks_as_its_command_expects(monkeypatch, output_of):
    """torchrun reads the rest of its options from the variables that the operator sets."""
    spec = yaml.safe_load(MANIFEST.read_text())["spec"]
    policy, worker = spec["elasticPolicy"], spec["pytorchReplicaSpecs"]["Worker"]
    assert policy["minReplicas"] == policy["maxReplicas"] == worker["replicas"], "Lightning fixes the ranks"
    monkeypatch.setenv("PET_RDZV_BACKEND", policy["rdzvBackend"])
    monkeypatch.setenv("PET_NNODES", f"{policy['minReplicas']}:{policy['maxReplicas']}")
    monkeypatch.setenv("PET_MAX_RESTARTS", str(policy["maxRestarts"]))
    monkeypatch.setenv("PET_RDZV_ENDPOINT", "ppo-worker-0:23456")
    pod = worker["template"]["spec"]
    (container,) = pod["containers"]
    program, *args = container["command"]
    options = torchrun.parse_args(args)
    assert (program, options.module, options.training_script) == ("torchrun", True, "ppo_lightning")
    assert (options.nnodes, options.rdzv_backend, options.max_restarts) == ("2:2", "c10d", 3)
    assert options.shutdown_timeout < pod["terminationGracePeriodSeconds"]
    trainer = yaml.safe_load(output_of(*options.training_script_args, "--print_config"))["trainer"]
    assert int(trainer["num_nodes"]) == worker["replicas"]
    assert int(trainer["devices"]) == int(options.nproc_per_node)
