"""``ppo-lightning details``: list the implementation details of a run and their places in the code."""

import re
from collections.abc import Sequence
from pathlib import Path

import lightning as L

from ppo_lightning.algorithms.manifest import DETAILS, Value, manifest
from ppo_lightning.algorithms.ppo import PPO
from ppo_lightning.commands.arguments import Arguments
from ppo_lightning.commands.checkpoint_settings import add_checkpoint_settings
from ppo_lightning.commands.options import QUIET, parser_of
from ppo_lightning.errors import ConfigError
from ppo_lightning.rollouts.learner import Learner

ROOT = Path(__file__).parents[1]


def places() -> dict[str, str]:
    """Return the place of each detail in the code, ``file:line`` by number."""
    locations = {}
    for path in sorted(ROOT.rglob("*.py")):
        lines = path.read_text().splitlines()
        comments = [re.fullmatch(r"\s*# detail (\w+)", line) for line in lines]
        for number, match in enumerate(comments, start=1):
            if match:  # the code follows, perhaps after that of another detail
                locations[match[1]] = f"{path.relative_to(ROOT.parent)}:{comments.index(None, number) + 1}"
    return locations


def format_value(value: Value) -> str:
    """Return a value of the manifest as printed in the table."""
    return {"None": "-", "True": "on", "False": "off"}.get(str(value), str(value))


class DetailsTable(L.Callback):
    """Callback that prints the details of a run before training, and ends the run."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: Learner) -> None:
        """Print the table, and end the process with code 0."""
        if not isinstance(pl_module, PPO):
            name = type(pl_module).__name__
            raise ConfigError(f"details lists those of PPO, not of {name}: see docs/off-policy.md.")
        code = places()
        values = manifest(pl_module)
        print("| detail | | this run | code |\n|---|---|---|---|")
        for number, (title, _) in DETAILS.items():
            print(f"| {number} | {title} | {format_value(values[number])} | {code[number]} |")
        raise SystemExit(0)


def main(args: Sequence[str]) -> None:
    """Run ``ppo-lightning details``."""
    from ppo_lightning.commands import cli

    arguments = "--config RECIPE --model.norm_adv false, or --ckpt_path FILE"
    parser = parser_of("details", f"Arguments are passed to fit: {arguments}.")
    run = Arguments(["fit", *parser.parse_known_args(args)[1]])
    add_checkpoint_settings(run)
    run.extend(["--ckpt_path", "null", *QUIET])
    cli.run([DetailsTable()], run, save_config=False)
