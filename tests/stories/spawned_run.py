"""Train in processes that Lightning starts from this one; test_distributed.py starts it."""

import json
import sys

import lightning as L
import torch

from ppo_lightning import RND, RolloutDataModule
from tests.conftest import trainers_in

options = json.loads(sys.argv[1])

if __name__ == "__main__":
    torch.set_num_threads(1)
    L.seed_everything(1)
    processes = {"devices": 2, "strategy": options["strategy"]}
    validations = {"limit_val_batches": 1.0, "num_sanity_val_steps": 0}
    trainer = trainers_in(options["folder"])(max_epochs=-1, **processes, **validations)
    data = {"num_envs": 4, "num_steps": 16, "total_timesteps": options["timesteps"], "eval_episodes": 4}
    module = RND(learning_rate=1e-3, num_iterations_obs_norm_init=2, **options["model"])
    trainer.fit(module, RolloutDataModule(**data))
    fitted = {name: value.item() for name, value in trainer.callback_metrics.items()}
    (validated,) = trainer.validate(module, RolloutDataModule(**data), verbose=False)
    if trainer.is_global_zero:
        result = {"weights": module.state_dict(), "fitted": fitted, "validated": validated}
        torch.save(result | {"progress": module.progress.state_dict()}, f"{options['folder']}/result.pt")
