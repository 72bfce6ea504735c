"""The implementation details of PPO as a run has them, and where each stands in the code: ``ppo-lightning details``."""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L

from ppo_lightning.checkpoint_file import read_checkpoint
from ppo_lightning.envs import BatchedEnv
from ppo_lightning.envs.atari import AtariEnv
from ppo_lightning.envs.specs import mask_columns
from ppo_lightning.models.composite import MultiCategoricalHead
from ppo_lightning.models.heads import GaussianHead

Value = bool | float | int | str | list | None  # None: it does not concern this run
ROOT = Path(__file__).parent


@dataclass(frozen=True)
class Detail:
    """One detail of Huang et al., "The 37 Implementation Details of Proximal Policy Optimization" (2022).

    Attributes:
        number: As in the comments ``# detail N``.
        title: What it is.
        value: Reads from a module in training whether it is on, or its value; None where it does not concern the run.
        off: The flags that switch it off; nothing where it cannot be.
    """

    number: str
    title: str
    value: Callable[[Any], Value]
    off: tuple[str, ...] = ()


def _model(name: str) -> Callable[[Any], Value]:
    return lambda module: module.hparams[name]


def _atari(name: str) -> Callable[[Any], Value]:
    def value(module: Any) -> Value:
        env = module.data.env
        env = env.parts[0] if isinstance(env, BatchedEnv) else env
        return getattr(env, name) if isinstance(env, AtariEnv) else None

    return value


def _continuous(value: Callable[[Any], Value]) -> Callable[[Any], Value]:
    return lambda module: value(module) if any(isinstance(part, GaussianHead) for part in module.agent.head.modules()) else None


def _pictures(value: Callable[[Any], Value]) -> Callable[[Any], Value]:
    return lambda module: value(module) if len(module.data.observation_spec.shape) == 3 else None


def _separate(module: Any) -> Value:
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
    return next((part.num_components for part in head.modules() if isinstance(part, MultiCategoricalHead)), None)


DETAILS = (
    Detail("1", "vectorised environments", lambda m: m.data.num_envs),
    Detail("2", "orthogonal initialisation", lambda m: True),
    Detail("3", "Adam's epsilon", _model("adam_eps"), ("--model.adam_eps", "1e-8")),
    Detail("4", "learning rate annealing", _model("anneal_lr"), ("--model.anneal_lr", "false")),
    Detail("5", "GAE, lambda", _model("gae_lambda"), ("--model.gae_lambda", "1.0")),
    Detail("6", "minibatches, times epochs", lambda m: f"{m.hparams.num_minibatches} x {m.hparams.update_epochs}"),
    Detail("7", "advantage normalisation", _model("norm_adv"), ("--model.norm_adv", "false")),
    Detail("8", "clipped objective", _model("clip_coef"), ("--model.clip_coef", "1000000.0", "--model.clip_vloss", "false")),
    Detail("9", "clipped value loss", _model("clip_vloss"), ("--model.clip_vloss", "false")),
    Detail("10", "entropy bonus in the total loss", _model("ent_coef"), ("--model.ent_coef", "0.0")),
    Detail("11", "gradient clipping", _model("max_grad_norm"), ("--model.max_grad_norm", "1000000.0")),
    Detail("12", "debug variables", lambda m: True),
    Detail("13", "separate networks", _separate, ("--model.agent.shared", "true")),
    Detail("14", "no-ops at a reset, at most", _atari("noop_max"), ("--data.env_kwargs.noop_max", "0")),
    Detail("15", "frame skip with max", _atari("frame_skip"), ("--data.env_kwargs.frame_skip", "1")),
    Detail("16", "episodic life", _atari("episodic_life"), ("--data.env_kwargs.episodic_life", "false")),
    Detail("17", "fire at a reset", _atari("fire_reset"), ("--data.env_kwargs.fire_reset", "false")),
    Detail("18", "grey pictures of this size", _atari("screen_size")),
    Detail("19", "reward clipping to the sign", _atari("clip_reward"), ("--data.env_kwargs.clip_reward", "false")),
    Detail("20", "frame stack", lambda m: None if _atari("game")(m) is None else m.data.observation_spec.shape[0]),
    Detail("21", "Nature network", _body("NatureCNN")),
    Detail("22", "pixels scaled to [0, 1]", _pictures(lambda m: True)),
    Detail("23", "normal distribution", _continuous(lambda m: type(m.agent.head).__name__)),
    Detail("24", "state-independent log std", _continuous(lambda m: True)),
    Detail("25", "independent components", _continuous(lambda m: True)),
    Detail("26", "separate networks", _continuous(_separate), ("--model.agent.shared", "true")),
    Detail("27", "action clipping", _continuous(lambda m: True)),
    Detail("28", "observation normalisation", _observations(lambda m: True), ("--model.agent.norm_obs", "false")),
    Detail(
        "29", "observation clipping", _observations(lambda m: m.agent.normalizer.clip), ("--model.agent.clip_obs", "1000000.0")
    ),
    Detail("30", "reward scaling", _rewards(lambda m: True), ("--model.norm_reward", "false")),
    Detail("31", "scaled reward clipping", _rewards(_model("clip_reward")), ("--model.clip_reward", "1000000.0")),
    Detail("32", "memory: orthogonal weights", _memory(lambda m: m.agent.memory.kind)),
    Detail("33", "memory zero at first", _memory(lambda m: True)),
    Detail("34", "memory reset at episode ends", _memory(lambda m: True)),
    Detail("35", "minibatches of whole sequences", _memory(lambda m: True)),
    Detail("36", "memory recomputed in the update", _memory(lambda m: True)),
    Detail("37", "independent discrete components", lambda m: _components(m.agent.head)),
    Detail("A1", "clip range annealing", _model("anneal_clip_coef"), ("--model.anneal_clip_coef", "false")),
    Detail("A2", "ranks that share the gradients", lambda m: m.trainer.world_size),
    Detail("A3", "early stop by KL", lambda m: m.hparams.target_kl or False, ("--model.target_kl", "null")),
    Detail("A4", "invalid action masking", lambda m: mask_columns(m.data.observation_spec) is not None),
    Detail("P1", "IMPALA network", _body("ImpalaCNN")),
    Detail("P2", "rewards scaled with PPO's own gamma", _rewards(_model("gamma")), ("--model.norm_reward", "false")),
)


def manifest(module: Any) -> dict[str, Value]:
    """Returns what each detail is in a run, by number; the same for every rank."""
    return {detail.number: detail.value(module) for detail in DETAILS}


def places() -> dict[str, str]:
    """Returns where each detail stands, ``file:line`` by number, as the comments say."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            if match := re.fullmatch(r"\s*# detail (\w+)", line):
                found[match[1]] = f"{path.relative_to(ROOT.parent)}:{number + 1}"
    return found


def shown(value: Value) -> str:
    """Returns a value for people."""
    return {"None": "-", "True": "on", "False": "off"}.get(str(value), str(value))


class SeenError(Exception):
    """The run has been looked at, and need not go on."""


class Look(L.Callback):
    """Keeps the manifest of a run that is about to start, and ends it."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Looks.

        Raises:
            SeenError: Always.
        """
        self.found = manifest(pl_module)
        raise SeenError


def of_recipe(args: Sequence[str]) -> dict[str, Value]:
    """Returns the manifest of a run with these arguments of ``fit``, which is not trained and leaves no file."""
    from ppo_lightning import cli

    look = Look()
    flags = [
        part for name in ("logger", "enable_checkpointing", "enable_model_summary") for part in (f"--trainer.{name}", "false")
    ]
    sys.argv[1:] = ["fit", *args, *flags, "--trainer.enable_progress_bar", "false"]
    try:
        cli.run([look], save_config=False)
    except SeenError:
        return look.found
    raise AssertionError("fit has an on_fit_start")


def main(args: Sequence[str]) -> None:
    """Runs ``ppo-lightning details``: prints the manifest of a recipe or a checkpoint, or how two checkpoints differ."""
    parser = argparse.ArgumentParser(
        "ppo-lightning details",
        description="The implementation details of PPO as a recipe or a checkpoint has them, and where they stand in the code.",
        epilog="All other arguments are those of fit: --config RECIPE.yaml --model.norm_adv false ...",
        allow_abbrev=False,
    )
    parser.add_argument("--ckpt_path", nargs="+", default=[], help="one: what its run had; two: where they differ")
    own, rest = parser.parse_known_args(args)
    found = [read_checkpoint(path)["details"] for path in own.ckpt_path[:2]] or [of_recipe(rest)]
    where = places()
    names = own.ckpt_path if len(found) > 1 else ["this run"]
    print(f"| detail | | {' | '.join(names)} | code |\n|---|---|{'---|' * len(found)}---|")
    for detail in DETAILS:
        values = [its.get(detail.number) for its in found]
        if len(values) == 1 or values[0] != values[1]:
            print(f"| {detail.number} | {detail.title} | {' | '.join(map(shown, values))} | {where[detail.number]} |")
