"""Misspelt options are refused before PyTorch is imported, and nothing else is."""

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ppo_lightning import algorithms, games, models
from ppo_lightning.commands import cli, options
from ppo_lightning.errors import SYNONYMS, ConfigError

CARTPOLE = str(Path(__file__).parents[2] / "configs/classic/cartpole.yaml")
REFUSED = {
    "--seed 1": "'--seed' is unknown: did you mean --seed_everything?",
    "--env-id X": "'--env-id' is unknown: did you mean --data.env_id?",
    "--env_id=X": "did you mean --data.env_id?",
    "--data.env X": "did you mean --data.env_id?",
    "--learning-rate 1e-3": "did you mean --model.learning_rate?",
    "--total-timesteps 500": "did you mean --data.total_timesteps?",
    "--num-envs 4": "did you mean --data.num_envs?",
    "--n_steps 4": "did you mean --data.num_steps?",
    "--cuda true": "did you mean --trainer.accelerator?",
    "--track": "did you mean --trainer.logger=WandbLogger?",
    "--wandb-project-name x": "did you mean --trainer.logger=WandbLogger?",
    "--capture_video": "did you mean --trainer.callbacks+=ppo_lightning.callbacks.CaptureVideo?",
    "--data.num_env 3": "'--data.num_env' is unknown: did you mean --data.num_envs, ",
    "--model.init_args.gama 1": "'--model.gama' is unknown: did you mean --model.gamma, ",
    "--model.agent.init_args.hiden_sizes [8]": "did you mean --model.agent.hidden_sizes, ",
    "--model ppo_lightning.RPO --model.rpo_alfa 1": "did you mean --model.rpo_alpha of ppo_lightning.RPO",
    "--trainer.loggr.save_dir x": "'--trainer.loggr' is unknown: did you mean --trainer.logger?",
    "--trainer.max_epoch=3": "did you mean --trainer.max_epochs, ",
    "--verbose true": "'--verbose' is unknown",
    "--data.init_args.num_envs 3": "'--data.init_args' is unknown",
    "CartPole-v1": "'CartPole-v1' belongs to no option: did you mean --data.env_id CartPole-v1?",
    "--auto_resume classic/cartpole": "did you mean --config classic/cartpole?",
}
ACCEPTED = [
    "--data.env_kwargs.render_mode null",
    "--data.env_kwargs {a:1}",
    "--model tests.commands.test_options.Mine --model.foo 3",
    "--model=tests.commands.test_options.Mine --model.init_args.foo 3",
    "--model.class_path tests.commands.test_options.Mine --model.foo 3",
    "--model.agent tests.commands.test_options.Agent --model.agent.width 3",
    "--model.init_args.agent.class_path tests.commands.test_options.Agent --model.agent.width 3",
    "--model tests.commands.test_options.Mine --model.foo 3 --model ppo_lightning.PPO",
    "--model RPO --model.rpo_alpha 0.1",
    "--model ppo_lightning.PPG --model.n_iteration 3 --model.init_args.gamma 0.5",
    "--model.agent CNNAgent --model.agent.body impala",
    "--model ppo_lightning.RecurrentPPO --model.agent.memory lstm",
    "--model.dict_kwargs.gamma 0.5",
    "--trainer.callbacks+=Doctor --trainer.callbacks+=ppo_lightning.callbacks.CaptureVideo",
    "--trainer.callbacks.every 3",
    "--trainer.logger CSVLogger --trainer.logger.save_dir x",
    "--trainer.devices+=0",
    "--data.rollouts_per_epoch -1 --name --",
    "--print_config",
    "--seed_everything true --num_threads 2 --weights_only true",
]


class Mine(algorithms.PPO):
    def __init__(self, foo: int = 1, **hyperparameters):
        super().__init__(**hyperparameters)


class Agent(models.MLPAgent):
    def __init__(self, observation_spec, action_spec, width: int = 1):
        super().__init__(observation_spec, action_spec)


def parsed_by_jsonargparse(args):
    """Whether the parser of the command line, without the early check, accepts the options."""
    with pytest.raises(SystemExit) as exit_:
        cli.run([], [*args, "--print_config"])
    return not exit_.value.code


@pytest.mark.parametrize("flags", REFUSED)
def test_a_misspelt_option_names_the_right_one(flags, capsys):
    with pytest.raises(SystemExit, match="2"):
        options.answer(["fit", "--config", "classic/cartpole", *flags.split()])
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1
    assert REFUSED[flags] in err
    assert not parsed_by_jsonargparse(["fit", *flags.split()]), "the early check refuses nothing else"


@pytest.mark.parametrize("flags", ACCEPTED)
def test_keys_of_a_users_own_classes_are_left_to_jsonargparse(flags):
    assert not options.answer(["fit", "--config", "classic/cartpole", *flags.split()])


@pytest.mark.parametrize(
    "flags", [flags for flags in ACCEPTED if "env_kwargs {" not in flags and "--name" not in flags]
)
def test_what_the_early_check_accepts_is_an_option(flags):
    if "callbacks.every" not in flags:  # of a callback that a recipe names
        assert parsed_by_jsonargparse(["fit", *flags.split()])


def test_the_keys_of_recipes_are_checked(tmp_path):
    (tmp_path / "recipe.yaml").write_text("data: {num_env: 3}\n")
    with pytest.raises(ConfigError, match=r"'data\.num_env' is unknown: did you mean data\.num_envs, "):
        options.checked(["fit", "--config", str(tmp_path / "recipe.yaml")])
    mine = {"model": {"class_path": "mine.PPO", "init_args": {"foo": 1, "agent": {"init_args": {"bar": 2}}}}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(mine | {"data": {"env_kwargs": {"quux": {"a": 1}}}}))
    options.checked(["fit", "--config", str(tmp_path / "recipe.yaml"), "--model.baz", "3"])


def test_a_checkpoint_may_name_the_class_that_takes_a_key():
    options.checked(["validate", "--ckpt_path", "mine.ckpt", "--model.foo", "3", "--verbose", "false"])
    with pytest.raises(ConfigError, match=r"'--data\.foo' is unknown"):
        options.checked(["validate", "--ckpt_path", "mine.ckpt", "--data.foo", "3"])


def test_the_parser_has_no_option_that_the_check_refuses(monkeypatch):
    parsers = {}
    monkeypatch.setattr(
        cli.PPOCLI, "parse_arguments", lambda self, parser, args: parsers.update(self._subcommand_parsers)
    )
    for command in options.SUBCOMMANDS:
        with pytest.raises(AttributeError, match="config"):
            cli.run([], [command])
        assert list(parsers) == [command], "building another takes time"
        names = [name for action in parsers.pop(command)._actions for name in action.option_strings]
        names = [name for name in names if name.startswith("--") and name != "--config"]
        assert len(names) > 50
        for name in names:
            options.checked([command, f"{name}=x"])


def subclasses(cls):
    return set(cls.__subclasses__()).union(*map(subclasses, cls.__subclasses__()))


@pytest.mark.parametrize(
    ("group", "base"), [("model", algorithms.AgentModule), ("model.agent", models.ActorCritic)]
)
def test_the_options_of_every_class_of_the_package_are_known(group, base):
    """Fails for a new algorithm or agent: add it to ``ppo_lightning.commands.options.SOURCES``."""
    for room in (algorithms, games, models):
        for path in Path(room.__file__).parent.glob("*.py"):
            importlib.import_module(f"{room.__name__}.{path.stem}")
    ours = {cls.__name__: cls for cls in subclasses(base) if cls.__module__.startswith("ppo_lightning.")}
    assert ours.keys() == options.SOURCES[group].keys()
    for cls in ours.values():
        for name, parameter in inspect.signature(cls.__init__).parameters.items():
            assert parameter.default is parameter.empty or f"{group}.{name}" in options.known_options("fit")


def test_every_synonym_is_a_command_or_an_option():
    known = {*options.known_options("fit"), *options.DESCRIPTIONS}
    assert {meant.partition("=")[0].removesuffix("+") for meant in SYNONYMS.values()} <= known
    assert not SYNONYMS.keys() & known


def test_a_misspelt_option_is_reported_without_importing_pytorch():
    code = """import sys
from ppo_lightning.__main__ import main
try:
    main()
except SystemExit:
    heavy = ("torch", "lightning", "torchrl", "numpy", "gymnasium")
    print([name for name in heavy if name in sys.modules])"""
    args = [sys.executable, "-c", code, "fit", "--config", CARTPOLE, "--data.num_env", "3"]
    done = subprocess.run(args, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.stdout == "[]\n"
    assert done.stderr.startswith(
        "error: the option '--data.num_env' is unknown: did you mean --data.num_envs"
    )
