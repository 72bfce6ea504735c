"""Programs that `speed.py` compares with, written as their documentation recommends.

Each function trains with the given hyperparameters, which have our names. It returns the environment steps
per second of whole iterations after a warm-up, measured for a minimum time.

`python benchmarks/peers.py sac HalfCheetah-v4 --steps 200000 --seeds 1 2 --output FILE.csv` trains
Stable-Baselines3 with the settings of a recipe and writes one row per run, with the columns of `compare`.
TD3 has the settings of `configs/td3`, SAC those of `configs/sac` with the exceptions below, PPO those of
`configs/classic/cartpole.yaml`. It needs the extra `benchmark`, and LunarLander box2d 2.3.10.
"""

import argparse
import csv
import time
from pathlib import Path
from typing import Any

COLUMNS = ["recipe", "env_id", "seed", "env_steps", "episodic_return", "eval_return", "wall_seconds"]
LEARNING_STARTS = {"sac": 5_000, "td3": 25_000}

# The warm-up ends after this number of iterations or this time.
WARM_UP = 2
WARM_UP_SECONDS = 20.0
# Number of PyTorch threads with which these programs are fastest, by kind of network. None is PyTorch's
# default, one thread per core. In networks of 64 x 64 units, a second thread waits longer than it computes:
# beside other processes, Stable-Baselines3 reached 80 to 365 steps per second with two threads, and 1514 to
# 2843 with one. `speed.py --threads N` measures another number.
THREADS: dict[str, int | None] = {"classic": 1, "lstm": 1, "mujoco": 1, "atari": None}


class Stopwatch:
    """Stopwatch that counts iterations until a time is over.

    Args:
        seconds: Minimum duration of the measurement after the warm-up.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._created = time.perf_counter()
        self.times: list[float] = []  # times of the ends of iterations since the end of the warm-up
        self._iterations = 0

    def lap(self) -> bool:
        """Record the end of an iteration and return whether the measurement is complete."""
        now = time.perf_counter()
        self._iterations += 1
        if self.times or self._iterations >= WARM_UP or now - self._created > WARM_UP_SECONDS:
            self.times.append(now)
        return len(self.times) > 1 and now - self.times[0] > self.seconds

    def rate(self, frames: int) -> float:
        """Return the steps per second, given the number of steps per iteration."""
        return frames * (len(self.times) - 1) / (self.times[-1] - self.times[0])


def recurrent_ppo(
    env_id: str, options: dict[str, Any], num_envs: int, num_steps: int, seconds: float,
    memory: dict[str, Any] | None = None,
) -> float:  # fmt: skip
    """Train RecurrentPPO of sb3-contrib; by default, policy and value each have an LSTM of 256 units."""
    from sb3_contrib import RecurrentPPO

    return stable_baselines3(
        env_id, options, num_envs, num_steps, seconds, RecurrentPPO, "MlpLstmPolicy", memory
    )


def recurrent_ppo_like_ours(*args: Any) -> float:
    """Train RecurrentPPO of sb3-contrib with one LSTM of 128 units for policy and value."""
    return recurrent_ppo(
        *args, memory={"lstm_hidden_size": 128, "shared_lstm": True, "enable_critic_lstm": False}
    )


def stable_baselines3(
    env_id: str, options: dict[str, Any], num_envs: int, num_steps: int, seconds: float,
    algorithm: Any = None, policy: str | None = None, policy_kwargs: dict[str, Any] | None = None,
) -> float:  # fmt: skip
    """Train Stable-Baselines3; Atari games run through its own wrappers, one after the other."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_atari_env, make_vec_env
    from stable_baselines3.common.vec_env import VecFrameStack, VecNormalize

    watch = Stopwatch(seconds)
    atari = env_id.startswith("ALE/")

    class Clock(BaseCallback):
        over = False
        first = True

        def _on_rollout_start(self) -> None:
            if not self.first:
                self.over = watch.lap()
            self.first = False

        def _on_step(self) -> bool:
            return not self.over

    env: Any
    if atari:
        import ale_py
        import gymnasium

        gymnasium.register_envs(ale_py)
        game = env_id.removeprefix("ALE/").removesuffix("-v5")
        env = VecFrameStack(make_atari_env(f"{game}NoFrameskip-v4", n_envs=num_envs), 4)
    else:
        env = make_vec_env(env_id, n_envs=num_envs)
    if options.get("norm_reward"):
        env = VecNormalize(env)
    lr = options["learning_rate"]
    batch = num_envs * num_steps
    model = (algorithm or PPO)(
        policy or ("CnnPolicy" if atari else "MlpPolicy"),
        env,
        learning_rate=lambda left: left * lr,
        n_steps=num_steps,
        batch_size=batch // options["num_minibatches"],
        n_epochs=options["update_epochs"],
        clip_range=options["clip_coef"],
        clip_range_vf=options["clip_coef"],
        ent_coef=options["ent_coef"],
        device="cpu",
        policy_kwargs=policy_kwargs,
    )
    model.learn(10**9, callback=Clock())
    return watch.rate(batch)


def stable_baselines3_like_cartpole(
    env_id: str,
    seed: int,
    num_envs: int = 4,
    norm: bool = False,
    learning_rate: float = 2.5e-4,
    **changes: Any,
) -> Any:
    """Make Stable-Baselines3's PPO with the settings of configs/ppo/classic.yaml.

    Args:
        env_id: Environment.
        seed: Seed of the run.
        num_envs: Number of environments.
        norm: Normalize observations and rewards.
        learning_rate: Initial learning rate, which decreases linearly to 0.
        **changes: Other arguments of PPO.
    """
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    env: Any = make_vec_env(env_id, n_envs=num_envs, seed=seed)
    settings = {"n_steps": 128, "batch_size": 128, "n_epochs": 4, "clip_range_vf": 0.2, "ent_coef": 0.01}
    return PPO(
        "MlpPolicy",
        VecNormalize(env) if norm else env,
        learning_rate=lambda left: left * learning_rate,
        seed=seed,
        device="cpu",
        **(settings | changes),
    )


def stable_baselines3_off_policy(
    algorithm: str, env_id: str, learning_starts: int, seed: int | None = None
) -> Any:
    """Make Stable-Baselines3's SAC, TD3 or DQN with CleanRL's settings.

    All networks of SAC have one learning rate, 3e-4 (CleanRL's critics and temperature 1e-3), and its policy
    is updated at every step.

    Args:
        algorithm: `SAC`, `TD3` or `DQN` (for CartPole, with a constant epsilon of 0.05).
        env_id: Environment.
        learning_starts: Environment steps before the first update.
        seed: Seed of the run.
    """
    import numpy as np
    import stable_baselines3
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.noise import NormalActionNoise

    env = make_vec_env(env_id, seed=seed)
    options: dict[str, Any] = {
        "learning_rate": 3e-4,
        "batch_size": 256,
        "policy_kwargs": {"net_arch": [256, 256]},
    }
    if algorithm == "TD3":
        size = env.action_space.shape
        options["action_noise"] = NormalActionNoise(np.zeros(size), np.full(size, 0.1))
    if algorithm == "DQN":
        options = {"learning_rate": 2.5e-4, "buffer_size": 10_000, "batch_size": 128, "train_freq": 10}
        options |= {"target_update_interval": 500, "policy_kwargs": {"net_arch": [120, 84]}}
        options |= {"exploration_initial_eps": 0.05, "exploration_final_eps": 0.05}
    make = getattr(stable_baselines3, algorithm)
    return make("MlpPolicy", env, learning_starts=learning_starts, seed=seed, device="cpu", **options)


def torchrl_loop(
    env_id: str, options: dict[str, Any], num_envs: int, num_steps: int, seconds: float
) -> float:
    """Train with TorchRL's collector, GAE, replay buffer and ClipPPOLoss, as in its own PPO scripts."""
    import torch
    from tensordict.nn import AddStateIndependentNormalScale, TensorDictModule
    from torch import nn
    from torchrl.collectors import Collector
    from torchrl.data import Categorical, LazyTensorStorage, TensorDictReplayBuffer
    from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
    from torchrl.envs import (
        ClipTransform,
        Compose,
        DoubleToFloat,
        RewardSum,
        SerialEnv,
        StepCounter,
        TransformedEnv,
        VecNormV2,
    )
    from torchrl.envs.libs.gym import GymEnv, set_gym_backend
    from torchrl.modules import IndependentNormal, ProbabilisticActor, ValueOperator
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE

    def single() -> Any:
        with set_gym_backend("gymnasium"):
            return GymEnv(env_id, categorical_action_encoding=True)

    transforms = [DoubleToFloat()]
    if options.get("norm_reward"):
        transforms += [
            VecNormV2(in_keys=["observation"]),
            ClipTransform(in_keys=["observation"], low=-10, high=10),
        ]
    env = TransformedEnv(SerialEnv(num_envs, single), Compose(*transforms, RewardSum(), StepCounter()))
    size = env.observation_spec["observation"].shape[-1]
    spec = env.action_spec_unbatched
    discrete = isinstance(spec, Categorical)

    def mlp(out: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(size, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, out))

    actions = int(spec.space.n) if discrete else spec.shape[-1]
    body = mlp(actions) if discrete else nn.Sequential(mlp(actions), AddStateIndependentNormalScale(actions))
    keys = ["logits"] if discrete else ["loc", "scale"]
    actor = ProbabilisticActor(
        TensorDictModule(body, ["observation"], keys),
        in_keys=keys,
        spec=env.action_spec,
        distribution_class=torch.distributions.Categorical if discrete else IndependentNormal,
        return_log_prob=True,
    )
    critic = ValueOperator(mlp(1), in_keys=["observation"])
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic, average_gae=False)
    loss = ClipPPOLoss(
        actor, critic, clip_epsilon=options["clip_coef"], entropy_coeff=options["ent_coef"], critic_coeff=0.5,
        normalize_advantage=True, clip_value=options["clip_coef"], loss_critic_type="l2",
    )  # fmt: skip
    optimizer = torch.optim.Adam(loss.parameters(), lr=options["learning_rate"], eps=1e-5)
    frames = num_envs * num_steps
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(frames),
        sampler=SamplerWithoutReplacement(),
        batch_size=frames // options["num_minibatches"],
    )
    collector = Collector(env, actor, frames_per_batch=frames, total_frames=-1, track_traj_ids=False)
    watch = Stopwatch(seconds)
    for rollout in collector:
        with torch.no_grad():
            advantage(rollout)
        buffer.extend(rollout.reshape(-1))
        for _ in range(options["update_epochs"]):
            for minibatch in buffer:
                parts = loss(minibatch)
                optimizer.zero_grad()
                (parts["loss_objective"] + parts["loss_critic"] + parts["loss_entropy"]).backward()
                torch.nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
                optimizer.step()
        if watch.lap():
            break
    collector.shutdown()
    return watch.rate(frames)


def train_stable_baselines3(algorithm: str, env_id: str, steps: int, seed: int) -> list[str | int | float]:
    """Train one seed and return its row."""
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy

    if algorithm == "ppo":
        model = stable_baselines3_like_cartpole(env_id, seed)
    else:
        model = stable_baselines3_off_policy(algorithm.upper(), env_id, LEARNING_STARTS[algorithm], seed)
    begin = time.perf_counter()
    model.learn(steps)
    seconds = time.perf_counter() - begin
    returns = [episode["r"] for episode in model.ep_info_buffer or ()]
    evaluated, _ = evaluate_policy(model, make_vec_env(env_id, n_envs=1, seed=1000 + seed), 10)
    mean = round(sum(returns) / len(returns), 2) if returns else float("nan")
    result = [mean, round(float(evaluated), 2), round(seconds, 1)]
    return [f"stable-baselines3/{algorithm}", env_id, seed, model.num_timesteps, *result]


def main() -> None:
    """Train all seeds."""
    import torch

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("algorithm", choices=["ppo", *LEARNING_STARTS])
    parser.add_argument("env_id")
    parser.add_argument("--steps", type=int, default=500_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--output", type=Path, required=True, help="CSV file, one row per run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with options.output.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(COLUMNS)
        for seed in options.seeds:
            table.writerow(train_stable_baselines3(options.algorithm, options.env_id, options.steps, seed))
            file.flush()


if __name__ == "__main__":
    main()
