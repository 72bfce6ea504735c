"""Misspelt options and keys end in one sentence that names the right one."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

from ppo_lightning import PPO, AgentModule, algorithms, games, models
from ppo_lightning.commands import cli, options
from ppo_lightning.errors import SYNONYMS

REFUSED = {
    "--seed 1": "'--seed' is unknown: did you mean --seed_everything?",
    "--env-id X": "'--env-id' is unknown: did you mean --data.env_id?",
    "--env_id=X": "did you mean --data.env_id?",
    "--data.env X": "did you mean --data.env_id?",
    "--learning-rate 1e-3": "did you mean --model.learning_rate?",
    "--total_steps 9": "did you mean --data.total_timesteps, ",
    "--cuda true": "did you mean --trainer.accelerator=auto?",
    "--track": "did you mean --trainer.logger+=WandbLogger?",
    "--clip_range_vf 0.2": "did you mean --model.clip_vloss=true?",
    "--net_arch [8,8]": "did you mean --model.agent.hidden_sizes?",
    "--capture_video": "did you mean --trainer.callbacks+=ppo_lightning.callbacks.CaptureVideo?",
    "--data.num_env 3": "'--data.num_env' is unknown: did you mean --data.num_envs, ",
    "--model.init_args.gama 1": "'--model.init_args.gama' is unknown: did you mean --model.gamma, ",
    "--model.agent.init_args.hiden_sizes [8]": "did you mean --model.agent.hidden_sizes, ",
    "--model ppo_lightning.RPO --model.rpo_alfa 1": "did you mean --model.rpo_alpha of ppo_lightning.RPO",
    "--model DQN --model.norm_reward true": "is unknown: it belongs to another algorithm or agent.",
    "--trainer.loggr.save_dir x": "'--trainer.loggr.save_dir' is unknown: did you mean --trainer.logger?",
    "--trainer.max_epoch=3": "did you mean --trainer.max_epochs, ",
    "--verbose true": "'--verbose' is unknown",
    "--data.init_args.num_envs 3": "'--data.init_args.num_envs' is unknown: did you mean --data.num_envs?",
    "CartPole-v1": "'CartPole-v1' belongs to no option: did you mean --data.env_id CartPole-v1?",
    "--auto_resume classic/cartpole": "did you mean --config classic/cartpole?",
}
NO_REMEDY = {"--verbose true", "--trainer.loggr.save_dir x", "--model DQN --model.norm_reward true"}
ACCEPTED = [
    "--data.env_kwargs.render_mode null",
    "--model tests.commands.test_options.Mine --model.foo 3",
    "--model=tests.commands.test_options.Mine --model.init_args.foo 3",
    "--model.class_path tests.commands.test_options.Mine --model.foo 3",
    "--model.agent tests.commands.test_options.Agent --model.agent.width 3",
    "--model.init_args.agent.class_path tests.commands.test_options.Agent --model.agent.width 3",
    "--model tests.commands.test_options.Mine --model.foo 3 --model ppo_lightning.PPO",
    "--model RPO --model.rpo_alpha 0.1",
    "--model ppo_lightning.PPG --model.n_iteration 3 --model.init_args.gamma 0.5",
    "--model.agent CNNAgent --model.agent.body impala",
    "--model.rpo_alpha 0.3 --model RPO",
    "--model.agent.body impala --model.agent=CNNAgent --model.rpo_alpha 0.3 --model=RPO",
    "-cclassic/cartpole --ckpt_path null",
    "-cclassic/cartpole --model.agent.memory null --model.agent.actor_keys null",
    "--model ppo_lightning.RecurrentPPO --model.agent.memory lstm",
    "--model.dict_kwargs.gamma 0.5",
    "--trainer.callbacks+=Doctor --trainer.callbacks+=ppo_lightning.callbacks.CaptureVideo",
    "--trainer.logger CSVLogger --trainer.logger.save_dir x",
    "--trainer.devices+=0",
    "--trainer.callbacks+=Timer",
    "--model sac --model.q_lr 1e-3",
    "--data.rollouts_per_epoch -1 --name x",
    "--seed_everything true --num_threads 2 --weights_only true",
]


class Mine(PPO):
    def __init__(self, foo: int = 1, **hyperparameters):
        super().__init__(**hyperparameters)


class Agent(models.MLPAgent):
    def __init__(self, observation_spec, action_spec, width: int = 1):
        super().__init__(observation_spec, action_spec)


@pytest.mark.parametrize("flags", REFUSED)
def test_a_misspelt_option_names_the_right_one_which_is_accepted(flags, refusal_of, output_of):
    """With the value of the misspelt option, or with that of the suggestion."""
    err = refusal_of("fit", "--config", "ppo/classic", *flags.split(), "--print_config")
    assert REFUSED[flags] in err
    if flags in NO_REMEDY:
        return
    option, meant = re.search(r"'(\S+)' (?:is|belongs).* did you mean (.+?)(?: of \S+?)?[,?]", err).groups()
    words = [word for part in flags.split() for word in ([part] if "+=" in part else part.split("=", 1))]
    at = words.index(option)
    has_value = " " in meant or "=" in meant
    words[at : at + 1 + (has_value and option.startswith("--"))] = meant.split()
    output_of("fit", "--config", "ppo/classic", *words, "--print_config")


@pytest.mark.parametrize("flags", ACCEPTED)
def test_an_option_is_accepted(flags, output_of):
    output_of("fit", *flags.split(), "--print_config")


def subclasses(cls):
    return set(cls.__subclasses__()).union(*map(subclasses, cls.__subclasses__()))


@pytest.mark.parametrize(("group", "base"), [("model", AgentModule), ("model.agent", models.Actor)])
def test_the_options_of_every_class_of_the_package_are_known(group, base):
    """Fails for a new algorithm or agent that the package does not export."""
    for room in (algorithms, games, models):
        for path in Path(room.__file__).parent.glob("*.py"):
            importlib.import_module(f"{room.__name__}.{path.stem}")
    ours = {cls.__name__: cls for cls in subclasses(base) if cls.__module__.startswith("ppo_lightning.")}
    for cls in ours.values():
        for name, parameter in inspect.signature(cls.__init__).parameters.items():
            assert parameter.default is parameter.empty or f"{group}.{name}" in cli.known_options()


def test_every_synonym_is_a_command_or_an_option():
    known = {*cli.known_options(), *options.DESCRIPTIONS}
    meanings = " and ".join(SYNONYMS.values()).split(" and ")
    assert {meant.partition("=")[0].removesuffix("+") for meant in meanings} <= known
    assert not SYNONYMS.keys() & known
