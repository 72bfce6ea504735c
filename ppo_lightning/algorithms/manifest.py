"""Implementation details of PPO and their values in a run."""

from collections.abc import Callable
from typing import Any, NamedTuple

from ppo_lightning.models.composite import MultiCategoricalHead
from ppo_lightning.models.heads import GaussianHead
from ppo_lightning.rollouts.learner import Learner
from ppo_lightning.spaces.pictures import is_picture
from ppo_lightning.spaces.specs import mask_columns

Value = bool | float | int | str | list | None  # None: the detail does not concern the run
Function = Callable[[Any], Value]  # of a module in training


class Detail(NamedTuple):
    """One detail of Huang et al., "The 37 Implementation Details of Proximal Policy Optimization" (2022).

    Attributes:
        number: As in the comments ``# detail N``.
        title: Short name.
        value: Returns the value of the detail for a module in training. None: the detail does not concern
            the run.
    """

    number: str
    title: str
    value: Function


def _model(name: str) -> Function:
    return lambda module: module.hparams[name]


def _preprocessing(name: str) -> Function:
    return lambda module: getattr(module.data.env, name, None)


def _on(module: Learner) -> Value:
    return True


def _ours(value: Function = _on) -> Function:
    return lambda module: value(module) if module.agent.has_features else None


def _separate(module: Learner) -> Value:
    return module.agent.critic_body is not None


def _continuous(value: Function = _on) -> Function:
    return lambda module: (
        value(module) if any(isinstance(part, GaussianHead) for part in module.agent.head.modules()) else None
    )


def _pictures(value: Function = _on) -> Function:
    return lambda module: value(module) if is_picture(module.data.specs.observation) else None


def _body(name: str) -> Function:
    return _pictures(lambda module: type(module.agent.actor_body).__name__ == name)


def _memory(module: Learner) -> Value:
    return None if module.agent.memory is None else True


def _components(module: Learner) -> Value:
    heads = module.agent.head.modules()
    return next((part.num_components for part in heads if isinstance(part, MultiCategoricalHead)), None)


DETAILS = (
    Detail("1", "vectorized environments", lambda m: m.data.num_envs),
    Detail("2", "orthogonal initialization", _ours()),
    Detail("3", "Adam's epsilon", _model("adam_eps")),
    Detail("4", "learning rate annealing", _model("anneal_lr")),
    Detail("5", "GAE, lambda", _model("gae_lambda")),
    Detail(
        "6", "minibatches, times epochs", lambda m: f"{m.hparams.num_minibatches} x {m.hparams.update_epochs}"
    ),
    Detail("7", "advantage normalization", _model("norm_adv")),
    Detail("8", "clipped objective", _model("clip_coef")),
    Detail("9", "clipped value loss", _model("clip_vloss")),
    Detail("10", "entropy bonus in the total loss", _model("ent_coef")),
    Detail("11", "gradient clipping", _model("max_grad_norm")),
    Detail("12", "debug variables", _on),
    Detail("13", "separate networks", _ours(_separate)),
    Detail("14", "no-ops at a reset, at most", _preprocessing("noop_max")),
    Detail("15", "frame skip with max", _preprocessing("frame_skip")),
    Detail("16", "episodic life", _preprocessing("episodic_life")),
    Detail("17", "fire at a reset", _preprocessing("fire_reset")),
    Detail("18", "grey pictures of this size", _preprocessing("screen_size")),
    Detail("19", "reward clipping to the sign", _preprocessing("clip_reward")),
    Detail("20", "frame stack", _preprocessing("frame_stack")),
    Detail("21", "Nature network", _body("NatureCNN")),
    Detail("22", "pixels scaled to [0, 1]", _ours(_pictures())),
    Detail("23", "normal distribution", _continuous(lambda m: type(m.agent.head).__name__)),
    Detail("24", "state-independent log std", _continuous()),
    Detail("25", "independent components", _continuous()),
    Detail("26", "separate networks", _continuous(_separate)),
    Detail("27", "action clipping", _continuous()),
    Detail("28", "observation normalization", lambda m: m.agent.normalizer is not None),
    Detail("29", "observation clipping", lambda m: getattr(m.agent.normalizer, "clip", None)),
    Detail("30", "reward scaling", lambda m: m.reward_scaler is not None),
    Detail("31", "scaled reward clipping", lambda m: getattr(m.reward_scaler, "clip", None)),
    Detail("32", "memory: orthogonal weights", lambda m: getattr(m.agent.memory, "kind", None)),
    Detail("33", "memory zero at first", _memory),
    Detail("34", "memory reset at episode ends", _memory),
    Detail("35", "minibatches of whole sequences", _memory),
    Detail("36", "memory recomputed in the update", _memory),
    Detail("37", "independent discrete components", _components),
    Detail("A1", "clip range annealing", _model("anneal_clip_coef")),
    Detail("A2", "ranks that share the gradients", lambda m: m.trainer.world_size),
    Detail("A3", "early stop by KL", lambda m: m.hparams.target_kl or False),
    Detail("A4", "invalid action masking", lambda m: mask_columns(m.data.specs.observation) is not None),
    Detail("P1", "IMPALA network", _body("ImpalaCNN")),
    Detail("P2", "rewards scaled with PPO's own gamma", lambda m: getattr(m.reward_scaler, "gamma", None)),
)


def manifest(module: Learner) -> dict[str, Value]:
    """Return the value of each detail in a run, by number. All ranks return the same."""
    return {detail.number: detail.value(module) for detail in DETAILS}
