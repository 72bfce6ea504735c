"""Train in processes that Lightning starts from this one; test_distributed.py starts it."""

import json
import sys

import lightning as L
import torch

from ppo_lightning import PPO, RolloutDataModule

options = json.loads(sys.argv[1])

if __name__ == "__main__":
    torch.set_num_threads(1)
    L.seed_everything(1)
    trainer_options = {
        "max_epochs": -1,
        "accelerator": "cpu",
        "devices": 2,
        "strategy": options["strategy"],
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": options["folder"],
        "num_sanity_val_steps": 0,
    }
    data = {"num_envs": 4, "num_steps": 16, "total_timesteps": options["timesteps"], "eval_episodes": 4}
    module = PPO(learning_rate=1e-3, **options["model"])
    trainer = L.Trainer(**trainer_options)
    trainer.fit(module, RolloutDataModule(**data))
    fitted = {name: value.item() for name, value in trainer.callback_metrics.items()}
    (validated,) = trainer.validate(module, RolloutDataModule(**data), verbose=False)
    if trainer.is_global_zero:
        torch.save(
            {
                "weights": module.state_dict(),
                "fitted": fitted,
                "validated": validated,
                "env_steps": module.env_steps,
            },
            f"{options['folder']}/result.pt",
        )
