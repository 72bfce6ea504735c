"""Isaac Lab's environments, with a fake that behaves as they do, and the documented script."""

import re

import gymnasium
import numpy as np
import pytest
import torch

from ppo_lightning import MLPAgent
from ppo_lightning.envs.isaac_lab import IsaacLabEnv
from ppo_lightning.envs.specs import specs_of
from ppo_lightning.rollouts.tensor_collector import TensorCollector
from ppo_lightning.utils.seeding import Shard
from tests.documented import ROOT, blocks
from tests.envs.simulators import FakeIsaacEnv, configuration
from tests.helpers import Forked, script

FAKES = {
    "isaaclab/__init__.py": "",
    "isaaclab/app.py": """
        class AppLauncher:
            started = False

            def __init__(self, args):
                AppLauncher.started = True
                self.app = self

            @staticmethod
            def add_app_launcher_args(parser):
                parser.add_argument("--headless", action="store_true")
                parser.add_argument("--device", default="cuda:0")

            def close(self):
                print("closed")
        """,
    "isaaclab_tasks/__init__.py": """
        import gymnasium
        from isaaclab.app import AppLauncher

        assert AppLauncher.started, "the app starts first"
        gymnasium.register("Isaac-Ant-v0", "tests.envs.simulators:FakeIsaacEnv", disable_env_checker=True)
        """,
    "isaaclab_tasks/utils.py": """
        from tests.envs.simulators import configuration

        def parse_env_cfg(task, device, num_envs):
            made = configuration(num_envs, critic=False, compute_final_obs=False)
            made.sim.device = device
            return made
        """,
}


def make(**options):
    return IsaacLabEnv(FakeIsaacEnv(configuration(**options)))


def collected(env, num_steps=8, **options):
    torch.manual_seed(1)
    agent = MLPAgent(*specs_of(env), **options)
    return TensorCollector(env, agent, num_steps, shard=Shard.whole(env.num_envs, seed=1)).rollout()


def test_the_critic_reads_its_group_and_the_actor_does_not():
    spec = specs_of(make()).observation
    assert spec.entry_sizes == {"policy": 2, "privileged_critic": 3}
    assert MLPAgent(*specs_of(make())).entries.actor == {"policy": 2}
    rollout = collected(make())
    assert rollout["observation"][1, 0].tolist() == [0, 1, 0, 1, -1]
    assert not hasattr(specs_of(make(critic=False)).observation, "entry_sizes")
    alone = collected(make(critic=False))["observation"]
    assert alone[0].tolist() == rollout["observation"][0, :, :2].tolist()


def test_final_observations_and_time_limits():
    rollout = collected(make())
    following = rollout["next"]
    assert not following["terminated"].any(), "the agent does not fall"
    assert following["truncated"][0, :, 0].tolist() == [False, False, True] * 2 + [False, False]
    assert rollout["observation"][0, :, 0].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert following["observation"][0, :, 0].tolist() == [1, 2, 3, 1, 2, 3, 1, 2]
    assert rollout["observation"][0, :, 1].tolist() == [0, 0, 0, 10, 10, 10, 20, 20]
    assert following["observation"][0, :, 1].tolist() == [0, 0, 0, 10, 10, 10, 20, 20]
    assert following["reward"][0, :, 0].tolist() == [1, 2, 3, 1, 2, 3, 1, 2], "no buffer is reused"
    last_seen = collected(make(compute_final_obs=False))["next", "observation"]
    assert last_seen[0, :, 0].tolist() == [1, 2, 2, 1, 2, 2, 1, 2]
    finite = collected(make(is_finite_horizon=True))["next"]
    assert torch.equal(finite["terminated"], following["truncated"]) and not finite["truncated"].any()


def test_it_is_reset_once_and_gets_bounded_actions():
    env = make()
    rollout = collected(env, num_steps=32)
    assert env.env.reset_calls == 1
    assert env.action_spec_unbatched.space.high.tolist() == [10.0]
    assert torch.equal(torch.stack(env.env.actions, 1), rollout["action"].clamp(-10, 10))


def test_a_fall_is_terminal():
    """Actions are inside their bounds for any caller."""
    env = make()
    carrier = env.reset()
    carrier["action"] = torch.tensor([[-16.0], [0.0]])
    step, carrier = env.step_and_maybe_reset(carrier)
    assert env.env.actions[-1].flatten().tolist() == [-10, 0] and step["action"][0] == -16
    assert step["next", "terminated"].flatten().tolist() == [True, False]
    assert carrier["observation"][:, 0].tolist() == [0, 1]
    env.set_seed(3)
    assert env.env.seeded == 3
    env.close()
    assert env.env.is_closed


@pytest.mark.integration
def test_the_documented_script_trains(tmp_path):
    (text,) = [block.text for block in blocks(ROOT / "docs/simulators.md") if "AppLauncher" in block.text]
    (tmp_path / "train.py").write_text(text)
    for name, text in FAKES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(re.sub(r"^        ", "", text, flags=re.MULTILINE))
    recipe = ["--config", str(ROOT / "configs/ppo/isaac_ant.yaml")]
    small = ["--data.num_envs", "4", "--data.num_steps", "8", "--data.total_timesteps", "64"]
    flags = ["--task", "Isaac-Ant-v0", "--device", "cpu", *recipe, *small]
    process = Forked(tmp_path, script, "train.py", *flags)
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "wall time:" in out and out.rstrip().endswith("closed")


def test_actions_without_bounds_get_some_and_the_others_keep_theirs():
    fake = FakeIsaacEnv(configuration())
    low, high = np.array([-1, -np.inf], np.float32), np.array([np.inf, 2], np.float32)
    fake.unwrapped.single_action_space = gymnasium.spaces.Box(low, high)
    space = IsaacLabEnv(fake, clip_actions=7.0).action_spec_unbatched.space
    assert space.low.tolist() == [-1, -7] and space.high.tolist() == [7, 2]
