"""Random recipes with adversarial values; used by `attack.py`."""

import functools
import inspect
import operator
import random
from pathlib import Path
from typing import Any

import lightning as L
import yaml

from ppo_lightning import PPO, MLPAgent, RolloutDataModule

CONFIGS = Path(__file__).parent.parent / "configs"
FOLDERS = ("classic", "memory", "mujoco", "spaces")
RECIPES = sorted(path for folder in FOLDERS for path in (CONFIGS / folder).glob("*.yaml"))
# Class, prefix of its flags, path in YAML.
OWNERS: list[tuple[Any, str, list[str]]] = [
    (PPO, "--model.", ["model", "init_args"]),
    (MLPAgent, "--model.agent.init_args.", ["model", "init_args", "agent", "init_args"]),
    (RolloutDataModule, "--data.", ["data"]),
    (L.Trainer, "--trainer.", ["trainer"]),
]
WAITS = "num_nodes"  # waits for other machines
EXCLUDED = ("self", "kwargs", "args", "observation_spec", "action_spec", "compile", WAITS)
SMALL = ("update_epochs", "devices", "max_time")  # a large value takes long, but is valid
ADVERSARIAL: list[Any] = [
    None, True, False, 0, -1, 1, 2, 3, 7, 1000, 10**6, 2**31, 2**63, 10**30, 0.0, -0.5, 0.5, 1e-300,
    1e300, float("inf"), float("nan"), "", " ", "null", "x", "é☃", "%s%n", "../x", "/proc/nowhere",
    "os.getcwd", "nowhere:X-v0", "a" * 200, "1e999", "0x10", "{}", "[", "CartPole-v1", "Pendulum-v1",
    [], {}, [0], [-1], [1e300], ["x"], [[]], {"a": {"b": 1}}, {"class_path": "nowhere.Class"},
    {"class_path": "os.getcwd"},
]  # fmt: skip


def near(value: Any, rng: random.Random) -> Any:
    """Return another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice([0, -value, value + 1, 2 * value, 4 * value, value // 2, value * 1000])
    if isinstance(value, float):
        return rng.choice([0.0, -value, value / 2, 2 * value, 1 - value, value * 1e6, value / 1e6])
    if isinstance(value, str):
        return rng.choice([value.upper(), value[:-1], value * 2])
    return rng.choice(ADVERSARIAL)


def changed(value: Any, small: bool, rng: random.Random) -> Any:
    """Return an adversarial value or one near the present value; if ``small``, no number above 3."""
    new = near(value, rng) if rng.random() < 0.7 else rng.choice(ADVERSARIAL)
    return min(new, 3) if small and isinstance(new, int | float) else new


def damaged(text: str, rng: random.Random) -> str:
    """Return a YAML text with one defect: truncation, a duplicate line, wrong indentation, odd characters."""
    lines = text.splitlines(keepends=True)
    index = rng.randrange(len(lines))
    return rng.choice([
        text[: rng.randrange(len(text))],
        "".join([*lines[: index + 1], *lines[index:]]),
        "".join([*lines[:index], " " + lines[index], *lines[index + 1 :]]),
        "".join([*lines[:index], "\t" + lines[index], *lines[index + 1 :]]),
        "".join([*lines[:index], lines[index].replace(":", ""), *lines[index + 1 :]]),
        "".join([*lines[:index], "\x00é: [", *lines[index:]]),
        "a: &a [x]\nb: &b [*a, *a]\n" + text,
    ])  # fmt: skip


def draw(rng: random.Random) -> tuple[str, list[str], str]:
    """Draw a recipe with one to three random changes, shortened to two rollouts.

    Returns:
        Text of the YAML file, flags of ``fit``, and a description of the changes.
    """
    recipe = rng.choice(RECIPES)
    config: dict[str, Any] = yaml.safe_load(recipe.read_text())
    data = config["data"]
    flags = list[str]()
    changes = [recipe.stem]
    data |= {"total_timesteps": 2 * data["num_envs"] * data["num_steps"], "eval_episodes": 1}
    config["model"]["init_args"]["compile"] = False  # compilation takes 20 s per attempt
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        owner, flag, place = rng.choices(OWNERS, weights=[4, 3, 3, 2])[0]
        defaults = {name: argument.default for name, argument in inspect.signature(owner).parameters.items()}
        try:
            inside = functools.reduce(operator.getitem, place, config)
            present = defaults | inside
        except (KeyError, TypeError):  # removed by an earlier change
            continue
        names = [name for name in present if name not in EXCLUDED]
        name = rng.choice(
            [name for name in names if rng.random() < 0.3 or present[name] is not None] or names
        )
        kind = rng.random()
        if kind < 0.47:
            flags.append(f"{flag}{name}={changed(present[name], name in SMALL, rng)}")
        elif kind < 0.94:
            inside[name] = changed(present[name], name in SMALL, rng)
            changes.append(f"{name}: {inside[name]!r}")
        elif kind < 0.98:
            key = rng.choice(list(inside))
            renamed = key + rng.choice(["s", " "])
            inside[renamed] = inside.pop(key)
            changes.append(f"{renamed!r} for {key}")
        else:
            flags.append(
                rng.choice(["--seed_everything=-1", "--seed_everything=x", "--ckpt_path=no", "--no", "x"])
            )
    text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
    if rng.random() < 0.05:
        text = damaged(text, rng)
        changes.append("a damaged text")
    return text, flags, ", ".join([*changes, *flags])
