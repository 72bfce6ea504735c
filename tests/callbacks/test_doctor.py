"""The doctor finds every symptom in a run that has it, and nothing in healthy runs."""

import functools

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from ppo_lightning import MLPAgent
from ppo_lightning.callbacks import Doctor
from ppo_lightning.callbacks.doctor import (
    RunSnapshot,
    dead_shares,
    sample_observations,
    unexplained_variance,
)
from ppo_lightning.models import MLP
from tests.environments import Counter
from tests.helpers import weights

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


def huge_integers():
    """Return the environment with integers, which no network divides by 255."""
    space = gym.spaces.Box(-1_000_000, 1_000_000, (1,), np.int64)
    return gym.wrappers.TransformObservation(gym.make("Huge-v0"), lambda it: it.astype(np.int64), space)


for entry in (Huge, Flips):
    gym.register(f"{entry.__name__}-v0", entry, max_episode_steps=20)


ILL = {
    "large KL": ({}, {"learning_rate": 0.01, "update_epochs": 10, "clip_coef": 10.0}),
    "no clipping": ({}, {"learning_rate": 1e-8}),
    "entropy collapse": (
        {"env_id": "tests.environments:Probe-v0", "env_kwargs": {"kind": "action"}},
        {"learning_rate": 0.01},
    ),
    "explained variance": ({"env_id": "Flips-v0"}, {"learning_rate": 0.01, "gamma": 0.0, "anneal_lr": False}),
    "unscaled observations": ({"env_id": "Huge-v0"}, {}),
    "dead units": ({}, {"learning_rate": 1.0}),
}


@pytest.mark.parametrize("symptom", ILL)
def test_the_doctor_reports_each_symptom_once(symptom, fit, capsys):
    data, model = ILL[symptom]
    doctor = Doctor()
    fit(WELL | data, model, callbacks=[doctor])
    out = capsys.readouterr().out
    assert doctor.findings[symptom] in out
    assert out.count(f"steps: {symptom}: ") == 1, "once"


@pytest.mark.parametrize(
    ("symptom", "remedy"),
    [
        ("no clipping", {"learning_rate": 1e-3}),
        ("entropy collapse", {"learning_rate": 1e-5}),
        ("unscaled observations", {"agent": functools.partial(MLPAgent, norm_obs=True)}),
    ],
)
def test_a_run_with_the_doctors_remedy_has_the_symptom_no_more(symptom, remedy, fit):
    """At the default learning rate, the run is the healthy one of CartPole below."""
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


def test_the_doctor_sees_unscaled_integers(fit):
    doctor = Doctor()
    fit(WELL | {"env_id": huge_integers}, {}, callbacks=[doctor])
    assert "unscaled observations" in doctor.findings


@pytest.mark.parametrize(("num_envs", "num_steps"), [(1024, 16), (3, 5), (2048, 128)])
def test_the_rows_of_the_doctor_are_of_all_steps(num_envs, num_steps):
    rollout = {"observation": torch.arange(num_steps).expand(num_envs, num_steps)}
    rows = sample_observations(RunSnapshot(None, rollout, {}, 1, 0.0))
    assert len(rows) <= 512 and len(rows.unique()) == num_steps


@pytest.mark.parametrize(("value_loss", "is_ill"), [(1e-5, False), (0.1, True)])
def test_small_errors_of_nearly_equal_returns_are_no_symptom(value_loss, is_ill):
    metrics = {"explained_variance": -2.0, "value_loss": value_loss}
    snapshot = RunSnapshot(None, {"state_value": torch.full((2, 3), 2.0)}, metrics, 50, 0.0)
    assert bool(unexplained_variance(snapshot)) == is_ill


def test_the_doctor_changes_no_weight(fit):
    assert torch.equal(weights(fit(WELL, callbacks=[Doctor(every=1)])), weights(fit(WELL)))


@pytest.mark.parametrize(
    ("activation", "rows", "share"),
    [
        ("tanh", [9, 9], 1),
        ("tanh", [-9, -9], 1),
        ("tanh", [-9, 9], 0),
        ("elu", [9, 9], 0),
        ("elu", [-9, -9], 1),
        ("relu", [-1, -1], 1),
        ("relu", [9, 9], 0),
    ],
)
@pytest.mark.parametrize("wrap", [lambda body: body, nn.Sequential])
def test_a_unit_is_dead_where_its_activation_is_constant(activation, rows, share, wrap):
    body = MLP(1, [1], activation=activation)
    nn.init.ones_(body.layers[0].weight)
    assert dead_shares(wrap(body), torch.tensor(rows).float()[:, None]) == [share]


def test_the_doctor_sees_units_of_an_agent_with_relu_that_are_0_for_every_observation(fit):
    class Dead(MLPAgent):
        def __init__(self, observation_spec, action_spec):
            super().__init__(observation_spec, action_spec, activation="relu")
            self.save_hyperparameters(ignore=["observation_spec", "action_spec"])
            nn.init.zeros_(self.actor_body.layers[1].weight)
            nn.init.constant_(self.actor_body.layers[1].bias, -1)

    doctor = Doctor(every=1)
    fit(WELL | {"total_timesteps": 4 * 64 * 2}, {"agent": Dead}, callbacks=[doctor])
    assert "100 % of the units in layer 2 of the policy" in doctor.findings["dead units"]
