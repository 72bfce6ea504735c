"""Published changes to PPO in benchmarks/candidates.py do what their sources say."""

import functools
import math

import pytest
import torch
from torchrl.data import Bounded, Unbounded

from benchmarks import candidates
from benchmarks.candidates import SPO, AdamRel, ColouredAgent, FreshAdvantages, MuonPPO, Reuse
from ppo_lightning import PPO
from ppo_lightning.models import Evaluation
from tests.helpers import Recorder, weights

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


class RecordedReuse(Reuse):
    def minibatches(self, rollout):
        self.weights = [*getattr(self, "weights", []), rollout["importance"].clone()]
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


AGENTS = [
    "ResidualAgent",
    "ResidualValueAgent",
    "HLGaussAgent",
    "QuantileAgent",
    "StateStdAgent",
    "BetaAgent",
]


@pytest.mark.parametrize(
    ("name", "compile"),
    [(name, False) for name in AGENTS]
    + [pytest.param(name, True, marks=pytest.mark.integration) for name in ("HLGaussAgent", "BetaAgent")],
)
def test_an_agent_of_a_candidate_trains(fit, name, compile):
    ppo = candidates.DistributionalPPO if name in ("HLGaussAgent", "QuantileAgent") else PPO
    agent = functools.partial(getattr(candidates, name), norm_obs=True, log_std_init=-1.0)
    settings = MODEL | {"agent": agent, "compile": compile, "norm_reward": True}
    module = fit(PENDULUM, settings, ppo=type("Recorded", (Recorder, ppo), {}))
    assert 0 < module.moved < math.inf


@pytest.mark.parametrize("critic", [candidates.HLGaussCritic, candidates.QuantileCritic])
def test_the_mean_of_the_returns_is_the_value_that_a_distribution_learns(critic):
    torch.manual_seed(1)
    critic = critic(2)
    optimizer = torch.optim.Adam(critic.parameters(), lr=0.1)
    features, target = torch.eye(2).repeat(50, 1), torch.tensor([-1.0, 4.0]).repeat(50)
    target[::4] += 2  # half of the first kind
    for _ in range(500):
        optimizer.zero_grad()
        critic.loss(features, target).mean().backward()
        optimizer.step()
    torch.testing.assert_close(critic(torch.eye(2)).flatten(), torch.tensor([0.0, 4.0]), atol=0.05, rtol=0)


def test_a_beta_head_samples_its_distribution():
    head = candidates.BetaHead(1, Bounded(-2.0, 2.0, shape=(1,)))
    head.log_std.fill_(-1.0)
    features = torch.zeros(20_000, 1)
    action, log_prob = head.sample(features, head.noise((20_000,)))
    assert abs(action.std().item() / 2 - 0.368) < 0.01 and abs(action.mean().item()) < 0.02
    evaluated, entropy, parameters = head.evaluate(features, action)
    torch.testing.assert_close(evaluated, log_prob)
    assert abs(entropy[0].item() + log_prob.mean().item()) < 0.02
    with torch.no_grad():
        head.linear.bias.copy_(torch.tensor([2.0, -1.0]))
    action, _ = head.sample(features, head.noise((20_000,)))
    share = (action + 2) / 4
    beta = torch.distributions.Beta(*head.evaluate(features, action)[2][0][0, 0])
    assert abs(share.mean() - beta.mean) < 0.005 and abs(share.var() - beta.variance) < 0.002
    assert head.kl(parameters, parameters).abs().max() < 1e-6


def test_the_deviation_of_a_candidate_depends_on_the_observation():
    agent = candidates.StateStdAgent(Unbounded((3,)), Bounded(-1.0, 1.0, shape=(2,)), log_std_init=-1.0)
    observation = torch.randn(1000, 3)
    action, log_prob, *_ = agent.act(observation, agent.noise((1000,)))
    evaluation = agent.evaluate(observation, action)
    torch.testing.assert_close(evaluation.log_prob, log_prob)
    assert 0 < evaluation.parameters[1].std() < 0.1 and abs(evaluation.parameters[1].mean() + 1) < 0.01


def test_the_time_left_is_observed():
    env = candidates.gymnasium.make("TimeLeft/Hopper-v4")
    env.reset(seed=1)
    observation, *_ = env.step(env.action_space.sample())
    assert observation.shape == (12,) and abs(observation[-1] - 0.001) < 1e-6
