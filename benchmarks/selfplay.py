"""Self-play: what the pool, the openings, the annealed entropy bonus and the sign of GAE are worth.

`python benchmarks/selfplay.py connectfour [--seeds 1 2 3] [--steps N]` trains the Connect Four recipe and the
recipe without one of its parts, one run at a time with one thread. All agents then play each other, snapshots
of the recipe's first run, random play and minimax of depth 2.

`python benchmarks/selfplay.py sign [--seeds 1 2 3]` trains the TicTacToe recipe, the recipe with a GAE that
does not change its sign, and the recipe with each reward given to the other player, and counts losses against
perfect play.

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
from ppo_lightning.rollouts.opponents import frozen_copy
from ppo_lightning.rollouts.players import AgentPlayer, make_player
from ppo_lightning.rollouts.tournament import play_games

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/selfplay"
PARTS = {  # arm -> flags beside the recipe
    "recipe": {},
    "without_pool": {"model.past_share": 0.0},
    "without_openings": {"model.opening_moves": 0},
    "without_annealing": {"model.anneal_ent_coef": "false"},
}
SIGNS = {  # arm -> code that breaks the recipe
    "recipe": "",
    "same_sign": "ppo.perspective = lambda rollout: None",
    "reward_of_the_other": """
def advantages(self, rollout, compute=ppo.PPO.advantages):
    rollout["next", "reward"] = -rollout["next", "reward"]
    return compute(self, rollout)
ppo.PPO.advantages = advantages
""",
}


def train(recipe: str, folder: Path, seed: int, flags: dict, code: str = "") -> Path:
    """Train one run in a process of its own and return its last checkpoint."""
    if not list(folder.rglob("*.ckpt")):
        folder.mkdir(parents=True, exist_ok=True)
        flags = {"seed_everything": seed, "num_threads": 1, "model.rating_games": 0} | flags
        arguments = ["fit", "--config", str(ROOT / f"configs/selfplay/{recipe}.yaml")]
        arguments += [part for name, value in flags.items() for part in (f"--{name}", str(value))]
        program = (
            "import sys\nfrom ppo_lightning.algorithms import ppo\nfrom ppo_lightning.commands import cli\n"
        )
        program += f"{code}\ncli.main(sys.argv[1:])"
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        started = time.perf_counter()
        command = [sys.executable, "-c", program, *arguments]
        subprocess.run(command, cwd=folder, env=env, check=True, stderr=subprocess.DEVNULL)
        print(f"{folder.name}: {time.perf_counter() - started:.0f} s", flush=True)
    return max(folder.rglob("*.ckpt"), key=lambda path: path.stat().st_mtime)


def connect_four(work: Path, output: Path, arms: list[str], seeds: list[int], steps: int, games: int) -> None:
    """Train and compare the parts of the Connect Four recipe."""
    factory = EnvFactory("ConnectFour-v1", "envpool")
    specs = factory.specs()
    agents = {}
    snapshots = {}
    for arm in arms:
        for seed in seeds:
            flags = {"data.total_timesteps": steps, "data.rollouts_per_epoch": 10**6} | PARTS[arm]
            path = train("connectfour", work / f"{arm}-{steps}-seed{seed}", seed, flags)
            checkpoint = read_checkpoint(str(path))
            agents[arm, seed] = trained_agent(checkpoint)
            if arm == "recipe" and seed == seeds[0]:
                pool = checkpoint["pool"]
                for entry in (pool[0], pool[len(pool) // 2]):
                    frozen = frozen_copy(agents[arm, seed], entry["weights"])
                    snapshots[f"snapshot_{entry['step']}"] = AgentPlayer(frozen)
    others = {
        name: make_player(name, "ConnectFour-v1", specs) for name in ("random", "minimax:2")
    } | snapshots
    rows = []
    for (arm, seed), agent in agents.items():
        for deterministic in (False, True):
            for name, other in others.items():
                result = play_games(factory, AgentPlayer(agent, deterministic), other, games, seed)
                rows.append(row(arm, seed, name, deterministic, result))
        for (other_arm, other_seed), other_agent in agents.items():
            if other_arm != arm and "recipe" in (arm, other_arm):
                result = play_games(factory, AgentPlayer(agent), AgentPlayer(other_agent), games, seed)
                rows.append(row(arm, seed, f"{other_arm}-seed{other_seed}", False, result))
    write(output / "connectfour.csv", [{"steps": steps} | line for line in rows])


def sign(work: Path, output: Path, seeds: list[int], steps: int | None, games: int) -> None:
    """Train TicTacToe with and without the sign of GAE."""
    factory = EnvFactory("TicTacToe-v1", "envpool")
    perfect = make_player("perfect", "TicTacToe-v1", factory.specs())
    flags = {"data.total_timesteps": steps} if steps else {}
    rows = []
    for arm, code in SIGNS.items():
        for seed in seeds:
            agent = trained_agent(
                read_checkpoint(str(train("tictactoe", work / f"sign-{arm}-{seed}", seed, flags, code)))
            )
            for deterministic in (True, False):
                result = play_games(factory, AgentPlayer(agent, deterministic), perfect, games, seed)
                rows.append(row(arm, seed, "perfect", deterministic, result))
    write(output / "sign.csv", rows)


def row(arm: str, seed: int, opponent: str, deterministic: bool, result: tuple[int, int, int]) -> dict:
    """Return a row of the results."""
    wins, draws, losses = result
    counts = {"wins": wins, "draws": draws, "losses": losses}
    return {"arm": arm, "seed": seed, "opponent": opponent, "deterministic": deterministic, **counts}


def write(path: Path, rows: list[dict]) -> None:
    """Write rows to a CSV file and print the mean score of each arm against each kind of opponent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    groups: dict[tuple, list[float]] = {}
    for line in rows:
        games = line["wins"] + line["draws"] + line["losses"]
        key = line["arm"], line["opponent"].partition("-seed")[0], line["deterministic"]
        groups.setdefault(key, []).append((line["wins"] + line["draws"] / 2) / games)
    print("| agent | opponent | deterministic | score | runs |\n|---|---|---|---|---|")
    for (arm, opponent, deterministic), scores in groups.items():
        score = f"{np.mean(scores):.3f} ± {np.std(scores):.3f}"
        print(f"| {arm} | {opponent} | {deterministic} | {score} | {len(scores)} |")


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
    parser.add_argument("what", choices=["connectfour", "sign", "curve"])
    parser.add_argument("metrics", nargs="?", type=Path, help="metrics.csv of a run, for curve")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument(
        "--steps", type=int, help="steps of a run (default: 2000000 for connectfour, the recipe's for sign)"
    )
    parser.add_argument("--games", type=int, default=1000)
    parser.add_argument("--arms", nargs="+", choices=PARTS, default=list(PARTS), help="of connectfour")
    parser.add_argument(
        "--work", type=Path, default=Path("runs/selfplay"), help="folder of the training runs"
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--images", type=Path, default=ROOT / "docs/images", help="folder of the figure")
    options = parser.parse_args()
    if options.what == "curve":
        curve(options.metrics, options.output, options.images)
    elif options.what == "sign":
        sign(options.work, options.output, options.seeds, options.steps, options.games)
    else:
        steps = options.steps or 2_000_000
        connect_four(options.work, options.output, options.arms, options.seeds, steps, options.games)
