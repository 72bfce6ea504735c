"""Settings of rl_games: a YAML file with ``params`` and ``config``."""

from collections.abc import Mapping
from typing import Any

from ppo_lightning.commands.against.translation import (
    BOOTSTRAPS_CURRENT,
    INITIAL_WEIGHTS,
    KEEPS_ONE_PERMUTATION,
    MINIBATCH_STATISTICS,
    NO_LIMIT,
    NORMALIZES_ROLLOUT,
    VALUE_NORMALIZATION,
    Translation,
    chosen,
    require,
    scaled_rewards,
)

LIBRARY = "rl_games"
DEFAULTS = {  # rl_games/common/a2c_common.py (2.0); settings without a default there have none here
    "normalize_value": False,
    "value_bootstrap": True,
    "truncate_grads": False,
    "schedule_type": "legacy",
    "lr_schedule": None,
    "num_actors": -1,
    "max_epochs": -1,
    "max_frames": -1,
    "bounds_loss_coef": None,
    "entropy_coef": 0.0,
    "critic_coef": 1.0,
    "grad_norm": 1.0,
}
UNUSED = (  # settings that do not affect what is learned, or that are read elsewhere
    "name", "env_name", "device", "device_name", "multi_gpu", "ppo", "score_to_win", "save_best_after",
    "save_frequency", "seq_length", "print_stats", "full_experiment_name", "train_dir", "player",
    "env_config", "features", "reward_shaper", "weight_decay", "use_diagnostics",
)  # fmt: skip


def translate(settings: dict[str, Any], overrides: Mapping[str, Any]) -> Translation:
    """Translate settings into a recipe.

    Args:
        settings: Of the file: ``params`` with ``config`` and ``network``.
        overrides: Values of our settings that the user gave, by flag.

    Raises:
        ConfigError: The file has no settings of rl_games.
    """
    params = chosen(settings, "params") or settings
    require(params, ("config",), "rl_games", "a YAML file with params and config")
    config = chosen(params, "config")
    t = Translation(LIBRARY, config, DEFAULTS, overrides)
    require(config, ("horizon_length", "mini_epochs", "e_clip"), "rl_games", "settings of PPO")
    actors = int(t.number("num_actors"))
    t.sizes("horizon_length", actors if actors > 0 else None, "mini_epochs")
    if t.num_envs is not None:
        t.minibatches_of("minibatch_size", t.number("minibatch_size"), "horizon_length")
        per_epoch = t.num_envs * t.number("horizon_length")
        total = max(t.number("max_frames"), t.number("max_epochs") * per_epoch)
        if total > 0:
            name = "max_epochs" if t.number("max_epochs") > 0 else "max_frames"
            note = f"counts iterations; here environment steps, with {t.num_envs} environments"
            t.convert(name, "data.total_timesteps", int(total), note if name == "max_epochs" else "")
    t.same("gamma", "model.gamma")
    t.convert("tau", "model.gae_lambda", t.number("tau"), "lambda of GAE")
    t.same("e_clip", "model.clip_coef")
    t.same("clip_value", "model.clip_vloss")
    t.convert("critic_coef", "model.vf_coef", t.number("critic_coef"), "both multiply half the squared error")
    t.same("entropy_coef", "model.ent_coef")
    clips = bool(t.get("truncate_grads"))
    norm = t.number("grad_norm") if clips else NO_LIMIT
    t.convert("grad_norm", "model.max_grad_norm", norm, "" if clips else "off, because truncate_grads is off")
    continuous = "discrete" not in str(chosen(params, "algo").get("name", ""))
    _learning_rate(t, continuous)
    _normalization(t)
    if t.get("value_bootstrap"):
        t.differ(BOOTSTRAPS_CURRENT)
    t.convert("value_bootstrap", "model.bootstrap_truncated", bool(t.get("value_bootstrap")), "see below")
    t.differ(KEEPS_ONE_PERMUTATION, order="cuts the rollout into blocks of environments and uses them")
    t.implicit("Adam's epsilon", "model.adam_eps", 1e-8)
    if t.get("bounds_loss_coef"):
        t.differ(
            f"Bounds: a loss on means outside ±1.1, times {t.get('bounds_loss_coef')}; here there is none."
        )
    if t.get("mixed_precision"):
        t.differ("Precision: mixed; add --trainer.precision bf16-mixed for the same here.")
    _network(t, chosen(params, "network"))
    t.read |= set(UNUSED)
    return t


def _learning_rate(t: Translation, continuous: bool) -> None:
    t.same("learning_rate", "model.learning_rate")
    schedule = t.get("lr_schedule")
    t.convert("lr_schedule", "model.anneal_lr", schedule == "linear")
    if schedule == "linear":
        t.differ("Learning rate: {library} decreases to 1e-6; here to 0.")
    if schedule != "adaptive":
        return
    t.convert("kl_threshold", "model.desired_kl", t.number("kl_threshold"), "see below")
    when = "epoch" if t.get("schedule_type") == "standard" and continuous else "minibatch"
    kl = "the exact divergence KL(new || old) of Gaussians" if continuous else "half the squared log-ratio"
    t.differ(
        f"Adaptive learning rate: {{library}} adapts after each {when}, by {kl}, to the policy of the"
        " previous pass over the minibatch; here after each iteration, by the mean of the estimate"
        " approx_kl to the policy that collected. Its lower bound is 1e-6, here 1e-5."
        if continuous
        else f"Adaptive learning rate: {{library}} adapts by {kl}, with the lower bound 1e-6; here by the"
        " mean of the estimate approx_kl, with 1e-5."
    )


def _normalization(t: Translation) -> None:
    t.same("normalize_input", "model.agent.norm_obs")
    if t.get("normalize_input"):
        t.implicit("clipping of observations", "model.agent.clip_obs", 5.0)
        t.differ(MINIBATCH_STATISTICS)
    t.convert("normalize_advantage", "model.norm_adv", bool(t.get("normalize_advantage")), "see below")
    if t.get("normalize_advantage"):
        t.differ(NORMALIZES_ROLLOUT)
    if t.get("normalize_value"):
        t.differ(VALUE_NORMALIZATION, clip="clip_value", weight="critic_coef")
    scale = chosen(t.settings, "reward_shaper").get("scale_value", 1)
    if scale != 1:
        name, note = f"reward_shaper.scale_value {scale}", "returns are scaled, too"
        t.implicit(name, "data.transforms", scaled_rewards(scale), note)


def _network(t: Translation, network: dict[str, Any]) -> None:
    mlp = chosen(network, "mlp")
    layers = mlp.get("units", [64, 64])
    t.hidden_layers("network.mlp.units", layers, layers)
    t.implicit("network.separate", "model.agent.shared", not network.get("separate", False))
    t.activation(mlp.get("activation", "elu"))
    t.differ(INITIAL_WEIGHTS)
    continuous = chosen(network, "space", "continuous")
    if continuous and not continuous.get("fixed_sigma", True):
        t.differ("Standard deviation: a function of the observation; here it is not.")
    t.log_std(chosen(continuous, "sigma_init").get("val", 0))
    if "rnn" in network or "cnn" in network:
        t.differ("network: rnn and cnn are not translated.")
