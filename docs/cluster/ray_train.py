"""Train with two ranks on a Ray cluster: `python docs/cluster/ray_train.py`.

Ray Train starts the ranks, and starts them again if one is lost. They then resume from the last epoch.
"""

import os

import lightning as L
import ray.train
from ray.train import lightning as rl
from ray.train.torch import TorchTrainer

from ppo_lightning import PPO, RolloutDataModule


def train() -> None:
    """Train as a rank."""
    L.seed_everything(1)
    data = RolloutDataModule("CartPole-v1", num_envs=4, total_timesteps=500_000)
    ranks = {"strategy": rl.RayDDPStrategy(), "plugins": rl.RayLightningEnvironment(), "accelerator": "cpu"}
    trainer = rl.prepare_trainer(L.Trainer(max_epochs=-1, callbacks=[rl.RayTrainReportCallback()], **ranks))
    checkpoint = ray.train.get_checkpoint()  # None: the start of the run
    trainer.fit(PPO(), data, ckpt_path=checkpoint and os.path.join(checkpoint.path, "checkpoint.ckpt"))


if __name__ == "__main__":
    run = ray.train.RunConfig("ppo", os.path.abspath("runs"))  # a folder that all nodes share
    run.failure_config = ray.train.FailureConfig(max_failures=3)
    TorchTrainer(train, scaling_config=ray.train.ScalingConfig(num_workers=2), run_config=run).fit()
