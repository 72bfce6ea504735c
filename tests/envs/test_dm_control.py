"""Quadrupeds of dm_control, which need what this package sets for them, step through Gymnasium."""

import subprocess
import sys

import numpy as np
import pytest

from ppo_lightning import make_env
from tests.helpers import NO_DM_CONTROL

pytest.importorskip("dm_control.suite", reason=NO_DM_CONTROL)


def test_a_task_whose_code_is_older_than_numpy_steps():
    env = make_env("dm_control/quadruped-walk-v0", 1)
    env.reset_arrays()
    observation, reward, *_ = env.step_arrays(env.action_spec.rand().numpy())
    assert observation.shape == env.observation_spec["observation"].shape
    assert np.isfinite(observation).all() and np.isfinite(reward).all()


@pytest.mark.integration
def test_a_task_with_a_terrain_steps_without_a_display():
    """In a process: dm_control chooses its renderer at import."""
    code = "from ppo_lightning import make_env; env = make_env('dm_control/quadruped-escape-v0', 1)"
    code += "; env.reset_arrays(); env.step_arrays(env.action_spec.rand().numpy())"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
