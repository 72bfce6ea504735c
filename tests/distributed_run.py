"""A short data parallel run; every rank saves what it ended with. Started by test_distributed.py."""

import json
import sys

import lightning as L
import torch

import ppo_lightning

options = json.loads(sys.argv[1])


class Run(ppo_lightning.PPO):
    def on_train_start(self):
        super().on_train_start()
        self.initial = torch.nn.utils.parameters_to_vector(self.agent.parameters()).detach().clone()

    def training_step(self, rollout, batch_idx):
        self.last_observation = rollout["observation"].clone()
        return super().training_step(rollout, batch_idx)

    def update(self, minibatch):
        metrics = super().update(minibatch)
        if options["kl_of_ranks"]:
            metrics["approx_kl"] = torch.tensor(options["kl_of_ranks"][self.global_rank])
        return metrics


if __name__ == "__main__":
    torch.set_num_threads(1)
    L.seed_everything(1)
    module = Run(**options["model"], learning_rate=1e-3)
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", devices=options["devices"], strategy="ddp" if options["devices"] > 1 else "auto",
        logger=False, enable_checkpointing=False, enable_progress_bar=False, limit_val_batches=0,
        default_root_dir=options["folder"],
    )  # fmt: skip
    trainer.fit(module, ppo_lightning.RolloutDataModule(num_envs=4, num_steps=16, total_timesteps=4 * 16 * 3))
    result = {
        "weights": torch.nn.utils.parameters_to_vector(module.agent.parameters()).detach(),
        "initial": module.initial,
        "observation": module.last_observation,
        "env_steps": module.env_steps,
        "global_step": trainer.global_step,
    }
    torch.save(result, f"{options['folder']}/rank{trainer.global_rank}.pt")
