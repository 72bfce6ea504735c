"""``ppo-lightning details``: the implementation details as a run has them, and where each stands in the code."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

import lightning as L

from ppo_lightning.algorithms.manifest import DETAILS, Value, manifest
from ppo_lightning.checkpoints.file import read_checkpoint

ROOT = Path(__file__).parents[1]


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
    from ppo_lightning.commands import cli

    look = Look()
    flags = [
        part
        for name in ("logger", "enable_checkpointing", "enable_model_summary")
        for part in (f"--trainer.{name}", "false")
    ]
    try:
        cli.run([look], ["fit", *args, *flags, "--trainer.enable_progress_bar", "false"], save_config=False)
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
    parser.add_argument(
        "--ckpt_path", nargs="+", default=[], help="one: what its run had; two: where they differ"
    )
    own, rest = parser.parse_known_args(args)
    found = [read_checkpoint(path)["details"] for path in own.ckpt_path[:2]] or [of_recipe(rest)]
    where = places()
    names = own.ckpt_path if len(found) > 1 else ["this run"]
    print(f"| detail | | {' | '.join(names)} | code |\n|---|---|{'---|' * len(found)}---|")
    for detail in DETAILS:
        values = [its.get(detail.number) for its in found]
        if len(values) == 1 or values[0] != values[1]:
            print(
                f"| {detail.number} | {detail.title} | {' | '.join(map(shown, values))} | {where[detail.number]} |"
            )
