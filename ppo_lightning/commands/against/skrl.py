"""Settings of skrl: a YAML file with ``agent: class: PPO`` and ``models``."""

from collections.abc import Mapping
from typing import Any

from ppo_lightning.commands.against.translation import (
    BOOTSTRAPS_CURRENT,
    INITIAL_WEIGHTS,
    KEEPS_ONE_PERMUTATION,
    MINIBATCH_STATISTICS,
    NO_LIMIT,
    NORMALIZES_ROLLOUT,
    VALUE_CLIPPING,
    VALUE_NORMALIZATION,
    Translation,
    chosen,
    require,
    scaled_rewards,
)

LIBRARY = "skrl"
DEFAULTS: dict[str, Any] = {  # PPO_CFG in skrl/agents/torch/ppo/ppo_cfg.py (2.0)
    "rollouts": 16,
    "learning_epochs": 8,
    "mini_batches": 2,
    "discount_factor": 0.99,
    "gae_lambda": 0.95,
    "learning_rate": 1e-3,
    "learning_rate_scheduler": None,
    "grad_norm_clip": 0.5,
    "ratio_clip": 0.2,
    "value_clip": 0.2,
    "clip_predicted_values": True,
    "entropy_loss_scale": 0.0,
    "value_loss_scale": 2.5,
    "kl_threshold": 0.0,
    "time_limit_bootstrap": False,
    "rewards_shaper_scale": 1.0,
}
DEFAULTS_1 = {"value_loss_scale": 1.0, "clip_predicted_values": False}  # of skrl 1.x
UNUSED = (  # settings that do not affect what is learned, or that are read elsewhere
    "class", "random_timesteps", "learning_starts", "experiment", "observation_preprocessor_kwargs",
    "state_preprocessor_kwargs", "value_preprocessor_kwargs", "learning_rate_scheduler_kwargs",
)  # fmt: skip


def translate(settings: dict[str, Any], overrides: Mapping[str, Any]) -> Translation:
    """Translate settings into a recipe.

    Args:
        settings: Of the file: ``agent``, ``models``, ``trainer``.
        overrides: Values of our settings that the user gave, by flag.

    Raises:
        ConfigError: The file has no settings of skrl's PPO.
    """
    require(settings, ("agent",), "skrl", "a YAML file with agent and models")
    agent = chosen(settings, "agent")
    require(agent, ("rollouts", "learning_epochs", "mini_batches"), "skrl", "settings of PPO")
    defaults = DEFAULTS
    if "lambda" in agent:  # the name until skrl 1.4
        agent["gae_lambda"] = agent.pop("lambda")
        defaults = DEFAULTS | DEFAULTS_1
    t = Translation(LIBRARY, agent, defaults, overrides)
    t.sizes("rollouts", None, "learning_epochs")
    timesteps = chosen(settings, "trainer").get("timesteps")
    if t.num_envs is not None and timesteps:
        note = f"steps of each environment; here of all {t.num_envs} environments together"
        t.implicit(f"trainer.timesteps {timesteps}", "data.total_timesteps", timesteps * t.num_envs, note)
    t.same("mini_batches", "model.num_minibatches")
    t.same("discount_factor", "model.gamma")
    t.same("gae_lambda", "model.gae_lambda")
    t.same("ratio_clip", "model.clip_coef")
    _value_loss(t)
    t.same("entropy_loss_scale", "model.ent_coef")
    limit = t.number("grad_norm_clip")
    t.convert("grad_norm_clip", "model.max_grad_norm", limit if limit > 0 else NO_LIMIT)
    _learning_rate(t)
    t.implicit("normalization of advantages", "model.norm_adv", True, "see below")
    t.differ(NORMALIZES_ROLLOUT)
    t.differ(KEEPS_ONE_PERMUTATION, order="cuts the rollout into blocks of consecutive steps and uses them")
    _time_limits(t)
    t.implicit("Adam's epsilon", "model.adam_eps", 1e-8)
    _normalization(t)
    _network(t, chosen(settings, "models"))
    t.read |= set(UNUSED)
    return t


def _value_loss(t: Translation) -> None:
    clip = t.number("value_clip") if t.get("clip_predicted_values") else 0
    t.read.add("clip_predicted_values")
    note = "here one switch, and the range is that of the ratio"
    t.convert("value_clip", "model.clip_vloss", clip > 0, note)
    if clip > 0:
        t.differ(VALUE_CLIPPING, clip=f"{clip:g}")
    t.squared_error("value_loss_scale")


def _learning_rate(t: Translation) -> None:
    t.same("learning_rate", "model.learning_rate")
    adaptive = "KLAdaptive" in str(t.get("learning_rate_scheduler"))
    t.convert("learning_rate_scheduler", "model.anneal_lr", False)
    if adaptive:
        kl = chosen(t.settings, "learning_rate_scheduler_kwargs").get("kl_threshold", 0.008)
        t.implicit(f"KLAdaptiveLR: kl_threshold {kl}", "model.desired_kl", kl, "see below")
        t.differ(
            "Adaptive learning rate: {library} adapts after each epoch, by the mean of the estimate approx_kl"
            " over its minibatches, down to 1e-6; here after each iteration, down to 1e-5. The estimate, the"
            " factor 1.5 and the thresholds are the same."
        )
    elif t.get("learning_rate_scheduler") is not None:
        t.differ(f"Learning rate: the schedule {t.get('learning_rate_scheduler')} is not translated.")
    target = t.number("kl_threshold")
    t.convert("kl_threshold", "model.target_kl", target or None, "0 is off" if not target else "")
    if target:
        t.differ("KL: {library} leaves the epoch at the minibatch that exceeds it; here all epochs end.")


def _time_limits(t: Translation) -> None:
    bootstraps = bool(t.get("time_limit_bootstrap"))
    t.convert("time_limit_bootstrap", "model.bootstrap_truncated", bootstraps, "see below")
    if bootstraps:
        t.differ(BOOTSTRAPS_CURRENT)
    t.differ(
        "Time limits: in {library} 1.4 they end the sum of GAE, as here. In versions 1.3 and 2.0, advantages"
        " before a time limit contain those of the next episode."
    )


def _normalization(t: Translation) -> None:
    on = any(t.get(name) for name in ("state_preprocessor", "observation_preprocessor"))
    t.implicit("RunningStandardScaler of observations", "model.agent.norm_obs", on)
    if on:
        t.implicit("clipping of observations", "model.agent.clip_obs", 5.0)
        t.differ(MINIBATCH_STATISTICS)
    if t.get("value_preprocessor"):
        t.differ(VALUE_NORMALIZATION, clip="value_clip", weight="value_loss_scale")
    scale = t.number("rewards_shaper_scale")
    if scale != 1:
        t.convert("rewards_shaper_scale", "data.transforms", scaled_rewards(scale), "returns are scaled, too")


def _network(t: Translation, models: dict[str, Any]) -> None:
    layers, activation = {}, "elu"
    for role in ("policy", "value"):
        networks = chosen(models, role).get("network") or [{"layers": [64, 64]}]
        layers[role] = networks[0].get("layers", [64, 64])
        activation = networks[0].get("activations", activation)
    t.hidden_layers("models.network.layers", layers["policy"], layers["value"])
    t.implicit("models.separate", "model.agent.shared", not models.get("separate", False))
    t.activation(activation)
    t.differ(INITIAL_WEIGHTS)
    t.log_std(chosen(models, "policy").get("initial_log_std", 0))
