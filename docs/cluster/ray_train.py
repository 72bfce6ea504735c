"""Train with two ranks on a Ray cluster: python docs/cluster/ray_train.py

Ray Train starts the ranks, and starts them again if one is lost. They then resume from the last epoch.
"""

import sys
from pathlib import Path

import lightning as L
import ray.train
from ray.train.lightning import (
    RayDDPStrategy,
    RayLightningEnvironment,
    RayTrainReportCallback,
    prepare_trainer,
)
from ray.train.torch import TorchTrainer

from ppo_lightning import PPO, RolloutDataModule


def train(total_timesteps):
    L.seed_everything(1)
    data = RolloutDataModule("CartPole-v1", num_envs=4, total_timesteps=total_timesteps)
    parts = {"strategy": RayDDPStrategy(), "plugins": RayLightningEnvironment()}
    trainer = L.Trainer(max_epochs=-1, accelerator="cpu", callbacks=RayTrainReportCallback(), **parts)
    checkpoint = ray.train.get_checkpoint()
    path = checkpoint and str(Path(checkpoint.path, RayTrainReportCallback.CHECKPOINT_NAME))
    prepare_trainer(trainer).fit(PPO(), data, ckpt_path=path)


if __name__ == "__main__":
    run = ray.train.RunConfig("ppo", str(Path("runs").absolute()))  # a folder that all nodes share
    run.failure_config = ray.train.FailureConfig(max_failures=3)
    ranks = ray.train.ScalingConfig(num_workers=2)
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 500_000
    TorchTrainer(train, train_loop_config=steps, scaling_config=ranks, run_config=run).fit()
