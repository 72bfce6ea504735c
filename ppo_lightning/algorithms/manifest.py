"""Implementation details of PPO and their values in a run."""

from collections.abc import Callable
from typing import Any

from ppo_lightning.models.composite import MultiCategoricalHead
from ppo_lightning.models.foreign import ForeignAgent
from ppo_lightning.models.heads import GaussianHead
from ppo_lightning.rollouts.learner import Learner
from ppo_lightning.spaces.pictures import is_picture
from ppo_lightning.spaces.specs import mask_columns

Value = bool | float | int | str | list | None  # None: the detail does not concern the run
Function = Callable[[Any], Value]  # of a module in training


def _model(name: str) -> Function:
    return lambda module: module.hparams[name]


def _preprocessing(name: str) -> Function:
    return lambda module: getattr(module.data.env, name, None)


def _on(module: Learner) -> Value:
    return True


def _ours(value: Function = _on) -> Function:
    return lambda module: None if isinstance(module.agent, ForeignAgent) else value(module)


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


# Huang et al., "The 37 Implementation Details of Proximal Policy Optimization" (2022): title and value by
# number, which is that of the comments `# detail N`.
DETAILS: dict[str, tuple[str, Function]] = {
    "1": ("vectorized environments", lambda m: m.data.num_envs),
    "2": ("orthogonal initialization", _ours()),
    "3": ("Adam's epsilon", _model("adam_eps")),
    "4": ("learning rate annealing", _model("anneal_lr")),
    "5": ("GAE, lambda", _model("gae_lambda")),
    "6": ("minibatches, times epochs", lambda m: f"{m.hparams.num_minibatches} x {m.hparams.update_epochs}"),
    "7": ("advantage normalization", _model("norm_adv")),
    "8": ("clipped objective", _model("clip_coef")),
    "9": ("clipped value loss", _model("clip_vloss")),
    "10": ("entropy bonus in the total loss", _model("ent_coef")),
    "11": ("gradient clipping", _model("max_grad_norm")),
    "12": ("debug variables", _on),
    "13": ("separate networks", _ours(_separate)),
    "14": ("no-ops at a reset, at most", _preprocessing("noop_max")),
    "15": ("frame skip with max", _preprocessing("frame_skip")),
    "16": ("episodic life", _preprocessing("episodic_life")),
    "17": ("fire at a reset", _preprocessing("fire_reset")),
    "18": ("grey pictures of this size", _preprocessing("screen_size")),
    "19": ("reward clipping to the sign", _preprocessing("clip_reward")),
    "20": ("frame stack", _preprocessing("frame_stack")),
    "21": ("Nature network", _body("NatureCNN")),
    "22": ("pixels scaled to [0, 1]", _ours(_pictures())),
    "23": ("normal distribution", _continuous(lambda m: type(m.agent.head).__name__)),
    "24": ("state-independent log std", _continuous()),
    "25": ("independent components", _continuous()),
    "26": ("separate networks", _continuous(_separate)),
    "27": ("action clipping", _continuous()),
    "28": ("observation normalization", lambda m: m.agent.normalizer is not None),
    "29": ("observation clipping", lambda m: getattr(m.agent.normalizer, "clip", None)),
    "30": ("reward scaling", lambda m: m.reward_scaler is not None),
    "31": ("scaled reward clipping", lambda m: getattr(m.reward_scaler, "clip", None)),
    "32": ("memory: orthogonal weights", lambda m: getattr(m.agent.memory, "kind", None)),
    "33": ("memory zero at first", _memory),
    "34": ("memory reset at episode ends", _memory),
    "35": ("minibatches of whole sequences", _memory),
    "36": ("memory recomputed in the update", _memory),
    "37": ("independent discrete components", _components),
    "A1": ("clip range annealing", _model("anneal_clip_coef")),
    "A2": ("ranks that share the gradients", lambda m: m.trainer.world_size),
    "A3": ("early stop by KL", lambda m: m.hparams.target_kl or False),
    "A4": ("invalid action masking", lambda m: mask_columns(m.data.specs.observation) is not None),
    "P1": ("IMPALA network", _body("ImpalaCNN")),
    "P2": ("rewards scaled with PPO's own gamma", lambda m: getattr(m.reward_scaler, "gamma", None)),
}


def manifest(module: Learner) -> dict[str, Value]:
    """Return the value of each detail in a run, by number. All ranks return the same."""
    return {number: value(module) for number, (_, value) in DETAILS.items()}
