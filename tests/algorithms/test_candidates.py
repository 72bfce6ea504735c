"""Published changes to PPO in benchmarks/candidates.py do what their sources say."""

import functools

import pytest
import torch
from torchrl.data import Bounded, Unbounded

from benchmarks.candidates import SPO, AdamRel, ColouredAgent, FreshAdvantages, MuonPPO, ResidualAgent, Reuse
from ppo_lightning import PPO
from ppo_lightning.models import Evaluation
from tests.helpers import weights

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


def test_fresh_advantages_are_those_of_ppo_if_the_value_function_stays_the_same(fit):
    ends = [weights(fit(PENDULUM, MODEL | {"vf_coef": 0.0}, ppo=ppo)) for ppo in (PPO, FreshAdvantages)]
    torch.testing.assert_close(*ends)


def test_residual_bodies_train(fit):
    agent = functools.partial(ResidualAgent, hidden_sizes=(16, 16), norm_obs=True)
    module = fit(PENDULUM, MODEL | {"agent": agent})
    assert module.trainer.callback_metrics["losses/approx_kl"] > 0
    assert len(module.agent.actor_body.blocks) == len(module.agent.critic_body.blocks) == 2


class RecordedReuse(Reuse):
    """Keeps the weights of the rows of each epoch."""

    def minibatches(self, rollout):
        self.weights = [*getattr(self, "weights", []), rollout["weight"].clone()]
        return super().minibatches(rollout)


def test_reused_rows_are_weighted_by_the_ratio_of_the_policies(fit):
    first, second, *_ = fit(PENDULUM, MODEL | {"update_epochs": 1}, ppo=RecordedReuse).weights
    assert first.shape == (2, 32, 1) and (first == 1).all()
    assert second.shape == (4, 32, 1) and (second[:2] == 1).all()
    assert (second[2:] <= 1).all() and 0 < second[2:].min() < 1
    unchanged = fit(PENDULUM, MODEL | {"update_epochs": 1, "learning_rate": 1e-12}, ppo=RecordedReuse)
    torch.testing.assert_close(unchanged.weights[1], torch.ones(4, 32, 1))


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.integration)])
def test_adam_counts_the_steps_of_an_iteration(fit, compile):
    states = fit(PENDULUM, MODEL | {"compile": compile}, ppo=AdamRel).trainer.optimizers[0].state.values()
    assert {int(state["step"]) for state in states} == {4}


def test_muon_optimizes_the_hidden_layers(fit):
    muon, adam = fit(PENDULUM, MODEL, ppo=MuonPPO).trainer.optimizers[0]._optimizers
    (group,) = muon.param_groups
    assert [tuple(matrix.shape) for matrix in group["params"]] == [(64, 3), (64, 64)] * 2
    assert (1, 64) in [tuple(parameter.shape) for parameter in adam.param_groups[0]["params"]]


@pytest.mark.parametrize("advantage", [2.0, -1.0])
def test_the_objective_of_spo_is_greatest_at_the_bound_of_the_range(advantage):
    bound = 1.2 if advantage > 0 else 0.8
    zero = torch.zeros(1)
    minibatch = dict.fromkeys(("action_log_prob", "state_value", "value_target"), zero)
    minibatch["advantage"] = torch.tensor([advantage])

    def loss_at(log_prob):
        return SPO(ent_coef=0.0).loss(minibatch, Evaluation(log_prob, zero, zero, zero, zero, ()))[0]

    log_prob = torch.tensor([bound]).log().requires_grad_()
    loss = loss_at(log_prob)
    loss.backward()
    assert log_prob.grad.abs().item() < 1e-6
    assert all(loss < loss_at(torch.tensor([bound + step]).log()) for step in (-0.01, 0.01))


def test_coloured_noise_has_variance_1_and_is_correlated():
    agent = ColouredAgent(Unbounded((3,)), Bounded(-1.0, 1.0, shape=(2,)))
    draw = functools.partial(agent.noise, (4096, 4))
    noise = draw(torch.Generator().manual_seed(1))
    assert noise.shape == (4096, 4, 2) and abs(noise.var().item() - 1) < 0.05
    assert 0.3 < (noise[1:] * noise[:-1]).mean() < 0.45  # white noise: 0, beta 1: 0.8
    assert abs((noise[:, 0] * noise[:, 1]).mean().item()) < 0.1, "independent between environments"
    assert torch.equal(noise, draw(torch.Generator().manual_seed(1)))
