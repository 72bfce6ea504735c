"""Every recipe in ``configs/`` runs, starts at ratio 1, and is reproduced by its saved configuration."""

import csv
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

import ppo_lightning
from ppo_lightning import MLPAgent
from ppo_lightning.algorithms.ppo import PPO

ROOT = Path(__file__).parents[2]
RECIPES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "configs").rglob("*.yaml"))
QUICK = ("configs/classic/", "configs/spaces/")
NOT_PUBLISHED = ("tictactoe.yaml", "connectfour.yaml", "ppg/cartpole.yaml", "rnd/mountaincar.yaml")
NOT_PUBLISHED += ("rnd/mountaincar_sparse.yaml", "rnd/multiroom.yaml")
PPG_PHASES = {"n_iteration": 32, "e_auxiliary": 6, "beta_clone": 1.0, "num_aux_rollouts": 4}


def short(recipe):
    data = yaml.safe_load((ROOT / recipe).read_text())["data"]
    options = ["--data.total_timesteps", 2 * data["num_envs"] * data["num_steps"], "--data.eval_episodes", 1]
    if "ALE/" in data["env_id"] or data["env_id"].startswith("atari/"):
        options += ["--data.env_kwargs.max_episode_frames", 400, "--data.num_steps", 16]
        options[1] //= 8
    if "/selfplay/" in recipe:
        options += ["--model.rating_games", 2]
    if "/rnd/" in recipe:
        options += ["--model.num_iterations_obs_norm_init", 1]
    if "/ppg/" in recipe:
        options += ["--model.n_iteration", 2]
    if "/tensor/" in recipe:  # tests/envs/test_jax_env.py and test_isaac_lab.py have their environments
        options += ["--data.env_id", "tests.envs.simulators.StandIn", "--trainer.accelerator", "cpu"]
        options += ["--data.num_envs", 64, "--data.num_steps", 16]
        options[1] = 2 * 64 * 16
    if data.get("backend") == "procgen":
        options += ["--data.num_envs", 16, "--data.num_steps", 8]
        options[1] = 2 * 16 * 8
    # RPO's noise moves the ratio from 1; without it, RPO is PPO.
    is_rpo = "ppo_lightning.RPO" in (ROOT / recipe).read_text()
    return options + (["--model.rpo_alpha", 0] if is_rpo else [])


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(it, marks=() if it.startswith(QUICK) else pytest.mark.integration) for it in RECIPES],
)
def test_recipe_runs_and_begins_with_ratio_1(recipe, run_cli, monkeypatch, tmp_path):
    if "backend: procgen" in (ROOT / recipe).read_text():
        pytest.importorskip("procgen", reason="there are wheels for Python 3.11 on Linux only")
    metrics_of_updates = []
    update = PPO.update

    def recorded(self, minibatches):
        metrics = update(self, minibatches)
        metrics_of_updates.extend(metrics)
        return metrics

    monkeypatch.setattr(PPO, "update", recorded)
    # Other tests cover the compiled update.
    _, out, _ = run_cli("fit", "--config", ROOT / recipe, *short(recipe), "--model.compile", "false")
    assert abs(metrics_of_updates[0]["approx_kl"]) < 1e-6, "also with bfloat16"
    assert metrics_of_updates[0]["clipfrac"] == 0
    assert all(torch.isfinite(value) for metrics in metrics_of_updates for value in metrics.values())
    assert "wall time:" in out
    checkpoint = Path(out.split("checkpoint: ")[1].splitlines()[0])
    assert checkpoint.is_relative_to(tmp_path)
    torch.load(checkpoint, weights_only=True)
    files = {path.name.split(".")[0] for path in tmp_path.rglob("*") if path.is_file()}
    assert {"metrics", "events", "hparams", "cli_config"} <= files


def test_the_recipes_have_the_reference_hyperparameters():
    """CleanRL's ppo.py, ppo_continuous_action.py, ppo_atari.py, ... : https://docs.cleanrl.dev/rl-algorithms/ppo/."""
    reference = {
        "learning_rate": 2.5e-4,
        "anneal_lr": True,
        "gamma": 0.99,
        "gae_lambda": 0.95,
        "num_minibatches": 4,
        "update_epochs": 4,
        "norm_adv": True,
        "clip_coef": 0.2,
        "clip_vloss": True,
        "ent_coef": 0.01,
        "vf_coef": 0.5,
        "max_grad_norm": 0.5,
    }
    defaults = PPO().hparams
    assert {key: defaults[key] for key in reference} == reference
    assert (defaults["target_kl"], defaults["adam_eps"]) == (None, 1e-5)
    continuous = reference | {
        "learning_rate": 3e-4,
        "num_minibatches": 32,
        "update_epochs": 10,
        "ent_coef": 0.0,
        "norm_reward": True,
    }
    best = continuous | {"clip_vloss": False}
    procgen = reference | {
        "learning_rate": 5e-4,
        "anneal_lr": False,
        "gamma": 0.999,
        "num_minibatches": 8,
        "update_epochs": 3,
        "norm_reward": True,
    }
    expected = {
        "classic": (reference, (4, 128, 500_000)),
        "mujoco": (continuous, (1, 2048, 1_000_000)),
        "best": (best, (8, 256, 1_000_000)),
        "dm_control": (continuous, (1, 2048, 1_000_000)),
        "rpo": (continuous, (1, 2048, 8_000_000)),
        "atari": (reference | {"clip_coef": 0.1}, (8, 128, 10_000_000)),
        "atari_lstm": (reference | {"clip_coef": 0.1}, (8, 128, 10_000_000)),
        "procgen": (procgen, (64, 256, 25_000_000)),
        # ppg_procgen.py, whose update_epochs are e_policy
        "ppg": (procgen | {"update_epochs": 1, "adam_eps": 1e-8} | PPG_PHASES, (64, 256, 25_000_000)),
        "rnd": (  # ppo_rnd_envpool.py
            reference
            | {"learning_rate": 1e-4, "gamma": 0.999, "ent_coef": 0.001, "clip_coef": 0.1, "ext_coef": 2.0}
            | {"int_coef": 1.0, "int_gamma": 0.99, "update_proportion": 0.25}
            | {"num_iterations_obs_norm_init": 50},
            (128, 128, 2_000_000_000),
        ),
        "selfplay": (reference | {"clip_coef": 0.1}, (16, 128, 20_000_000)),  # ppo_pettingzoo_ma_atari.py
        "multiagent": (  # TorchRL's tutorial on PPO with several agents, with normalized rewards
            reference
            | {
                "learning_rate": 3e-4,
                "anneal_lr": False,
                "gamma": 0.9,
                "gae_lambda": 0.9,
                "num_minibatches": 15,
                "update_epochs": 30,
                "clip_vloss": False,
                "ent_coef": 1e-4,
                "max_grad_norm": 1.0,
                "norm_reward": True,
            },
            (60, 300, 900_000),
        ),
        "memory": (
            reference | {"learning_rate": 1e-3, "num_minibatches": 16, "ent_coef": 0.015, "target_kl": 0.02},
            (64, 64, 1_000_000),
        ),
        "spaces": (reference | {"learning_rate": 1e-3, "ent_coef": 0.05}, (4, 128, 100_000)),
        "tensor": (
            continuous | {"learning_rate": 1e-3, "num_minibatches": 8, "update_epochs": 5},
            (64, 32, 200_000),
        ),
        # Losses, epochs and clipping of MuJoCo Playground's rsl_rl_config, discount of its brax_ppo_config.
        "playground": (
            {
                "gamma": 0.97,
                "gae_lambda": 0.95,
                "update_epochs": 5,
                "clip_coef": 0.2,
                "clip_vloss": True,
                "ent_coef": 0.001,
                "vf_coef": 1.0,
                "max_grad_norm": 1.0,
            },
            (64, 64, 5_000_000),
        ),
    }
    # Defaults of Brax 0.14.2, and MuJoCo Playground's brax_ppo_config for the suite of dm_control.
    brax = reference | {"learning_rate": 1e-3, "anneal_lr": False, "gamma": 0.995, "num_minibatches": 32}
    brax |= {"update_epochs": 16, "clip_coef": 0.3, "clip_vloss": False, "ent_coef": 1e-2, "adam_eps": 1e-8}
    brax |= {"max_grad_norm": 1e9}
    go1 = brax | {"learning_rate": 3e-4, "gamma": 0.97, "update_epochs": 4, "max_grad_norm": 1.0}
    rl_games = reference | {"learning_rate": 3e-4, "anneal_lr": False, "num_minibatches": 2, "ent_coef": 0.0}
    rl_games |= {"vf_coef": 2.0, "max_grad_norm": 1.0, "desired_kl": 0.008, "adam_eps": 1e-8}
    # rl-baselines3-zoo's environments, discount, lambda and minibatches, with shorter rollouts
    lunarlander = reference | {"learning_rate": 1e-3, "num_minibatches": 64, "gamma": 0.999}
    lunarlander |= {"gae_lambda": 0.98, "norm_reward": True}
    by_name = {
        "pendulum.yaml": (  # rl-baselines3-zoo's hyperparams/ppo.yml, with 64 of its minibatches of 64
            reference
            | {"learning_rate": 1e-3, "anneal_lr": False, "gamma": 0.9, "num_minibatches": 64}
            | {"update_epochs": 10, "clip_vloss": False, "ent_coef": 0.0},
            (4, 1024, 100_000),
        ),
        "lunarlander.yaml": (lunarlander, (16, 256, 500_000)),
        "best/mountaincar.yaml": (lunarlander | {"gamma": 0.99, "ent_coef": 0.0}, (16, 256, 500_000)),
        # benchmarks/results/tune/best_cartpole.yaml, rounded
        "best/classic.yaml": (
            reference | {"learning_rate": 6.5e-4, "gamma": 0.98, "update_epochs": 6, "clip_vloss": False},
            (4, 32, 100_000),
        ),
        "best/mujoco.yaml": (best | {"target_kl": 0.03}, (8, 256, 1_000_000)),
        "best/dm_control.yaml": (best | {"target_kl": 0.03, "rpo_alpha": 0.1}, (8, 256, 1_000_000)),
        # rl-baselines3-zoo's environments, minibatches, discount, lambda and learning rate
        "best/swimmer.yaml": (
            continuous | {"learning_rate": 6e-4, "num_minibatches": 16, "gamma": 0.9999, "gae_lambda": 0.98},
            (4, 1024, 1_000_000),
        ),
        "best/ant.yaml": (best | {"gamma": 0.98, "gae_lambda": 0.9}, (8, 256, 1_000_000)),
        "best/pusher.yaml": (best | {"gamma": 0.95}, (8, 256, 1_000_000)),
        "playground_cheetah.yaml": (brax, (2048, 480, 60_000_000)),
        "playground_go1.yaml": (go1, (8192, 20, 200_000_000)),
        "isaac_ant.yaml": (rl_games, (4096, 16, 500 * 4096 * 16)),  # Isaac Lab's rl_games_ppo_cfg.yaml
    }
    pong_in_5_minutes = {"num_minibatches": 8, "update_epochs": 3, "clip_coef": 0.2}
    for recipe in RECIPES:
        if recipe.endswith(NOT_PUBLISHED):
            continue
        *_, family, name = Path(recipe).parts
        hyperparameters, sizes = by_name.get(f"{family}/{name}") or by_name.get(name) or expected[family]
        config = yaml.safe_load((ROOT / recipe).read_text())
        if recipe.endswith("masked_velocity.yaml"):
            hyperparameters, sizes = (
                hyperparameters | {"learning_rate": 1e-3, "norm_reward": True},
                (8, *sizes[1:]),
            )
        if recipe.endswith("pong_fast.yaml"):
            hyperparameters, sizes = hyperparameters | pong_in_5_minutes, (16, *sizes[1:])
        own = {key: float(v) if isinstance(v, str) else v for key, v in config["model"]["init_args"].items()}
        algorithm = getattr(ppo_lightning, config["model"]["class_path"].rpartition(".")[2])
        model = algorithm().hparams | own
        assert {key: model[key] for key in hyperparameters} == hyperparameters, recipe
        data = config["data"]
        if recipe.endswith("halfcheetah_fast.yaml"):
            assert model["compile"]
            assert data["num_envs"] * data["num_steps"] == sizes[0] * sizes[1], "minibatches of the same size"
        else:
            assert (data["num_envs"], data["num_steps"], data["total_timesteps"]) == sizes, recipe
        if hyperparameters is continuous or (family == "best" and data["env_id"].endswith("-v4")):
            agent = {
                "hidden_sizes": [128, 128] if recipe == "configs/best/mujoco.yaml" else [64, 64],
                "shared": False,
                "head": "gaussian",
                "norm_obs": True,
            }
            defaults = {name: value.default for name, value in inspect.signature(MLPAgent).parameters.items()}
            made = defaults | model["agent"]["init_args"]
            made["hidden_sizes"] = list(made["hidden_sizes"])
            made["shared"] = bool(made["shared"])  # None is the class's default
            assert {key: made[key] for key in agent} == agent, recipe


def rows(path):
    with path.open() as file:
        return [
            {key: value for key, value in row.items() if key != "charts/SPS"} for row in csv.DictReader(file)
        ]


def test_the_saved_configuration_repeats_the_run(run_cli, tmp_path):
    recipe = RECIPES[[Path(r).stem for r in RECIPES].index("cartpole")]
    run_cli("fit", "--config", ROOT / recipe, *short(recipe), "--model.gamma", 0.9, "--seed_everything", 7)
    run_cli("fit", "--config", "runs/cartpole/version_0/cli_config.yaml")
    first, second = (rows(tmp_path / f"runs/cartpole/version_{version}/metrics.csv") for version in (0, 1))
    assert len(first) == 4, "two rollouts, each with an evaluation"
    assert first == second
    assert [row["step"] for row in first] == ["512", "512", "1024", "1024"]


def test_a_checkpoint_knows_its_environment(run_cli, tmp_path):
    recipe = "configs/classic/acrobot.yaml"
    _, out, _ = run_cli("fit", "--config", ROOT / recipe, *short(recipe))
    checkpoint = Path(out.split("checkpoint: ")[1].splitlines()[0])
    assert torch.load(checkpoint, weights_only=True)["datamodule_hyper_parameters"]["env_id"] == "Acrobot-v1"
    assert (
        yaml.safe_load((checkpoint.parent.parent / "cli_config.yaml").read_text())["data"]["env_id"]
        == "Acrobot-v1"
    )
    trained = float(out.split("deterministic: return ")[1].split()[0])
    assert f"{trained}" in run_cli("validate", "--ckpt_path", checkpoint)[1]


@pytest.mark.integration
def test_the_module_is_runnable():
    out = subprocess.run(
        [sys.executable, "-m", "ppo_lightning", "--help"], capture_output=True, text=True, check=True
    )
    assert all(command in out.stdout for command in ("fit", "validate", "test"))
