"""Damaged, edited or malicious checkpoints: one sentence, no import, no memory use."""

import contextlib
import os
import random
import re
import resource
import shlex
import shutil
import sys
from pathlib import Path

import gymnasium
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from ppo_lightning import PPO, ConfigError, MLPAgent, RolloutDataModule, last_checkpoint
from ppo_lightning.checkpoints.file import CHECKPOINT, read_checkpoint, write_atomically
from ppo_lightning.checkpoints.io import CheckedCheckpointIO
from ppo_lightning.video.record import record_video
from tests.checkpoints.conftest import DATA, MISSING, SMALL
from tests.helpers import CARTPOLE, RECIPE, Forked

SHORT = CARTPOLE | {"total_timesteps": 128}

MALICIOUS = "a_module_of_the_attacker"


@pytest.fixture
def attacker(tmp_path, monkeypatch):
    """Write a module; return a function that tells whether the module was imported."""
    text = f"open({str(tmp_path / 'imported')!r}, 'w')\nclass Evil:\n    pass\ndef make():\n    pass\n"
    (tmp_path / f"{MALICIOUS}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield (tmp_path / "imported").exists
    sys.modules.pop(MALICIOUS, None)


WEIGHT = "agent.critic.weight"
STRUCTURE = {f"no {key}": (key, MISSING) for key in CHECKPOINT}
STRUCTURE |= {
    "not finite": ("state_dict", WEIGHT, torch.full((1, 64), torch.nan)),
    "not finite, too": ("optimizer_states", 0, "state", 0, "exp_avg", torch.tensor([torch.inf])),
}


@pytest.mark.parametrize("name", STRUCTURE)
def test_a_checkpoint_with_another_structure_ends_in_one_sentence(name, edited, refusal_of, make_trainer):
    path = edited(*STRUCTURE[name])
    for command, *flags in (["validate"], ["fit", "--config", RECIPE, *SMALL], ["export", "--onnx", "a"]):
        error = refusal_of(command, *flags, "--ckpt_path", path)
        assert "cannot be read as a checkpoint: " in error
    for load in (
        PPO.load_from_checkpoint,
        lambda path: make_trainer().validate(PPO(), RolloutDataModule(), ckpt_path=path),
    ):
        with pytest.raises(ConfigError, match="cannot be read as a checkpoint: ") as error:
            load(path)
        assert str(error.value).count("\n") == 0


OBSERVATION, ACTION = (("agent", f"{kind}_spec") for kind in ("observation", "action"))
ARGUMENTS = ("agent", "init_args")
SPACE, WEIGHTS, BUILD = "names a space of", "where the module has", "cannot be built"
AGENTS = {  # the sentence, and the entry with its value
    "a giant argument": ("does not have", *ARGUMENTS, {"x" * 10**7: 1}),
    "giant layers": (WEIGHTS, *ARGUMENTS, "hidden_sizes", [10**6, 10**6]),
    "a large observation": (SPACE, *OBSERVATION, "shape", [10**8]),
    "giant choices": (SPACE, *ACTION, "n", 10**12),
    "giant one-hot choices": (SPACE, *OBSERVATION, {"kind": "MultiCategorical", "n": [10**12]}),
    "negative sizes": (SPACE, *OBSERVATION, "shape", [-1]),
    "a function for a type": (SPACE, *OBSERVATION, "dtype", "load"),
    "no such type": (BUILD, *OBSERVATION, "dtype", "float33"),
    "no such kind": (BUILD, *OBSERVATION, "kind", "Sphere"),
    "a spec without a shape": (BUILD, *OBSERVATION, "shape", MISSING),
    "an argument of another type": ("hidden_sizes is", *ARGUMENTS, "hidden_sizes", "wide"),
    "other layers": (WEIGHTS, *ARGUMENTS, "hidden_sizes", [32, 32]),
    "another class of ours": ("import", "agent", "class_path", "ppo_lightning.models.bodies.MLP"),
    "no class": ("import", "agent", "class_path", ""),
    "a missing weight": (WEIGHTS, "state_dict", WEIGHT, MISSING),
    "a weight of another shape": (WEIGHTS, "state_dict", WEIGHT, torch.ones(2)),
}


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_that_does_not_fit_its_weights_ends_in_one_sentence_and_takes_no_memory(
    name, edited, refusal_of
):
    sentence, *entry = AGENTS[name]
    path, before = edited(*entry), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for command in ("validate", "play"):
        found = refusal_of(command, "--ckpt_path", path)
        assert re.search(sentence, found)
        assert len(found) < 1000
    with pytest.raises(ConfigError, match=sentence):
        PPO.load_from_checkpoint(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000, "kB"


def test_flipped_bits_are_refused_or_without_effect(run, tmp_path):
    """PyTorch ignores the checksums; without our check, half of the copies loaded other weights."""
    whole, generator, refusals = read_checkpoint(run), random.Random(1), 0
    for copy in range(60):
        data = bytearray(run.read_bytes())
        for _ in range((1, 4, 30)[copy % 3]):
            data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        (tmp_path / "flipped.ckpt").write_bytes(data)
        try:
            read = read_checkpoint(tmp_path / "flipped.ckpt")
        except ConfigError:
            refusals += 1
            continue
        assert all(torch.equal(read["state_dict"][key], value) for key, value in whole["state_dict"].items())
        assert repr({**read, "state_dict": 0}) == repr({**whole, "state_dict": 0})
    assert refusals > 30


def test_cut_checkpoints_are_refused(run, tmp_path):
    data, generator = run.read_bytes(), random.Random(2)
    for length in [0, 1, len(data) - 1, *(generator.randrange(len(data)) for _ in range(20))]:
        (tmp_path / "cut.ckpt").write_bytes(data[:length])
        with pytest.raises(ConfigError, match="cannot be read as a checkpoint"):
            PPO.load_from_checkpoint(tmp_path / "cut.ckpt")


# What a checkpoint names

CLASS = {"class_path": f"{MALICIOUS}.Evil"}
CODE = {
    "a function that makes environments": (DATA, "env_id", f"{MALICIOUS}.make"),
    "a module of environments": (DATA, "env_id", f"{MALICIOUS}:CartPole-v1"),
    "a class that is an environment": (DATA, "env_id", CLASS),
    "transforms": (DATA, "transforms", [CLASS]),
    "an object for the environment": (DATA, "env_kwargs", {"x": [CLASS]}),
    "an algorithm": ("hyper_parameters", "_class_path", f"{MALICIOUS}.Evil"),
    "an instantiator": ("hyper_parameters", "_instantiator", f"{MALICIOUS}.make"),
    "an agent": ("agent", "class_path", f"{MALICIOUS}.Evil"),
    "an agent among the hyperparameters": ("hyper_parameters", "agent", CLASS),
    "an agent's name among the hyperparameters": ("hyper_parameters", "agent", f"{MALICIOUS}.Evil"),
    "a hyperparameter": ("hyper_parameters", "gamma", f"{MALICIOUS}.make"),
    "an argument of the agent": ("agent", "init_args", "head", CLASS),
}
COMMANDS = {
    "fit": ("--data.total_timesteps", "256"),
    "validate": (),
    "test": (),
    "play": ("--max_frames", "3", "--output", "a.gif"),
    "export": ("--hub", "hub"),
}
UNREAD = {name for name, entry in CODE.items() if entry[1] in ("_instantiator", "agent")}


@pytest.mark.parametrize("name", CODE)
def test_a_checkpoint_imports_and_calls_nothing(name, edited, refusal_of, run_cli, attacker, make_trainer):
    path = edited(*CODE[name])
    for command, flags in COMMANDS.items():
        if command not in ("play", "export") and name not in UNREAD:
            error = refusal_of(command, "--ckpt_path", path, *flags)
            assert f"name it yourself: ppo-lightning {command} --ckpt_path {path} " in error
        else:
            quiet = ["--trainer.logger", "false"] * (command == "fit")
            assert run_cli(command, "--ckpt_path", path, *flags, *quiet)[0] in (0, 2)
        assert not attacker(), command
    refusal = pytest.raises(ConfigError, match="give these settings")
    with refusal if CODE[name][0] == DATA else contextlib.nullcontext():
        RolloutDataModule.load_from_checkpoint(path)
    given = {"env_id": "CartPole-v1", "transforms": None, "env_kwargs": None}
    assert RolloutDataModule.load_from_checkpoint(path, **given).num_steps == 16
    assert not attacker()
    try:
        PPO.load_from_checkpoint(path)
    except ConfigError:
        assert name in ("an agent", "an argument of the agent", "a hyperparameter")
    if name not in ("an agent", "an argument of the agent"):
        data = RolloutDataModule(eval_episodes=1)
        make_trainer(limit_val_batches=1).validate(PPO(), data, ckpt_path=path)
    assert not attacker()


def test_a_function_without_arguments_is_not_called(edited, refusal_of, output_of):
    """``os.abort`` would end this process."""
    path = edited(DATA, "env_id", "os.abort")
    for command in ("fit", "validate", "play"):
        assert "env_id 'os.abort'" in refusal_of(command, "--ckpt_path", path)
    for written in (["--onnx", "a.onnx"], ["--hub", "hub"]):
        out = output_of("export", "--ckpt_path", path, *written)
        assert f"{written[0][2:]}: " in out, "an export does not need the environment"


NAMED = {  # what a checkpoint names, and the command that the sentence shows
    "validate": ("--data.env_id", (DATA, "env_id", f"{MALICIOUS}:CartPole-v1")),
    "play": ("--env_id", (DATA, "env_id", f"{MALICIOUS}:CartPole-v1")),
    "test": ("--model.agent", ("agent", "class_path", f"{MALICIOUS}.Mine")),
    "export": ("--model.agent", ("agent", "class_path", f"{MALICIOUS}.Mine")),
}


@pytest.mark.parametrize("command", NAMED)
def test_the_shown_command_names_the_code_and_works(
    command, edited, attacker, refusal_of, output_of, tmp_path
):
    with (tmp_path / f"{MALICIOUS}.py").open("a") as file:
        file.write("from ppo_lightning import MLPAgent\nclass Mine(MLPAgent):\n    pass\n")
    flag, entry = NAMED[command]
    path = edited(*entry)
    error = refusal_of(command, "--ckpt_path", path, *COMMANDS[command])
    shown = shlex.split(error.partition("name it yourself: ppo-lightning ")[2])
    assert shown == [command, "--ckpt_path", path, *COMMANDS[command], flag, entry[-1]]
    assert not attacker()
    output_of(*shown)
    assert attacker()


def test_code_that_no_flag_names_is_named_by_the_settings_of_the_run(run, edited, refusal_of):
    edited(DATA, "transforms", [CLASS], name=run.with_name("edited.ckpt"))
    error = refusal_of("validate", "--ckpt_path", run.with_name("edited.ckpt"))
    assert error.strip().endswith(f"--config {run.parents[1]}/cli_config.yaml")


def test_classes_and_environments_that_moved_are_found(edited, output_of, monkeypatch):
    rows = {
        "ppo_lightning.former.MLPAgent": "ppo_lightning.models.mlp.MLPAgent",
        "ppo_lightning.toys:CartPole-v1": "ppo_lightning.envs.tasks:CartPole-v1",
    }
    monkeypatch.setattr("ppo_lightning.checkpoints.moved.MOVED", rows)
    path = edited("agent", "class_path", "ppo_lightning.former.MLPAgent")
    path = edited(DATA, "env_id", "ppo_lightning.toys:CartPole-v1", source=path)
    assert "eval/episodic_return" in output_of("validate", "--ckpt_path", path)
    assert type(PPO.load_from_checkpoint(path).agent) is MLPAgent


def test_flags_override_what_a_checkpoint_names(edited, attacker, output_of):
    path = edited(DATA, "env_id", f"{MALICIOUS}.make")
    output_of("validate", "--ckpt_path", path, "--data.env_id", "CartPole-v1")
    output_of("play", "--ckpt_path", path, "--env_id", "CartPole-v1", "--output", "a.gif")
    assert not attacker()


def test_settings_of_the_trainer_are_read_with_config_only(run, tmp_path, attacker, output_of):
    """They may name callbacks. The run prints where the settings are."""
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    path = shutil.copy(run, tmp_path / "run/checkpoints")
    text = (run.parents[1] / "cli_config.yaml").read_text()
    text = text.replace("callbacks: null", f"callbacks: [{{class_path: {MALICIOUS}.Evil}}]")
    for folder in (tmp_path, tmp_path / "run"):
        (folder / "cli_config.yaml").write_text(text)
    out = output_of("fit", "--ckpt_path", path, "--data.total_timesteps", "256")
    assert "(those of the run: --config cli_config.yaml, in its folder)" in out
    assert not attacker()


# Names of files


def test_a_name_with_a_colon_is_a_name(edited, refusal_of, output_of):
    path = edited(DATA, "eval_episodes", 3, name="step:1.ckpt")
    flags = ["--data.env_kwargs", '{"max_episode_steps": 7}']
    assert "7.0" in output_of("validate", "--ckpt_path", path, *flags)
    for name in ("C:\\x.ckpt", "hpc", "best", "step:2.ckpt"):
        assert "is not a file" in refusal_of("validate", "--ckpt_path", name)
    address = "http://127.0.0.1:9/x.ckpt"
    assert "cannot be read as a checkpoint" in refusal_of("validate", "--ckpt_path", address)
    output_of("validate", "--ckpt_path", f"file://{Path(path).resolve()}")


def test_the_last_of_several_paths_counts(run, refusal_of):
    paths = ["--ckpt_path", run, "--ckpt_path=other.ckpt"]
    assert "'other.ckpt' is not a file" in refusal_of("validate", *paths)


def test_a_run_is_not_resumed_from_weights_only(run, edited, refusal_of):
    flags = ["--trainer.logger", "false", "--data.total_timesteps", "256"]
    shutil.copy(run, "whole.ckpt")
    os.utime("whole.ckpt", (0, 0))
    path = edited("optimizer_states", MISSING)
    assert last_checkpoint(".") == "whole.ckpt", "the other one is newer"
    path_of_class = f"{Forked.__module__}.{Forked.__qualname__}"
    edited(DATA, "env_id", path_of_class, name="of_a_class.ckpt")
    assert (
        last_checkpoint(".", env_id=Forked) == last_checkpoint(".", env_id=path_of_class) == "of_a_class.ckpt"
    )
    assert PPO.load_from_checkpoint(path).env_steps == 128
    assert "weights only (no optimizer_states)" in refusal_of("fit", "--ckpt_path", path, *flags)


WRITER = """
import os, signal
from ppo_lightning.checkpoints import io as checkpoint_io
os.fsync = lambda file: (print("writes", flush=True), signal.pause())
checkpoint_io.CheckedCheckpointIO().save_checkpoint(checkpoint_io.read_checkpoint("last.ckpt"), "last.ckpt")
"""


def test_a_killed_writer_leaves_the_previous_file_and_the_next_save_replaces_its_own(
    run, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    shutil.copy(run, "last.ckpt")
    writer = Forked(tmp_path, exec, WRITER, {})
    try:
        writer.wait_for("writes\n")
    finally:
        writer.kill()
        writer.communicate()
    assert {path.name for path in tmp_path.iterdir()} == {"last.ckpt", ".last.ckpt.part"}
    assert last_checkpoint(tmp_path) == str(tmp_path / "last.ckpt")
    CheckedCheckpointIO().save_checkpoint(read_checkpoint("last.ckpt"), "last.ckpt")
    assert {path.name for path in tmp_path.iterdir()} == {"last.ckpt"}


def test_runs_that_save_in_one_folder_at_once_keep_their_own_weights(tmp_path, monkeypatch):
    """The second run begins and ends its file while the first one writes."""
    monkeypatch.setattr(os, "fsync", lambda _: monkeypatch.undo() or write_atomically(2, tmp_path / "b.ckpt"))
    write_atomically(1, tmp_path / "a.ckpt")
    assert [torch.load(tmp_path / f"{name}.ckpt") for name in "ab"] == [1, 2]


# Where files are written, and which one is found


@pytest.mark.parametrize(
    ("write", "file"),
    [
        (lambda module: module.trainer.save_checkpoint("~/a.ckpt"), "a.ckpt"),
        (lambda module: module.save_pretrained("~/agent"), "agent/model.ckpt"),
        (lambda module: module.to_onnx("~/a.onnx"), "a.onnx"),
        (lambda module: record_video(module.agent, module.data.factory, "~/a.gif", max_frames=2), "a.gif"),
    ],
)
def test_a_tilde_is_the_home_directory(fit, tmp_path, monkeypatch, write, file):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    write(fit(SHORT))
    assert (tmp_path / "home" / file).is_file() and not Path("~").exists()
    if file == "a.ckpt":
        assert PPO.load_from_checkpoint("~/a.ckpt").env_steps == 128
        assert last_checkpoint("~") == str(tmp_path / "home/a.ckpt")
    elif file.endswith("model.ckpt"):
        assert PPO.from_pretrained("~/agent").env_steps == 128


@pytest.mark.parametrize("times", [lambda i: 1.7e9, lambda i: 1.7e9 - i, lambda i: 1.7e9 + i])
def test_a_copy_does_not_change_which_checkpoint_is_the_newest(fit, tmp_path, times):
    """The first run has more steps; a link of the copy leads nowhere."""
    for name, steps in (("first", 192), ("second", 128)):
        checkpoints = ModelCheckpoint(dirpath=tmp_path / name, save_top_k=-1)
        data = SHORT | {"rollouts_per_epoch": 1, "total_timesteps": steps}
        fit(data, enable_checkpointing=True, callbacks=[checkpoints])
    paths = sorted(tmp_path.rglob("*.ckpt"))
    assert [path.name for path in paths][-2:] == ["epoch=0-step=64.ckpt", "epoch=1-step=128.ckpt"]
    (tmp_path / "gone.ckpt").symlink_to(tmp_path / "nowhere.ckpt")
    for i, path in enumerate(paths):
        os.utime(path, (times(i), times(i)))
    assert last_checkpoint(tmp_path) == str(paths[-1])


class Away(gymnasium.Wrapper):
    def reset(self, **options):
        Path("away").mkdir(exist_ok=True)
        os.chdir("away")
        return super().reset(**options)


@pytest.mark.parametrize("logger", [CSVLogger("logs"), TensorBoardLogger("logs"), False])
def test_the_folders_of_a_run_stay_where_it_began(fit, tmp_path, monkeypatch, logger):
    monkeypatch.chdir(tmp_path)
    options = {"logger": logger, "enable_checkpointing": True, "default_root_dir": "logs"}
    fit(SHORT | {"env_id": lambda: Away(gymnasium.make("CartPole-v1"))}, **options)
    files = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) >= (2 if logger else 1) and {path.parts[0] for path in files} == {"logs"}


def test_names_of_checkpoints_hold_steps_beyond_31_bits(fit, tmp_path):
    class Late(PPO):
        def on_train_start(self):
            self.progress.env_steps = self.progress.extra_steps = 3 * 10**10

    checkpoint = ModelCheckpoint(tmp_path, monitor="step", mode="max")
    fit(SHORT, enable_checkpointing=True, callbacks=[checkpoint], ppo=Late)
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["epoch=0-step=30000000128.ckpt"]
    assert read_checkpoint(checkpoint.best_model_path)["env_steps"] == 3 * 10**10 + 128


def test_a_folder_with_another_readme_is_left_alone(fit, tmp_path):
    module = fit(SHORT)
    (tmp_path / "curve.png").write_text("mine")
    for _ in range(2):
        module.save_pretrained(tmp_path)
    (tmp_path / "model.ckpt").unlink()
    (tmp_path / "README.md").write_text("# My project")
    with pytest.raises(ConfigError, match="is no model card of ppo_lightning"):
        module.save_pretrained(tmp_path)
    assert not (tmp_path / "model.ckpt").exists()
