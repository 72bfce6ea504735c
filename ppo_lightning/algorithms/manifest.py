"""Implementation details of PPO and their values in a run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ppo_lightning.models.composite import MultiCategoricalHead
from ppo_lightning.models.heads import GaussianHead
from ppo_lightning.rollouts.learner import PolicyLearner
from ppo_lightning.spaces.pictures import is_picture
from ppo_lightning.spaces.specs import mask_columns

Value = bool | float | int | str | list | None  # None: the detail does not concern the run


@dataclass(frozen=True)
class Detail:
    """One detail of Huang et al., "The 37 Implementation Details of Proximal Policy Optimization" (2022).

    Attributes:
        number: As in the comments ``# detail N``.
        title: Short name.
        value: Returns the value of the detail for a module in training. None: the detail does not concern
            the run.
        off: Flags that switch the detail off. Empty: the detail cannot be switched off.
    """

    number: str
    title: str
    value: Callable[[Any], Value]
    off: tuple[str, ...] = ()


def _model(name: str) -> Callable[[Any], Value]:
    return lambda module: module.hparams[name]


def _preprocessing(name: str) -> Callable[[Any], Value]:
    return lambda module: getattr(module.data.env, name, None)


def _continuous(value: Callable[[Any], Value]) -> Callable[[Any], Value]:
    return lambda module: (
        value(module) if any(isinstance(part, GaussianHead) for part in module.agent.head.modules()) else None
    )


def _pictures(value: Callable[[Any], Value]) -> Callable[[Any], Value]:
    return lambda module: value(module) if is_picture(module.data.specs.observation) else None


def _separate(module: PolicyLearner) -> Value:
    return module.agent.critic_body is not None


def _body(name: str) -> Callable[[Any], Value]:
    return _pictures(lambda module: type(module.agent.actor_body).__name__ == name)


def _rewards(value: Callable[[Any], Value]) -> Callable[[Any], Value]:
    return lambda module: module.reward_scaler is not None and value(module)


def _observations(value: Callable[[Any], Value]) -> Callable[[Any], Value]:
    return lambda module: module.agent.normalizer is not None and value(module)


def _memory(value: Callable[[Any], Value]) -> Callable[[Any], Value]:
    return lambda module: None if module.agent.memory is None else value(module)


def _components(head: Any) -> Value:
    return next(
        (part.num_components for part in head.modules() if isinstance(part, MultiCategoricalHead)), None
    )


DETAILS = (
    Detail("1", "vectorized environments", lambda m: m.data.num_envs),
    Detail("2", "orthogonal initialization", lambda m: True),
    Detail("3", "Adam's epsilon", _model("adam_eps"), ("--model.adam_eps", "1e-8")),
    Detail("4", "learning rate annealing", _model("anneal_lr"), ("--model.anneal_lr", "false")),
    Detail("5", "GAE, lambda", _model("gae_lambda"), ("--model.gae_lambda", "1.0")),
    Detail(
        "6", "minibatches, times epochs", lambda m: f"{m.hparams.num_minibatches} x {m.hparams.update_epochs}"
    ),
    Detail("7", "advantage normalization", _model("norm_adv"), ("--model.norm_adv", "false")),
    Detail(
        "8",
        "clipped objective",
        _model("clip_coef"),
        ("--model.clip_coef", "1000000.0", "--model.clip_vloss", "false"),
    ),
    Detail("9", "clipped value loss", _model("clip_vloss"), ("--model.clip_vloss", "false")),
    Detail("10", "entropy bonus in the total loss", _model("ent_coef"), ("--model.ent_coef", "0.0")),
    Detail("11", "gradient clipping", _model("max_grad_norm"), ("--model.max_grad_norm", "1000000.0")),
    Detail("12", "debug variables", lambda m: True),
    Detail("13", "separate networks", _separate, ("--model.agent.shared", "true")),
    Detail(
        "14", "no-ops at a reset, at most", _preprocessing("noop_max"), ("--data.env_kwargs.noop_max", "0")
    ),
    Detail("15", "frame skip with max", _preprocessing("frame_skip"), ("--data.env_kwargs.frame_skip", "1")),
    Detail(
        "16", "episodic life", _preprocessing("episodic_life"), ("--data.env_kwargs.episodic_life", "false")
    ),
    Detail("17", "fire at a reset", _preprocessing("fire_reset"), ("--data.env_kwargs.fire_reset", "false")),
    Detail("18", "grey pictures of this size", _preprocessing("screen_size")),
    Detail(
        "19",
        "reward clipping to the sign",
        _preprocessing("clip_reward"),
        ("--data.env_kwargs.clip_reward", "false"),
    ),
    Detail("20", "frame stack", _preprocessing("frame_stack")),
    Detail("21", "Nature network", _body("NatureCNN")),
    Detail("22", "pixels scaled to [0, 1]", _pictures(lambda m: True)),
    Detail("23", "normal distribution", _continuous(lambda m: type(m.agent.head).__name__)),
    Detail("24", "state-independent log std", _continuous(lambda m: True)),
    Detail("25", "independent components", _continuous(lambda m: True)),
    Detail("26", "separate networks", _continuous(_separate), ("--model.agent.shared", "true")),
    Detail("27", "action clipping", _continuous(lambda m: True)),
    Detail(
        "28", "observation normalization", _observations(lambda m: True), ("--model.agent.norm_obs", "false")
    ),
    Detail("29", "observation clipping", _observations(lambda m: m.agent.normalizer.clip)),
    Detail("30", "reward scaling", _rewards(lambda m: True), ("--model.norm_reward", "false")),
    Detail("31", "scaled reward clipping", _rewards(lambda m: m.reward_scaler.clip)),
    Detail("32", "memory: orthogonal weights", _memory(lambda m: m.agent.memory.kind)),
    Detail("33", "memory zero at first", _memory(lambda m: True)),
    Detail("34", "memory reset at episode ends", _memory(lambda m: True)),
    Detail("35", "minibatches of whole sequences", _memory(lambda m: True)),
    Detail("36", "memory recomputed in the update", _memory(lambda m: True)),
    Detail("37", "independent discrete components", lambda m: _components(m.agent.head)),
    Detail("A1", "clip range annealing", _model("anneal_clip_coef"), ("--model.anneal_clip_coef", "false")),
    Detail("A2", "ranks that share the gradients", lambda m: m.trainer.world_size),
    Detail("A3", "early stop by KL", lambda m: m.hparams.target_kl or False, ("--model.target_kl", "null")),
    Detail("A4", "invalid action masking", lambda m: mask_columns(m.data.specs.observation) is not None),
    Detail("P1", "IMPALA network", _body("ImpalaCNN")),
    Detail(
        "P2",
        "rewards scaled with PPO's own gamma",
        _rewards(_model("gamma")),
        ("--model.norm_reward", "false"),
    ),
)


def manifest(module: PolicyLearner) -> dict[str, Value]:
    """Return the value of each detail in a run, by number. All ranks return the same."""
    return {detail.number: detail.value(module) for detail in DETAILS}
