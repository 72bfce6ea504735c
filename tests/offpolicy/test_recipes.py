"""Recipes and commands of the off-policy algorithms."""

import inspect

import onnx
import pytest
import torch
import yaml

import ppo_lightning
from tests.commands.conftest import checkpoint_of
from tests.helpers import ROOT

FAMILIES = ("dqn", "c51", "ddpg", "td3", "sac")
RECIPES = sorted(path for family in FAMILIES for path in (ROOT / "configs" / family).glob("*.yaml"))
SHORT = [
    *("--data.total_timesteps", "128", "--data.eval_episodes", "1", "--data.num_steps", "16"),
    *("--model.learning_starts", "64", "--model.batch_size", "8", "--model.compile", "false"),
    *("--model.train_frequency", "16", "--model.buffer_size", "1000"),
]
CLEANRL = {  # values of the scripts
    "dqn": {"learning_rate": 2.5e-4, "buffer_size": 10_000, "batch_size": 128, "learning_starts": 10_000}
    | {"train_frequency": 10, "target_network_frequency": 500, "tau": 1.0, "start_e": 1.0, "end_e": 0.05}
    | {"exploration_fraction": 0.5, "gamma": 0.99, "hidden_sizes": (120, 84), "total_timesteps": 500_000},
    "sac": {"policy_lr": 3e-4, "q_lr": 1e-3, "buffer_size": 1_000_000, "batch_size": 256, "tau": 0.005}
    | {"learning_starts": 5000, "policy_frequency": 2, "target_network_frequency": 1, "autotune": True}
    | {"gamma": 0.99, "hidden_sizes": (256, 256), "total_timesteps": 1_000_000, "train_frequency": 1},
    "ddpg": {"learning_rate": 3e-4, "buffer_size": 1_000_000, "batch_size": 256, "tau": 0.005, "gamma": 0.99}
    | {"learning_starts": 25_000, "policy_frequency": 2, "exploration_noise": 0.1, "hidden_sizes": (256, 256)}
    | {"total_timesteps": 1_000_000, "train_frequency": 1},
}
CLEANRL["c51"] = CLEANRL["dqn"] | {"n_atoms": 101, "v_min": -100, "v_max": 100}
CLEANRL["td3"] = CLEANRL["ddpg"] | {"policy_noise": 0.2, "noise_clip": 0.5}
ATARI = {"buffer_size": 1_000_000, "batch_size": 32, "learning_starts": 80_000, "train_frequency": 4}
ATARI |= {"exploration_fraction": 0.1, "end_e": 0.01, "total_timesteps": 10_000_000}
PUBLISHED = {family: CLEANRL[family] for family in FAMILIES} | {
    "sac atari": {"policy_lr": 3e-4, "q_lr": 3e-4, "tau": 1.0, "batch_size": 64, "learning_starts": 20_000}
    | {"train_frequency": 4, "target_network_frequency": 8000, "target_entropy_scale": 0.89}
    | {"policy_frequency": 1, "total_timesteps": 5_000_000, "buffer_size": 1_000_000, "autotune": True},
    "dqn atari": ATARI | {"learning_rate": 1e-4, "target_network_frequency": 1000},
    "c51 atari": ATARI
    | {"learning_rate": 2.5e-4, "target_network_frequency": 10_000, "n_atoms": 51}
    | {"v_min": -10, "v_max": 10},
}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_recipe_has_the_values_of_its_script(recipe):
    config = yaml.safe_load(recipe.read_text())
    settings = config["model"].get("init_args", {})
    algorithm = getattr(ppo_lightning, config["model"]["class_path"].rpartition(".")[2])
    maker = getattr(algorithm().make_agent, "func", algorithm().make_agent)
    found = {name: value.default for name, value in inspect.signature(maker).parameters.items()}
    found |= {**algorithm().hparams, **settings, **config["data"]}
    expected = PUBLISHED[recipe.parent.name + " atari" * ("ALE/" in config["data"]["env_id"])]
    if recipe.stem == "pendulum":
        expected = expected | {"learning_starts": 1000, "total_timesteps": 20_000}
    assert {name: found[name] for name in expected} == expected
    assert config["name"] == f"{recipe.parent.name}_{recipe.stem}"


QUICK = ("dqn/classic", "sac/pendulum")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.integration)
        for name in [f"{path.parent.name}/{path.stem}" for path in RECIPES]
    ],
)
def test_a_recipe_runs(name, output_of, tmp_path):
    out = output_of("fit", "--config", name, *SHORT)
    assert "wall time:" in out
    torch.load(checkpoint_of(out), weights_only=True)
    assert {"metrics.csv"} <= {path.name for path in tmp_path.rglob("*.csv")}


@pytest.mark.integration
def test_commands_take_a_checkpoint(run_cli, output_of, tmp_path):
    data = ("--data.env_id", "Pendulum-v1", "--data.num_envs", "1")
    out = output_of("fit", "--model", "SAC", *data, *SHORT, "--model.save_buffer", "true")
    assert out.startswith("SAC, SACAgent: ")
    path = checkpoint_of(out)
    assert path.parents[2] == tmp_path / "runs/sac"
    assert [*path.parent.glob("*.replay")]
    output_of("validate", "--ckpt_path", path, "--data.eval_episodes", "2")
    output_of("play", "--ckpt_path", path, "--max_frames", "9", "--output", "v.gif", "--overlay")
    output_of("export", "--ckpt_path", path, "--onnx", "agent.onnx", "--hub", "hub")
    outputs = onnx.load("agent.onnx").graph.output
    assert [output.name for output in outputs] == ["action"], "there is no value of observations alone"
    assert "# SAC on Pendulum-v1" in (tmp_path / "hub/README.md").read_text()
    code, _, errors = run_cli("fit", "--ckpt_path", path, "--data.total_timesteps", "160")
    assert code == 0 and "refill" not in errors
    module = ppo_lightning.AgentModule.load_from_checkpoint(path)
    assert type(module) is ppo_lightning.SAC
    assert module.predict([1.0, 0.0, 0.0]).shape == (1,)


def test_help_and_messages_name_the_algorithm_of_the_recipe(output_of, refusal_of):
    out = output_of("fit", "--config", "sac/pendulum", "--help")
    assert "those of SAC" in " ".join(out.split())
    assert "--model.tau" in out
    assert "--model.norm_adv" not in out
    assert "those of PPO, not of SAC" in refusal_of("details", "--config", "sac/pendulum")
