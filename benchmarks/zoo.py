"""Train the agents of `zoo/`, which the wheel contains, and write `zoo/agents.csv`.

`python benchmarks/zoo.py --names best/halfcheetah ...` trains some of them again (default: all) with seed 1,
evaluates each in 20 episodes, and writes its folder as `save_pretrained` does, without the curve.
"""

import argparse
import csv
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L

from ppo_lightning import AgentModule, RolloutDataModule, last_checkpoint
from ppo_lightning.export.hub import find_model
from ppo_lightning.utils.bundled import ZOO

ROOT = Path(__file__).parents[1]
EPISODES = 20
# Name -> arguments of fit. The name is that of the recipe, or tells the environment.
AGENTS = {
    "classic/cartpole": "--config classic/cartpole",
    "classic/acrobot": "--config classic/acrobot",
    "best/mountaincar": "--config best/mountaincar",
    "best/lunarlander": "--config best/lunarlander",
    "best/halfcheetah": "--config best/halfcheetah",
    "best/hopper": "--config best/hopper",
    "best/walker2d": "--config best/hopper --data.env_id Walker2d-v4",
    "best/ant": "--config best/ant",
    "best/mujoco": "--config best/mujoco",
    "best/swimmer": "--config best/swimmer",
    "best/pusher": "--config best/pusher",
    "sac/pendulum": "--config sac/pendulum --model.agent.hidden_sizes [64,64]",  # a tenth of the size
    "dqn/cartpole": "--config dqn/cartpole",
    "selfplay/tictactoe": "--config selfplay/tictactoe",
}


def evaluate(folder: Path) -> dict[str, float]:
    """Return the results of the agent in a folder over 20 episodes of seed 1."""
    L.seed_everything(1, verbose=False)
    data = RolloutDataModule.load_from_checkpoint(find_model(folder), eval_episodes=EPISODES)
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    return dict(trainer.validate(AgentModule.from_pretrained(folder), data, verbose=False)[0])


def add(name: str) -> dict[str, Any]:
    """Train an agent, write its folder, and return its row of the table."""
    arguments = f"{AGENTS[name]} --seed_everything 1"
    commit = subprocess.check_output(["git", "rev-parse", "--short=10", "HEAD"], cwd=ROOT, text=True).strip()
    with tempfile.TemporaryDirectory() as runs:
        fit = [sys.executable, "-m", "ppo_lightning", "fit", *arguments.split()]
        subprocess.run(fit, check=True, cwd=runs, env=os.environ | {"PYTHONPATH": str(ROOT)})
        path = last_checkpoint(runs)
        assert path is not None
        module = AgentModule.load_from_checkpoint(path)
    module.save_pretrained(ZOO / name, name)
    results = evaluate(ZOO / name)
    return {
        "agent": name,
        "env_id": module.loaded[0]["datamodule_hyper_parameters"]["env_id"],
        "env_steps": module.loaded[0]["env_steps"],
        "episodic_return": f"{results['eval/episodic_return']:.2f}",
        "std": f"{results['eval/episodic_return_std']:.2f}",
        "episodes": EPISODES,
        "command": f"ppo-lightning fit {arguments}",
        "commit": commit,
    }


def main(args: Sequence[str] | None = None) -> None:
    """Train agents, and update the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--names", nargs="+", choices=AGENTS, default=list(AGENTS))
    names = parser.parse_args(args).names
    table = ZOO / "agents.csv"
    rows = {}
    if table.is_file():
        with table.open() as file:
            rows = {row["agent"]: row for row in csv.DictReader(file)}
    for name in names:
        rows[name] = add(name)
        with table.open("w") as file:
            writer = csv.DictWriter(file, rows[name], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows[key] for key in AGENTS if key in rows)


if __name__ == "__main__":
    main()
