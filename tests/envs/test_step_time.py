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
def test_slow_environments_are_named_once_with_the_remedy(fit, capsys, overlap):
    fit(DATA | {"env_id": Sleeps, "overlap": overlap})
    said = r"The environments take (\d+)% of the time: ppo-lightning profile tries data.num_workers"
    (share,) = re.findall(said, capsys.readouterr().out)
    assert int(share) > 50


@pytest.mark.parametrize("data", [{"env_id": Sleeps, "num_workers": 2}, {"total_timesteps": 4 * 16 * 60}])
def test_fast_environments_and_workers_are_not_named(fit, capsys, data):
    module = fit(DATA | data)
    assert "The environments take" not in capsys.readouterr().out
    assert getattr(module.data.collector, "clock", None) is None
