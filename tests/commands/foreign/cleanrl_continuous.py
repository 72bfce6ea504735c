import os
from dataclasses import dataclass

import gymnasium as gym


@dataclass
class Args:
    exp_name: str = os.path.basename(__file__)[: -len(".py")]
    seed: int = 1
    cuda: bool = True
    env_id: str = "HalfCheetah-v4"
    total_timesteps: int = 1000000
    learning_rate: float = 3e-4
    num_envs: int = 1
    num_steps: int = 2048
    anneal_lr: bool = True
    gamma: float = 0.99
    gae_lambda: float = 0.95
    num_minibatches: int = 32
    update_epochs: int = 10
    norm_adv: bool = True
    clip_coef: float = 0.2
    clip_vloss: bool = True
    ent_coef: float = 0.0
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    target_kl: float = None


def make_env(env_id, gamma):
    env = gym.wrappers.NormalizeObservation(gym.wrappers.ClipAction(gym.make(env_id)))
    return gym.wrappers.NormalizeReward(env, gamma=gamma)


raise SystemExit("this file must be read, not run")
