"""Self-play: the strength of the recipes, and what the sign of GAE is worth.

`python benchmarks/selfplay.py tictactoe` and
`python benchmarks/selfplay.py connectfour --arms recipe --seeds 1 2` train the recipe, one run at a time with
one thread, and let its agents play random play and minimax. The other arms break the recipe: a GAE that does
not change its sign, and each reward given to the other player.

`python benchmarks/selfplay.py curve METRICS.CSV` draws the Elo ratings of a run over its environment steps.

Results go to `benchmarks/results/selfplay/`. Runs that are there are not repeated.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from ppo_lightning.checkpoints.agent import trained_agent
from ppo_lightning.checkpoints.file import read_checkpoint
from ppo_lightning.envs.factory import EnvFactory
from ppo_lightning.games.players import agent_player, make_player
from ppo_lightning.games.tournament import play_games, probe_game

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/selfplay"
GAMES = {  # recipe -> game and opponents
    "tictactoe": ("TicTacToe-v1", ("random", "minimax:2", "minimax:9")),
    "connectfour": ("ConnectFour-v1", ("random", "minimax:2")),
}
ARMS = {  # arm -> what is done to a rollout
    "recipe": "",
    "same_sign": 'rollout["discount"] = rollout["discount"].abs()',
    "reward_of_the_other": 'rollout["next", "reward"] = -rollout["next", "reward"]',
}
PROGRAM = """
import sys
from ppo_lightning.algorithms import ppo
from ppo_lightning.commands import cli

def advantages(self, rollout, compute=ppo.PPO.advantages):
    {}
    return compute(self, rollout)

ppo.PPO.advantages = advantages
cli.main(sys.argv[1:])
"""


def train(recipe: str, arm: str, seed: int, steps: int | None, folder: Path) -> Path:
    """Train one run in a process of its own and return its last checkpoint."""
    if not list(folder.rglob("*.ckpt")):
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-c", PROGRAM.format(ARMS[arm] or "pass"), "fit"]
        command += ["--config", str(ROOT / f"configs/selfplay/{recipe}.yaml")]
        command += ["--seed_everything", str(seed), "--num_threads", "1"]
        command += ["--data.total_timesteps", str(steps)] if steps else []
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        started = time.perf_counter()
        subprocess.run(command, cwd=folder, env=env, check=True, stderr=subprocess.DEVNULL)
        print(f"{folder.name}: {time.perf_counter() - started:.0f} s", flush=True)
    return max(folder.rglob("*.ckpt"), key=lambda path: path.stat().st_mtime)


def matches(options: argparse.Namespace) -> None:
    """Train the arms of a recipe and let their agents play the opponents."""
    env_id, opponents = GAMES[options.what]
    factory = EnvFactory(env_id, "envpool")
    env = probe_game(factory)
    rows = []
    for arm in options.arms:
        for seed in options.seeds:
            folder = options.work / f"{options.what}-{arm}-seed{seed}"
            checkpoint = read_checkpoint(str(train(options.what, arm, seed, options.steps, folder)))
            agent = trained_agent(checkpoint)
            for deterministic in (False, True):
                for name in opponents:
                    player = agent_player(agent, deterministic)
                    result = play_games(factory, player, make_player(name, env_id, env), options.games, seed)
                    row = {"steps": checkpoint["env_steps"], "arm": arm, "seed": seed, "opponent": name}
                    rows.append(row | {"deterministic": deterministic} | result._asdict())
    options.output.mkdir(parents=True, exist_ok=True)
    with (options.output / f"{options.what}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    groups: dict[tuple, list] = {}
    for row in rows:
        groups.setdefault((row["arm"], row["opponent"], row["deterministic"]), []).append(row)
    print("| agent | opponent | deterministic | wins | draws | losses | score | runs |\n" + "|---" * 8 + "|")
    for key, lines in groups.items():
        counts = np.array([[line[name] for name in ("wins", "draws", "losses")] for line in lines])
        scores = (counts[:, 0] + counts[:, 1] / 2) / options.games
        means = (f"{count:.0f}" for count in counts.mean(0))
        cells = [*key, *means, f"{scores.mean():.3f} ± {scores.std(ddof=1):.3f}", len(lines)]
        print(f"| {' | '.join(map(str, cells))} |")


def curve(path: Path, output: Path, images: Path) -> None:
    """Draw the ratings of a run, and copy them to the results."""
    import matplotlib.pyplot as plt

    with path.open() as file:
        rated = [line for line in csv.DictReader(file) if line.get("charts/elo")]
    names = ["step", "charts/elo", "charts/elo_low", "charts/elo_high"]
    opponents = ("random", "minimax:2")
    names += [f"charts/{what}-{name}" for name in opponents for what in ("win", "draw", "loss")]
    rows = [{name: line.get(name, "") for name in names} for line in rated]
    output.mkdir(parents=True, exist_ok=True)
    with (output / "elo.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    step, elo, low, high = (np.array([float(line[name]) for line in rated]) for name in names[:4])
    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    axes.fill_between(step / 1e6, low, high, alpha=0.3, label="95 % interval")
    axes.plot(step / 1e6, elo, marker="o", label="agent")
    axes.axhline(0, color="gray", linestyle=":", label="random play")
    axes.set(xlabel="environment steps [millions]", ylabel="Elo", title="Connect Four by self-play")
    axes.legend()
    figure.savefig(images / "connectfour_elo.png", dpi=120)
    print(
        json.dumps({"elo": elo.round().tolist(), "low": low.round().tolist(), "high": high.round().tolist()})
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=[*GAMES, "curve"])
    parser.add_argument("metrics", nargs="?", type=Path, help="metrics.csv of a run, for curve")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, help="steps of a run (default: those of the recipe)")
    parser.add_argument("--games", type=int, default=1000)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument(
        "--work", type=Path, default=Path("runs/selfplay"), help="folder of the training runs"
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--images", type=Path, default=ROOT / "docs/images", help="folder of the figure")
    options = parser.parse_args()
    if options.what == "curve":
        curve(options.metrics, options.output, options.images)
    else:
        matches(options)
