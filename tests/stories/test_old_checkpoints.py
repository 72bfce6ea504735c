"""Checkpoints of commit 03b7cb3, one of each algorithm, load, act as they did, and resume.

`python -m tests.stories.test_old_checkpoints` writes the files of another commit.
"""

import inspect
import pkgutil
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torchrl.data import Composite

import ppo_lightning
from ppo_lightning import AgentModule, RolloutDataModule
from ppo_lightning.checkpoints.moved import MOVED
from tests.conftest import trainers_in

FOLDER = Path(__file__).parent / "old"
ZOO = Path(__file__).parents[2] / "zoo"
SMALL = {"hidden_sizes": (8,)}
ON_POLICY = {"num_minibatches": 2, "update_epochs": 1}
OFF_POLICY = {"learning_starts": 20, "buffer_size": 200}
# Name of the file -> algorithm, its settings, environment, settings of the agent.
RUNS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "ppo": ("PPO", ON_POLICY | {"norm_reward": True}, "Pendulum-v1", {"norm_obs": True}),
    "ppo_cartpole": ("PPO", ON_POLICY, "CartPole-v1", {}),
    "recurrent": ("RecurrentPPO", ON_POLICY, "CartPole-v1", {"memory": "lstm", "memory_size": 8}),
    "min_gru": ("RecurrentPPO", ON_POLICY, "CartPole-v1", {"memory": "min_gru", "memory_size": 8}),
    "rpo": ("RPO", ON_POLICY, "Pendulum-v1", {}),
    "ppg": ("PPG", ON_POLICY | {"n_iteration": 1, "e_auxiliary": 1}, "CartPole-v1", {}),
    "rnd": ("RND", ON_POLICY | {"num_iterations_obs_norm_init": 1}, "CartPole-v1", {}),
    "selfplay": ("SelfPlay", ON_POLICY | {"rating_games": 0}, "TicTacToe-v1", {}),
    "dqn": ("DQN", OFF_POLICY | {"batch_size": 16}, "CartPole-v1", {}),
    "c51": ("C51", OFF_POLICY | {"batch_size": 16}, "CartPole-v1", {}),
    "ddpg": ("DDPG", OFF_POLICY, "Pendulum-v1", {}),
    "td3": ("TD3", OFF_POLICY, "Pendulum-v1", {}),
    "sac": ("SAC", OFF_POLICY, "Pendulum-v1", {"norm_obs": True}),
    "sac_discrete": ("DiscreteSAC", OFF_POLICY, "CartPole-v1", {}),
}


def run_of(name: str, rollouts: int = 2) -> tuple[Any, RolloutDataModule]:
    """Return module and data of a short run."""
    algorithm, settings, env_id, agent = RUNS[name]
    kind = getattr(ppo_lightning, algorithm)
    maker: Any = kind().make_agent
    module = kind(**settings, agent=partial(getattr(maker, "func", maker), **SMALL | agent))
    size = {"num_envs": 4, "num_steps": 16, "total_timesteps": rollouts * 64, "eval_episodes": 1}
    backend = "envpool" if algorithm == "SelfPlay" else "gymnasium"
    return module, RolloutDataModule(env_id, backend, **size)


def actions_of(module: Any, rows: int = 100) -> np.ndarray:
    """Return the deterministic actions for random observations, and for a memory those of two steps."""
    spec = module.observation_spec
    draw = np.random.default_rng(1)

    def batch(spec: Any) -> Any:
        if isinstance(spec, Composite):
            return {key: batch(part) for key, part in spec.items()}
        shape = (rows, *spec.shape)
        if spec.dtype.is_floating_point:
            return draw.standard_normal(shape).astype(np.float32)
        return draw.integers(0, 2, shape).astype(torch.empty(0, dtype=spec.dtype).numpy().dtype)

    observation = batch(spec)
    if isinstance(observation, dict) and "action_mask" in observation:
        observation["action_mask"][:, 0] = 1
    action = module.predict(observation)
    if isinstance(action, tuple):
        action, memory = action
        return np.stack([action, module.predict(observation, memory=memory)[0]])
    return np.asarray(action)


def loaded() -> dict[str, Any]:
    """Return all modules by name: those of this folder and the bundled agents."""
    paths = {path.stem: path for path in FOLDER.glob("*.ckpt")}
    paths |= {f"zoo/{path.parent.relative_to(ZOO)}": path for path in ZOO.rglob("model.ckpt")}
    return {name: AgentModule.load_from_checkpoint(path) for name, path in sorted(paths.items())}


def test_old_checkpoints_act_as_they_did():
    expected = np.load(FOLDER / "actions.npz")
    modules = loaded()
    assert set(modules) == set(expected.files) and len(modules) == len(RUNS) + 14
    for name, module in modules.items():
        actions = actions_of(module)
        assert actions.dtype == expected[name].dtype, name
        np.testing.assert_allclose(actions, expected[name], rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("name", ["ppo", "recurrent", "dqn", "sac"])
@pytest.mark.filterwarnings("ignore:.*replay buffer.*")
def test_old_checkpoints_resume(name, make_trainer):
    module, data = run_of(name, rollouts=4)
    L.seed_everything(1)
    make_trainer().fit(module, data, ckpt_path=FOLDER / f"{name}.ckpt")
    assert module.env_steps == 256


def test_every_class_that_moved_is_found_by_its_former_name():
    for present in MOVED.values():
        assert inspect.isclass(pkgutil.resolve_name(present))


def main() -> None:
    """Write a checkpoint of each algorithm and the actions of all agents."""
    for name in RUNS:
        L.seed_everything(1)
        module, data = run_of(name)
        trainer = trainers_in(FOLDER)()
        trainer.fit(module, data)
        trainer.save_checkpoint(FOLDER / f"{name}.ckpt")
    np.savez_compressed(FOLDER / "actions.npz", **{name: actions_of(x) for name, x in loaded().items()})


if __name__ == "__main__":
    main()
