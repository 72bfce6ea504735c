"""Settings of Stable-Baselines3: a saved model (.zip) or hyperparameters of RL Baselines3 Zoo (YAML)."""

import re
from collections.abc import Mapping
from typing import Any

from ppo_lightning.commands.against.files import keyword_arguments
from ppo_lightning.commands.against.translation import VALUE_CLIPPING, Translation, require
from ppo_lightning.errors import ConfigError, nearest

LIBRARY = "Stable-Baselines3"
DEFAULTS: dict[str, Any] = {  # PPO.__init__ in stable_baselines3/ppo/ppo.py (2.9)
    "learning_rate": 3e-4,
    "n_steps": 2048,
    "batch_size": 64,
    "n_epochs": 10,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "clip_range": 0.2,
    "clip_range_vf": None,
    "normalize_advantage": True,
    "ent_coef": 0.0,
    "vf_coef": 0.5,
    "max_grad_norm": 0.5,
    "use_sde": False,
    "target_kl": None,
    "policy": "MlpPolicy",
    "n_envs": 1,
}
CONSTANT = re.compile(r"ConstantSchedule\(val=([^)]+)\)")
LINEAR = re.compile(r"LinearSchedule\(start=([^,]+), end=0(?:\.0)?, end_fraction=1(?:\.0)?\)")
GENERAL = ("default", "atari")  # entries of RL Zoo that are not an environment
UNUSED = (  # settings that do not affect what is learned, or that are read elsewhere
    "verbose", "device", "seed", "tensorboard_log", "policy_class", "observation_space", "action_space",
    "lr_schedule", "sde_sample_freq", "rollout_buffer_class", "rollout_buffer_kwargs", "action_noise",
    "start_time", "ep_info_buffer", "ep_success_buffer", "num_timesteps", "n_timesteps", "env_wrapper",
    "frame_stack", "normalize_kwargs",
)  # fmt: skip


def translate(settings: dict[str, Any], overrides: Mapping[str, Any]) -> Translation:
    """Translate settings into a recipe.

    Args:
        settings: Of the file. If it has entries for several environments, ``data.env_id`` chooses one.
        overrides: Values of our settings that the user gave, by flag.

    Raises:
        ConfigError: The file has several entries and none is chosen, or no settings of PPO.
    """
    saved = "policy_class" in settings
    env_id = overrides.get("data.env_id")
    if not saved and all(isinstance(entry, dict) for entry in settings.values()):
        env_id = env_id or next((name for name in settings if name not in GENERAL), "")
        settings = _entry(settings, str(env_id), "data.env_id" in overrides)
    require(settings, (*DEFAULTS, "n_timesteps"), "sb3", "a saved model or hyperparameters of RL Zoo")
    t = Translation(LIBRARY, settings, DEFAULTS, overrides)
    if env_id:
        t.recipe["data.env_id"] = env_id
    _learning_rate_and_clipping(t)
    t.sizes("n_steps", int(t.number("n_envs")), "n_epochs")
    t.same("n_envs", "data.num_envs")
    t.minibatches_of("batch_size", t.number("batch_size"), "n_steps")
    steps = "_total_timesteps" if saved else "n_timesteps"
    if t.get(steps):
        t.convert(steps, "data.total_timesteps", int(t.number(steps)))
    for name, ours in (("gamma", "gamma"), ("gae_lambda", "gae_lambda"), ("ent_coef", "ent_coef")):
        t.same(name, f"model.{ours}")
    t.squared_error("vf_coef")
    t.same("max_grad_norm", "model.max_grad_norm")
    t.convert("normalize_advantage", "model.norm_adv", t.get("normalize_advantage"))
    target = t.get("target_kl")
    note = "" if target is None else "stops at 1.5 times this value"
    t.convert("target_kl", "model.target_kl", None if target is None else 1.5 * target, note)
    if target is not None:
        t.differ("KL: {library} checks each minibatch before its step; here the last minibatch of an epoch.")
    t.implicit("time limits", "model.bootstrap_truncated", True, "both bootstrap from the final observation")
    _normalization(t, saved)
    _network(t)
    t.read |= {*UNUSED, *(name for name in settings if name.startswith("_"))}
    return t


def _entry(settings: dict[str, Any], env_id: str, chosen: bool) -> dict[str, Any]:
    if not chosen and len([name for name in settings if name not in GENERAL]) > 1:
        raise ConfigError(
            f"--against sb3: the file has {len(settings)} entries: choose one with --data.env_id,"
            f" for example --data.env_id {env_id}."
        )
    atari = env_id.startswith("ALE/") or "NoFrameskip" in env_id
    name = "atari" if atari and env_id not in settings else env_id
    if name not in settings:
        raise ConfigError(
            f"--against sb3: the file has no entry {name!r}{nearest(name, list(settings)) or '.'}"
        )
    return dict(settings[name])


def _learning_rate_and_clipping(t: Translation) -> None:
    for name, value, anneal in (
        ("learning_rate", "model.learning_rate", "model.anneal_lr"),
        ("clip_range", "model.clip_coef", "model.anneal_clip_coef"),
    ):
        number, linear = _schedule(t.get(name))
        note = ""
        if number is None:
            number, note = DEFAULTS[name], "a pickled function, which is not executed: the default is assumed"
            t.differ(f"{name}: the file has a pickled function. Set {value} and {anneal} yourself.")
        elif linear:
            note = "decreases to 0"
            t.differ(f"{name}: {{library}} is one iteration ahead in the decrease.")
        t.convert(name, value, number, note)
        t.implicit(f"{name}: schedule", anneal, linear)
    clip, _ = _schedule(t.get("clip_range_vf"))
    note = "off unless set; here one switch, and the range is that of the ratio"
    t.convert("clip_range_vf", "model.clip_vloss", clip is not None, note)
    if clip is not None:
        t.differ(VALUE_CLIPPING, clip=f"{clip:g}")


def _schedule(value: Any) -> tuple[float | None, bool]:
    """Return the value of a schedule and whether it decreases linearly to 0; None for anything else."""
    if isinstance(value, int | float):
        return float(value), False
    if isinstance(value, dict):  # of a saved model: the object's attributes as texts
        value = str(value.get("value_schedule", ""))
    for pattern, linear in ((r"lin_(\S+)", True), (CONSTANT, False), (LINEAR, True)):
        if isinstance(value, str) and (match := re.fullmatch(pattern, value)):
            return float(match[1]), linear
    return None, False


def _normalization(t: Translation, saved: bool) -> None:
    t.implicit("Adam's epsilon", "model.adam_eps", 1e-5)
    if saved:
        t.differ(
            "VecNormalize: a saved model does not contain it. If the run used it, set model.agent.norm_obs"
            " and model.norm_reward to true."
        )
        return
    value = t.get("normalize")
    options = keyword_arguments(value) if isinstance(value, str | dict) else {}
    lab = {"norm_obs": t.get("normalize_input"), "norm_reward": t.get("normalize_value")}  # Isaac Lab's names
    for name, ours in (("norm_obs", "model.agent.norm_obs"), ("norm_reward", "model.norm_reward")):
        t.implicit(f"VecNormalize: {name}", ours, bool(lab[name] or (value and options.get(name, True))))
    if t.get("clip_obs"):
        t.same("clip_obs", "model.agent.clip_obs")
    if value or any(lab.values()):
        t.differ(
            "Statistics: {library} starts them with 1e-4 pseudo-observations; here they are of data only."
        )


def _network(t: Translation) -> None:
    policy = t.get("policy")
    name = t.settings.get("policy_class")
    document = str(name.get("__doc__", "")) if isinstance(name, dict) else ""
    pictures = policy == "CnnPolicy" or document.strip().startswith("CNN policy")
    options = keyword_arguments(t.get("policy_kwargs"))
    if pictures:
        t.classes["model.agent"] = "ppo_lightning.CNNAgent"
        t.convert("policy", "", None, "NatureCNN: CNNAgent here")
        return
    layers = options.get("net_arch", [64, 64])
    layers = layers if isinstance(layers, dict) else {"pi": layers, "vf": layers}
    t.hidden_layers("policy_kwargs", layers.get("pi", []), layers.get("vf", []))
    t.implicit("bodies of policy and value", "model.agent.shared", False)
    t.activation(re.sub(r".*\.|'>", "", str(options.get("activation_fn", "Tanh"))))
    if options.get("ortho_init") is False:
        t.differ("Initial weights: those of nn.Linear; here they are orthogonal.")
    t.log_std(options.get("log_std_init", 0))
    if t.get("use_sde"):
        t.differ("Exploration: state-dependent (gSDE); here the noise is independent in each step.")
    for name in set(options) - {"net_arch", "activation_fn", "ortho_init", "log_std_init"}:
        if not name.startswith(":"):
            t.differ(f"policy_kwargs: {name} is not translated.")
