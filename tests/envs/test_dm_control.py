"""Every task of dm_control makes and steps through Gymnasium, the default backend of the recipe."""

import pytest
from dm_control import suite

from ppo_lightning import make_env

TASKS = [f"dm_control/{domain}-{task}-v0" for domain, task in suite.ALL_TASKS]


@pytest.mark.parametrize(
    "env_id",
    [
        pytest.param(
            task, marks=() if task.startswith("dm_control/quadruped-walk") else pytest.mark.integration
        )
        for task in TASKS
    ],
)
def test_a_task_steps(env_id):
    env = make_env(env_id, 1)
    env.reset_arrays()
    observation, reward, *_ = env.step_arrays(env.action_spec.rand().numpy())
    assert observation.shape == env.observation_spec["observation"].shape
    assert 0 <= reward[0] <= 1
