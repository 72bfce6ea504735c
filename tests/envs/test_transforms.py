"""TorchRL's transforms from the data module: they train, evaluate and resume, or a sentence says why not."""

import functools

import gymnasium
import pytest
import torch
from tensordict.nn import TensorDictModule
from torchrl.data import Unbounded
from torchrl.envs import transforms as t

from ppo_lightning import ConfigError, RolloutDataModule
from ppo_lightning.envs import EnvFactory
from tests.helpers import SaveAfter

KEYS = {"in_keys": ["observation"]}
CARTPOLE, PENDULUM = (
    ("CartPole-v1", {"num_steps": 16}),
    ("Pendulum-v1", {"env_kwargs": {"max_episode_steps": 9}}),
)
STATEFUL = {
    "CatFrames": (CARTPOLE, [t.CatFrames(3, dim=-1, **KEYS)]),
    "Compose": (CARTPOLE, [t.Compose(t.StepCounter(9), t.Compose(t.RewardSum()))]),
    "TimeMaxPool": (CARTPOLE, [t.TimeMaxPool(T=3, **KEYS)]),
    "TrajCounter": (CARTPOLE, [t.TrajCounter()]),
    "VecNorm": (CARTPOLE, [t.VecNorm(**KEYS)]),
    "VecNormV2": (CARTPOLE, [t.VecNormV2(**KEYS)]),
}
OTHERS = {
    "ActionDiscretizer": (PENDULUM, [t.ActionDiscretizer(num_intervals=5)]),
    "ActionScaling": (PENDULUM, [t.ActionScaling()]),
    "BinarizeReward": (PENDULUM, [t.BinarizeReward()]),
    "CatTensors": (CARTPOLE, [t.CatTensors(**KEYS, out_key="observation", del_keys=False)]),
    "ClipTransform": (CARTPOLE, [t.ClipTransform(low=-1.0, high=1.0, **KEYS)]),
    "ConditionalSkip": (CARTPOLE, [t.ConditionalSkip(lambda td: torch.zeros(td.shape, dtype=torch.bool))]),
    "DTypeCastTransform": (CARTPOLE, [t.DTypeCastTransform(torch.float32, torch.float64, **KEYS)]),
    "DeviceCastTransform": (CARTPOLE, [t.DeviceCastTransform("cpu")]),
    "DoubleToFloat": (CARTPOLE, [t.DoubleToFloat()]),
    "ExpandAs": (CARTPOLE, [t.ExpandAs("reward", "observation", "wide")]),
    "FiniteTensorDictCheck": (CARTPOLE, [t.FiniteTensorDictCheck()]),
    "FlattenObservation": (
        CARTPOLE,
        [t.UnsqueezeTransform(-1, **KEYS), t.FlattenObservation(-2, -1, **KEYS)],
    ),
    "FrameSkipTransform": (CARTPOLE, [t.FrameSkipTransform(2)]),
    "InitTracker": (CARTPOLE, [t.InitTracker()]),
    "LineariseRewards": (CARTPOLE, [t.LineariseRewards(in_keys=["reward"])]),
    "ModuleTransform": (
        CARTPOLE,
        [t.ModuleTransform(module=TensorDictModule(lambda x: x * 2, out_keys=["observation"], **KEYS))],
    ),
    "ObservationNorm": (CARTPOLE, [t.ObservationNorm(loc=0.0, scale=2.0, **KEYS)]),
    "RenameTransform": (
        CARTPOLE,
        [t.RenameTransform(["observation"], ["seen"]), t.RenameTransform(["seen"], ["observation"])],
    ),
    "RewardClipping": (PENDULUM, [t.RewardClipping(-1, 1)]),
    "RewardScaling": (CARTPOLE, [t.RewardScaling(0.0, 2.0)]),
    "RewardSum": (CARTPOLE, [t.RewardSum()]),
    "SelectTransform": (CARTPOLE, [t.SelectTransform("observation")]),
    "SignTransform": (PENDULUM, [t.SignTransform(in_keys=["reward"])]),
    "SqueezeTransform": (CARTPOLE, [t.UnsqueezeTransform(-1, **KEYS), t.SqueezeTransform(-1, **KEYS)]),
    "StepCounter": (CARTPOLE, [t.StepCounter(7)]),
    "TensorDictPrimer": (CARTPOLE, [t.TensorDictPrimer(extra=Unbounded((3,)), expand_specs=True)]),
    "TerminateTransform": (CARTPOLE, [t.TerminateTransform(lambda td: td["observation"][..., :1] > 1)]),
    "Timer": (CARTPOLE, [t.Timer()]),
    "UnaryTransform": (
        CARTPOLE,
        [t.UnaryTransform(out_keys=["observation"], fn=lambda x: x * 2, **KEYS)],
    ),
}
REFUSED = {
    "AutoResetTransform": [t.AutoResetTransform()],
    "BurnInTransform": [t.BurnInTransform([], burn_in=2)],
    "EndOfLifeTransform": [t.EndOfLifeTransform()],
    "ExcludeTransform": [t.StepCounter(), t.ExcludeTransform("step_count")],
    "Hash": [t.Hash(out_keys=["hash"], **KEYS)],
    "MultiAction": [t.MultiAction()],
    "MultiStepTransform": [t.MultiStepTransform(n_steps=2, gamma=0.9)],
    "NoopResetEnv": [t.NoopResetEnv(3)],
    "ObservationNorm": [t.ObservationNorm(**KEYS)],
    "SuccessReward": [t.SuccessReward()],
    "TensorDictPrimer": [t.TensorDictPrimer(extra=Unbounded((3,)))],
}


@pytest.mark.parametrize(
    "name", [*STATEFUL, *(pytest.param(name, marks=pytest.mark.integration) for name in OTHERS)]
)
def test_a_transform_trains_evaluates_and_resumes(fit, tmp_path, name):
    (env_id, options), transforms = (STATEFUL | OTHERS)[name]
    data = {"env_id": env_id, "num_envs": 4, "num_steps": 8, "total_timesteps": 192, "transforms": transforms}
    path = tmp_path / "middle.ckpt"
    whole = fit(data | options, callbacks=[SaveAfter(path, 2)], limit_val_batches=1)
    assert fit(data | options, ckpt_path=path, limit_val_batches=1).env_steps == whole.env_steps == 192
    assert whole.trainer.callback_metrics["eval/episodic_length"] > 0


@pytest.mark.parametrize("name", REFUSED)
def test_one_sentence_names_the_transform_that_does_not_work(fit, name):
    with pytest.raises(
        ConfigError, match=f"^data.transforms: {name} does not work with these environments: "
    ):
        fit({"transforms": REFUSED[name], "total_timesteps": 512})


def test_the_settings_of_a_run_name_its_transforms():
    assert "StepCounter" in RolloutDataModule(transforms=[t.StepCounter(10)]).hparams["transforms"][0]


def test_a_vectorized_environment_of_fixed_size_takes_transforms(fit):
    makers = [functools.partial(gymnasium.make, "CartPole-v1")] * 4
    data = {
        "env_id": lambda: gymnasium.vector.SyncVectorEnv(makers),
        "num_envs": 4,
        "transforms": [t.RewardScaling(0.0, 2.0)],
    }
    assert fit(data | {"num_steps": 8, "total_timesteps": 64}).env_steps == 64


def test_a_transform_that_removes_the_observation_is_refused(fit):
    with pytest.raises(ConfigError, match="remove the observation"):
        fit({"transforms": [t.NextObservationDelta(**KEYS)]})


def test_training_and_evaluation_share_no_frames():
    factory = EnvFactory("CartPole-v1", transforms=(t.CatFrames(3, dim=-1, **KEYS),))
    one, other = factory.make(4), factory.make(2, stream="eval")
    first = one.reset()["observation"]
    other.rollout(3)
    assert torch.equal(next(one.transform.buffers()), first)
    assert first.shape == (4, 12)
