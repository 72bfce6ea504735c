"""Invalid settings end in one sentence, from Python and from the command line."""

import copy
import functools
import inspect
import math
import re
from numbers import Real

import gymnasium as gym
import pytest
import torch
import yaml
from lightning.pytorch.tuner import Tuner
from torchrl.data import Categorical, Unbounded
from torchrl.envs import GymEnv

from ppo_lightning import (
    DQN,
    PPG,
    PPO,
    RND,
    RPO,
    SAC,
    CNNAgent,
    ConfigError,
    MLPAgent,
    RecurrentPPO,
    RolloutDataModule,
    SelfPlay,
)
from ppo_lightning.errors import NonFiniteError
from ppo_lightning.utils.arguments import Range
from tests.commands.conftest import CARTPOLE, SHORT
from tests.environments import Counter

SMALL = {"num_envs": 2, "num_steps": 8, "total_timesteps": 32}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.learning_rate", 0.0),
        ("model.learning_rate", math.inf),
        ("model.learning_rate", float("nan")),
        ("model.vf_coef", -1.0),
        ("model.ent_coef", -math.inf),
        ("model.clip_coef", 1e-300),
        ("model.target_kl", 0.0),
        ("model.num_minibatches", 2.5),
        ("model.update_epochs", 0),
        ("model.clip_vloss", "yes"),
        ("model.gamma", 1.01),
        ("model.gamma", None),
        ("model.gamma", "0.9"),
        ("model.agent", "x"),
        ("model.agent", None),
        ("data.num_envs", 0),
        ("data.step_timeout", math.inf),
        ("data.backend", None),
        ("model.agent.hidden_sizes", (64, 0)),
        ("model.agent.hidden_sizes", 64),
        ("model.agent.critic_hidden_sizes", (0,)),
    ],
)
def test_a_value_that_cannot_work_is_refused(name, value):
    group, _, key = name.rpartition(".")
    specs = (Unbounded((4,)), Categorical(2)) if group == "model.agent" else ()
    owner = {"model": PPO, "data": RolloutDataModule, "model.agent": functools.partial(MLPAgent, *specs)}
    sentence = r"(it|each entry) must be [^.]*(\.\w[^.]*)*\.$"
    with pytest.raises(ConfigError, match=f"^{re.escape(f'{name} is {value!r}')}: {sentence}"):
        owner[group](**{key: value})


def test_what_means_no_limit_is_allowed():
    PPO(max_grad_norm=math.inf, clip_coef=math.inf, target_kl=None, ent_coef=-0.01, vf_coef=0)
    RolloutDataModule(step_timeout=None)


def test_a_number_of_steps_may_be_a_whole_float():
    steps = RolloutDataModule(total_timesteps=1e4).hparams["total_timesteps"]
    assert type(steps) is int and steps == 10_000


def agent(kind=MLPAgent, **settings):
    return {"agent": functools.partial(kind, **settings)}


class Momentum(PPO):
    def configure_optimizers(self):
        return torch.optim.SGD(self.trainable_parameters(), lr=0.1)


PENDULUM = {"env_id": "Pendulum-v1"}
FUNCTION = {"env_id": lambda: gym.make("CartPole-v1")}
MEMORY = agent(memory="lstm")
STEPS = {"num_envs": 4, "num_steps": 8, "total_timesteps": 64}
TORCH = {"backend": "torch", "env_id": "Acrobot-v1"}
REWARDS = {"backend": "torch", "env_kwargs": {"sutton_barto_reward": True}}
ONE_HOT = {"env_id": GymEnv, "env_kwargs": {"env_name": "CartPole-v1"}}
CATEGORICAL = {"env_kwargs": {"env_name": "CartPole-v1", "categorical_action_encoding": True}}
GYMNASIUM = {"data": {"backend": "gymnasium"}}
HUGE = {"num_steps": 10**11, "total_timesteps": 10**12}
OFF = {"learning_starts": 32, "train_frequency": 4, "batch_size": 8}
# What the sentence asks for, algorithm and settings of model and data before, and the changes after
ASKED = {
    "set anneal_lr to false": (PPO, {"desired_kl": 0.01}, {}, {"model": {"anneal_lr": False}}),
    "of one step: lower it": (PPO, {"num_minibatches": 32}, {}, {"model": {"num_minibatches": 4}}),
    "leave model.compile off": (Momentum, {"compile": True}, {}, {"model": {"compile": False}}),
    "use ppo_lightning.RecurrentPPO": (PPO, MEMORY, {}, {"ppo": RecurrentPPO}),
    "set model.agent.memory to lstm or min_gru": (RecurrentPPO, {}, {}, {"model": MEMORY}),
    "change one of the two": (
        RecurrentPPO,
        MEMORY | {"num_minibatches": 4},
        {"num_envs": 3},
        {"data": {"num_envs": 4}},
    ),
    "remove one of them": (
        PPO,
        agent(shared=True, critic_hidden_sizes=[8]),
        {},
        {"model": agent(shared=True)},
    ),
    "set model.agent to ppo_lightning.MLPAgent": (PPO, agent(CNNAgent), {}, {"model": agent()}),
    "use ppo_lightning.PPO": (RPO, {}, {}, {"ppo": PPO}),
    "would have no auxiliary phase: lower it": (PPG, {"n_iteration": 9}, {}, {"model": {"n_iteration": 2}}),
    "set model.rating_games to 0": (SelfPlay, {}, {}, {"model": {"rating_games": 0}}),
    "use SAC, TD3 or DDPG": (DQN, OFF, PENDULUM, {"ppo": SAC}),
    "use DQN, C51 or DiscreteSAC": (SAC, OFF, {}, {"ppo": DQN}),
    "leave it out": (DQN, OFF | agent(), {}, {"model": {"agent": None}}),
    "raise it": (PPO, {}, {"total_timesteps": 8}, {"data": {"total_timesteps": 32}}),
    "lower one of these settings": (PPO, {}, HUGE, {"data": STEPS}),
    "set it to 'gymnasium'": (PPO, {}, TORCH, GYMNASIUM),
    "is not an option of CartPole-v1 with data.backend 'torch'": (PPO, {}, REWARDS, GYMNASIUM),
    "is a function: data.backend 'envpool' must be": (PPO, {}, FUNCTION | {"backend": "envpool"}, GYMNASIUM),
    "must be 0": (PPO, {}, {"backend": "vectorized", "num_workers": 2}, {"data": {"num_workers": 0}}),
    "or a function that makes a new environment": (
        PPO,
        {},
        {"env_id": gym.make("CartPole-v1")},
        {"data": FUNCTION},
    ),
    "make it with categorical_action_encoding=True": (PPO, {}, ONE_HOT, {"data": CATEGORICAL}),
}


@pytest.mark.parametrize("asked", ASKED)
def test_a_run_trains_after_what_the_sentence_asks_for(fit, asked):
    algorithm, model, data, change = ASKED[asked]
    with pytest.raises(ConfigError, match=re.escape(asked)):
        fit(STEPS | data, model, ppo=algorithm)
    model = {name: value for name, value in (model | change.get("model", {})).items() if value is not None}
    module = fit(STEPS | data | change.get("data", {}), model, ppo=change.get("ppo", algorithm))
    assert module.env_steps >= 32


def test_every_number_has_a_range_and_its_default_lies_in_it():
    ranges = 0
    for owner in (PPO, RPO, PPG, RND, RolloutDataModule, MLPAgent, CNNAgent):
        for parameter in inspect.signature(owner.__init__).parameters.values():
            annotation = str(parameter.annotation)
            metadata = getattr(parameter.annotation, "__metadata__", ())
            found = [entry for entry in metadata if isinstance(entry, Range)]
            assert found or not re.search(r"\b(int|float)\b", annotation), (owner, parameter.name)
            defaults = parameter.default if isinstance(parameter.default, tuple) else (parameter.default,)
            for value in defaults if found else ():
                assert value is None or found[0].holds(value, Real), parameter.name
            ranges += len(found)
    assert ranges > 25


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PPO(lr=1e-3), "PPO takes no argument 'lr': did you mean learning_rate?"),
        (lambda: PPO(n_envs=4), "PPO takes no argument 'n_envs': did you mean data.num_envs?"),
        (lambda: PPO(quux=4), "PPO takes no argument 'quux': it takes learning_rate, anneal_lr, "),
        (lambda: SAC(lr=1e-3), "SAC takes no argument 'lr': did you mean q_lr?"),
        (lambda: DQN(norm_adv=True), "DQN takes no argument 'norm_adv': it takes agent,"),
        (lambda: RolloutDataModule(n_envs=4), "takes no argument 'n_envs': did you mean num_envs?"),
        (lambda: RolloutDataModule(env="A"), "takes no argument 'env': did you mean env_id?"),
        (
            lambda: PPO("CartPole-v1"),
            "first argument is learning_rate, not 'CartPole-v1': name the env",
        ),
        (lambda: PPO(agent={"class_path": "net.My"}), "such as functools.partial(MyAgent, width=64)."),
        (lambda: RolloutDataModule(total_timesteps=1.5), "is 1.5: it must be an integer."),
        (lambda: SAC(learning_rate=1e-3), "no argument 'learning_rate': did you mean policy_lr and q_lr?"),
        (lambda: DQN(exploration_final_eps=0.1), "did you mean end_e?"),
        (lambda: SAC(gradient_steps=1), "did you mean train_frequency?"),
        (lambda: PPO(learning_rate=lambda left: left), "or configure_optimizers of a subclass."),
    ],
)
def test_an_argument_of_another_package_names_ours(make, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        make()


def test_the_check_of_arguments_leaves_a_users_own_to_the_user():
    class Mine(PPO):
        def __init__(self, name: str = "x", **more):
            self.extra = more.pop("lr", None)
            super().__init__(**more)

    assert Mine("y", lr=3, gamma=0.5).extra == 3
    assert copy.deepcopy(PPO(gamma=0.5)).hparams.gamma == 0.5
    with pytest.raises(TypeError, match="takes no argument 'gama'"):
        PPO(gama=0.5)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"min_steps": 100_000}, "min_steps"),
        ({"overfit_batches": 2}, "overfit_batches"),
        ({"val_check_interval": 0, "limit_val_batches": 1}, "val_check_interval"),
        ({"log_every_n_steps": 0}, "log_every_n_steps"),
        ({"max_steps": 0}, "max_steps"),
        ({"limit_train_batches": 0}, "limit_train_batches"),
    ],
)
def test_a_trainer_option_that_cannot_work_is_refused(fit, options, name):
    with pytest.raises(ConfigError, match=rf"^trainer\.{name} [^.]*(\w\.\w[^.]*)*\.$"):
        fit(SMALL, **options)


@pytest.mark.parametrize(
    "use",
    [
        lambda data: data.setup("fit"),
        lambda data: data.train_dataloader(),
        lambda data: data.val_dataloader(),
        lambda data: data.env,
        lambda data: data.specs,
    ],
)
def test_a_data_module_alone_says_that_it_needs_a_run(use):
    with pytest.raises(AssertionError, match="RolloutDataModule collects with the policy of a run: pass it"):
        use(RolloutDataModule(**SMALL))


@pytest.mark.parametrize("method", ["lr_find", "scale_batch_size"])
def test_lightnings_tuner_is_refused(make_trainer, method):
    with pytest.raises(ConfigError, match="Tuner cannot tune runs"):
        getattr(Tuner(make_trainer()), method)(PPO(), datamodule=RolloutDataModule(**SMALL))


@pytest.mark.parametrize("number", ["2e3", "2k", "2000", "0.002M", "2.0e3"])
@pytest.mark.parametrize("place", ["flag", "yaml"])
def test_large_integers_may_be_short(output_of, tmp_path, number, place):
    lines = ("seed_everything: {0}", "model: {{update_epochs: {0}}}", "data: {{total_timesteps: {0}}}")
    text = "\n".join([*lines, "trainer: {{max_steps: {0}}}"]).format(number)
    (tmp_path / "short.yaml").write_text(text)
    flags = ["seed_everything", "model.update_epochs", "data.total_timesteps", "trainer.max_steps"]
    given = [part for flag in flags for part in (f"--{flag}", number)]
    args = ["--config", tmp_path / "short.yaml"] if place == "yaml" else given
    out = output_of("fit", *args, "--print_config")
    read = yaml.safe_load(out)
    assert read["seed_everything"] == read["data"]["total_timesteps"] == read["trainer"]["max_steps"] == 2000
    assert read["model"]["init_args"]["update_epochs"] == 2000


def test_keys_of_transforms_stay_texts_in_a_saved_configuration(output_of, tmp_path):
    transform = {"class_path": "torchrl.envs.DoubleToFloat", "init_args": {"in_keys": ["observation"]}}
    (tmp_path / "it.yaml").write_text(yaml.safe_dump({"data": {"transforms": [transform]}}))
    printed = yaml.safe_load(output_of("fit", "--config", tmp_path / "it.yaml", "--print_config"))
    (saved,) = printed["data"]["transforms"]
    assert saved["init_args"]["in_keys"] == ["observation"]


def test_only_integers_may_be_short(output_of, refusal_of, tmp_path):
    sentence = "data.total_timesteps: Expected a int. Got value: 1.5"
    assert sentence in refusal_of("fit", "--data.total_timesteps", "1.5")
    flags = ["--name", "500k", "--data.env_kwargs.a", "1e3", "--data.env_kwargs.b", "5k"]
    (tmp_path / "share.yaml").write_text("trainer: {limit_val_batches: 1.0}")
    floats = ["--config", tmp_path / "share.yaml", "--data.step_timeout", "1e3", "--model.clip_coef", "1.0"]
    out = output_of("fit", *flags, *floats, "--print_config")
    read = yaml.safe_load(out)
    values = [
        read["name"],
        *read["data"]["env_kwargs"].values(),
        read["trainer"]["limit_val_batches"],
        read["data"]["step_timeout"],
        read["model"]["init_args"]["clip_coef"],
    ]
    assert list(map(repr, values)) == ["'500k'", "1000.0", "'5k'", "1.0", "1000.0", "1.0"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (bytes(range(256)), "cannot be read as text"),
        ("model: 1".encode("utf-16"), "cannot be read as text"),
        (b"data: {num_envs: 4, seed: [}\n", r"is not YAML"),
        (b"? [1]\n: 2\n", r"is not YAML.* unhashable"),
        (b"data: null\n", r"data holds no settings"),
        (b"trainer: [1]\n", r"trainer holds no settings"),
    ],
)
def test_a_configuration_that_cannot_be_read_ends_in_one_sentence(refusal_of, tmp_path, content, message):
    (tmp_path / "odd.yaml").write_bytes(content)
    assert re.search(rf"odd\.yaml.* {message}", refusal_of("fit", "--config=odd.yaml", *SHORT))


@pytest.mark.parametrize(
    "error",
    [MemoryError("9 TiB"), torch.OutOfMemoryError("9 TiB"), RuntimeError("can't allocate memory: 9 TiB")],
)
def test_insufficient_memory_ends_in_one_sentence(refusal_of, monkeypatch, error):
    def fail(*args):
        raise error

    monkeypatch.setattr("ppo_lightning.algorithms.ppo.PPO.advantages", fail)
    expected = r"The run does not fit into memory \(.*9 TiB\): lower data\.num_envs, .*model\.buffer_size "
    assert re.search(expected, refusal_of("fit", "--config", CARTPOLE, *SHORT))


def test_a_users_own_error_keeps_its_traceback(run_cli, monkeypatch):
    """Only errors of Lightning itself become one sentence; here, a method of the module raises an error."""
    monkeypatch.setattr("ppo_lightning.algorithms.ppo.PPO.configure_optimizers", lambda self: int("x"))
    with pytest.raises(ValueError, match="invalid literal"):
        run_cli("fit", "--config", CARTPOLE, *SHORT)


def test_huge_rewards_are_advised_to_be_normalized(fit):
    """The loss overflows, which no learning rate can fix."""
    scale = gym.wrappers.TransformReward
    gym.register("HugeReward-v0", lambda: scale(Counter(4), lambda reward: 1e25 * reward))
    data = SMALL | {"env_id": "HugeReward-v0"}
    with pytest.raises(
        NonFiniteError,
        match=r"losses/\w+ is \w+ after .*: lower the learning rate, or scale large rewards",
    ):
        fit(data, {"norm_adv": False, "norm_reward": False})
    fit(data)
