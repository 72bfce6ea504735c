"""A run says once if its environments take most of the time."""

import re
import time

import pytest

from ppo_lightning.envs.step_time import StepClock
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
@pytest.mark.parametrize(
    ("cores", "remedy"),
    [
        (3, r"set data.num_workers to 2\."),  # 3 does not divide 4 environments
        (1, r"ppo-lightning profile compares the backends, such as envpool\."),
    ],
)
def test_slow_environments_are_named_once_with_the_setting(fit, capsys, monkeypatch, overlap, cores, remedy):
    monkeypatch.setattr(datamodule, "processors", lambda: cores)
    fit(DATA | {"env_id": Sleeps, "overlap": overlap})
    (share,) = re.findall(rf"The environments take (\d+)% of the time: {remedy}", capsys.readouterr().out)
    assert int(share) > 50


@pytest.mark.parametrize("data", [{"env_id": Sleeps, "num_workers": 2}, {"total_timesteps": 4 * 16 * 60}])
def test_fast_environments_and_workers_are_not_named(fit, capsys, data):
    module = fit(DATA | data)
    assert "The environments take" not in capsys.readouterr().out
    assert getattr(module.data.collector, "clock", None) is None


def test_workers_are_not_named_for_short_steps():
    clock = StepClock()
    for _ in range(1000):
        clock.time(sum, range(1000))
    assert re.fullmatch(
        r"The environments take \d+% of the time: ppo-lightning profile .*", clock.advice(4, 4)
    )
