"""A run says once if its environments take most of the time."""

import re
import time

import pytest

from ppo_lightning.rollouts import datamodule
from tests.environments import Counter

DATA = {"num_steps": 16, "total_timesteps": 4 * 16 * 4}


class Sleeps(Counter):
    def step(self, action):
        time.sleep(0.002)
        return super().step(action)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(datamodule, "MEASURED", 0.1)


@pytest.mark.parametrize("overlap", [False, True])
def test_slow_environments_are_named_once_with_the_setting(fit, capsys, overlap):
    fit(DATA | {"env_id": Sleeps, "overlap": overlap})
    out = capsys.readouterr().out
    (share,) = re.findall(r"The environments take (\d+)% of the time\. Worker processes pay", out)
    assert int(share) > 50
    assert re.search(
        r"takes 2\.\d* ms, \d+ % of it on the CPU, \d+ CPU cores\): set data.num_workers to 4\.", out
    )


def test_slow_environments_without_a_use_for_workers(fit, capsys, monkeypatch):
    monkeypatch.setattr("ppo_lightning.envs.step_time.GAIN", 1e9)
    fit(DATA | {"env_id": Sleeps})
    sentence = r"take \d+% of the time. ppo-lightning check-env compares the backends, such as envpool."
    assert re.search(sentence, capsys.readouterr().out)


@pytest.mark.parametrize("data", [{"env_id": Sleeps, "num_workers": 2}, {"total_timesteps": 4 * 16 * 60}])
def test_fast_environments_and_workers_are_not_named(fit, capsys, data):
    module = fit(DATA | data)
    assert "The environments take" not in capsys.readouterr().out
    assert getattr(module.data.collector, "clock", None) is None
