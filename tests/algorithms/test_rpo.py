"""Robust Policy Optimization."""

import pytest
import torch
from torchrl.data import Bounded, Unbounded

from ppo_lightning import PPO, RPO, ConfigError, MLPAgent
from tests.helpers import REACH, Recorder, weights

REACH = REACH | {"num_steps": 16}
MODEL = {"num_minibatches": 2, "update_epochs": 3, "norm_reward": True}


class RecordedRPO(Recorder, RPO):
    pass


def test_rpo_without_noise_is_ppo(fit):
    whole = MODEL | {"num_minibatches": 1, "update_epochs": 2}  # the whole rollout: the order does not matter
    plain = fit(REACH, whole)
    without, with_noise = (fit(REACH, whole | {"rpo_alpha": alpha}, ppo=RPO) for alpha in (0.0, 0.5))
    torch.testing.assert_close(weights(without), weights(plain), atol=1e-5, rtol=1e-4)
    assert (weights(with_noise) - weights(plain)).abs().max() > 1e-4
    assert (without.hparams.rpo_alpha, without.hparams.gamma) == (0.0, plain.hparams.gamma)


def nearly_deterministic(*specs):
    agent = MLPAgent(*specs, log_std_init=-10.0)
    torch.nn.init.zeros_(agent.head.linear.weight)
    return agent


def test_the_noise_is_uniform_new_in_each_epoch_and_not_in_the_rollout(fit):
    data = REACH | {"num_steps": 1024, "total_timesteps": 2048}
    model = MODEL | {"rpo_alpha": 0.4, "learning_rate": 1e-9, "agent": nearly_deterministic}
    module = fit(data, model, ppo=RecordedRPO)
    assert module.rollouts[0]["action"].abs().max() < 0.01
    epochs = [torch.cat([minibatch["noise"] for minibatch in epoch]) for epoch in module.epochs]
    for epoch in epochs:
        assert 0.39 < epoch.abs().max() < 0.41
        assert epoch.mean().item() == pytest.approx(0, abs=0.02)
        assert epoch.var().item() == pytest.approx(0.4**2 / 3, rel=0.05)
        assert (epoch[:, 0] - epoch[:, 1]).std() > 0.1, "each component has its own"
    values = torch.stack([epoch.flatten().sort().values for epoch in epochs])
    assert (values[0] - values[1]).abs().max() > 1e-3
    assert (values[1] - values[2]).abs().max() > 1e-3


def test_the_divergence_is_that_of_the_policy_and_the_ratios_of_the_loss_have_the_noise(fit):
    module = fit(REACH, MODEL | {"learning_rate": 0.01}, ppo=RecordedRPO)
    minibatch = module.epochs[-1][-1]
    parts = module.total_loss(minibatch)[1]
    plain = PPO.loss(module, minibatch, PPO.evaluate(module, minibatch))[1]
    for name in ("approx_kl", "old_approx_kl"):
        torch.testing.assert_close(parts[name], plain[name], atol=1e-5, rtol=1e-4)
    assert parts["clipfrac"] > plain["clipfrac"] + 0.1


def test_the_actions_are_evaluated_under_the_moved_mean():
    torch.manual_seed(0)
    module = RPO()
    module.agent = MLPAgent(Unbounded(shape=(3,)), Bounded(-1, 1, shape=(2,), dtype=torch.float32))
    minibatch = {"observation": torch.randn(5, 3), "action": torch.randn(5, 2), "noise": torch.rand(5, 2)}
    mean, log_std = module.agent.evaluate(minibatch["observation"], minibatch["action"]).parameters
    moved = torch.distributions.Normal(mean + minibatch["noise"], log_std.exp())
    log_prob = moved.log_prob(minibatch["action"]).sum(-1)
    torch.testing.assert_close(module.evaluate(minibatch).log_prob, log_prob)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ({"agent": lambda o, a: MLPAgent(o, a, head="tanh_gaussian")}, "with a Gaussian head"),
        ({"rpo_alpha": -1.0}, "model.rpo_alpha is -1.0"),
    ],
)
def test_what_rpo_cannot_train_is_refused(fit, model, sentence):
    with pytest.raises(ConfigError, match=sentence):
        fit(REACH, MODEL | model, ppo=RPO)
