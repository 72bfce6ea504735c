"""Settings of CleanRL: a script, whose defaults are read, or its arguments as YAML or JSON."""

from collections.abc import Mapping
from typing import Any

from ppo_lightning.commands.against.translation import Translation, require

LIBRARY = "CleanRL"
DEFAULTS = {  # Args of cleanrl/ppo.py
    "env_id": "CartPole-v1",
    "total_timesteps": 500_000,
    "learning_rate": 2.5e-4,
    "num_envs": 4,
    "num_steps": 128,
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
    "target_kl": None,
}
DATA = ("env_id", "num_envs", "num_steps", "total_timesteps")
UNUSED = (  # settings that do not affect what is learned, or that are read elsewhere
    "exp_name", "seed", "torch_deterministic", "cuda", "track", "wandb_project_name", "wandb_entity",
    "capture_video", "save_model", "upload_model", "hf_entity", "batch_size", "minibatch_size",
    "num_iterations", "modules", "gym_id", "wandb_version", "_wandb", "gae",
    "record_video_step_frequency",
)  # fmt: skip


def translate(settings: dict[str, Any], overrides: Mapping[str, Any]) -> Translation:
    """Translate settings into a recipe.

    Args:
        settings: Of the file. In ``config.yaml`` of Weights & Biases, each value is a mapping with ``value``.
        overrides: Values of our settings that the user gave, by flag.

    Raises:
        ConfigError: The file has no arguments of CleanRL's PPO.
    """
    settings = {
        name: value["value"] if isinstance(value, dict) and "value" in value else value
        for name, value in settings.items()
    }
    require(settings, ("num_minibatches", "clip_coef", "gae_lambda"), "cleanrl", "a script or its arguments")
    if "gym_id" in settings:  # the name until 2022
        settings["env_id"] = settings["gym_id"]
    t = Translation(LIBRARY, settings, DEFAULTS, overrides)
    for name in DEFAULTS:
        t.same(name, f"data.{name}" if name in DATA else f"model.{name}")
    t.recipe["data.total_timesteps"] = int(t.number("total_timesteps"))
    t.implicit("Adam's epsilon", "model.adam_eps", 1e-5)
    t.implicit("time limits", "model.bootstrap_truncated", False, "CleanRL treats them as terminal states")
    used, script = settings.get("modules", ()), str(settings.get("exp_name", ""))
    continuous = "continuous" in script
    norm_obs = continuous or "NormalizeObservation" in used
    norm_reward = continuous or "NormalizeReward" in used
    if "Conv2d" in used or "atari" in script or "procgen" in script:
        t.classes["model.agent"] = "ppo_lightning.CNNAgent"
        norm_reward = norm_reward or "procgen" in script
    else:
        t.implicit("NormalizeObservation", "model.agent.norm_obs", norm_obs)
        t.implicit("networks of 64 x 64 with tanh", "model.agent.shared", False)
    t.implicit("NormalizeReward", "model.norm_reward", norm_reward)
    if norm_obs or norm_reward:
        t.differ("Statistics: {library} has one set for each environment; here all environments share one.")
        t.differ(
            "Statistics: Gymnasium's wrappers start with 1e-4 pseudo-observations, and the wrapper of rewards"
            " resets its sum before the last reward of an episode; here neither happens."
        )
    if "LSTM" in used or "lstm" in script:
        t.differ("Network: the LSTM is not translated. Set model to ppo_lightning.RecurrentPPO.")
    t.read |= set(UNUSED)
    return t
