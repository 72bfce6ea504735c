"""Print the returns of PPO and RPO on dm_control tasks beside CleanRL's.

`python benchmarks/dm_control_table.py` reads `benchmarks/results/dm_control/*/runs.csv`, one seed for each
task, and prints two tables in Markdown. In `terminal`, PPO treats time limits as terminal states.

CleanRL's figures (documentation of RPO) are after 8 000 000 steps, with 10 seeds.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from ppo_lightning.commands.report import PUBLISHED, common_id, read_csv

RESULTS = Path(__file__).parent / "results/dm_control"
STEPS = "8000000"


def main(args: Sequence[str] | None = None) -> None:
    """Print the tables."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args(args)
    returns = {
        algorithm: {
            row["env_id"]: float(row["episodic_return"]) for row in read_csv(RESULTS / algorithm / "runs.csv")
        }
        for algorithm in ("ppo", "rpo", "terminal")
    }
    published = {
        (row["recipe"], common_id(row["env_id"])): f"{float(row['mean']):.1f} ± {float(row['std']):.1f}"
        for row in read_csv(PUBLISHED)
        if row["env_steps"] == STEPS and row["env_id"].startswith("dm_control/")
    }
    print("| task | PPO | RPO | CleanRL's PPO, 8 M steps | CleanRL's RPO, 8 M steps |\n|---|---|---|---|---|")
    for env_id, ppo in returns["ppo"].items():
        figures = [published[family, env_id] for family in ("dm_control", "rpo")]
        print(f"| {env_id} | {ppo:.1f} | {returns['rpo'][env_id]:.1f} | {' | '.join(figures)} |")
    print("\n| task | bootstrapped | terminal state | CleanRL's PPO, 8 M steps |\n|---|---|---|---|")
    for env_id, terminal in returns["terminal"].items():
        figures = published["dm_control", env_id]
        print(f"| {env_id} | {returns['ppo'][env_id]:.1f} | {terminal:.1f} | {figures} |")


if __name__ == "__main__":
    main()
