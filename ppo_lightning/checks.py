"""What the hyperparameters must satisfy, checked before anything starts."""

import math
from typing import Any

from ppo_lightning.errors import ConfigError


def check_hyperparameters(hparams: Any) -> None:
    """Demands that every number of the algorithm is in its range.

    Raises:
        ConfigError: Names the first field that is not.
    """
    for name, good, must in (
        ("learning_rate", 0 < hparams.learning_rate < math.inf, "above 0 and finite"),
        ("adam_eps", 0 < hparams.adam_eps < math.inf, "above 0 and finite"),
        ("ent_coef", math.isfinite(hparams.ent_coef), "a finite number"),
        ("vf_coef", math.isfinite(hparams.vf_coef), "a finite number"),
        ("gamma", 0 <= hparams.gamma <= 1, "between 0 and 1"),
        ("gae_lambda", 0 <= hparams.gae_lambda <= 1, "between 0 and 1"),
        ("num_minibatches", hparams.num_minibatches >= 1, "at least 1"),
        ("update_epochs", hparams.update_epochs >= 1, "at least 1"),
        ("clip_coef", hparams.clip_coef > 0, "above 0"),
        ("max_grad_norm", hparams.max_grad_norm > 0, "above 0"),
        ("clip_reward", hparams.clip_reward > 0, "above 0"),
        ("desired_kl", hparams.desired_kl is None or hparams.desired_kl > 0, "above 0, or null"),
        ("target_kl", hparams.target_kl is None or hparams.target_kl > 0, "above 0, or null for no limit"),
        ("microbatch_size", hparams.microbatch_size is None or hparams.microbatch_size >= 1, "at least 1, or null"),
        ("num_threads", hparams.num_threads is None or hparams.num_threads >= 1, "at least 1, or null to choose by size"),
    ):
        if not good:
            raise ConfigError(f"model.{name} is {hparams[name]}: it must be {must}.")
    if hparams.desired_kl is not None and hparams.anneal_lr:
        raise ConfigError("model.desired_kl and model.anneal_lr both set the learning rate: set anneal_lr to false.")


def check_minibatches(hparams: Any, num_envs: int, num_steps: int, world_size: int) -> None:
    """Demands that a rollout can be split into equal minibatches of at least two steps.

    Raises:
        ConfigError: Names the fields and what to change.
    """
    size, rest = divmod(num_envs * num_steps // world_size, hparams.num_minibatches)
    if world_size > 1 and num_steps % hparams.num_minibatches:
        raise ConfigError(
            f"data.num_steps = {num_steps} is not divisible by model.num_minibatches = {hparams.num_minibatches}, which"
            f" {world_size} ranks need: change one of the two."
        )
    if rest:
        raise ConfigError(
            f"data.num_envs * data.num_steps = {num_envs * num_steps} is not divisible by model.num_minibatches ="
            f" {hparams.num_minibatches}: change one of the three."
        )
    check_minibatch_size(hparams, size)


def check_cuda_graphs(hparams: Any, device: str, world_size: int, precision: str, whole_graph: bool) -> None:
    """Demands what ``cuda_graphs`` needs: one GPU, a compiled update of one graph, and no casts of weights that it would keep.

    Raises:
        ConfigError: Something of that is missing.
    """
    needs = {
        "accelerator gpu": device == "cuda",
        "devices 1": world_size == 1,
        "precision 32-true": precision == "32-true",
        "model.compile": hparams.compile,
        "an agent without memory": whole_graph,
    }
    if hparams.cuda_graphs and not all(needs.values()):
        missing = ", ".join(name for name, there in needs.items() if not there)
        raise ConfigError(f"model.cuda_graphs does not work without {missing}: leave it off.")


def check_minibatch_size(hparams: Any, size: int) -> None:
    """Demands minibatches of two steps at least, where their advantages are normalised.

    Raises:
        ConfigError: They have one.
    """
    if size == 1 and hparams.norm_adv:
        raise ConfigError(
            f"model.num_minibatches = {hparams.num_minibatches} makes minibatches of one step, whose advantage cannot be"
            " normalised: lower it, or collect more steps."
        )
