"""Every script of benchmarks/ runs at small size."""

import os
import re
import shlex
import subprocess
import sys
from typing import NamedTuple

import pytest

from tests.helpers import ROOT

BENCHMARKS = ROOT / "benchmarks"
SHORT = "--repeats 1 --seconds 0.5"


class Command(NamedTuple):
    """A run of a script: its arguments, a pattern in its output and the exit codes that are right."""

    arguments: str
    output: str = ""
    codes: tuple[int, ...] = (0,)


# Script -> its commands, which run one after the other in one folder; or the reason why only --help runs.
SCRIPTS: dict[str, list[Command] | str] = {
    "ablate": [
        Command(
            f"--config {ROOT}/configs/ppo/classic.yaml --details 7 --seeds 1 --output ."
            " --data.total_timesteps 1024 --data.eval_episodes 1 && test -s ablation.png",
            r"(?s)\| the recipe .*\| without 7, advantage normalization ",
        )
    ],
    "attack": "tests/test_attack.py has a small one",
    "candidates": [Command("")],  # a module: tests/algorithms/test_candidates.py
    "collection": [
        Command("workers --repeats 1 --seconds 0.2", "TorchRL ParallelEnv"),
        Command("ray --repeats 1 --seconds 0.2", r"\| ray, 4 workers \|"),
        Command("transforms --workloads cartpole-1 --repeats 2", r"\| cartpole-1 \| both "),
        Command("backends --repeats 1 --num_envs 4", "torch, compiled"),
    ],
    "compare_checkouts": [  # one measurement each: the ratio, and with it the exit code, is chance
        Command(f"{ROOT} {ROOT} --workloads cartpole-64x128 {SHORT}", r"ratio of medians", (0, 1))
    ],
    "defaults": [
        Command(
            "--arms today guess stable-baselines3 --tasks FrozenLakeDry-v0 Goal-v0 --budgets 2048"
            " --seeds 11 12 --output a.csv",
            r"(?s)\| today .*\| guess .*\| stable-baselines3 ",
        ),
        Command(
            "--stage report --arms guess --output a.csv --table",
            r"(?s)Goal-v0 \| 2048 .*at least as high on \d of 2 tasks.*`guess` and `today`.*of 2 tasks",
        ),
    ],
    "figures": "tests/test_figures.py draws all",
    "offpolicy_speed": [
        Command("--workloads dqn-cartpole --repeats 1 --seconds 1", r"\| dqn-cartpole \| 50 \| ours \| \d+ ")
    ],
    "peers": [
        Command("ppo CartPole-v1 --steps 512 --seeds 1 --output a && cat a", "ppo,CartPole-v1,1,512,"),
        Command("sac Pendulum-v1 --steps 300 --seeds 1 --output a && cat a", "sac,Pendulum-v1,1,300,"),
    ],
    "ranks": [
        Command(
            f"--checkouts {ROOT} {ROOT} --devices 2 --workloads cartpole-64x128 {SHORT}",
            r"before, 2 ranks \| after, 2 ranks \|",
        )
    ],
    "reference_runs": [
        Command("record a.json --runs cartpole"),
        Command("compare a.json a.json", "cartpole_resumed: equal to the bit"),
        Command("settings b.json && cat b.json", '"sac/walker2d"'),
    ],
    "resolve": "asks a package index",
    "scaling": [
        Command("--parts environments workers --largest 1 --seconds 0.1 --csv a.csv"),
        Command("--csv a.csv --table --plot a.png && test -s a.png", r"\| 1 \|( [\d ]+ \(\d+\) \|){4}"),
    ],
    "speed": [
        Command(
            f"--workloads cartpole-4x128 --competitors ours stable-baselines3 torchrl {SHORT}",
            r"(?s)\| ours .*\| stable-baselines3 .*\| torchrl ",
        ),
        Command(
            f"--workloads cartpole-64x128 --competitors 'ours, compiled, overlap' --busy 1 {SHORT}",
            r"\| ours, compiled, overlap \| default \| \d+",
        ),
    ],
    "studies": [
        Command("rnd cartpole --seeds 1 --steps 4096 --output .", r"(?s)\| rnd .*\| ppo "),
        Command("rnd --output .", r"(?s)\| rnd .*\| ppo "),
        Command(
            "multiagent torchrl ippo mappo --seeds 1 --steps 6000 --output games",
            r"(?s)\| torchrl .*\| ippo .*\| mappo ",
        ),
        Command(
            "selfplay connectfour --seeds 1 --steps 8192 --games 4 --arms recipe --output .",
            r"\| minimax:2 ",
        ),
        Command(
            "selfplay tictactoe --seeds 1 --steps 8192 --games 4 --output .",
            r"(?s)\| same_sign .*\| reward_of_",
        ),
    ],
    "tables": [
        Command(
            "",
            r"(?s)Interquartile mean.*\| \[?SPO.*\| no change.*PendulumSwingup.*with 5 ms per step \| 60 ",
        )
    ],
    "time_to_return": [
        Command("--beside ours --sizes 2048x128", '"sps"'),  # the other half needs PureJaxRL
        Command(
            "--workloads cartpole-fast --programs tensors stable-baselines3 --seeds 1 --steps 4096",
            r"(?s)tensors, warm cache \| .*\| cartpole-fast, stable-baselines3 \| .* \| not reached",
        ),
        Command(
            "--workloads halfcheetah --programs eager stable-baselines3 --seeds 1 --steps 4096",
            r"(?s)eager \| .*\| halfcheetah, stable-baselines3 \| .* \| not reached",
        ),
    ],
    "zoo": "trains for an hour, and writes into the checkout",
}  # fmt: skip


def test_the_list_is_complete():
    assert set(SCRIPTS) == {path.stem for path in BENCHMARKS.glob("*.py")}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_script_runs(name, tmp_path):
    commands = SCRIPTS[name]
    for command in [Command("--help", "usage")] if isinstance(commands, str) else commands:
        line = f"{shlex.quote(sys.executable)} {BENCHMARKS / name}.py {command.arguments}"
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            line, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode in command.codes, done.stdout[-2000:] + done.stderr[-4000:]
        assert re.search(command.output, done.stdout), done.stdout[-2000:]
