"""Published changes to PPO in benchmarks/candidates.py do what their sources say."""

import functools

import pytest
import torch
from torchrl.data import Bounded, Unbounded

from benchmarks.candidates import SPO, AdamRel, ColouredAgent, FreshAdvantages, MuonPPO, Reuse
from ppo_lightning import PPO
from ppo_lightning.models import Evaluation
from tests.algorithms.test_update import weights

PENDULUM = {"env_id": "Pendulum-v1", "num_envs": 2, "num_steps": 32, "total_timesteps": 64 * 4}
MODEL = {"num_minibatches": 2, "update_epochs": 2}


@pytest.mark.parametrize("algorithm", [AdamRel, SPO, FreshAdvantages, Reuse, MuonPPO])
def test_a_candidate_trains_and_differs_from_ppo(fit, algorithm):
    ends = [weights(fit(PENDULUM, MODEL, ppo=ppo)) for ppo in (PPO, algorithm)]
    assert ends[1].isfinite().all()
    assert not torch.equal(*ends)


@pytest.mark.parametrize("algorithm", [FreshAdvantages, Reuse])
def test_the_first_epoch_of_the_first_iteration_is_that_of_ppo(fit, algorithm):
    model = MODEL | {"update_epochs": 1}
    data = PENDULUM | {"total_timesteps": 64}
    ends = [weights(fit(data, model, ppo=ppo)) for ppo in (PPO, algorithm)]
    torch.testing.assert_close(*ends)


def test_adam_counts_the_steps_of_an_iteration(fit):
    states = fit(PENDULUM, MODEL, ppo=AdamRel).trainer.optimizers[0].state.values()
    assert {int(state["step"]) for state in states} == {4}


@pytest.mark.parametrize("advantage", [2.0, -1.0])
def test_the_objective_of_spo_is_greatest_at_the_bound_of_the_range(advantage):
    bound = 1.2 if advantage > 0 else 0.8
    log_prob = torch.tensor([bound]).log().requires_grad_()
    zero = torch.zeros(1)
    minibatch = dict.fromkeys(("action_log_prob", "state_value", "value_target"), zero)
    minibatch["advantage"] = torch.tensor([advantage])
    evaluation = Evaluation(log_prob, zero, zero, zero, zero, ())
    loss, _ = SPO(ent_coef=0.0).loss_of(minibatch, evaluation)
    loss.backward()
    assert log_prob.grad.abs().item() < 1e-6


def test_coloured_noise_has_variance_1_and_is_correlated():
    agent = ColouredAgent(Unbounded((3,)), Bounded(-1.0, 1.0, shape=(2,)))
    draw = functools.partial(agent.noise, (4096, 4))
    noise = draw(torch.Generator().manual_seed(1))
    assert noise.shape == (4096, 4, 2) and abs(noise.var().item() - 1) < 0.05
    assert (noise[1:] * noise[:-1]).mean() > 0.3
    assert abs((noise[:, 0] * noise[:, 1]).mean().item()) < 0.1, "independent between environments"
    assert torch.equal(noise, draw(torch.Generator().manual_seed(1)))
