"""Every recipe in ``configs/`` runs, starts at ratio 1, and is reproduced by its saved configuration."""

import inspect
from importlib.util import find_spec

import pytest
import torch
import yaml

import ppo_lightning
from ppo_lightning import PPO
from ppo_lightning.commands.recipes import bundled_recipes, bundled_tasks
from ppo_lightning.experiments.report import read_csv
from ppo_lightning.offpolicy.module import OffPolicyModule
from tests.commands.conftest import checkpoint_of
from tests.helpers import NO_PROCGEN, RECIPE, ROOT, short

OFF_POLICY = {"dqn", "c51", "ddpg", "td3", "sac"}  # tests/offpolicy has them
RECIPES = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "configs").rglob("*.yaml")
    if path.parent.name not in OFF_POLICY
)
QUICK = (
    "configs/first/",
    "configs/ppo/c",
    "configs/ppo/pendulum",
    "configs/ppo/locks",
    "configs/recurrent_ppo/c",
)


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(it, marks=() if it.startswith(QUICK) else pytest.mark.integration) for it in RECIPES],
)
def test_recipe_runs_and_begins_with_ratio_1(recipe, output_of, monkeypatch, tmp_path):
    text = (ROOT / recipe).read_text()
    # RPO's noise moves the ratio from 1; without it, RPO is PPO.
    flags = ["--model.rpo_alpha", "0"] if "ppo_lightning.RPO" in text else []
    if "backend: procgen" in text:
        pytest.importorskip("procgen", reason=NO_PROCGEN)
    if "env_id: dm_control/" in text and find_spec("dm_control") is None:
        task = "WalkerWalk-v1" if "walker-walk" in text else "CartpoleBalance-v1"
        flags += ["--data.env_id", task, "--data.backend", "envpool"]
    metrics_of_updates = []
    update = PPO.update

    def recorded(self, minibatches):
        metrics = update(self, minibatches)
        metrics_of_updates.extend(metrics)
        return metrics

    monkeypatch.setattr(PPO, "update", recorded)
    # Other tests cover the compiled update.
    out = output_of(
        "fit", "--config", ROOT / recipe, *short(ROOT / recipe), *flags, "--model.compile", "false"
    )
    assert abs(metrics_of_updates[0]["approx_kl"]) < 1e-6, "also with bfloat16"
    assert metrics_of_updates[0]["clipfrac"] == 0
    assert all(torch.isfinite(value) for metrics in metrics_of_updates for value in metrics.values())
    assert "wall time:" in out
    checkpoint = checkpoint_of(out)
    assert checkpoint.is_relative_to(tmp_path)
    torch.load(checkpoint, weights_only=True)
    files = {path.name.split(".")[0] for path in tmp_path.rglob("*") if path.is_file()}
    assert {"metrics", "events", "hparams", "cli_config"} <= files


# https://docs.cleanrl.dev/rl-algorithms/ppo/
CLEANRL = {
    "learning_rate": 2.5e-4,
    "anneal_lr": True,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "num_minibatches": 4,
    "update_epochs": 4,
    "norm_adv": True,
    "adv_eps": 1e-8,
    "clip_coef": 0.2,
    "clip_vloss": True,
    "ent_coef": 0.01,
    "vf_coef": 0.5,
    "max_grad_norm": 0.5,
    "target_kl": None,
    "adam_eps": 1e-5,
}
CONTINUOUS = CLEANRL | {"learning_rate": 3e-4, "num_minibatches": 32, "update_epochs": 10, "ent_coef": 0.0}
CONTINUOUS |= {"norm_reward": True, "num_envs": 1, "num_steps": 2048, "total_timesteps": 1_000_000}
CONTINUOUS |= {"hidden_sizes": (64, 64), "shared": False, "head": "gaussian", "norm_obs": True}
ATARI = CLEANRL | {"clip_coef": 0.1, "num_envs": 8, "num_steps": 128, "total_timesteps": 10_000_000}
PROCGEN = CLEANRL | {"learning_rate": 5e-4, "anneal_lr": False, "gamma": 0.999, "num_minibatches": 8}
PROCGEN |= {"update_epochs": 3, "norm_reward": True}
PROCGEN |= {"num_envs": 64, "num_steps": 256, "total_timesteps": 25_000_000}
BRAX = CLEANRL | {"learning_rate": 1e-3, "anneal_lr": False, "gamma": 0.995, "num_minibatches": 32}
BRAX |= {"update_epochs": 16, "clip_coef": 0.3, "clip_vloss": False, "ent_coef": 1e-2, "adam_eps": 1e-8}
BRAX |= {"max_grad_norm": 1e9, "num_envs": 2048, "num_steps": 480, "total_timesteps": 60_000_000}
SELF_PLAY = ATARI | {"num_envs": 16, "total_timesteps": 20_000_000}  # ppo_pettingzoo_ma_atari.py
# Recipe -> what its source says. Recipes that are not here are our own.
PUBLISHED = {
    "ppo/classic": CLEANRL | {"num_envs": 4, "num_steps": 128, "total_timesteps": 500_000},
    "ppo/mujoco": CONTINUOUS,
    "ppo/dm_control": CONTINUOUS,
    "rpo/*[!t]": CONTINUOUS | {"total_timesteps": 8_000_000},  # without dm_control_best
    "ppo/atari": ATARI,
    "recurrent_ppo/atari": ATARI,
    "ppo/procgen": PROCGEN,
    # ppg_procgen.py, whose update_epochs are e_policy
    "ppg/procgen": PROCGEN
    | {"update_epochs": 1, "adam_eps": 1e-8, "n_iteration": 32, "e_auxiliary": 6, "beta_clone": 1.0}
    | {"num_aux_rollouts": 4},
    "rnd/montezuma": CLEANRL  # ppo_rnd_envpool.py
    | {"learning_rate": 1e-4, "gamma": 0.999, "ent_coef": 0.001, "clip_coef": 0.1, "ext_coef": 2.0}
    | {"int_coef": 1.0, "int_gamma": 0.99, "update_proportion": 0.25, "num_iterations_obs_norm_init": 50}
    | {"num_envs": 128, "num_steps": 128, "total_timesteps": 2_000_000_000},
    "selfplay/atari": SELF_PLAY,
    # TorchRL's tutorial on PPO with several agents
    "ppo/simple_spread_*": {"learning_rate": 3e-4, "anneal_lr": False, "gamma": 0.9, "gae_lambda": 0.9}
    | {"num_minibatches": 15, "update_epochs": 30, "clip_coef": 0.2, "ent_coef": 1e-4, "max_grad_norm": 1.0}
    | {"num_envs": 60, "num_steps": 300, "total_timesteps": 900_000},
    # rl-baselines3-zoo's hyperparams/ppo.yml
    "ppo/pendulum": {"learning_rate": 1e-3, "anneal_lr": False, "gamma": 0.9, "gae_lambda": 0.95}
    | {"num_minibatches": 64, "update_epochs": 10, "clip_coef": 0.2, "clip_vloss": False}
    | {"ent_coef": 0.0, "num_envs": 4, "num_steps": 1024, "total_timesteps": 100_000},
    "ppo/lunarlander_best": {"num_envs": 16, "gamma": 0.999, "gae_lambda": 0.98, "num_minibatches": 64},
    "ppo/swimmer_best": {"learning_rate": 6e-4, "num_envs": 4, "num_steps": 1024, "num_minibatches": 16}
    | {"gamma": 0.9999, "gae_lambda": 0.98, "total_timesteps": 1_000_000},
    # Losses, epochs and clipping of MuJoCo Playground's rsl_rl_config, discount of its brax_ppo_config
    "ppo/go1": {"gamma": 0.97, "gae_lambda": 0.95, "update_epochs": 5, "clip_coef": 0.2}
    | {"clip_vloss": True, "ent_coef": 0.001, "vf_coef": 1.0, "max_grad_norm": 1.0},
    # Defaults of Brax 0.14.2, and Playground's brax_ppo_config
    "ppo/playground_cheetah": BRAX,
    "ppo/playground_go1": BRAX
    | {"learning_rate": 3e-4, "gamma": 0.97, "update_epochs": 4, "max_grad_norm": 1.0}
    | {"num_envs": 8192, "num_steps": 20, "total_timesteps": 200_000_000},
    # Isaac Lab's rl_games_ppo_cfg.yaml
    "ppo/isaac_ant": CLEANRL
    | {"learning_rate": 3e-4, "anneal_lr": False, "num_minibatches": 2, "ent_coef": 0.0, "vf_coef": 2.0}
    | {"max_grad_norm": 1.0, "desired_kl": 0.008, "adam_eps": 1e-8}
    | {"num_envs": 4096, "num_steps": 16, "total_timesteps": 500 * 4096 * 16},
}


def settings(recipe):
    """Return the settings of a recipe's data, algorithm and agent by name, with defaults."""
    config = yaml.safe_load(recipe.read_text())
    algorithm, agent = config["model"], config["model"]["init_args"].get("agent", {})
    classes = [getattr(ppo_lightning, part["class_path"].rpartition(".")[2]) for part in (algorithm, agent)]
    defaults = {name: value.default for name, value in inspect.signature(classes[1]).parameters.items()}
    model = {
        name: float(value) if isinstance(value, str) else value
        for name, value in algorithm["init_args"].items()
    }
    found = {**defaults, **agent.get("init_args", {}), **classes[0]().hparams, **model, **config["data"]}
    return found | {"shared": bool(found.get("shared"))}  # None is the class's default


@pytest.mark.parametrize("pattern", PUBLISHED)
def test_a_recipe_has_the_settings_of_its_source(pattern):
    recipes = [*(ROOT / "configs").glob(f"{pattern}.yaml")]
    assert recipes
    for recipe in recipes:
        found = settings(recipe)
        assert {name: found[name] for name in PUBLISHED[pattern]} == PUBLISHED[pattern], recipe


# Classes -> settings that each recipe names, as their defaults are for runs without a recipe.
SPELLED_OUT = {
    ppo_lightning.PPO: "learning_rate anneal_lr gamma gae_lambda num_minibatches update_epochs norm_adv"
    " adv_eps clip_coef clip_vloss ent_coef vf_coef max_grad_norm target_kl adam_eps norm_reward",
    ppo_lightning.RPO: "rpo_alpha",
    ppo_lightning.PPG: "n_iteration e_auxiliary beta_clone num_aux_rollouts",
    ppo_lightning.RND: "update_proportion int_coef ext_coef int_gamma num_iterations_obs_norm_init",
    OffPolicyModule: "gamma buffer_size batch_size learning_starts train_frequency tau",
    ppo_lightning.DQN: "learning_rate target_network_frequency start_e end_e exploration_fraction",
    ppo_lightning.C51: "n_atoms v_min v_max",
    ppo_lightning.DDPG: "learning_rate exploration_noise policy_frequency",
    ppo_lightning.TD3: "policy_noise noise_clip",
    ppo_lightning.SAC: "policy_lr q_lr policy_frequency target_network_frequency autotune alpha",
    ppo_lightning.DiscreteSAC: "target_entropy_scale",
    ppo_lightning.MLPAgent: "norm_obs",
    ppo_lightning.RolloutDataModule: "env_id num_envs num_steps total_timesteps",
}


def test_a_recipe_names_its_settings_so_that_a_default_may_change():
    for recipe in (ROOT / "configs").rglob("*.yaml"):
        if recipe.parent.name == "first":
            continue  # which shows the defaults
        config = yaml.safe_load(recipe.read_text())
        agent = config["model"]["init_args"].get("agent", {"class_path": "ppo_lightning.CNNAgent"})
        data = {"class_path": "ppo_lightning.RolloutDataModule", "init_args": config["data"]}
        for part in (config["model"], agent, data):
            chosen = getattr(ppo_lightning, part["class_path"].rpartition(".")[2])
            names = {name for it in SPELLED_OUT if issubclass(chosen, it) for name in SPELLED_OUT[it].split()}
            assert names <= part.get("init_args", {}).keys(), recipe


def test_each_recipe_has_a_folder_of_its_own():
    """Otherwise ``--auto_resume`` finds the run of another recipe."""
    paths = bundled_recipes()
    folders = {name: yaml.safe_load(path.read_text()).get("name", path.stem) for name, path in paths.items()}
    assert len(set(folders.values())) == len(folders) > 40
    del folders["first/cartpole"]  # called as the runs of an alias, which will go
    for task in bundled_tasks().values():
        assert task.run not in {folders[name] for name in folders.keys() - {task.recipe}}, task


def rows(path):
    return [{key: value for key, value in row.items() if key != "charts/SPS"} for row in read_csv(path)]


def test_the_saved_configuration_repeats_the_run(run_cli, tmp_path):
    run_cli("fit", "--config", RECIPE, *short(RECIPE), "--model.gamma", 0.9, "--seed_everything", 7)
    run_cli("fit", "--config", "runs/ppo_classic/version_0/cli_config.yaml")
    first, second = (rows(tmp_path / f"runs/ppo_classic/version_{version}/metrics.csv") for version in (0, 1))
    assert len(first) == 4, "two rollouts, each with an evaluation"
    assert first == second
    assert [row["step"] for row in first] == ["512", "512", "1024", "1024"]
