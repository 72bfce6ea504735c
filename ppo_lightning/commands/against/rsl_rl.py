"""Settings of rsl_rl: ``agent.yaml`` of Isaac Lab, or its Python file of a configuration class."""

import math
from collections.abc import Mapping
from typing import Any

from ppo_lightning.commands.against.translation import (
    BOOTSTRAPS_CURRENT,
    INITIAL_WEIGHTS,
    KEEPS_ONE_PERMUTATION,
    NO_LIMIT,
    NORMALIZES_ROLLOUT,
    Translation,
    chosen,
    require,
)

LIBRARY = "rsl_rl"
DEFAULTS = {  # PPO.__init__ in rsl_rl/algorithms/ppo.py (5.4); sizes of Isaac Lab's configuration classes
    "num_learning_epochs": 5,
    "num_mini_batches": 4,
    "clip_param": 0.2,
    "gamma": 0.99,
    "lam": 0.95,
    "value_loss_coef": 1.0,
    "entropy_coef": 0.01,
    "learning_rate": 1e-3,
    "max_grad_norm": 1.0,
    "use_clipped_value_loss": True,
    "schedule": "adaptive",
    "desired_kl": 0.01,
    "normalize_advantage_per_mini_batch": False,
    "num_steps_per_env": 24,
    "activation": "elu",
    "init_noise_std": 1.0,
    "noise_std_type": "scalar",
}
LAYERS = [256, 256, 256]
UNUSED = (  # settings that do not affect what is learned, or that are read elsewhere
    "seed", "device", "save_interval", "experiment_name", "run_name", "logger", "neptune_project",
    "wandb_project", "resume", "load_run", "load_checkpoint", "class_name", "obs_groups", "optimizer",
    "share_cnn_encoders", "actor", "critic", "modules", "runner_class_name", "check_for_nan",
)  # fmt: skip


def translate(settings: dict[str, Any], overrides: Mapping[str, Any]) -> Translation:
    """Translate settings into a recipe.

    Args:
        settings: Of the file: ``algorithm``, ``policy`` (or ``actor`` and ``critic``), ``num_steps_per_env``.
        overrides: Values of our settings that the user gave, by flag.

    Raises:
        ConfigError: The file has no settings of rsl_rl.
    """
    require(settings, ("algorithm", "policy", "num_steps_per_env"), "rsl_rl", "agent.yaml of Isaac Lab")
    groups = [chosen(settings, name) for name in ("runner", "algorithm", "policy")]
    flat = {name: value for name, value in settings.items() if not isinstance(value, dict)}
    for group in groups:
        flat |= group
    actor, critic = chosen(settings, "actor"), chosen(settings, "critic")  # since rsl_rl 4
    if actor:
        noise = chosen(actor, "distribution_cfg")
        flat |= {"activation": actor.get("activation", "elu"), "actor_hidden_dims": actor.get("hidden_dims")}
        flat |= {"critic_hidden_dims": critic.get("hidden_dims", actor.get("hidden_dims"))}
        flat |= {"actor_obs_normalization": actor.get("obs_normalization", False)}
        flat |= {
            "init_noise_std": noise.get("init_std", 1.0),
            "noise_std_type": noise.get("std_type", "scalar"),
        }
    t = Translation(LIBRARY, flat, DEFAULTS, overrides)
    t.sizes("num_steps_per_env", None, "num_learning_epochs", "max_iterations")
    t.same("num_mini_batches", "model.num_minibatches")
    t.same("gamma", "model.gamma")
    t.same("lam", "model.gae_lambda")
    t.same("clip_param", "model.clip_coef")
    t.same("use_clipped_value_loss", "model.clip_vloss")
    t.squared_error("value_loss_coef")
    t.same("entropy_coef", "model.ent_coef")
    note = "rsl_rl 4 and 5 clip the gradients of actor and critic separately; here together"
    t.convert("max_grad_norm", "model.max_grad_norm", t.number("max_grad_norm"), note)
    _learning_rate(t)
    if t.get("normalize_advantage_per_mini_batch"):
        t.same("normalize_advantage_per_mini_batch", "model.norm_adv")
    else:
        t.convert("normalize_advantage_per_mini_batch", "model.norm_adv", True, "see below")
        t.differ(NORMALIZES_ROLLOUT)
    t.implicit("Adam's epsilon", "model.adam_eps", 1e-8)
    t.implicit("time limits", "model.bootstrap_truncated", True, "see below")
    t.differ(BOOTSTRAPS_CURRENT)
    t.differ(KEEPS_ONE_PERMUTATION, order="draws one permutation and uses it")
    _policy(t)
    t.read |= {*UNUSED, "runner"}
    return t


def _learning_rate(t: Translation) -> None:
    t.same("learning_rate", "model.learning_rate")
    adaptive = t.get("schedule") == "adaptive" and t.get("desired_kl") is not None
    t.convert("schedule", "model.anneal_lr", False)
    desired = t.number("desired_kl") if adaptive else None
    t.convert("desired_kl", "model.desired_kl", desired, "see below" if adaptive else "")
    if adaptive:
        t.differ(
            "Adaptive learning rate: {library} adapts before each minibatch, by the exact divergence"
            " KL(old || new) of the minibatch; here after each iteration, by the mean of the estimate"
            " approx_kl over its minibatches. Factor 1.5, thresholds and bounds are the same."
        )


def _policy(t: Translation) -> None:
    normalized = [
        name
        for name in ("empirical_normalization", "actor_obs_normalization", "critic_obs_normalization")
        if t.get(name)
    ]
    t.implicit("normalization of observations", "model.agent.norm_obs", bool(normalized))
    if normalized:
        t.recipe["model.agent.clip_obs"] = NO_LIMIT
        t.differ("Normalization: {library} adds 0.01 to the standard deviation and clips nothing.")
    actor, critic = (t.get(f"{part}_hidden_dims") or LAYERS for part in ("actor", "critic"))
    t.hidden_layers("actor_hidden_dims", actor, critic)
    t.implicit("bodies of actor and critic", "model.agent.shared", False)
    t.activation(t.get("activation"))
    t.differ(INITIAL_WEIGHTS)
    t.log_std(math.log(t.number("init_noise_std")))
    if t.get("noise_std_type") == "scalar":
        t.differ("Standard deviation: {library} learns it as it is; here its logarithm is learned.")
    for name in ("rnd_cfg", "symmetry_cfg", "clip_actions"):
        if t.get(name) is not None:
            t.differ(f"{name} is not translated.")
