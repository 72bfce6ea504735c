"""Every task of dm_control makes and steps through Gymnasium, the default backend of the recipe."""

import subprocess
import sys

import numpy as np
import pytest

from ppo_lightning import make_env
from tests.helpers import NO_DM_CONTROL

suite = pytest.importorskip("dm_control.suite", reason=NO_DM_CONTROL)

IN_A_PROCESS = "dm_control/quadruped-escape-v0"  # needs a renderer, which dm_control chooses at import
QUICK = "dm_control/quadruped-walk-v0"
TASKS = {f"dm_control/{domain}-{task}-v0" for domain, task in suite.ALL_TASKS} - {IN_A_PROCESS, QUICK}


def step(env_id):
    env = make_env(env_id, 1)
    env.reset_arrays()
    observation, reward, *_ = env.step_arrays(env.action_spec.rand().numpy())
    assert observation.shape == env.observation_spec["observation"].shape
    assert np.isfinite(observation).all() and np.isfinite(reward).all()


@pytest.mark.parametrize(
    "env_id", [QUICK, *(pytest.param(task, marks=pytest.mark.integration) for task in sorted(TASKS))]
)
def test_a_task_steps(env_id):
    step(env_id)


@pytest.mark.integration
def test_a_task_with_a_terrain_steps_without_a_display():
    code = f"from ppo_lightning import make_env; env = make_env({IN_A_PROCESS!r}, 1); env.reset_arrays();"
    code += "env.step_arrays(env.action_spec.rand().numpy())"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
