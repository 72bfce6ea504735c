"""PPO learns the five probe environments and the value of an infinite horizon behind time limits."""

import pytest
import torch

FAST = {"num_envs": 8, "num_steps": 16, "total_timesteps": 8 * 16 * 100}
EAGER = {"learning_rate": 3e-3, "gamma": 0.9, "ent_coef": 0.0, "anneal_lr": False}


def probe(fit, kind):
    return fit({**FAST, "env_id": "Probe-v0", "env_kwargs": {"kind": kind}}, EAGER).agent


def ask(agent, *observations):
    observation = torch.tensor(observations).unsqueeze(-1)
    with torch.no_grad():
        probabilities = agent.evaluate(observation, torch.ones(len(observations), dtype=torch.int64))[0].exp()
        return agent.value(observation), probabilities


def test_probe_1_the_value_of_a_constant(fit):
    value, _ = ask(probe(fit, "constant"), 0.0)
    torch.testing.assert_close(value, torch.tensor([1.0]), atol=0.1, rtol=0)


def test_probe_2_the_value_of_an_observation(fit):
    value, _ = ask(probe(fit, "observation"), -1.0, 1.0)
    torch.testing.assert_close(value, torch.tensor([-1.0, 1.0]), atol=0.15, rtol=0)


def test_probe_3_the_value_of_a_delayed_reward(fit):
    value, _ = ask(probe(fit, "delayed"), 0.0, 1.0)
    torch.testing.assert_close(value, torch.tensor([0.9, 1.0]), atol=0.1, rtol=0)


def test_probe_4_an_action(fit):
    value, probability = ask(probe(fit, "action"), 0.0)
    assert probability.item() > 0.9
    assert value.item() == pytest.approx(1, abs=0.25)


def test_probe_5_an_action_that_depends_on_the_observation(fit):
    value, probability = ask(probe(fit, "both"), -1.0, 1.0)
    assert probability[0] < 0.1
    assert probability[1] > 0.9
    torch.testing.assert_close(value, torch.ones(2), atol=0.25, rtol=0)


def horizon(fit, **model):
    data = {"num_envs": 4, "num_steps": 64, "total_timesteps": 4 * 64 * 100, "env_id": "Forever-v0"}
    module = fit({**data, "env_kwargs": {"max_episode_steps": 10}}, {**EAGER, "clip_vloss": False, **model})
    return ask(module.agent, 0.0)[0].item()


@pytest.mark.integration
def test_an_infinite_horizon_is_worth_1_over_1_minus_gamma_only_if_time_limits_are_bootstrapped(fit):
    assert horizon(fit) == pytest.approx(10, abs=1)
    # If step 10 counts as a terminal state, the value lies between 1 and (1 - 0.9^10) / 0.1 = 6.5.
    assert horizon(fit, bootstrap_truncated=False) < 7


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(1, marks=pytest.mark.integration),
        *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3)),
    ],
)
def test_cartpole_is_solved_by_the_recipe(seed, tmp_path):
    import subprocess
    import sys

    command = [
        "fit",
        "--config",
        "configs/classic/cartpole.yaml",
        "--seed_everything",
        str(seed),
        "--trainer.logger",
        "false",
    ]
    run = subprocess.run(
        [sys.executable, "-m", "ppo_lightning", *command, "--trainer.default_root_dir", str(tmp_path)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    line = next(
        line for line in run.stdout.splitlines() if line.startswith("return over the last 100 episodes")
    )
    assert float(line.split(":")[1]) >= 475
