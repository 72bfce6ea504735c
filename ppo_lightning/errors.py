"""Exceptions for users, and imports of optional dependencies."""

import difflib
import importlib
import re
from collections.abc import Iterable, Mapping
from types import ModuleType

SYNONYMS = {  # commands and settings of Stable-Baselines3, CleanRL and others -> names here
    "train": "fit",
    "resume": "fit",
    "eval": "validate",
    "evaluate": "validate",
    "record": "play",
    "enjoy": "play",
    "plot": "benchmark",
    "batch_size": "model.num_minibatches",
    "capture_video": "trainer.callbacks+=ppo_lightning.callbacks.CaptureVideo",
    "clip_range": "model.clip_coef",
    "clip_range_vf": "model.clip_vloss=true",
    "cuda": "trainer.accelerator=auto",
    "device": "trainer.accelerator",
    "env": "data.env_id",
    "exploration_final_eps": "model.end_e",
    "gradient_steps": "model.train_frequency",
    "gym_id": "data.env_id",
    "learning_rate": "model.policy_lr and model.q_lr",
    "lr": "model.learning_rate",
    "n_envs": "data.num_envs",
    "n_epochs": "model.update_epochs",
    "n_steps": "data.num_steps",
    "net_arch": "model.agent.hidden_sizes",
    "normalize_advantage": "model.norm_adv",
    "policy": "model.agent",
    "seed": "seed_everything",
    "tensorboard_log": "trainer.logger",
    "track": "trainer.logger+=WandbLogger",
    "value_coef": "model.vf_coef",
    "wandb_entity": "trainer.logger+=WandbLogger",
    "wandb_project_name": "trainer.logger+=WandbLogger",
}


class ConfigError(ValueError):
    """An invalid setting.

    The message is one sentence that names the setting and the fix. The command line shows it without a
    traceback.

    Example:
        >>> raise ConfigError("data.num_envs (3) must be divisible by the number of ranks (2).")
        Traceback (most recent call last):
        ppo_lightning.errors.ConfigError: data.num_envs (3) must be divisible by the number of ranks (2).
    """


class NonFiniteError(ValueError):
    """NaN or infinity in an observation, a reward, a loss or a checkpoint.

    Example:
        >>> raise NonFiniteError("The reward of environment 0 is nan at its step 19.")
        Traceback (most recent call last):
        ppo_lightning.errors.NonFiniteError: The reward of environment 0 is nan at its step 19.
    """


def import_extra(module: str, extra: str) -> ModuleType:
    """Import an optional module, which an extra of this package installs."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"The package {module!r} is missing: run pip install 'ppo-lightning[{extra}]', or, in a clone,"
            f" pip install -c constraints.txt -e '.[{extra}]'."
        ) from error


def nearest(name: str, known: Iterable[str] | Mapping[str, str]) -> str:
    """Return ``": did you mean A, B?"``, up to three known names near a name, or those of other packages.

    A mapping gives the form to show for each name. Without a suggestion, the result is empty.
    """
    shown = known if isinstance(known, Mapping) else {key: key for key in known}
    lowered = {key.lower(): form for key, form in shown.items()}
    for word, meant in SYNONYMS.items():
        meanings = {re.split(r"\+?=", one)[0]: one for one in meant.split(" and ")}  # some have a value
        if found := [shown[key] + one.removeprefix(key) for key, one in meanings.items() if key in shown]:
            lowered.setdefault(word, " and ".join(found))
    name = name.lower()
    close = [name] if name in lowered else difflib.get_close_matches(name, lowered, n=6)
    forms = list(dict.fromkeys(lowered[key] for key in close))[:3]
    return f": did you mean {', '.join(forms)}?" if forms else ""


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or the name of its type if there is no message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
