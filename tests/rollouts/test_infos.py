"""Numbers from the infos of finished episodes as metrics, and attributes of environments between rollouts."""

import time
import types

import gymnasium
import lightning as L
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torchrl.envs import StepCounter

from ppo_lightning import ConfigError
from ppo_lightning.envs import EnvFactory
from ppo_lightning.envs.gymnasium import GymnasiumEnv
from ppo_lightning.rollouts.infos import final_infos
from tests.documented import blocks
from tests.environments import Counter
from tests.helpers import ROOT, RecordedPPO, SaveAfter, require_same


class Pushes(gymnasium.Env):
    """Five steps, in which action 1 scores ``worth`` points: a success if it is taken ``goal`` times."""

    observation_space = gymnasium.spaces.Box(-1, 1, (3,))
    action_space = gymnasium.spaces.Discrete(2)
    more = types.MappingProxyType({})

    def __init__(self, goal=3, broken_at=None, seconds=0):
        self.goal, self.worth, self.broken_at, self.seconds = goal, 1.0, broken_at, seconds

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = self.pushes = 0
        return np.zeros(3, np.float32), {}

    def step(self, action):
        self.time += 1
        time.sleep(self.seconds)
        self.pushes += int(action)
        if self.time == self.broken_at and self.np_random.random() < 0.5:
            raise RuntimeError("broken")
        info = {"is_success": np.bool_(self.pushes >= self.goal), "pushes": np.array([self.pushes], np.int8)}
        info |= {"frames": lambda: self, "name": "Pushes"} | self.more
        if self.pushes != 2:
            info["rare"] = float(self.pushes)
        return np.zeros(3, np.float32), self.worth * action, self.time == 5, False, info


class Renamed(Pushes):
    """Its info has the name that MetaWorld gives a success."""

    def step(self, action):
        *step, info = super().step(action)
        return *step, info | {"success": info.pop("is_success")}


def vector(mode):
    return lambda num_envs: SyncVectorEnv([Pushes] * num_envs, autoreset_mode=mode)


SMALL = {"env_id": Pushes, "num_envs": 4, "num_steps": 16, "total_timesteps": 192, "eval_episodes": 4}
WITH = {
    "one by one": {},
    "failures": {"env_kwargs": {"broken_at": 5, "max_restarts": 50}},
    "overlap": {"overlap": True, "env_kwargs": {"seconds": 0.003}},  # longer than an update
    "transforms": {"transforms": [StepCounter(50)]},
    "ended by a transform": {"transforms": [StepCounter(4)]},
    "workers and a transform": {"transforms": [StepCounter(4)], "num_workers": 2},
    "disabled": {"env_id": vector(AutoresetMode.DISABLED)},
    "next step": {"env_id": vector(AutoresetMode.NEXT_STEP)},
    "workers": {"num_workers": 3},
    "success": {"env_id": Renamed},
}


NAMES = [pytest.param(name, marks=[pytest.mark.integration] * ("workers" in name)) for name in WITH]


@pytest.mark.parametrize("name", NAMES)
def test_the_metrics_are_means_over_the_episodes_of_a_rollout(name, fit):
    names = ["pushes", "rare", "name", "none"]
    run = {"ppo": RecordedPPO, "limit_val_batches": 1.0}
    data = SMALL | WITH[name] | {"log_info": ["is_success", *names]}
    with pytest.warns(UserWarning, match=r"no episode ended with a number called name or none\."):
        module = fit(data, {"num_minibatches": 2}, **run)
    following = module.rollouts[-1]["next"]
    ended = following["episode_done"][..., 0]
    if name == "failures":  # which have no info
        ended = ended & ~following["truncated"][..., 0]
    pushes, metrics = following["episode_reward"][ended][:, 0], module.trainer.callback_metrics
    assert 5 < len(pushes) < (17 if "a transform" in name else 14) and pushes.std() > 0
    expected = {"success_rate": pushes >= 3, "pushes": pushes, "rare": pushes[pushes != 2]}
    for key, values in expected.items():
        torch.testing.assert_close(metrics[f"charts/{key}"], values.float().mean())
    assert metrics["eval/success_rate"] in (0, 1)
    if name != "failures":
        assert metrics["eval/pushes"] == metrics["eval/episodic_return"]
    absent = {f"{prefix}/{key}" for prefix in ("charts", "eval") for key in names[2:]}
    assert not absent & metrics.keys()


def test_infos_of_envpool(fit):
    pytest.importorskip("envpool")
    data = {"env_id": "HalfCheetah-v4", "backend": "envpool", "env_kwargs": {"max_episode_steps": 8}}
    data |= {"num_envs": 2, "num_steps": 16, "total_timesteps": 64}
    data["log_info"] = ["reward_run", "elapsed_step"]
    metrics = fit(data, {"num_minibatches": 2}).trainer.callback_metrics
    assert metrics["charts/elapsed_step"] == 8 and abs(metrics["charts/reward_run"]) > 0
    assert "charts/success_rate" not in metrics


@pytest.mark.parametrize("data", [{"backend": "torch"}, {"env_id": "CartPole-v1", "backend": "vectorized"}])
def test_names_that_a_backend_without_infos_cannot_have_are_named(data, fit):
    with pytest.warns(UserWarning, match="no episode ended with a number called success"):
        fit(data | {"num_steps": 64, "total_timesteps": 512, "log_info": ["success"]})


def test_an_environment_reports_once_and_a_step_without_an_end_keeps_nothing(monkeypatch):
    monkeypatch.setattr(Pushes, "more", {"loss": torch.ones(1, requires_grad=True)})  # `np.asarray` fails
    env = GymnasiumEnv(Pushes, [1, 2])
    env.info_names = ["is_success", "pushes"]
    env.reset_arrays()
    for _ in range(5):
        assert not env.infos
        env.step_arrays(np.array([1, 0]))
    assert env.infos[0] == {"is_success": True, "pushes": 5, "rare": 5.0}
    assert final_infos(env, np.array([True, True])).tolist() == [[1, 5], [0, 0]]
    assert not env.infos


class Sometimes(Pushes):
    def step(self, action):
        *step, info = super().step(action)
        return *step, info if self.time == 2 else {}


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.integration)])
def test_infos_below_transforms_are_those_of_the_last_step(workers):
    factory = EnvFactory(Sometimes, transforms=[StepCounter(50)], num_workers=workers)
    env = factory.make(1).base_env
    env.reset_arrays()
    kept = []
    for _ in range(3):
        env.step_arrays(np.array([1]))
        kept.append({row: info["pushes"] for row, info in env.infos.items()})
    env.close()
    assert kept == [{}, {0: 2}, {}]


# Attributes


class Worth(L.Callback):
    """Set an attribute after each rollout, which begins at 1."""

    def __init__(self, name="worth", value=lambda rollouts: float(rollouts)):
        self.name, self.value = name, value

    def on_train_batch_end(self, trainer, pl_module, *args):
        trainer.datamodule.set_attr(self.name, self.value(pl_module.rollouts_done))


@pytest.mark.parametrize("name", NAMES)
def test_an_attribute_holds_from_the_next_rollout_on_also_in_new_environments(name, fit):
    late = name == "overlap"
    module = fit(SMALL | WITH[name], {"num_minibatches": 2}, ppo=RecordedPPO, callbacks=[Worth()])
    for number, rollout in enumerate(module.rollouts):
        rewards, pushed = rollout["next", "reward"], rollout["action"].unsqueeze(-1) == 1
        counted = (rollout.get("weight", torch.ones(4, 16)) > 0).unsqueeze(-1)
        counted &= ~rollout["next", "truncated"]  # a failed step has no reward
        assert (rewards[pushed & counted] == max(number - late, 1)).all()
    assert len(module.rollouts) == 3


def test_attributes_of_environments_of_tensors_and_of_wrappers(fit):
    for backend, name in (("torch", "max_episode_steps"), ("gymnasium", "_max_episode_steps")):
        data = {"backend": backend, "num_steps": 8, "total_timesteps": 96}
        module = fit(data, {"num_minibatches": 2}, callbacks=[Worth(name, lambda rollouts: 3)])
        assert module.trainer.callback_metrics["charts/episodic_length"] == 3


@pytest.mark.parametrize(
    ("data", "name", "value", "sentence"),
    [
        ({}, "wealth", 1, "Pushes has no attribute 'wealth'"),
        ({"env_id": vector(AutoresetMode.DISABLED)}, "wealth", 1, "Pushes has no attribute 'wealth'"),
        ({"env_id": "CartPole-v1", "backend": "torch"}, "wealth", 1, "TorchEnv has no attribute 'wealth'"),
        ({}, "worth", object(), r"data\.set_attr\('worth'\) got a object, not a number or array"),
    ],
)
def test_an_attribute_that_is_missing_or_not_plain_ends_in_one_sentence(data, name, value, sentence, fit):
    with pytest.raises(ConfigError, match=sentence):
        fit(SMALL | data, {"num_minibatches": 2}, callbacks=[Worth(name, lambda rollouts: value)])


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.integration)])
def test_the_documented_curriculum_resumes_to_the_bit(workers, fit, tmp_path):
    (code,) = [block.text for block in blocks(ROOT / "docs/watching.md") if "Curriculum" in block.text]
    names = {}
    exec(code, names)
    data = {"env_id": "Pendulum-v1", "num_envs": 4, "num_steps": 128, "total_timesteps": 512 * 4}
    data |= {"num_workers": workers}
    path, curriculum = tmp_path / "middle.ckpt", names["Curriculum"]
    whole = fit(data, {"num_minibatches": 4}, callbacks=[curriculum(), SaveAfter(path, 2)])
    resumed = fit(data, {"num_minibatches": 4}, callbacks=[curriculum()], ckpt_path=path)
    require_same(whole, resumed)
    saved = torch.load(path, weights_only=True)["RolloutDataModule"]["attributes"]
    assert 1 < saved["g"] < 10


def test_a_resumed_run_sets_an_attribute_that_no_callback_sets_again(fit, tmp_path):
    """Its environments start fresh episodes, and the attribute is an array."""

    class Once(Worth):
        def on_train_batch_end(self, trainer, pl_module, *args):
            if pl_module.rollouts_done == 10:
                super().on_train_batch_end(trainer, pl_module)
                trainer.save_checkpoint(tmp_path / "one.ckpt")

    data = SMALL | {"num_envs": 1}
    fit(data, {"num_minibatches": 2}, callbacks=[Once("worth", lambda rollouts: np.float32(7))])
    module = fit(data, {"num_minibatches": 2}, ppo=RecordedPPO, ckpt_path=tmp_path / "one.ckpt")
    rewards = torch.cat([rollout["next", "reward"] for rollout in module.rollouts])
    assert len(module.rollouts) == 2 and set(rewards.unique().tolist()) == {0, 7}


OURS = ["episodic_return", "episodic_length", "avg_episodic_return", "episodic_return_std", "SPS"]


@pytest.mark.parametrize("name", [*OURS, "learning_rate", "success_rate", "a.b"])
def test_names_of_infos_and_of_our_metrics_stay_apart(fit, name):
    class Informing(Counter):
        def step(self, action):
            *step, _ = super().step(action)
            return *step, {name: -777.0, "is_success": True}

    data = {"num_envs": 2, "num_steps": 8, "total_timesteps": 32, "eval_episodes": 2, "log_info": [name]}
    module = fit(data | {"env_id": lambda: Informing(terminate_at=8)}, limit_val_batches=1)
    metrics = module.trainer.callback_metrics
    assert metrics["eval/episodic_return"] == metrics["charts/episodic_return"] == 8
    assert metrics["charts/success_rate"] == metrics["eval/success_rate"] == 1
    for group in ("charts", "eval"):
        assert -777 in (metrics.get(f"{group}/{name}"), metrics.get(f"{group}/info_{name}"))
