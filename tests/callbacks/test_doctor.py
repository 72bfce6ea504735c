"""The doctor finds every symptom in a run that has it, and nothing in healthy runs."""

import functools
import statistics
import time

import gymnasium as gym
import lightning as L
import pytest
import torch

from ppo_lightning import MLPAgent
from ppo_lightning.callbacks import Doctor
from ppo_lightning.callbacks.symptoms import sinking_speed
from tests.environments import Counter
from tests.helpers import Dropout

WELL = {"num_envs": 4, "num_steps": 64, "total_timesteps": 4 * 64 * 40}


class Huge(Counter):
    """Counter with observations in the thousands."""

    observation_space = gym.spaces.Box(-1e6, 1e6, (1,))

    def observation(self):
        return super().observation() + 5000


class Flips(Counter):
    """Counter whose rewards change sign with every rollout: learned values are always wrong."""

    life = 0

    def observation(self):
        return super().observation() / 20

    def step(self, action):
        observation, _, *rest = super().step(action)
        sign = 1 - 2 * (self.life // 64 % 2)
        self.life += 1
        return observation, sign * float(observation[0]), *rest


class Narrow(gym.Env):
    """Action bounds of -0.01 and 0.01."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (1,)), gym.spaces.Box(-0.01, 0.01, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample() * 0, {}

    def step(self, action):
        return self.observation_space.sample() * 0, 1.0, False, False, {}


for name, entry in (("Huge", Huge), ("Flips", Flips), ("Narrow", Narrow)):
    gym.register(f"{name}-v0", entry, max_episode_steps=20)


ILL = {
    "ratio": ({}, {"agent": Dropout}),
    "large KL": ({}, {"learning_rate": 0.01, "update_epochs": 10, "clip_coef": 10.0}),
    "no clipping": ({}, {"learning_rate": 1e-8}),
    "much clipping": ({}, {"learning_rate": 0.01, "clip_coef": 0.005, "anneal_lr": False}),
    "entropy collapse": (
        {"env_id": "tests.environments:Probe-v0", "env_kwargs": {"kind": "action"}},
        {"learning_rate": 0.01},
    ),
    "explained variance": ({"env_id": "Flips-v0"}, {"learning_rate": 0.01, "gamma": 0.0, "anneal_lr": False}),
    "unscaled observations": ({"env_id": "Huge-v0"}, {}),
    "saturated actions": ({"env_id": "Narrow-v0"}, {}),
    "time limits": ({"env_kwargs": {"max_episode_steps": 10}}, {"bootstrap_truncated": False}),
    "dead units": ({}, {"learning_rate": 1.0}),
}


@pytest.mark.filterwarnings("ignore:The log-probabilities")
@pytest.mark.parametrize("symptom", ILL)
def test_the_doctor_reports_each_symptom_once(symptom, fit, capsys):
    data, model = ILL[symptom]
    doctor = Doctor()
    fit(WELL | data, model, callbacks=[doctor])
    out = capsys.readouterr().out
    assert str(doctor.findings[symptom]) in out
    assert out.count(f"steps: {symptom}: ") == 1, "once"


@pytest.mark.filterwarnings("ignore:The log-probabilities")
@pytest.mark.parametrize(
    ("symptom", "remedy"),
    [
        ("no clipping", {"learning_rate": 1e-3}),
        ("much clipping", {"learning_rate": 1e-5}),
        ("entropy collapse", {"learning_rate": 1e-5}),
        ("unscaled observations", {"agent": functools.partial(MLPAgent, norm_obs=True)}),
        ("saturated actions", {"agent": functools.partial(MLPAgent, head="tanh_gaussian")}),
        ("time limits", {"bootstrap_truncated": True}),
    ],
)
def test_a_run_with_the_doctors_remedy_has_the_symptom_no_more(symptom, remedy, fit):
    """Without dropout and at the default learning rate, the run is the healthy one of CartPole below."""
    data, model = ILL[symptom]
    doctor = Doctor()
    fit(WELL | data, model | remedy, callbacks=[doctor])
    assert symptom not in doctor.findings


@pytest.mark.parametrize(
    ("data", "model"),
    [
        ({}, {}),
        ({"env_id": "Acrobot-v1"}, {"learning_rate": 1e-3}),
        (
            {"env_id": "Hopper-v5", "num_envs": 1, "num_steps": 512, "total_timesteps": 512 * 24},
            {"agent": functools.partial(MLPAgent, norm_obs=True), "norm_reward": True, "ent_coef": 0.0,
             "learning_rate": 3e-4, "num_minibatches": 8, "update_epochs": 10},
        ),
    ],
    ids=["CartPole", "Acrobot", "Hopper"],
)  # fmt: skip
def test_the_doctor_reports_nothing_in_a_healthy_run(data, model, fit, capsys):
    doctor = Doctor()
    fit(WELL | data, model, callbacks=[doctor])
    assert doctor.findings == {}
    assert "doctor" not in capsys.readouterr().out


def test_the_doctor_changes_no_weight(fit):
    with_doctor, without = fit(WELL, callbacks=[Doctor(every=1)]), fit(WELL)
    for a, b in zip(with_doctor.parameters(), without.parameters(), strict=True):
        assert torch.equal(a, b)


# Speed


class Waits(L.Callback):
    """Callback that slows down evaluations from iteration 60 to 70, and training afterwards.

    In real runs, a second thread on a busy machine slows an iteration from milliseconds to seconds.
    """

    def __init__(self, doctor):
        self.doctor, self.last, self.times, self.healthy = doctor, time.perf_counter(), [], None

    def wait(self):
        time.sleep(8 * statistics.median(self.times))

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.last = time.perf_counter()
        if batch_idx == 71:
            self.healthy = "sinking speed" not in self.doctor.findings

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx < 71:
            self.times.append(time.perf_counter() - self.last)
        else:
            self.wait()

    def on_validation_start(self, trainer, pl_module):
        if 60 <= len(self.times) <= 70:
            self.wait()


def test_a_run_that_slows_down_with_two_threads_is_advised_to_use_one(fit, capsys, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    doctor = Doctor()
    waits = Waits(doctor)
    data = {"num_envs": 2, "num_steps": 16, "total_timesteps": 32 * 82, "rollouts_per_epoch": 100}
    model = {"update_epochs": 1, "num_minibatches": 1}
    options = {"val_check_interval": 1, "limit_val_batches": 1, "callbacks": [waits, doctor]}
    fit(data | {"eval_episodes": 1}, model, **options)
    assert waits.healthy, "the time of evaluations does not count"
    finding = doctor.findings["sinking speed"]
    assert finding.remedy == "--num_threads 1"
    assert "environment steps per second" in finding.observation and "2 PyTorch threads" in finding.cause
    assert capsys.readouterr().out.count("steps: sinking speed: ") == 1


@pytest.mark.parametrize(
    ("earlier", "now", "threads", "finds"),
    [
        (5, 400.0, 2, True),
        (5, 600.0, 2, False),  # not half as fast
        (4, 400.0, 2, False),  # too early
        (5, 400.0, 1, False),  # one thread waits for no other
    ],
)
def test_a_slow_run_has_several_threads_and_lost_half_of_its_speed(earlier, now, threads, finds, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    run = type("Run", (), {"speeds": [1000.0] * earlier + [now]})
    assert bool(sinking_speed(run)) == finds
