"""Settings that a user leaves out."""

import functools

import gymnasium as gym
import lightning as L
import numpy as np
import pytest
import torch

from ppo_lightning import PPG, PPO, RND, RPO, MLPAgent, RecurrentPPO, RolloutDataModule, SelfPlay
from ppo_lightning.algorithms.defaults import CLEANRL, LONG_RUNS, LONGEST_SHORT_RUN, MANY, SHORT_RUNS
from ppo_lightning.models.default import DefaultAgent
from ppo_lightning.spaces.specs import mask_columns, stored
from tests.environments import Parts
from tests.spaces.test_spaces import Any

pytestmark = pytest.mark.usefixtures("own_defaults")
SMALL = {"num_steps": 16, "total_timesteps": 128}


PICTURE = gym.spaces.Box(0, 255, (40, 40, 3), np.uint8)
VECTOR = gym.spaces.Box(-1, 1, (3,), np.float32)


def fields(module):
    """Return the hyperparameters of a module that a user may leave out."""
    return {name: module.hparams[name] for name in SHORT_RUNS if name in module.hparams}


def values(defaults, **others):
    return {name: value for name, value in defaults.items() if name != "norm_obs"} | others


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (PPO, values(SHORT_RUNS)),
        (RPO, values(SHORT_RUNS)),
        (functools.partial(PPO, learning_rate=0.1, clip_vloss=True),
         values(SHORT_RUNS, learning_rate=0.1, clip_vloss=True)),
        (RecurrentPPO, values(CLEANRL)),
        (PPG, values(CLEANRL, update_epochs=1)),
        (RND, values(CLEANRL)),
        (SelfPlay, values(CLEANRL)),
    ],
)  # fmt: skip
def test_what_is_left_out_has_the_value_of_the_algorithm(make, expected):
    assert fields(make()) == expected


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        (VECTOR, SHORT_RUNS),
        (gym.spaces.Discrete(3), SHORT_RUNS),
        (PICTURE, CLEANRL),
        (gym.spaces.Dict({"camera": PICTURE, "speed": VECTOR}), CLEANRL),
    ],
)
def test_pictures_have_those_of_cleanrl(fit, space, expected):
    module = fit({"env_id": functools.partial(Any, space), **SMALL})
    assert fields(module) == values(expected)
    assert (module.reward_scaler is not None) == expected["norm_reward"]
    assert module.data.num_envs == 8


def test_a_value_of_the_user_stays_on_pictures(fit):
    module = fit({"env_id": functools.partial(Any, PICTURE), **SMALL}, {"learning_rate": 0.1})
    assert fields(module) == values(CLEANRL, learning_rate=0.1)


@pytest.mark.parametrize("space", [gym.spaces.Discrete(3), gym.spaces.MultiDiscrete([2, 3])])
def test_one_hot_columns_are_not_normalized(fit, space):
    module = fit({"env_id": functools.partial(Any, space), **SMALL})
    rows = torch.ones(2, *stored(module.observation_spec).shape)
    assert torch.equal(module.agent.normalize(rows), rows)


@pytest.mark.parametrize(
    ("low", "high", "size", "normalizes"),
    [(0, 1, MANY, False), (0, 1, MANY - 1, True), (-1, 1, MANY, True), (0, 2, MANY, True)],
)
def test_many_numbers_between_0_and_1_are_left_as_they_are(fit, capsys, low, high, size, normalizes):
    space = gym.spaces.Box(low, high, (size,), np.float32)
    agent = fit({"env_id": functools.partial(Any, space), **SMALL}).agent
    assert (agent.normalizer is not None) == normalizes
    assert ("norm_obs false" in capsys.readouterr().out) != normalizes
    chosen = {"agent": functools.partial(DefaultAgent, norm_obs=True)}
    assert fit({"env_id": functools.partial(Any, space), **SMALL}, chosen).agent.normalizer is not None


def test_masks_are_not_normalized(fit):
    module = fit({"env_id": Parts, **SMALL})
    rows = torch.ones(2, *stored(module.observation_spec).shape)
    mask, normalized = mask_columns(module.observation_spec), module.agent.normalize(rows)
    assert torch.equal(normalized[:, mask], rows[:, mask])
    assert not torch.equal(normalized, rows)


def test_an_agent_of_the_user_is_left_alone(fit):
    assert fit(SMALL, {"agent": MLPAgent}).agent.normalizer is None
    assert fit(SMALL, {"agent": functools.partial(DefaultAgent, norm_obs=False)}).agent.normalizer is None
    wide = fit(SMALL, {"agent": functools.partial(DefaultAgent, hidden_sizes=[8])}).agent
    assert wide.normalizer is not None


def test_small_advantages_stay_small_where_rewards_have_a_known_scale():
    assert PPO().hparams.adv_eps == SHORT_RUNS["adv_eps"]
    assert PPO(norm_reward=False).hparams.adv_eps == CLEANRL["adv_eps"]
    assert PPO(norm_reward=False, adv_eps=0.5).hparams.adv_eps == 0.5


def test_the_number_of_environments_is_that_of_the_algorithm(fit):
    assert RolloutDataModule().num_envs == 4
    assert fit({"num_steps": 16, "total_timesteps": 64}, ppo=RND).data.num_envs == 4
    assert fit({"num_steps": 16, "num_envs": 2, "total_timesteps": 64}).data.num_envs == 2


def test_the_start_and_a_resumed_run_name_settings(fit, tmp_path, capsys):
    first = fit(SMALL, {"ent_coef": 0.5})
    assert "chosen: learning_rate 0.001, num_minibatches 8, update_epochs 10" in capsys.readouterr().out
    first.trainer.save_checkpoint(tmp_path / "a.ckpt")
    fit(SMALL | {"total_timesteps": 256}, ckpt_path=tmp_path / "a.ckpt")
    assert "model.ent_coef was 0.5 in the run and is 0.0 now" in capsys.readouterr().out


LONG = {"num_steps": 128, "total_timesteps": LONGEST_SHORT_RUN + 1024}


class Stop(L.Callback):
    def on_train_batch_end(self, trainer, *args):
        trainer.should_stop = True


STOP = {"callbacks": Stop()}


def test_long_runs_have_other_values(fit):
    assert fields(fit(LONG, **STOP)) == values(LONG_RUNS)
    assert fields(fit(LONG | {"total_timesteps": LONGEST_SHORT_RUN}, **STOP)) == values(SHORT_RUNS)
    assert fields(fit(LONG, ppo=RND, **STOP))["num_minibatches"] == 4
    assert fields(fit(LONG, {"learning_rate": 0.1}, **STOP)) == values(LONG_RUNS, learning_rate=0.1)


RUNS = [
    (SMALL | {"env_id": functools.partial(Any, PICTURE)}, values(CLEANRL)),
    (LONG, values(LONG_RUNS)),
    ({"num_envs": 1, "num_steps": 100, "total_timesteps": 400}, values(SHORT_RUNS, num_minibatches=5)),
]


@pytest.mark.parametrize(("data", "expected"), RUNS, ids=["pictures", "long", "100 rows"])
def test_each_fit_of_a_module_has_the_values_of_its_run(make_trainer, tmp_path, data, expected):
    """Whatever came before: another stage, the same run, its checkpoint or another run."""
    module, make = PPO(), functools.partial(RolloutDataModule, **data, eval_episodes=1)
    make_trainer().validate(module, make(), verbose=False)
    for _ in range(2):
        trainer = make_trainer(callbacks=[Stop()])
        trainer.fit(module, make())
        assert fields(module) == expected
        make_trainer().test(module, make(), verbose=False)
        assert fields(module) == expected
        assert (module.reward_scaler is not None) == expected["norm_reward"]
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    make_trainer().test(module, make(), ckpt_path=tmp_path / "a.ckpt", verbose=False)
    make_trainer(callbacks=[Stop()]).fit(module, make(), ckpt_path=tmp_path / "a.ckpt")
    assert fields(module) == expected
    if "env_id" not in data:
        make_trainer(callbacks=[Stop()]).fit(module, RolloutDataModule(**SMALL))
        assert fields(module) == values(SHORT_RUNS)


def test_a_loaded_module_has_the_values_of_its_next_run(fit, make_trainer, tmp_path):
    """As the module in memory has, but for those that its user gave."""
    fit(SMALL, {"ent_coef": 0.5}).trainer.save_checkpoint(tmp_path / "a.ckpt")
    module = PPO.load_from_checkpoint(tmp_path / "a.ckpt")
    assert fields(module) == values(SHORT_RUNS, ent_coef=0.5)
    for data, expected in RUNS[1:]:
        make_trainer(callbacks=[Stop()]).fit(module, RolloutDataModule(**data))
        assert fields(module) == expected | {"ent_coef": 0.5}


class Named(PPO):
    def __init__(self, name="a"):
        super().__init__()


class WithArray(PPO):
    """Takes an array, which has no truth value."""

    def __init__(self, demonstrations=None, **settings):
        super().__init__(**settings)
        self.save_hyperparameters(ignore=["demonstrations"])


def test_a_subclass_loads_what_it_left_out(fit, tmp_path):
    fit({"env_id": functools.partial(Any, PICTURE), **SMALL}, ppo=Named).trainer.save_checkpoint(
        tmp_path / "a.ckpt"
    )
    assert fields(Named.load_from_checkpoint(tmp_path / "a.ckpt")) == values(CLEANRL)


def test_a_subclass_may_take_an_array(fit):
    module = WithArray(np.zeros((3, 4)), learning_rate=0.1)
    assert fields(fit(SMALL, ppo=lambda: module)) == values(SHORT_RUNS, learning_rate=0.1)


def test_a_discount_that_is_set_later_scales_the_rewards(fit):
    module = PPO()
    module.hparams.gamma = 0.5
    assert fit(SMALL, ppo=lambda: module).reward_scaler.gamma == 0.5


@pytest.mark.parametrize("sizes", [(1, 100, 5), (3, 7, 7), (1, 13, 1), (8, 125, 8), (1, 8, 4)])
def test_a_number_of_minibatches_that_is_left_out_divides_the_rollout(fit, sizes):
    num_envs, num_steps, expected = sizes
    data = {"num_envs": num_envs, "num_steps": num_steps, "total_timesteps": num_envs * num_steps}
    assert fit(data).hparams.num_minibatches == expected


@pytest.mark.parametrize(("num_envs", "expected"), [(6, 3), (4, 4), (5, 1)])
def test_a_number_of_minibatches_that_is_left_out_divides_the_sequences(fit, num_envs, expected):
    data = {"num_envs": num_envs, "num_steps": 8, "total_timesteps": num_envs * 8}
    model = {"agent": functools.partial(MLPAgent, memory="lstm")}
    assert fit(data, model, ppo=RecurrentPPO).hparams.num_minibatches == expected


def test_a_longer_run_keeps_what_its_length_chose(fit, tmp_path):
    """A value that the user gives, and one that he gives later, win."""
    fit(SMALL).trainer.save_checkpoint(tmp_path / "a.ckpt")
    longer = LONG | {"num_steps": 16}
    resumed = fit(longer, ckpt_path=tmp_path / "a.ckpt", **STOP)
    assert fields(resumed) == values(SHORT_RUNS)
    assert resumed.trainer.optimizers[0].defaults["lr"] == 1e-3
    given = fit(longer, {"learning_rate": 0.1}, ckpt_path=tmp_path / "a.ckpt", **STOP)
    assert fields(given) == values(SHORT_RUNS, learning_rate=0.1)
    module = PPO()
    module.hparams.learning_rate = 0.2
    later = fit(longer, ppo=lambda: module, ckpt_path=tmp_path / "a.ckpt", **STOP)
    assert fields(later) == values(SHORT_RUNS, learning_rate=0.2)


def test_an_older_run_goes_on_as_it_began(fit, tmp_path):
    fit(SMALL).trainer.save_checkpoint(tmp_path / "a.ckpt")
    older = torch.load(tmp_path / "a.ckpt", weights_only=True)
    del older["hyper_parameters"]["adv_eps"]
    torch.save(older, tmp_path / "old.ckpt")
    longer = SMALL | {"total_timesteps": 256}
    assert fit(longer, ckpt_path=tmp_path / "old.ckpt").hparams.adv_eps == CLEANRL["adv_eps"]
    assert fit(longer, ckpt_path=tmp_path / "a.ckpt").hparams.adv_eps == SHORT_RUNS["adv_eps"]
