"""PPO learns the five probe environments and CartPole."""

import re

import pytest
import torch

from tests.helpers import RECIPE, Forked, command_line

FAST = {"num_envs": 8, "num_steps": 16, "total_timesteps": 8 * 16 * 100}
EAGER = {"learning_rate": 3e-3, "gamma": 0.9, "ent_coef": 0.0, "anneal_lr": False}


def ask(agent, *observations):
    """Return the values of observations, and the probabilities of action 1."""
    observation = torch.tensor(observations).unsqueeze(-1)
    with torch.no_grad():
        probabilities = agent.evaluate(observation, torch.ones(len(observations), dtype=torch.int64))[0].exp()
        return agent.value(observation), probabilities


@pytest.mark.parametrize(
    ("kind", "observations", "values", "tolerance", "right"),
    [
        ("constant", [0.0], [1.0], 0.1, None),
        ("observation", [-1.0, 1.0], [-1.0, 1.0], 0.15, None),
        ("delayed", [0.0, 1.0], [0.9, 1.0], 0.1, None),
        ("action", [0.0], [1.0], 0.25, [1.0]),
        ("both", [-1.0, 1.0], [1.0, 1.0], 0.25, [0.0, 1.0]),
    ],
)
def test_probe_environments(fit, kind, observations, values, tolerance, right):
    agent = fit(FAST | {"env_id": "Probe-v0", "env_kwargs": {"kind": kind}}, EAGER, seed=2).agent
    value, probability = ask(agent, *observations)
    torch.testing.assert_close(value, torch.tensor(values), atol=tolerance, rtol=0)
    if right is not None:
        torch.testing.assert_close(probability, torch.tensor(right), atol=0.1, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 4])
def test_a_policy_that_solves_cartpole_is_kept(own_defaults, fit, seed):
    """With ``adv_eps`` 1e-8, both forget it: the returns no longer vary, and advantages are noise."""
    module = fit({"env_id": "CartPole-v1", "total_timesteps": 100_000}, seed=seed)
    assert module.mean_return >= 475


LATER = [pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3)]


@pytest.mark.parametrize("seed", [pytest.param(1, marks=pytest.mark.integration), *LATER])
def test_the_first_recipe_solves_cartpole(own_defaults, seed, tmp_path):
    """``make train`` trains it."""
    assert output_of_fit(tmp_path, "first/cartpole", seed, r"evaluation, deterministic: return (\S+)") >= 475


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_cartpole_is_solved_by_the_recipe(seed, tmp_path):
    assert output_of_fit(tmp_path, RECIPE, seed, r"return over the last 100 episodes: (\S+)") >= 475


def output_of_fit(folder, recipe, seed, number):
    """Return the number that the output of a fit has at the place of a pattern's group."""
    flags = ["--config", recipe, "--seed_everything", str(seed), "--trainer.logger", "false"]
    process = Forked(folder, command_line, "fit", *flags)
    out, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    return float(re.search(number, out)[1])
