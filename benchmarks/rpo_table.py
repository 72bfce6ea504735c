"""Print the returns of PPO and RPO on tasks of MuJoCo and dm_control beside CleanRL's.

`python benchmarks/rpo_table.py` reads the raw runs of `mujoco`, `rpo_mujoco` and `dm_control` in
`benchmarks/results` and prints three tables in Markdown. In `terminal`, PPO treats time limits as terminal
states (seed 1). It needs the extra `report`.

CleanRL's figures (documentation of RPO) are after 8 000 000 steps, with 10 seeds.
"""

import argparse
from collections.abc import Sequence

import numpy as np

from benchmarks.candidate_table import returns_of
from ppo_lightning.commands.report import PUBLISHED, common_id, read_csv

STEPS = "8000000"


def figure(runs: Sequence[float]) -> str:
    """Return the mean, with the sample standard deviation of several runs."""
    return f"{np.mean(runs):.1f}" + (f" ± {np.std(runs, ddof=1):.1f}" if len(runs) > 1 else "")


def main(args: Sequence[str] | None = None) -> None:
    """Print the tables."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args(args)
    ppo, rpo, terminal = (returns_of(f"dm_control/{name}*/runs.csv") for name in ("ppo", "rpo", "terminal"))
    published = {
        (run["recipe"], common_id(run["env_id"])): f"{float(run['mean']):.1f} ± {float(run['std']):.1f}"
        for run in read_csv(PUBLISHED)
        if run["env_steps"] == STEPS
    }
    reference, others = returns_of("mujoco/runs.csv"), returns_of("rpo_mujoco/*/runs.csv")
    for family, ours, theirs in (("mujoco", reference, others), ("dm_control", ppo, rpo)):
        print("| task | PPO | RPO | CleanRL's PPO, 8 M steps | CleanRL's RPO, 8 M steps |")
        print("|---|---|---|---|---|")
        for env_id, runs in ours.items():
            figures = [published[family, env_id], published["rpo", env_id]]
            print(f"| {env_id} | {figure(runs)} | {figure(theirs[env_id])} | {' | '.join(figures)} |")
        print()
    print("| task | bootstrapped | terminal state | CleanRL's PPO, 8 M steps |\n|---|---|---|---|")
    for env_id, runs in terminal.items():
        print(
            f"| {env_id} | {figure(ppo[env_id][:1])} | {figure(runs)} | {published['dm_control', env_id]} |"
        )


if __name__ == "__main__":
    main()
