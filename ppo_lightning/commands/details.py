"""``ppo-lightning details``: list the implementation details of a run and their places in the code."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

import lightning as L

from ppo_lightning.algorithms.manifest import DETAILS, Value, manifest
from ppo_lightning.algorithms.ppo import PPO
from ppo_lightning.checkpoints.file import read_checkpoint
from ppo_lightning.commands.options import QUIET
from ppo_lightning.errors import ConfigError
from ppo_lightning.rollouts.learner import Learner

ROOT = Path(__file__).parents[1]
NO_DETAILS = "details lists those of PPO, not of {}: see docs/off-policy.md for off-policy algorithms."


def places() -> dict[str, str]:
    """Return the place of each detail in the code, ``file:line`` by number."""
    locations = {}
    for path in sorted(ROOT.rglob("*.py")):
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            if match := re.fullmatch(r"\s*# detail (\w+)", line):
                locations[match[1]] = f"{path.relative_to(ROOT.parent)}:{number + 1}"
    return locations


def format_value(value: Value) -> str:
    """Return a value of the manifest as printed in the table."""
    return {"None": "-", "True": "on", "False": "off"}.get(str(value), str(value))


class StopRunError(Exception):
    """Signal that the manifest, the argument, is read and that the run must not start."""


class ManifestReader(L.Callback):
    """Callback that reads the manifest of a run before training and stops the run."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: Learner) -> None:
        """Raise a StopRunError with the manifest."""
        if not isinstance(pl_module, PPO):
            raise ConfigError(NO_DETAILS.format(type(pl_module).__name__))
        raise StopRunError(manifest(pl_module))


def recipe_manifest(args: Sequence[str]) -> dict[str, Value]:
    """Return the manifest of a run with these arguments of ``fit``, without training it."""
    from ppo_lightning.commands import cli

    try:
        cli.run([ManifestReader()], ["fit", *args, *QUIET], save_config=False)
    except StopRunError as stop:
        return stop.args[0]
    raise AssertionError("fit did not call on_fit_start")


def checkpoint_manifest(path: str) -> dict[str, Value]:
    """Return the manifest of a checkpoint."""
    checkpoint = read_checkpoint(path)
    if not checkpoint["details"]:
        class_path = checkpoint["hyper_parameters"].get("_class_path", "another algorithm")
        raise ConfigError(NO_DETAILS.format(class_path.rpartition(".")[2]))
    return checkpoint["details"]


def main(args: Sequence[str]) -> None:
    """Run ``ppo-lightning details``: print the manifest of a run, or the differences of two checkpoints."""
    parser = argparse.ArgumentParser(
        "ppo-lightning details",
        description="List the implementation details of PPO in a recipe or a checkpoint, and their places"
        " in the code.",
        epilog="All other arguments are passed to fit: --config RECIPE.yaml --model.norm_adv false ...",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--ckpt_path", nargs="+", default=[], help="one checkpoint to describe, or two to compare"
    )
    options, flags = parser.parse_known_args(args)
    if superfluous := [*options.ckpt_path[2:], *(flags if options.ckpt_path else ())]:
        raise ConfigError(f"details --ckpt_path takes one or two files only: leave out {superfluous[0]}.")
    manifests = [checkpoint_manifest(path) for path in options.ckpt_path] or [recipe_manifest(flags)]
    code = places()
    names = options.ckpt_path if len(manifests) > 1 else ["this run"]
    print(f"| detail | | {' | '.join(names)} | code |\n|---|---|{'---|' * len(manifests)}---|")
    for detail in DETAILS:
        values = [values_by_number.get(detail.number) for values_by_number in manifests]
        if len(values) == 1 or values[0] != values[1]:
            cells = [detail.number, detail.title, *map(format_value, values), code[detail.number]]
            print(f"| {' | '.join(cells)} |")
