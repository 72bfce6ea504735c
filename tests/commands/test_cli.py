"""The command line: help, wrong input and subcommands."""

import importlib
import inspect
import io
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.loggers.logger import Logger
from torchrl.data import Bounded, Categorical, Unbounded
from torchrl.envs import EnvBase, SerialEnv
from torchrl.envs.libs.gym import GymEnv

import ppo_lightning
from ppo_lightning import PPO, MLPAgent, RolloutDataModule, __main__
from ppo_lightning.commands import options
from ppo_lightning.rollouts.evaluation import EvaluationLoader
from tests.commands.conftest import CARTPOLE, SHORT, checkpoint_of, metric
from tests.helpers import ROOT

FIT = "data.env_kwargs does not fit env_id"
WRONG = {
    "--data.env_id CartPol-v1": "'CartPol-v1' is not an environment of Gymnasium: did you mean CartPole-v1",
    "--data.env_id Pendulum-v1 --model.agent.init_args.head categorical": "continuous .*head is categorical",
    "--data.env_id tests.nowhere": "env_id 'tests.nowhere' cannot be imported",
    "--model.agent.init_args.head gaussian": "discrete actions, and model.agent.head is gaussian",
    "--model.num_minibatches 3": "= 512 is not divisible by model.num_minibatches = 3: change",
    "--model.gamma 1.5": "model.gamma is 1.5: it must be between 0 and 1",
    "--data.step_timeout 1e300": "data.step_timeout is 1e.300: it must be between 0.001 and",
    "--model.gamma high": "gamma: Expected a float. Got value: high",
    "--model.agent.init_args.hidden_sizes -0.5": r"agent: hidden_sizes: Expected a \S+Sequence. Got .* -0.5",
    "--trainer.plugins 3": r"^error: trainer.plugins: .{,300}$",
    "--data.eval_episodes 9223372036854775808": r"data.eval_episodes is 92\d*: it must be below 2..62",
    "--data.backend jax": "data.backend: .*'gymnasium', 'vectorized', 'torch', 'envpool'.* jax",
    "--data.env_kwargs.foo 1": f"{FIT} 'CartPole-v1'",
    "--data.backend envpool --data.env_kwargs.foo 1": f"{FIT} 'CartPole-v1'",
    "--data.env_kwargs.max_episode_steps 0": f"{FIT} 'CartPole-v1'",
    "--data.env_id Ant-v5 --data.env_kwargs.xml_file no.xml": f"{FIT} 'Ant-v5'",
    "--ckpt_path nowhere.ckpt": "ckpt_path 'nowhere.ckpt' is not a file",
    "--ckpt_path last": "fit --auto_resume finds the last one",
    "--config {[": "--config is not YAML: while parsing a flow node",
    '--config {"ckpt_path":"last"}': "fit --auto_resume finds the last one",
    '--config {"model":3}': "model: ",
    '--config {"seed_everything":null}': "seed_everything is None: it must be between 0 and 4294967295",
    "--seed_everything 4294967296": "seed_everything is 4294967296: it must be between 0 and 4294967295",
    "--num_threads 0": "null",
    "--trainer.accumulate_grad_batches 2": "model.num_minibatches",
    "--trainer.min_epochs 2": "trainer.min_epochs .*leave it out",
    "--trainer.max_epochs 0": "trainer.max_epochs .*at least 1",
    "--trainer.gradient_clip_val 0.5": "trainer.gradient_clip_val .* set model.max_grad_norm",
    "--trainer.precision bf16-true": "trainer.precision is 'bf16-true': PPO takes '32-true' or 'bf16-mixed'",
    "--trainer.devices true": "`devices` selected with `CPUAccelerator`",
    "--trainer.accelerator tpu": "torch_xla",
    "--trainer.barebones true": "barebones",
    "--trainer.default_root_dir /proc/nowhere --trainer.logger false": "/proc/nowhere",
}


@pytest.mark.parametrize("flags", WRONG)
def test_wrong_input_ends_in_one_sentence_and_exit_code_2(refusal_of, flags):
    sentence = refusal_of("fit", "--config", CARTPOLE, *SHORT, *flags.split())
    assert re.search(WRONG[flags], sentence), sentence


REMEDIES = [
    "--num_threads null",
    "--model.num_minibatches 2",
    "--model.max_grad_norm 0.3",
    "--trainer.precision bf16-mixed",
    "--trainer.max_epochs 1",
]


@pytest.mark.parametrize("flags", REMEDIES)
def test_a_run_with_the_remedy_of_a_sentence_trains(output_of, flags):
    assert "wall time: " in output_of("fit", "--config", CARTPOLE, *SHORT, *flags.split())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("model: {init_args: {gama: 0.9}}", "the key 'gama' is unknown: did you mean model.gamma, "),
        (
            "model: {init_args: {agent: {init_args: {hiden_sizes: [8]}}}}",
            "the key 'hiden_sizes' is unknown: did you mean model.agent.hidden_sizes, model.agent.critic_hid",
        ),
        ("model: {init_args: {rpo_alpha: 0.9}}", "did you mean model.rpo_alpha of ppo_lightning.RPO?"),
        ("model: {init_args: {norm_obs: true}}", "did you mean model.agent.norm_obs"),
        ("seed_everythin: 1", "unknown: did you mean seed_everything?"),
    ],
)
def test_a_misspelt_key_names_the_right_one(refusal_of, config, message):
    assert message in refusal_of("fit", "--config", CARTPOLE, "--config", config)


def test_a_finished_run_says_so_and_makes_no_new_version(output_of, trained, tmp_path):
    for flags in (["--config", CARTPOLE, *SHORT, "--auto_resume"], ["--ckpt_path", trained]):
        *_, last = output_of("fit", *flags).splitlines()
        assert last == "The run has 1024 steps: raise data.total_timesteps (1024) to train longer."
        assert [path.name for path in (tmp_path / "runs/ppo_classic").iterdir()] == ["version_0"]


def test_a_run_that_ends_in_its_last_evaluation_resumes_with_it(run_cli, output_of, monkeypatch):
    flags = ["fit", "--config", CARTPOLE, *SHORT, "--data.rollouts_per_epoch", "2", "--auto_resume"]
    play = EvaluationLoader.__iter__

    def play_after_a_signal(loader):
        signal.raise_signal(signal.SIGTERM)
        yield from play(loader)

    with monkeypatch.context() as patch:
        patch.setattr(EvaluationLoader, "__iter__", play_after_a_signal)
        code, out, _ = run_cli(*flags)
    assert code == 143 and "Preempted after 1024 environment steps" in out
    checkpoint = torch.load(checkpoint_of(output_of(*flags)), weights_only=True)
    assert checkpoint["env_steps"] == 1024 and checkpoint["evaluation"]["episodic_return"] > 0


DQN = ["--data.num_envs=4", "--data.num_steps=128", "--model.learning_starts=9", "--model.train_frequency=1"]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            ["--config", "ppo/classic", "--data.env_id", "Acrobot-v1"],
            "is of a run on CartPole-v1 and data.env_id is Acrobot-v1",
        ),
        (
            ["--config", CARTPOLE, "--data.num_envs", "2"],
            "with data.num_envs * data.num_steps = 512, and now it is 256",
        ),
        (["--config", "dqn/classic", *DQN], "model.agent.class_path was"),
    ],
)
def test_a_finished_run_is_not_that_of_other_settings(flags, sentence, refusal_of, trained):
    assert sentence in refusal_of("fit", *SHORT, *flags, "--ckpt_path", trained)


NO_FILE = "give its file as --ckpt_path"  # Lightning would evaluate an untrained agent, with a warning
NO_RECIPE = "There is neither a file nor a bundled recipe"
REFUSED = {  # a whole command, and what the sentence must name
    f"validate --config {CARTPOLE}": NO_FILE,
    f"test --config {CARTPOLE}": NO_FILE,
    f"validate --config {CARTPOLE} --ckpt_path last": NO_FILE,
    f"test --config {CARTPOLE} --ckpt_path last": NO_FILE,
    "fit --config": "--config needs a value: the name of a bundled recipe",
    "fit --config classic/cartpol": f"{NO_RECIPE} 'classic/cartpol': did you mean ppo/classic --data.env_id",
    "fit --config cartpole": f"{NO_RECIPE} 'cartpole': did you mean ppo/classic --data.env_id CartPole-v1?",
    "fit --config configs/ppo/clasic.yaml": "did you mean ppo/classic",
    "fit --config nothing/like/it": "ppo-lightning recipes lists all names",
}


@pytest.mark.parametrize("command", REFUSED)
def test_a_wrong_command_ends_in_one_sentence(command, refusal_of):
    assert REFUSED[command] in refusal_of(*command.split())


def test_settings_are_beside_the_checkpoints_of_any_logger(output_of, tmp_path):
    output_of("fit", *SHORT, "--trainer.logger", "tests.commands.test_cli.OwnLogger")
    assert {it.name for it in (tmp_path / "own/mine/run7").iterdir()} == {"checkpoints", "cli_config.yaml"}
    assert {path.name for path in tmp_path.iterdir()} == {"own"}


class OwnLogger(Logger):
    """Logger without a folder of its own, as that of Weights & Biases."""

    name, version, save_dir = "mine", "run7", "own"

    def log_metrics(self, metrics, step=None):
        """Log nothing."""

    def log_hyperparams(self, params, *args, **kwargs):
        """Log nothing."""


@pytest.mark.parametrize("flags", [["--config", "model: ppo_lightning.SAC"], ["--model", "sac.yaml"]])
def test_an_algorithm_may_be_text_or_a_file(flags, output_of, tmp_path):
    (tmp_path / "sac.yaml").write_text("class_path: SAC")
    data = ["--data.env_id", "Pendulum-v1", "--data.num_envs", "1", "--data.total_timesteps", "512"]
    assert output_of("fit", *data, *flags, "--model.learning_starts", "500").startswith("SAC, SACAgent: ")


def test_a_run_without_a_recipe_writes_where_others_do_and_shows_no_noise(run_cli, tmp_path):
    code, out, err = run_cli("fit", *SHORT)
    assert code == 0, err
    for noise in ("FLOPs", "LeafSpec", "Deprecat", "litlogger"):
        assert noise not in out + err
    assert out.splitlines()[0] == "PPO, MLPAgent: 9155 parameters"
    assert logging.getLogger("lightning.pytorch.profilers.simple").isEnabledFor(logging.INFO)
    written = {path.name for path in (tmp_path / "runs/ppo/version_0").iterdir()}
    assert {"metrics.csv", "checkpoints", "cli_config.yaml"} <= written
    assert not (tmp_path / "lightning_logs").exists()
    options = ("logger", "enable_checkpointing", "enable_progress_bar")
    code, out, err = run_cli("fit", *SHORT, *(f"--trainer.{option}=false" for option in options))
    assert code == 0, err
    assert "SPS" not in err and "wall time" in out
    assert [path.name for path in (tmp_path / "runs/ppo").iterdir()] == ["version_0"]


@pytest.mark.integration
def test_a_video_and_an_export_show_no_noise(trained, tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    play = in_a_process(tmp_path, "play", "--ckpt_path", trained, "--output", "video.gif")
    assert play.returncode == 0 and "XDG_RUNTIME_DIR" not in play.stderr, play.stderr
    export = in_a_process(tmp_path, "export", "--ckpt_path", trained, "--onnx", "agent.onnx")
    assert export.returncode == 0 and "torchvision" not in export.stderr, export.stderr


def test_ctrl_c_ends_a_command_without_a_traceback(monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["ppo-lightning", "play"])
    for stream in ("stdout", "stderr"):  # `main` replaces them
        monkeypatch.setattr(sys, stream, getattr(sys, stream))
    monkeypatch.setattr("ppo_lightning.commands.cli.main", interrupted)
    with pytest.raises(SystemExit, match=r"^130$"):
        __main__.main()


def test_a_missing_extra_names_the_pip_command(refusal_of, monkeypatch):
    monkeypatch.setitem(sys.modules, "envpool", None)
    refusal = refusal_of("fit", "--config", CARTPOLE, "--data.backend", "envpool")
    assert "'envpool' is missing: run pip install 'ppo-lightning[envpool]'" in refusal


def in_a_process(tmp_path, *args):
    """Run the console script, as pip writes it, in a new process that prints whether PyTorch was imported."""
    script = tmp_path / "bin/ppo-lightning"
    script.parent.mkdir(exist_ok=True)
    script.write_text(
        "import sys\nfrom ppo_lightning.__main__ import main\nmain()\nprint('torch' in sys.modules)"
    )
    command = [sys.executable, str(script), *map(str, args)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)


def answered(capsys, *args):
    assert options.run_without_imports([str(arg) for arg in args])
    return capsys.readouterr().out


@pytest.mark.parametrize("command", ["fit", "validate", "test"])
def test_help_lists_the_options_of_algorithm_agent_data_and_trainer(output_of, command):
    out = output_of(command, "--config", CARTPOLE, "--help")
    for owner, prefix in (
        (PPO, "model"),
        (MLPAgent, "model.agent"),
        (RolloutDataModule, "data"),
        (L.Trainer, "trainer"),
    ):
        for name, parameter in inspect.signature(owner.__init__).parameters.items():
            if name != "self" and parameter.default is not inspect.Parameter.empty:
                assert re.search(rf" --{prefix}\.{name}[ ,]", out), name  # a comma on Python 3.13
    text = " ".join(out.split())
    assert "Discount of future rewards. (type: Annotated[float, between 0 and 1], default: 0.99)" in text
    assert "known subclasses" not in text
    for option in ("--ckpt_path", "--config", "--seed_everything", "--auto_resume", "--print_config"):
        assert option in out


def test_another_agent_has_its_own_defaults(output_of):
    """The parser keeps arguments of the default agent that the other class takes, too."""
    pictures = Bounded(0, 255, (4, 84, 84), dtype=torch.uint8)
    specs = {"MLPAgent": Unbounded((4,)), "CNNAgent": pictures}
    for agent, shared in (("MLPAgent", False), ("CNNAgent", True)):
        out = output_of("fit", "--model.agent", f"ppo_lightning.{agent}", "--print_config")
        arguments = yaml.safe_load(out)["model"]["init_args"]["agent"]["init_args"]
        made = getattr(ppo_lightning, agent)(specs[agent], Categorical(2), **arguments)
        assert (made.critic_body is None) == shared


def test_a_full_disk_ends_in_one_sentence_before_training(refusal_of, monkeypatch):
    """Without the check, TensorBoard's writer would end the run with a traceback."""
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda dir: io.FileIO("/dev/full", "w"))
    sentence = refusal_of("fit", "--config", CARTPOLE)
    assert re.search(r"The folder of the run, \S+, cannot be written: No space left on device\.", sentence)


def test_the_list_of_commands_is_whole(capsys):
    out = answered(capsys, "--help")
    assert re.findall(r"^  ([\w-]+) ", out, flags=re.MULTILINE) == [*options.SUBCOMMANDS, *options.MODULES]
    assert answered(capsys) == out
    for module in options.MODULES.values():
        assert callable(importlib.import_module(module).main)


def test_an_unknown_command_ends_in_one_sentence(capsys):
    for name, message in (
        ("train", "did you mean fit?"),
        ("benchmrk", "did you mean benchmark?"),
        ("xyz", "'xyz'."),
    ):
        with pytest.raises(SystemExit, match="2"):
            options.run_without_imports([name])
        err = capsys.readouterr().err
        assert err.startswith(f"error: there is no command {name!r}")
        assert message in err and "fit, validate, test, play, " in err


@pytest.mark.integration
def test_help_and_version_import_neither_pytorch_nor_lightning(tmp_path):
    """Importing PyTorch would take about five seconds."""
    for args, expected in (
        (["--help"], "validate"),
        (["--version"], f"ppo-lightning {ppo_lightning.__version__}"),
        (["recipes"], "classic/cartpole"),
    ):
        run = in_a_process(tmp_path, *args)
        assert run.returncode == 0, run.stderr
        assert expected in run.stdout
        assert run.stdout.splitlines()[-1] == "False", "PyTorch was imported"


@pytest.mark.integration
def test_the_console_script_finds_modules_in_the_current_folder(tmp_path):
    """``python -m ppo_lightning`` does so, too; Python puts the folder of a script on the path instead."""
    shutil.copy(ROOT / "tests/environments.py", tmp_path / "my_own.py")
    flags = ["--data.env_id", "my_own:Counter-v0", *SHORT, "--trainer.logger", "false"]
    run = in_a_process(tmp_path, "fit", "--config", CARTPOLE, *flags)
    assert run.returncode == 0, run.stderr
    assert "wall time" in run.stdout


def test_validate_and_test_need_only_the_checkpoint_and_write_no_settings(output_of, trained, monkeypatch):
    run = trained.parent.parent
    settings = (run / "cli_config.yaml").read_text()
    monkeypatch.chdir(run)
    for command, prefix in (("validate", "eval"), ("test", "test")):
        assert f"{prefix}/episodic_return_std" in output_of(command, "--ckpt_path", trained)
    assert (run / "cli_config.yaml").read_text() == settings


def test_validation_of_a_checkpoint_uses_the_seed_of_its_run(output_of):
    out = output_of("fit", "--config", CARTPOLE, *SHORT, "--seed_everything", "7")
    logged = re.search(r"deterministic: return ([\d.]+)", out).group(1)
    out = output_of("validate", "--ckpt_path", checkpoint_of(out))
    assert metric(out, "eval/episodic_return") == pytest.approx(float(logged), abs=0.05)


def test_a_checkpoint_of_another_environment_or_agent_is_refused(refusal_of, trained):
    for flags, message in (
        (["--data.env_id", "Acrobot-v1"], "trained on observations {'kind': 'Box', 'shape': [4]"),
        (["--model.agent.hidden_sizes", "[32]"], "model.agent"),
    ):
        assert message in refusal_of("validate", "--config", CARTPOLE, "--ckpt_path", trained, *flags)


def four_torchrl_cartpoles() -> EnvBase:
    return SerialEnv(4, lambda: GymEnv("CartPole-v1", categorical_action_encoding=True))


def test_any_torchrl_environment_and_transform_can_be_named_in_yaml(run_cli):
    names = "env_id: tests.commands.test_cli.four_torchrl_cartpoles, transforms: [torchrl.envs.InitTracker]"
    code, out, err = run_cli("fit", "--config", CARTPOLE, "--config", f"data: {{{names}}}", *SHORT)
    assert code == 0, err
    assert "evaluation" in out
    assert "Exception ignored" not in err


@pytest.mark.parametrize(
    ("command", "flag", "path", "reason"),
    [
        ("export", "--onnx", "folder", "folder cannot be used (Is a directory)"),
        ("export", "--onnx", "", ". cannot be used (Is a directory)"),
        ("export", "--onnx", "a" * 300, f"{'a' * 300} cannot be used (File name too long)"),
        ("export", "--hub", "file", "file cannot be used (File exists)"),
        ("export", "--hub", "/proc/x/hub", "/proc/x cannot be used (No such file or directory)"),
        ("play", "--output", "file/a.gif", "file cannot be used (File exists)"),
        ("benchmark", "--output", "file", "file/runs cannot be used (Not a directory)"),
        ("tune", "--output", "file", "file cannot be used (File exists)"),
    ],
)
def test_an_output_that_cannot_be_written_ends_in_one_sentence(
    refusal_of, request, command, flag, path, reason
):
    Path("folder").mkdir()
    Path("file").write_text("")
    Path("space.yaml").write_text("parameters: {model.gamma: {choices: [0.9]}}")
    if command in ("export", "play"):
        own = ["--ckpt_path", request.getfixturevalue("trained")]
    else:
        own = ["--recipes", CARTPOLE, *(["--space", "space.yaml"] if command == "tune" else [])]
    assert f"error: {reason}: " in refusal_of(command, *own, flag, path)
