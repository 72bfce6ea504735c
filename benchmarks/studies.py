"""Train what `ppo-lightning benchmark` cannot compare: other programs, and recipes with a part replaced.

`python benchmarks/studies.py rnd mountaincar mountaincar_sparse multiroom [--seeds 1 2 3]` trains RND
beside PPO of the same settings: where novelty helps, and where it does not. It writes `runs.csv` (one row
per run, with the command) and `curves.csv` (about 50 rows per run). Returns are means over the last 100
training episodes. `steps_to_target` and `minutes_to_target` say when they first exceeded the target. The
minutes include the random steps of RND, and no imports.

`python benchmarks/studies.py multiagent torchrl ippo mappo [--seeds 1]` trains IPPO and MAPPO beside
TorchRL's multi-agent PPO tutorial on simple_spread, with the same game steps. Each run writes
`torchrl_N.csv`, `ippo_N.csv` or `mappo_N.csv` (one row per rollout) and a row of `runs.csv`. A game step
moves three agents: 300 000 game steps are 900 000 agent steps. Returns are means over the agents. `sps` are
game steps per second, `sps_cpu` game steps per second of CPU time. Imports and the final evaluation are not
timed. The fit of our recipes includes validations and checkpoints. The TorchRL side follows the tutorial
"Multi-Agent Reinforcement Learning (PPO) with TorchRL": `MultiAgentMLP` for policy and critic (shared
parameters, depth 2, 256 cells, tanh), a central critic (MAPPO), `ClipPPOLoss` without advantage
normalization, Adam, and the values of `TUTORIAL`. The tutorial trains VMAS Navigation. Here, a `SerialEnv`
steps 20 games in `PettingZooWrapper`, actions are categorical, and GAE bootstraps at the time limit,
because the wrapper marks truncations.

`python benchmarks/studies.py selfplay tictactoe connectfour [--arms recipe] [--seeds 1 2]` trains the
recipes and lets their agents play random play and minimax. The other arms break the recipe: a GAE that does
not change its sign, and each reward given to the other player.

Runs are trained one at a time with one thread. Results go to `benchmarks/results/STUDY`. `rnd` and
`multiagent` do not repeat runs that are in `runs.csv`, and without a name they print the table of finished
runs.
"""

import argparse
import contextlib
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
OWN = {
    "update_proportion",
    "int_coef",
    "ext_coef",
    "int_gamma",
    "num_iterations_obs_norm_init",
}
SHORT = {"data.total_timesteps": 200_000}
# Task -> target of the mean return, and arm -> recipe, algorithm and settings that differ from the recipe.
TASKS: dict[str, tuple[float, dict[str, tuple[str, str, dict[str, Any]]]]] = {
    "mountaincar": (
        -130.0,
        {
            "rnd": ("rnd/mountaincar", "RND", {}),
            "ppo": ("rnd/mountaincar", "PPO", {}),
            "ppo_classic": ("classic/mountaincar", "PPO", {"data.total_timesteps": 400_000}),
        },
    ),
    "mountaincar_sparse": (
        0.95,
        {"rnd": ("rnd/mountaincar_sparse", "RND", {}), "ppo": ("rnd/mountaincar_sparse", "PPO", {})},
    ),
    "multiroom": (0.5, {"rnd": ("rnd/multiroom", "RND", {}), "ppo": ("rnd/multiroom", "PPO", {})}),
    "cartpole": (
        475.0,
        {"rnd": ("classic/cartpole", "RND", SHORT), "ppo": ("classic/cartpole", "PPO", SHORT)},
    ),
    "acrobot": (-100.0, {"rnd": ("classic/acrobot", "RND", SHORT), "ppo": ("classic/acrobot", "PPO", SHORT)}),
}


# Multi-agent.
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
PARALLEL = 20  # games
EVALUATION = 100  # episodes of the evaluation, with the most probable actions
LAST = 0.1  # share of the training episodes over which the final return is averaged
# Self-play.
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


def append(path: Path, rows: list[dict]) -> None:
    """Append rows to a CSV file, with a header if the file is new."""
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(rows)


def written(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file, none if there is no file."""
    return list(csv.DictReader(path.open())) if path.exists() else []


def config(recipe: str, algorithm: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe with another algorithm and other settings."""
    made = yaml.safe_load((ROOT / f"configs/{recipe}.yaml").read_text())
    made["model"]["class_path"] = f"ppo_lightning.{algorithm}"
    if algorithm == "PPO":
        arguments = made["model"]["init_args"]
        made["model"]["init_args"] = {key: value for key, value in arguments.items() if key not in OWN}
    for name, value in settings.items():
        group, _, key = name.partition(".")
        entries = made[group]["init_args"] if group == "model" else made[group]
        entries[key] = value
    return made


def fit_rnd(path: str, seed: int, target: float) -> None:
    """Train a recipe, and print the result and the curve of the run as JSON."""
    import lightning as L

    from ppo_lightning.commands import cli
    from ppo_lightning.commands.arguments import Arguments

    class Curve(L.Callback):
        def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
            self.started = time.perf_counter()
            self.rows: list[dict] = []
            self.reached: tuple[int, float] | None = None

        def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
            returns = pl_module.episode_returns
            mean = sum(returns) / len(returns) if returns else float("nan")
            minutes = (time.perf_counter() - self.started) / 60
            if self.reached is None and len(returns) == 100 and mean > target:
                self.reached = pl_module.env_steps, minutes
            done = pl_module.rollouts_done
            if done % max(1, pl_module.data.num_rollouts // 50) == 0 or done == pl_module.data.num_rollouts:
                curiosity = trainer.callback_metrics.get("charts/episode_curiosity_reward")
                row = {"env_steps": pl_module.env_steps, "mean_return": mean, "minutes": minutes}
                self.rows.append(row | {"curiosity": "" if curiosity is None else float(curiosity)})

    curve = Curve()
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    flags = [part for name in quiet for part in (f"--trainer.{name}", "false")]
    flags += ["--seed_everything", str(seed), "--num_threads", "1", "--trainer.limit_val_batches", "0"]
    cli.run([curve], Arguments(["fit", "--config", path, *flags]), save_config=False)
    print(json.dumps({"rows": curve.rows, "reached": curve.reached}))


def train_rnd(task: str, arm: str, seed: int, made: dict[str, Any], target: float) -> tuple[dict, list[dict]]:
    """Train one run in a process of its own, and return the row of the run and those of its curve."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(yaml.safe_dump(made))
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = [
            sys.executable,
            __file__,
            "rnd",
            "--fit",
            str(path),
            "--seeds",
            str(seed),
            "--target",
            str(target),
        ]
        options = {"cwd": folder, "env": env, "check": True, "text": True, "stderr": subprocess.DEVNULL}
        done = subprocess.run(command, stdout=subprocess.PIPE, **options)
    result = json.loads(done.stdout.splitlines()[-1])
    last = result["rows"][-1]
    steps, minutes = result["reached"] or ("", "")
    row = {"task": task, "arm": arm, "seed": seed, "target": target, "steps_to_target": steps}
    row |= {"minutes_to_target": minutes and round(minutes, 2), "env_steps": last["env_steps"]}
    row |= {"final_return": round(last["mean_return"], 3), "minutes": round(last["minutes"], 2)}
    row["command"] = f"python benchmarks/studies.py rnd {task} --arms {arm} --seeds {seed}"
    curve = [
        {"task": task, "arm": arm, "seed": seed}
        | {key: round(value, 4) if isinstance(value, float) else value for key, value in point.items()}
        for point in result["rows"]
    ]
    return row, curve


def rnd_table(rows: list[dict]) -> str:
    """Return a table with one line for each arm of each task."""
    lines = ["| task | arm | runs above the target | environment steps | minutes | final return |"]
    lines.append("|---|---|---|---|---|---|")
    for task, (target, arms) in TASKS.items():
        for arm in arms:
            runs = [row for row in rows if (row["task"], row["arm"]) == (task, arm)]
            reached = [row for row in runs if row["steps_to_target"]]
            if not runs:
                continue
            steps = sorted(int(row["steps_to_target"]) for row in reached)
            minutes = sorted(float(row["minutes_to_target"]) for row in reached)
            spans = [f"{values[0]} to {values[-1]}" if values else "" for values in (steps, minutes)]
            finals = [float(row["final_return"]) for row in runs]
            spread = f" ± {statistics.stdev(finals):.3g}" if len(finals) > 1 else ""
            final = f"{statistics.fmean(finals):.3g}{spread}"
            share = f"{len(reached)} of {len(runs)} above {target:g}"
            lines.append(f"| {task} | {arm} | {share} | {' | '.join(spans)} | {final} |")
    return "\n".join(lines)


def rnd(options: argparse.Namespace) -> None:
    """Train the runs that are missing, and print the table."""
    runs = options.output / "runs.csv"
    done = {(row["task"], row["arm"], int(row["seed"])) for row in written(runs)}
    for task in options.names:
        target, arms = TASKS[task]
        short = {"data.total_timesteps": options.steps} if options.steps else {}
        for seed in options.seeds:
            for arm in options.arms or arms:
                if (task, arm, seed) not in done:
                    recipe, algorithm, settings = arms[arm]
                    made = config(recipe, algorithm, settings | short)
                    row, curve = train_rnd(task, arm, seed, made, target)
                    append(options.output / "curves.csv", curve)
                    append(runs, [row])
                    print(row, flush=True)
    print(rnd_table(written(runs)))


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
    env = SerialEnv(PARALLEL, lambda: PettingZooWrapper(parallel_env(), categorical_actions=True))
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
        played = [env.rollout(LENGTH, policy) for _ in range(EVALUATION // PARALLEL)]
    evaluation = torch.cat(played)["next", "agent", "reward"].sum(1).mean().item()
    return summarize(rows, row["seconds"], row["cpu_seconds"]) | {"eval_return": evaluation}


def train_ours(recipe: str, seed: int, steps: int, curve: Path) -> dict:
    """Train our recipe in this process, write its curve, and return the row of the run."""
    import lightning as L

    from ppo_lightning import PPO, RolloutDataModule
    from ppo_lightning.commands.cli import main as run_command

    flags = {"seed_everything": seed, "data.total_timesteps": steps * AGENTS, "num_threads": 1}
    command = ["fit", "--config", str(ROOT / f"configs/multiagent/simple_spread_{recipe}.yaml")]
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


def multiagent_table(rows: list[dict]) -> str:
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


def multiagent(options: argparse.Namespace) -> None:
    """Train the runs that are missing, and print the table."""
    runs = options.output / "runs.csv"
    steps = options.steps or 300_000
    done = {(row["library"], int(row["seed"])) for row in written(runs)}
    for seed in options.seeds:
        for program in options.names:
            if (program, seed) in done:
                continue
            curve = options.output / f"{program}_{seed}.csv"
            curve.unlink(missing_ok=True)
            if program == "torchrl":
                result = train_torchrl(seed, steps, options.minutes, curve)
            else:
                result = train_ours(program, seed, steps, curve)
            append(runs, [result])
            print(result, flush=True)
    print(multiagent_table(written(runs)))


def train_selfplay(recipe: str, arm: str, seed: int, steps: int | None, folder: Path) -> Path:
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


def play(game: str, options: argparse.Namespace) -> None:
    """Train the arms of a recipe and let their agents play the opponents."""
    from ppo_lightning.checkpoints.agent import trained_agent
    from ppo_lightning.checkpoints.file import read_checkpoint
    from ppo_lightning.envs.factory import EnvFactory
    from ppo_lightning.games.players import agent_player, make_player
    from ppo_lightning.games.tournament import play_games, probe_game

    env_id, opponents = GAMES[game]
    factory = EnvFactory(env_id, "envpool")
    env = probe_game(factory)
    rows = []
    for arm in options.arms or ARMS:
        for seed in options.seeds:
            folder = options.work / f"{game}-{arm}-seed{seed}"
            checkpoint = read_checkpoint(str(train_selfplay(game, arm, seed, options.steps, folder)))
            agent = trained_agent(checkpoint)
            for deterministic in (False, True):
                for name in opponents:
                    player = agent_player(agent, deterministic)
                    result = play_games(factory, player, make_player(name, env_id, env), options.games, seed)
                    row = {"steps": checkpoint["env_steps"], "arm": arm, "seed": seed, "opponent": name}
                    rows.append(row | {"deterministic": deterministic} | result._asdict())
    with (options.output / f"{game}.csv").open("w", newline="") as file:
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


def selfplay(options: argparse.Namespace) -> None:
    """Train and play the games."""
    for game in options.names:
        play(game, options)


STUDIES = {
    "rnd": (rnd, [*TASKS]),
    "multiagent": (multiagent, ["torchrl", "ippo", "mappo"]),
    "selfplay": (selfplay, [*GAMES]),
}


def main() -> None:
    """Train what a study lacks, and print its table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", choices=STUDIES)
    names = "; ".join(f"{study}: {', '.join(choices)}" for study, (_, choices) in STUDIES.items())
    parser.add_argument("names", nargs="*", metavar="NAME", help=names)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--arms", nargs="+", help="arms of rnd and selfplay (default: all)")
    parser.add_argument(
        "--steps", type=int, help="steps of a run, game steps for multiagent (default: those measured)"
    )
    parser.add_argument("--games", type=int, default=1000, help="games against each opponent")
    parser.add_argument("--minutes", type=float, default=35.0, help="wall-clock limit of a run of torchrl")
    parser.add_argument(
        "--work", type=Path, default=Path("runs/selfplay"), help="folder of the training runs of selfplay"
    )
    parser.add_argument("--output", type=Path, help="folder of the results")
    parser.add_argument("--fit", help=argparse.SUPPRESS)
    parser.add_argument("--target", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.fit:
        fit_rnd(options.fit, options.seeds[0], options.target)
        return
    run, choices = STUDIES[options.study]
    if unknown := set(options.names) - {*choices}:
        parser.error(f"{options.study} has no {' or '.join(unknown)}: choose from {', '.join(choices)}")
    options.output = (options.output or RESULTS / options.study).resolve()  # training changes the folder
    options.output.mkdir(parents=True, exist_ok=True)
    run(options)


if __name__ == "__main__":
    main()
