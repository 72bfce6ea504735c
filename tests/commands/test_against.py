"""``ppo-lightning details --against``: settings of other libraries, and an update of Stable-Baselines3."""

import base64
import functools
import json
import math
import pickle
import random
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from ppo_lightning import PPO, ConfigError, MLPAgent, RolloutDataModule
from ppo_lightning.algorithms import losses
from ppo_lightning.algorithms.minibatches import mean_of, split_epoch
from ppo_lightning.commands.against.files import keyword_arguments, read_settings
from ppo_lightning.commands.against.report import LIBRARIES, recipe_text, settings_here, translate

FILES = Path(__file__).parent / "foreign"
ANT = {"data.env_id": "Ant-v4", "data.num_envs": 4}
CASES = {  # library, file, settings that the file does not have
    "rsl_rl": ("rsl_rl", "rsl_rl_agent.yaml", ANT),
    "rl_games": ("rl_games", "rl_games_ant.yaml", ANT),
    "skrl": ("skrl", "skrl_ant.yaml", ANT),
    "sb3": ("sb3", "sb3_ant.yaml", ANT),
    "zoo": ("sb3", "sb3_zoo.yaml", {"data.env_id": "HalfCheetah-v4"}),
    "cleanrl": ("cleanrl", "cleanrl_continuous.py", {}),
}


def translated(case):
    library, file, overrides = CASES[case]
    return translate(library, FILES / file, overrides)


def words(translation):
    return " ".join(translation.remaining)


def test_rsl_rl_counts_the_value_loss_twice_and_normalizes_the_rollout():
    translation = translated("rsl_rl")
    expected = {
        "model.vf_coef": 2.0,
        "model.adam_eps": 1e-8,
        "model.desired_kl": 0.01,
        "model.anneal_lr": False,
    }
    expected |= {"model.clip_vloss": True, "model.gae_lambda": 0.95, "data.total_timesteps": 1000 * 32 * 4}
    expected |= {"model.agent.hidden_sizes": [400, 200, 100], "model.agent.norm_obs": False}
    expected |= {"model.agent.activation": "elu"}
    assert expected.items() <= translation.recipe.items()
    for difference in (
        "KL(old || new)",
        "normalizes the whole rollout",
        "gamma * V(s_t)",
        "one permutation",
    ):
        assert difference in words(translation)
    assert not translation.unread()


def test_the_python_file_and_the_yaml_file_of_isaac_lab_say_the_same():
    python = translate("rsl_rl", FILES / "rsl_rl_ant.py", ANT)
    assert python.recipe == translated("rsl_rl").recipe
    assert python.remaining == translated("rsl_rl").remaining
    assert not python.unread()


def test_the_networks_of_rsl_rl_5_are_read(tmp_path):
    settings = yaml.load(
        (FILES / "rsl_rl_agent.yaml").read_text().replace("!!python/tuple", ""), yaml.SafeLoader
    )
    del settings["policy"]
    network = {"hidden_dims": [32, 32], "activation": "tanh", "obs_normalization": True}
    settings["actor"] = network | {"distribution_cfg": {"init_std": 0.5, "std_type": "log"}}
    settings["critic"] = {"hidden_dims": [64], "activation": "tanh", "obs_normalization": True}
    (tmp_path / "agent.yaml").write_text(yaml.safe_dump(settings))
    translation = translate("rsl_rl", tmp_path / "agent.yaml", ANT)
    assert translation.recipe["model.agent.hidden_sizes"] == [32, 32]
    assert translation.recipe["model.agent.norm_obs"] is True
    assert translation.recipe["model.agent.critic_hidden_sizes"] == [64]
    assert translation.recipe["model.agent.log_std_init"] == pytest.approx(math.log(0.5))
    assert "logarithm" not in words(translation) and "tanh after" not in words(translation)


def test_rl_games_halves_the_value_loss_and_shapes_rewards():
    translation = translated("rl_games")
    expected = {
        "model.vf_coef": 2,
        "model.gae_lambda": 0.95,
        "model.clip_vloss": True,
        "model.desired_kl": 0.008,
    }
    expected |= {
        "model.agent.clip_obs": 5.0,
        "model.agent.shared": True,
        "data.total_timesteps": 500 * 16 * 4,
    }
    expected |= {"model.num_minibatches": 1, "model.learning_rate": 3e-4}
    assert expected.items() <= translation.recipe.items()
    assert translation.recipe["data.transforms"][0]["init_args"]["scale"] == 0.6
    for difference in ("Value normalization", "previous pass over the minibatch", "Bounds", "mixed"):
        assert difference in words(translation)
    many = translate("rl_games", FILES / "rl_games_ant.yaml", ANT | {"data.num_envs": 4096})
    assert many.recipe["model.num_minibatches"] == 2, "4096 x 16 steps in minibatches of 32768"
    assert not translation.unread()


def test_skrl_does_not_shuffle_and_its_value_loss_is_not_halved():
    translation = translated("skrl")
    expected = {
        "model.vf_coef": 2.0,
        "model.gae_lambda": 0.95,
        "model.target_kl": None,
        "model.desired_kl": 0.008,
    }
    expected |= {"data.total_timesteps": 8000 * 4, "model.agent.norm_obs": True, "model.num_minibatches": 2}
    assert translation.recipe["model.bootstrap_truncated"] is False
    assert expected.items() <= translation.recipe.items()
    for difference in (
        "after each epoch",
        "takes the clipped error",
        "they end the sum of GAE",
        "consecutive steps",
    ):
        assert difference in words(translation)
    assert not translation.unread()


def test_stable_baselines3_doubles_the_value_loss_and_does_not_clip_it():
    zoo = translated("zoo")
    expected = {"model.vf_coef": 2 * 0.58096, "model.clip_vloss": False, "model.anneal_lr": False}
    expected |= {"model.num_minibatches": 8, "model.agent.norm_obs": True, "model.norm_reward": True}
    assert expected.items() <= zoo.recipe.items()
    assert zoo.recipe["model.agent.activation"] == "relu"
    assert zoo.recipe["model.agent.log_std_init"] == -2
    assert "orthogonal" in words(zoo)
    cartpole = translate("sb3", FILES / "sb3_zoo.yaml", {"data.env_id": "CartPole-v1"})
    expected = {"model.anneal_lr": True, "model.learning_rate": 0.001, "model.anneal_clip_coef": True}
    assert expected.items() <= cartpole.recipe.items()
    atari = translate("sb3", FILES / "sb3_zoo.yaml", {"data.env_id": "ALE/Pong-v5"})
    assert atari.classes["model.agent"] == "ppo_lightning.CNNAgent"
    assert atari.recipe["model.num_minibatches"] == 4
    assert "gSDE" in words(translated("sb3"))
    assert not any(translation.unread() for translation in (zoo, cartpole, atari, translated("sb3")))


def test_the_log_of_rl_zoo_is_read(tmp_path):
    """RL Zoo writes ``config.yml`` of a run as an OrderedDict of pairs."""
    text = (
        "!!python/object/apply:collections.OrderedDict\n- - - batch_size\n    - 32\n  - - gamma\n    - 0.9\n"
    )
    (tmp_path / "config.yml").write_text(text)
    assert read_settings(tmp_path / "config.yml") == {"batch_size": 32, "gamma": 0.9}


def test_early_stopping_of_stable_baselines3_is_wider(tmp_path):
    (tmp_path / "ppo.yaml").write_text(
        "{n_envs: 2, n_steps: 64, batch_size: 32, target_kl: 0.02, clip_range_vf: 0.2}"
    )
    translation = translate("sb3", tmp_path / "ppo.yaml", {})
    assert translation.recipe["model.target_kl"] == pytest.approx(0.03)
    assert translation.recipe["model.clip_vloss"] is True
    assert "checks each minibatch" in words(translation) and "takes the clipped error" in words(translation)


def test_cleanrl_ends_at_time_limits():
    translation = translated("cleanrl")
    expected = {"model.bootstrap_truncated": False, "model.agent.norm_obs": True, "model.norm_reward": True}
    assert expected.items() <= translation.recipe.items()
    recipe = settings_here(Path(__file__).parents[2] / "configs/mujoco/halfcheetah.yaml")
    ours = {name: value for name, value in translation.recipe.items() if value != recipe[name]}
    assert ours == {"model.bootstrap_truncated": False}, (
        "the bundled recipe is CleanRL's, except for time limits"
    )
    assert not translation.unread()


def test_arguments_of_cleanrl_in_other_forms(tmp_path):
    (tmp_path / "config.yaml").write_text(
        "{gamma: {value: 0.9}, num_minibatches: {value: 8}, _wandb: {value: {}}}"
    )
    assert translate("cleanrl", tmp_path / "config.yaml", {}).recipe["model.gamma"] == 0.9
    (tmp_path / "args.json").write_text(json.dumps({"gamma": 0.8, "num_minibatches": 8, "clip_coef": 0.1}))
    assert translate("cleanrl", tmp_path / "args.json", {}).recipe["model.clip_coef"] == 0.1
    (tmp_path / "ppo.py").write_text(
        "p.add_argument('--gym-id', default='Acrobot-v1')\np.add_argument('--num-minibatches', default=8)"
    )
    old = translate("cleanrl", tmp_path / "ppo.py", {})
    assert old.recipe["data.env_id"] == "Acrobot-v1" and old.recipe["model.num_minibatches"] == 8


# Files of others


class Bomb:
    def __reduce__(self):
        return (sys.exit, ("unpickled",))


def test_no_file_is_executed(tmp_path):
    """A script that raises, YAML tags of Python, and a pickle inside a saved model."""
    assert read_settings(FILES / "cleanrl_continuous.py")["num_steps"] == 2048
    (tmp_path / "bomb.yaml").write_text(
        "a: !!python/object/apply:sys.exit [executed]\nb: !!python/name:os.system x"
    )
    assert read_settings(tmp_path / "bomb.yaml") == {"a": ["executed"], "b": "x"}
    bomb = {":type:": "function", ":serialized:": base64.b64encode(pickle.dumps(Bomb())).decode()}
    data = {
        "policy_class": bomb,
        "clip_range": bomb,
        "learning_rate": bomb,
        "n_steps": 64,
        "_total_timesteps": 128,
    }
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w") as archive:
        archive.writestr("data", json.dumps(data))
    translation = translate("sb3", tmp_path / "bomb.zip", {})
    assert "clip_range: the file has a pickled function" in words(translation)
    assert translation.recipe["model.clip_coef"] == 0.2


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.yaml", "", "no settings"),
        ("a.yaml", "[1, 2]", "no mapping"),
        ("a.yaml", "a: [", "no settings"),
        ("a.yaml", "a: 1", "the file has none of"),
        ("a.json", "{", "no settings"),
        ("a.py", "def", "no settings"),
        ("a.zip", "no archive", "cannot be read"),
        ("a.yaml", "{algorithm: {value_loss_coef: high}}", "needs a number"),
        ("a.yaml", "{algorithm: {clip_param: 0.2}, policy: {actor_hidden_dims: 3}}", "unexpected form"),
    ],
)
def test_a_file_that_is_not_of_the_library_is_refused_in_one_sentence(name, content, message, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message) as error:
        translate("rsl_rl", tmp_path / name, {})
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


@pytest.mark.parametrize("case", CASES)
def test_settings_of_any_form_are_translated_or_refused(case, tmp_path):
    """Values of real files are replaced by others, two hundred times."""
    library, file, overrides = CASES[case]
    generator = random.Random(1)
    values = (None, True, -1, 0, 1e300, "x", "3e-4", [], [1, "a"], {}, {"a": {"b": 1}})
    original = read_settings(FILES / file)

    def changed(settings):
        return {
            name: generator.choice(values)
            if generator.random() < 0.1
            else changed(value)
            if isinstance(value, dict)
            else value
            for name, value in settings.items()
        }

    outcomes = []
    for _ in range(200):
        try:
            translate_settings(library, changed(original), overrides, tmp_path)
            outcomes.append("translated")
        except ConfigError:
            outcomes.append("refused")
    assert set(outcomes) == {"translated", "refused"}


def translate_settings(library, settings, overrides, folder):
    (folder / "settings.json").write_text(json.dumps(settings))
    return recipe_text(translate(library, folder / "settings.json", overrides), "settings.json")


def test_keyword_arguments_are_parsed_and_not_evaluated():
    with pytest.raises(ConfigError, match="is not a mapping"):
        keyword_arguments("dict(a=__import__('os').getcwd())")


# The command


def test_the_table_marks_what_differs_from_a_recipe(run_cli):
    args = ("details", "--against", "sb3", FILES / "sb3_zoo.yaml", "--data.env_id", "CartPole-v1")
    out = run_cli(*args, "--config", "classic/cartpole")
    assert "| vf_coef | 0.5 (default) | model.vf_coef | **1** | 0.5 | Stable-Baselines3's value loss" in out
    assert "| gae_lambda | 0.8 | model.gae_lambda | **0.8** | 0.95 |  |" in out
    assert "| max_grad_norm | 0.5 (default) | model.max_grad_norm | 0.5 | 0.5 |  |" in out
    assert "| cartpole.yaml |" in out


def test_a_recipe_needs_an_environment(run_cli, capsys):
    with pytest.raises(SystemExit):
        run_cli("details", "--against", "rl_games", FILES / "rl_games_ant.yaml")
    message = capsys.readouterr().err
    assert "--data.env_id, --data.num_envs, --data.total_timesteps. Give them as flags." in message
    with pytest.raises(SystemExit):
        run_cli("details", "--against", "sb3", FILES / "sb3_zoo.yaml")
    assert "choose one with --data.env_id" in capsys.readouterr().err


@pytest.mark.integration
@pytest.mark.parametrize("case", CASES)
def test_the_recipe_trains(case, run_cli):
    library, file, overrides = CASES[case]
    flags = [part for name, value in overrides.items() for part in (f"--{name}", value)]
    run_cli("details", "--against", library, FILES / file, *flags, "--output", "recipe.yaml")
    recipe = yaml.safe_load(Path("recipe.yaml").read_text())
    assert all(len(line) <= 110 for line in Path("recipe.yaml").read_text().splitlines())
    steps = 2 * recipe["data"]["num_envs"] * recipe["data"]["num_steps"]
    short = ("--data.total_timesteps", steps, "--data.eval_episodes", 1)
    short += ("--data.env_kwargs.max_episode_steps", 50)
    assert "wall time:" in run_cli("fit", "--config", "recipe.yaml", *short)


# One update of Stable-Baselines3


class SameData(PPO):
    """PPO that learns from given minibatches, starting at given weights."""

    def configure_model(self):
        super().configure_model()
        copy_weights(self.policy, self.agent)

    def advantages(self, rollout):
        return rollout

    def minibatches(self, rollout):
        yield from split_epoch(next(self.epochs), self.hparams.num_minibatches, self.hparams.norm_adv)

    def log_rollout(self, rollout, metrics):
        self.count_episodes(rollout)
        self.metrics = {name: value.item() for name, value in mean_of(metrics).items()}


def pairs(policy, agent):
    networks = policy.mlp_extractor
    for theirs, ours in ((networks.policy_net, agent.actor_body), (networks.value_net, agent.critic_body)):
        yield from zip([theirs[0], theirs[2]], ours.layers, strict=True)
    yield policy.action_net, agent.head.linear
    yield policy.value_net, agent.critic


def copy_weights(policy, agent):
    for theirs, ours in pairs(policy, agent):
        ours.load_state_dict(theirs.state_dict())
    if hasattr(policy, "log_std"):
        agent.head.log_std.data.copy_(policy.log_std)


@pytest.mark.parametrize(("env_id", "seed"), [("CartPole-v1", 1), ("Pendulum-v1", 2)])
def test_losses_and_weights_are_those_of_stable_baselines3(env_id, seed, tmp_path, make_trainer):
    """A model is saved and translated; then both programs learn from the same rollout, three epochs of it."""
    sb3 = pytest.importorskip("stable_baselines3", reason="in the extras dev and benchmark")
    from stable_baselines3.common.logger import configure

    options = {
        "n_steps": 64,
        "batch_size": 32,
        "n_epochs": 3,
        "ent_coef": 0.01,
        "vf_coef": 0.7,
        "gamma": 0.97,
    }
    env = sb3.common.env_util.make_vec_env(env_id, n_envs=2, seed=seed)
    theirs = sb3.PPO("MlpPolicy", env, seed=seed, device="cpu", **options)
    theirs.set_logger(configure(None, []))
    theirs.learn(total_timesteps=128)  # so that values and entropies are not those of the first weights
    _, callback = theirs._setup_learn(128)
    theirs.collect_rollouts(env, callback, theirs.rollout_buffer, theirs.n_steps)
    theirs.policy.optimizer.state.clear()  # Adam starts anew here, too
    theirs.save(tmp_path / "model.zip")

    overrides = {"data.env_id": env_id, "data.total_timesteps": 128}
    translation = translate("sb3", tmp_path / "model.zip", overrides)
    recipe = yaml.safe_load(recipe_text(translation, "model.zip"))
    arguments = recipe["model"]["init_args"]
    agent = arguments.pop("agent")["init_args"]
    ours = SameData(**arguments, agent=functools.partial(MLPAgent, **agent))
    ours.policy = theirs.policy
    buffer = theirs.rollout_buffer
    check_advantages(buffer, arguments, theirs)
    np.random.seed(seed)  # noqa: NPY002  (the generator of its minibatches)
    ours.epochs = iter([epoch_of(buffer, env_id) for _ in range(options["n_epochs"])])
    make_trainer().fit(ours, RolloutDataModule(**recipe["data"]))
    np.random.seed(seed)  # noqa: NPY002  (the generator of its minibatches)
    theirs.train()

    logged = theirs.logger.name_to_value
    assert ours.metrics["policy_loss"] == pytest.approx(
        logged["train/policy_gradient_loss"], rel=1e-4, abs=1e-6
    )
    assert 2 * ours.metrics["value_loss"] == pytest.approx(logged["train/value_loss"], rel=1e-4)
    assert ours.metrics["entropy"] == pytest.approx(-logged["train/entropy_loss"], rel=1e-5)
    assert ours.metrics["clipfrac"] == pytest.approx(logged["train/clip_fraction"], abs=1e-6)
    for expected, layer in pairs(theirs.policy, ours.agent):
        torch.testing.assert_close(layer.weight, expected.weight, rtol=1e-4, atol=1e-5)


def epoch_of(buffer, env_id):
    """Return one epoch of minibatches of Stable-Baselines3 as one dictionary of tensors."""
    samples = [*buffer.get(32)]
    fields = {"observation": "observations", "action": "actions", "action_log_prob": "old_log_prob"}
    fields |= {"state_value": "old_values", "advantage": "advantages", "value_target": "returns"}
    epoch = {key: torch.cat([getattr(sample, name) for sample in samples]) for key, name in fields.items()}
    if env_id == "CartPole-v1":
        epoch["action"] = epoch["action"].long().flatten()
    return epoch | {key: epoch[key].view(-1, 1) for key in ("state_value", "advantage", "value_target")}


def check_advantages(buffer, arguments, theirs):
    """GAE gives the advantages of the buffer, whose rewards contain the bootstrap at time limits."""
    starts = np.concatenate([buffer.episode_starts[1:], theirs._last_episode_starts[None]])
    value = torch.from_numpy(buffer.values.T)
    last = theirs.policy.predict_values(theirs.policy.obs_to_tensor(theirs._last_obs)[0]).detach()
    done = torch.from_numpy(starts.T > 0)
    advantage, target = losses.gae(
        torch.from_numpy(buffer.rewards.T.copy()),
        value,
        torch.cat([value[:, 1:], last], dim=1),
        done,
        done,
        arguments["gamma"],
        arguments["gae_lambda"],
    )
    torch.testing.assert_close(advantage, torch.from_numpy(buffer.advantages.T), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(target, torch.from_numpy(buffer.returns.T), rtol=1e-4, atol=1e-4)


def test_every_library_has_a_case():
    assert {library for library, *_ in CASES.values()} == set(LIBRARIES)
