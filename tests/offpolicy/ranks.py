"""Train SAC on two ranks, then resume the run from its middle, and save the result of every rank."""

import functools
import json
import sys

import lightning as L
import torch

from ppo_lightning import SAC, RolloutDataModule
from ppo_lightning.offpolicy import SACAgent
from tests.helpers import SaveAfter, weights


def train(folder, ckpt_path=None):
    L.seed_everything(1)
    data = RolloutDataModule("Pendulum-v1", num_envs=2, num_steps=10, total_timesteps=100)
    agent = functools.partial(SACAgent, norm_obs=True)
    module = SAC(batch_size=16, learning_starts=40, buffer_size=200, save_buffer=True, agent=agent)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        default_root_dir=folder,
        callbacks=[] if ckpt_path else [SaveAfter(f"{folder}/middle.ckpt", 3)],
    )
    initial = []
    module.on_train_epoch_start = lambda: initial.append(initial[0] if initial else weights(module))
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return module, initial


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = json.loads(sys.argv[1])["folder"]
    module, initial = train(folder)
    resumed, _ = train(folder, f"{folder}/middle.ckpt")
    rows = module.buffer.gather(torch.arange(len(module.buffer)))
    result = {
        "weights": weights(module),
        "state": module.state_dict(),  # with target networks and statistics
        "optimizers": [optimizer.state_dict()["state"] for optimizer in module.trainer.optimizers],
        "returns": list(module.episode_returns),
        "resumed": weights(resumed),
        "initial": initial[0],
        "observation": rows["observation"],
        "length": len(module.buffer),
    }
    torch.save(result, f"{folder}/rank{module.global_rank}.pt")
