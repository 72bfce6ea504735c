"""Print the returns of PPO and RPO on tasks of MuJoCo and dm_control beside CleanRL's.

`python benchmarks/rpo_table.py` reads the raw runs of `mujoco`, `mujoco_unclipped`, `rpo_mujoco` and
`dm_control` in `benchmarks/results` and prints four tables in Markdown. In `mujoco_unclipped`, PPO has an
unclipped value loss; in `terminal`, it treats time limits as terminal states (seed 1). The last row of
dm_control has the means of all tasks, and p: the probability of a mean gain at least as large if RPO does
nothing, by a permutation test that is stratified by task. It needs the extra `report`.

CleanRL's figures (documentation of RPO) are after 8 000 000 steps, with 10 seeds.
"""

import argparse
from collections.abc import Sequence

import numpy as np

from benchmarks.best import aggregate
from benchmarks.candidate_table import returns_of
from benchmarks.selection_table import stratified_p
from ppo_lightning.experiments.compare import format_difference
from ppo_lightning.experiments.report import PUBLISHED, common_id, read_csv

STEPS = "8000000"
CLEANRL = "CleanRL's PPO, 8 M steps | CleanRL's RPO, 8 M steps"


def figure(runs: Sequence[float]) -> str:
    """Return the mean, with the sample standard deviation of several runs."""
    return f"{np.mean(runs):.1f}" + (f" ± {np.std(runs, ddof=1):.1f}" if len(runs) > 1 else "")


def compared(before: Sequence[float], after: Sequence[float]) -> str:
    """Return the cells of a row: two sets of runs, and their difference with its interval."""
    return f"{figure(before)} | {figure(after)} | {format_difference(before, after)}"


def main(args: Sequence[str] | None = None) -> None:
    """Print the tables."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args(args)
    published = {
        (run["recipe"], common_id(run["env_id"])): f"{float(run['mean']):.1f} ± {float(run['std']):.1f}"
        for run in read_csv(PUBLISHED)
        if run["env_steps"] == STEPS
    }

    mujoco, rpo = returns_of("mujoco/runs.csv"), returns_of("rpo_mujoco/*/runs.csv")
    print(f"| task | PPO | RPO | difference [95 %] | {CLEANRL} |\n|---|---|---|---|---|---|")
    for env_id, runs in mujoco.items():
        figures = f"{published['mujoco', env_id]} | {published['rpo', env_id]}"
        print(f"| {env_id} | {compared(runs, rpo[env_id])} | {figures} |")

    unclipped = returns_of("mujoco_unclipped/*/runs.csv")
    print("\n| task | clipped | unclipped | difference [95 %] | CleanRL's, clipped, 8 M steps |")
    print("|---|---|---|---|---|")
    for env_id, runs in mujoco.items():
        print(f"| {env_id} | {compared(runs, unclipped[env_id])} | {published['mujoco', env_id]} |")
    score = aggregate(*([np.array(side[task]) for task in mujoco] for side in (unclipped, mujoco)))
    low, high = score["interval"]
    print(f"| interquartile mean, relative to clipped | 1 | {score['iqm']:.2f} [{low:.2f}, {high:.2f}] | | |")

    ppo, rpo, terminal = (returns_of(f"dm_control/{name}/runs.csv") for name in ("ppo", "rpo", "terminal"))
    print(f"\n| task | PPO | RPO | {CLEANRL} |\n|---|---|---|---|---|")
    for env_id, runs in ppo.items():
        figures = f"{published['dm_control', env_id]} | {published['rpo', env_id]}"
        print(f"| {env_id} | {figure(runs)} | {figure(rpo[env_id])} | {figures} |")
    before, after = ({task: np.array(runs) for task, runs in side.items()} for side in (ppo, rpo))
    means = [np.mean([runs.mean() for runs in side.values()]) for side in (before, after)]
    means += [
        np.mean([float(published[recipe, task].split()[0]) for task in ppo])
        for recipe in ("dm_control", "rpo")
    ]
    label = f"mean of {len(ppo)} tasks, p = {stratified_p(before, after):.2f}"
    print(f"| {label} | {' | '.join(f'{mean:.1f}' for mean in means)} |")

    print("\n| task | bootstrapped | terminal state | CleanRL's PPO, 8 M steps |\n|---|---|---|---|")
    for env_id, runs in terminal.items():
        print(
            f"| {env_id} | {figure(ppo[env_id][:1])} | {figure(runs)} | {published['dm_control', env_id]} |"
        )


if __name__ == "__main__":
    main()
