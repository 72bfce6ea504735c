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
STATEFUL = [
    [t.CatFrames(3, dim=-1, **KEYS)],
    [t.Compose(t.StepCounter(9), t.Compose(t.RewardSum()))],
    [t.TimeMaxPool(T=3, **KEYS)],
    [t.TrajCounter()],
    [t.VecNorm(**KEYS)],
    [t.VecNormV2(**KEYS)],
]
CONTINUOUS = [[t.ActionDiscretizer(num_intervals=5)], [t.ActionScaling()], [t.RewardClipping(-1, 1)]]
OTHERS = [
    [t.CatTensors(**KEYS, out_key="observation", del_keys=False)],
    [t.ConditionalSkip(lambda td: torch.zeros(td.shape, dtype=torch.bool))],
    [t.DTypeCastTransform(torch.float32, torch.float64, **KEYS)],
    [t.ExpandAs("reward", "observation", "wide")],
    [t.UnsqueezeTransform(-1, **KEYS), t.FlattenObservation(-2, -1, **KEYS)],
    [t.FrameSkipTransform(2)],
    [t.InitTracker()],
    [t.ModuleTransform(module=TensorDictModule(lambda x: x * 2, out_keys=["observation"], **KEYS))],
    [t.ObservationNorm(loc=0.0, scale=2.0, **KEYS)],
    [t.RenameTransform(["observation"], ["seen"]), t.RenameTransform(["seen"], ["observation"])],
    [t.RewardSum()],
    [t.SelectTransform("observation")],
    [t.StepCounter(7)],
    [t.TensorDictPrimer(extra=Unbounded((3,)), expand_specs=True)],
    [t.TerminateTransform(lambda td: td["observation"][..., :1] > 1)],
    [t.Timer()],
]
REFUSED = [
    [t.AutoResetTransform()],
    [t.BurnInTransform([], burn_in=2)],
    [t.EndOfLifeTransform()],
    [t.StepCounter(), t.ExcludeTransform("step_count")],
    [t.Hash(out_keys=["hash"], **KEYS)],
    [t.MultiAction()],
    [t.MultiStepTransform(n_steps=2, gamma=0.9)],
    [t.NoopResetEnv(3)],
    [t.ObservationNorm(**KEYS)],
    [t.SuccessReward()],
    [t.TensorDictPrimer(extra=Unbounded((3,)))],
]


def name_of(transforms):
    return type(transforms[-1]).__name__


@pytest.mark.parametrize(
    "transforms",
    [*STATEFUL, *(pytest.param(each, marks=pytest.mark.integration) for each in CONTINUOUS + OTHERS)],
    ids=name_of,
)
def test_a_transform_trains_evaluates_and_resumes(fit, tmp_path, transforms):
    data = {"num_envs": 4, "num_steps": 16, "total_timesteps": 192, "transforms": transforms}
    if transforms in CONTINUOUS:
        data |= {"env_id": "Pendulum-v1", "env_kwargs": {"max_episode_steps": 9}}
    path = tmp_path / "middle.ckpt"
    whole = fit(data, callbacks=[SaveAfter(path, 2)], limit_val_batches=1)
    assert fit(data, ckpt_path=path, limit_val_batches=1).env_steps == whole.env_steps == 192
    assert whole.trainer.callback_metrics["eval/episodic_length"] > 0


@pytest.mark.parametrize("transforms", REFUSED, ids=name_of)
def test_one_sentence_names_the_transform_that_does_not_work(fit, transforms):
    said = f"^data.transforms: {name_of(transforms)} does not work with these environments: "
    with pytest.raises(ConfigError, match=said):
        fit({"transforms": transforms, "total_timesteps": 512})


def test_the_settings_of_a_run_name_its_transforms():
    (named,) = RolloutDataModule(transforms=[t.StepCounter(10)]).hparams["transforms"]
    assert named["class_path"].endswith("StepCounter")


def test_a_vectorized_environment_of_fixed_size_takes_transforms(fit):
    makers = [functools.partial(gymnasium.make, "CartPole-v1")] * 4
    data = {
        "env_id": lambda: gymnasium.vector.SyncVectorEnv(makers),
        "num_envs": 4,
        "transforms": [t.RewardScaling(0.0, 2.0)],
    }
    assert fit(data | {"num_steps": 8, "total_timesteps": 64}).env_steps == 64


def test_a_transform_that_removes_the_observation_is_refused(fit):
    with pytest.raises(ConfigError, match=r"NextObservationDelta .* removes the observation"):
        fit({"transforms": [t.NextObservationDelta(**KEYS)]})


def test_training_and_evaluation_share_no_frames():
    factory = EnvFactory("CartPole-v1", transforms=(t.CatFrames(3, dim=-1, **KEYS),))
    one, other = factory.make(4), factory.make(2, stream="eval")
    first = one.reset()["observation"]
    other.rollout(3)
    assert torch.equal(next(one.transform.buffers()), first)
    assert first.shape == (4, 12)
