"""Compare IPPO and MAPPO with TorchRL's multi-agent PPO tutorial on simple_spread, with the same game steps.

`python benchmarks/multiagent.py torchrl [--seed N] [--minutes M]` trains with TorchRL.
`python benchmarks/multiagent.py ippo [--seed N]` or `mappo` trains our recipe, with one thread.
Each run writes `torchrl_N.csv`, `ippo_N.csv` or `mappo_N.csv` (one row per rollout) and appends a row to
`runs.csv`. `python benchmarks/multiagent.py report` prints the table of `runs.csv`.

A game step moves three agents: 300 000 game steps are 900 000 agent steps. Returns are means over the agents.
`sps` are game steps per second, `sps_cpu` game steps per second of CPU time. Imports and the final evaluation
are not timed. The fit of our recipes includes validations and checkpoints.

The TorchRL side follows the tutorial "Multi-Agent Reinforcement Learning (PPO) with TorchRL".
From the tutorial: `MultiAgentMLP` for policy and critic (shared parameters, depth 2, 256 cells, tanh), a
central critic (MAPPO), `ClipPPOLoss` without advantage normalization, Adam, and the values of `TUTORIAL`.
The tutorial trains VMAS Navigation. Here, a `SerialEnv` steps 20 games in `PettingZooWrapper`, actions are
categorical, and GAE bootstraps at the time limit, because the wrapper marks truncations.
"""

import argparse
import contextlib
import csv
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from privileged import append

ROOT = Path(__file__).parents[1]
TUTORIAL: dict[str, Any] = {
    "frames_per_batch": 6000,
    "num_epochs": 30,
    "minibatch_size": 400,
    "lr": 3e-4,
    "max_grad_norm": 1.0,
    "clip_epsilon": 0.2,
    "gamma": 0.9,
    "lmbda": 0.9,
    "entropy_coeff": 1e-4,
}
AGENTS = 3
LENGTH = 25  # steps of an episode, always
GAMES = 20
EVALUATION = 100  # episodes of the evaluation, with the most probable actions
LAST = 0.1  # share of the training episodes over which the final return is averaged


def train_torchrl(seed: int, steps: int, minutes: float, curve: Path) -> dict:
    """Train with TorchRL, append a row to the curve after each batch, and return the row of the run."""
    import torch
    from mpe2.simple_spread_v3 import parallel_env
    from tensordict.nn import TensorDictModule
    from torchrl.collectors import Collector
    from torchrl.data import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer
    from torchrl.envs import ExplorationType, SerialEnv, set_exploration_type
    from torchrl.envs.libs.pettingzoo import PettingZooWrapper
    from torchrl.modules import MultiAgentMLP, ProbabilisticActor
    from torchrl.objectives import ClipPPOLoss, ValueEstimators

    observation = ("agent", "observation")

    def network(outputs: int, centralized: bool) -> MultiAgentMLP:
        return MultiAgentMLP(
            env.observation_spec[observation].shape[-1], outputs, AGENTS, centralized=centralized,
            share_params=True, depth=2, num_cells=256, activation_class=torch.nn.Tanh,
        )  # fmt: skip

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    env = SerialEnv(GAMES, lambda: PettingZooWrapper(parallel_env(), categorical_actions=True))
    env.set_seed(seed)
    actions = env.full_action_spec_unbatched["agent", "action"].space.n
    policy = ProbabilisticActor(
        TensorDictModule(network(actions, centralized=False), [observation], [("agent", "logits")]),
        in_keys=[("agent", "logits")], out_keys=[("agent", "action")],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True, log_prob_key=("agent", "sample_log_prob"),
    )  # fmt: skip
    critic = TensorDictModule(network(1, centralized=True), [observation], [("agent", "state_value")])
    loss = ClipPPOLoss(
        policy, critic, clip_epsilon=TUTORIAL["clip_epsilon"], entropy_coeff=TUTORIAL["entropy_coeff"],
        normalize_advantage=False,
    )  # fmt: skip
    names = ("reward", "action", "sample_log_prob", "done", "terminated")  # one value per agent
    loss.set_keys(value=("agent", "state_value"), **{name: ("agent", name) for name in names})
    loss.make_value_estimator(ValueEstimators.GAE, gamma=TUTORIAL["gamma"], lmbda=TUTORIAL["lmbda"])
    optimizer = torch.optim.Adam(loss.parameters(), TUTORIAL["lr"])
    frames, size = TUTORIAL["frames_per_batch"], TUTORIAL["minibatch_size"]
    storage = LazyTensorStorage(frames)
    buffer = TensorDictReplayBuffer(storage=storage, sampler=SamplerWithoutReplacement(), batch_size=size)
    collector = Collector(env, policy, frames_per_batch=frames, total_frames=steps // frames * frames)
    rows: list[dict] = []
    wall, cpu = time.perf_counter(), time.process_time()
    for rollout in collector:
        collected = time.process_time() - cpu - (rows[-1]["cpu_seconds"] if rows else 0)
        with torch.no_grad():
            weights = loss.target_critic_network_params  # those of the critic, without gradients
            loss.value_estimator(rollout, params=weights, target_params=weights)
        buffer.extend(rollout.reshape(-1))
        for _ in range(TUTORIAL["num_epochs"] * (frames // size)):
            parts = loss(buffer.sample())
            (parts["loss_objective"] + parts["loss_critic"] + parts["loss_entropy"]).backward()
            torch.nn.utils.clip_grad_norm_(loss.parameters(), TUTORIAL["max_grad_norm"])
            optimizer.step()
            optimizer.zero_grad()
        rewards = rollout["next", "agent", "reward"]  # [games, steps, agents, 1], whole episodes
        assert rollout["next", "done"][:, LENGTH - 1 :: LENGTH].all()
        row = {"library": "torchrl", "seed": seed, "game_steps": frames * (len(rows) + 1)}
        row["episodic_return"] = LENGTH * rewards.mean().item()
        row |= {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
        row["collection_cpu_seconds"] = collected
        rows.append(row)
        append(curve, rows[-1:])
        print(row, flush=True)
        if row["seconds"] > 60 * minutes:
            break
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        env.set_seed(seed)  # the collector has closed its games
        played = [env.rollout(LENGTH, policy) for _ in range(EVALUATION // GAMES)]
    evaluation = torch.cat(played)["next", "agent", "reward"].sum(1).mean().item()
    return summarize(rows, row["seconds"], row["cpu_seconds"]) | {"eval_return": evaluation}


def train_ours(recipe: str, seed: int, steps: int, curve: Path) -> dict:
    """Train our recipe in this process, write its curve, and return the row of the run."""
    import lightning as L

    from ppo_lightning import PPO, RolloutDataModule
    from ppo_lightning.commands.cli import main as run_command

    flags = {"seed_everything": seed, "data.total_timesteps": steps * AGENTS, "num_threads": 1}
    command = ["fit", "--config", str(ROOT / f"configs/ppo/simple_spread_{recipe}.yaml")]
    command += [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        wall, cpu = time.perf_counter(), time.process_time()
        run_command(command)  # including evaluations and checkpoints
        used = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
        (metrics,) = Path(folder).rglob("metrics.csv")
        logged = [row for row in csv.DictReader(metrics.open()) if row["charts/episodic_return"]]
        checkpoint = max(Path(folder).rglob("*.ckpt"), key=lambda path: path.stat().st_mtime)
        data = RolloutDataModule.load_from_checkpoint(checkpoint, eval_episodes=EVALUATION * AGENTS)
        model = PPO.load_from_checkpoint(checkpoint)
        (tested,) = L.Trainer(accelerator="cpu", logger=False).test(model, data)
    rows = [{"library": recipe, "seed": seed, "game_steps": int(row["step"]) // AGENTS} for row in logged]
    for row, metric in zip(rows, logged, strict=True):
        row["episodic_return"] = float(metric["charts/episodic_return"])
    append(curve, rows)
    return summarize(rows, **used) | {"eval_return": tested["test/episodic_return"]}


def summarize(rows: list[dict], seconds: float, cpu_seconds: float) -> dict:
    """Return the row of a run: the return at the end of training and throughput in game steps."""
    steps = rows[-1]["game_steps"]
    late = [row["episodic_return"] for row in rows if row["game_steps"] > (1 - LAST) * steps]
    result = {name: rows[-1][name] for name in ("library", "seed", "game_steps")}
    result |= {"final_return": statistics.fmean(late), "seconds": seconds, "cpu_seconds": cpu_seconds}
    return result | {"sps": steps / seconds, "sps_cpu": steps / cpu_seconds}


def report(rows: list[dict]) -> str:
    """Return a table with the mean and the range over the seeds."""
    names = ("final_return", "eval_return", "sps", "sps_cpu")
    lines = [f"| program | seeds | game steps | {' | '.join(names)} |", "|---|---|---|" + "---|" * len(names)]
    for library in dict.fromkeys(row["library"] for row in rows):
        runs = [row for row in rows if row["library"] == library]
        cells = [library, " ".join(row["seed"] for row in runs), runs[0]["game_steps"]]
        for values in ([float(row[name]) for row in runs] for name in names):
            cells.append(f"{statistics.fmean(values):.1f} ({min(values):.1f} to {max(values):.1f})")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Train one run, or print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("program", choices=["torchrl", "ippo", "mappo", "report"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=300_000, help="game steps of the run")
    parser.add_argument("--minutes", type=float, default=35.0, help="wall-clock limit of the TorchRL run")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/multiagent")
    options = parser.parse_args()
    output = options.output.resolve()  # training changes the folder
    output.mkdir(parents=True, exist_ok=True)
    if options.program == "report":
        print(report(list(csv.DictReader((output / "runs.csv").open()))))
        return
    curve = output / f"{options.program}_{options.seed}.csv"
    curve.unlink(missing_ok=True)
    if options.program == "torchrl":
        result = train_torchrl(options.seed, options.steps, options.minutes, curve)
    else:
        result = train_ours(options.program, options.seed, options.steps, curve)
    append(output / "runs.csv", [result])
    print(result)


if __name__ == "__main__":
    main()
