"""A flag wins over a recipe, wherever it stands."""

import itertools
import json
from pathlib import Path

import pytest
import torch
import yaml

from ppo_lightning.commands.arguments import Arguments
from ppo_lightning.experiments.report import read_csv
from tests.commands.conftest import CARTPOLE, SHORT, checkpoint_of


def test_every_form_of_config_moves_before_the_flags_in_its_order():
    flags = ["--model.gamma", "-1", "--data.env_kwargs", '{"a": "--config"}', "--auto_resume"]
    for forms in itertools.permutations((["--config", "a: 1"], ["-cb: 1"], ["--config=c: 1"])):
        args = ["fit", *flags[:2], *forms[0], *flags[2:4], *forms[1], *flags[4:], *forms[2]]
        order = [f"--config={form[-1].removeprefix('--config=').removeprefix('-c')}" for form in forms]
        assert Arguments(args).words() == ["fit", *order, *flags]


def settings_of_an_older_version(checkpoint):
    saved = checkpoint.parent.parent / "cli_config.yaml"
    assert not {"ckpt_path", "auto_resume"} & yaml.safe_load(saved.read_text()).keys()
    old = saved.with_name("old.yaml")
    old.write_text(saved.read_text() + "ckpt_path: null\nauto_resume: false\n")
    return old


@pytest.mark.parametrize("place", ["before", "after", "between"])
@pytest.mark.parametrize("resume", ["--ckpt_path", "--auto_resume"])
def test_a_run_resumes_wherever_the_flag_stands(output_of, trained, resume, place):
    old = settings_of_an_older_version(trained)
    more = ["--data.total_timesteps", "2048", "--model.learning_rate", "1e-3", "--model.adam_eps", "1e-4"]
    flags = [resume, trained] if resume == "--ckpt_path" else [resume]
    args = {"before": [*flags, *more, "-c", old], "after": ["-c", old, *flags, *more]}
    out = output_of("fit", *args.get(place, [*flags, f"--config={old}", *more]))
    assert "Resumed from" in out
    checkpoint = torch.load(checkpoint_of(out), weights_only=True)
    assert checkpoint["env_steps"] == 2048
    group = checkpoint["optimizer_states"][0]["param_groups"][0]
    assert (group["initial_lr"], group["eps"]) == (1e-3, 1e-4)
    assert checkpoint["lr_schedulers"][0]["last_epoch"] == 4
    rows = read_csv(trained.parents[2] / "version_1/metrics.csv")
    assert min(int(row["step"]) for row in rows) > 1024, "the x axis continues"


@pytest.mark.parametrize("form", ["{} {}", "{}={}"])
@pytest.mark.parametrize("last", ["flag", "file"])
def test_a_flag_wins_over_the_file_of_its_group(output_of, tmp_path, form, last):
    """Also over a later recipe, while a later file of a group wins over a recipe."""
    given = {"data": "num_envs: 8\nnum_steps: 32", "trainer": "max_epochs: 7\nmin_epochs: 0"}
    files, flags = [], ["--data.num_envs", "2", "--trainer.max_epochs=3"]
    for group, text in given.items():
        (tmp_path / f"{group}.yaml").write_text(text)
        files += form.format(f"--{group}", f"{group}.yaml").split()
    args = [*flags, *files] if last == "file" else [*files, *flags]
    out = output_of("fit", *args, "--config", CARTPOLE, "--print_config")
    read = yaml.safe_load(out)
    assert (read["data"]["num_envs"], read["data"]["num_steps"]) == (2, 32)
    assert (read["trainer"]["max_epochs"], read["trainer"]["min_epochs"]) == (3, 0)


def test_a_first_start_with_auto_resume_takes_the_given_checkpoint_and_later_ones_the_newest(
    output_of, trained
):
    flags = ["--name", "mine", "--auto_resume", "--ckpt_path", trained, "--data.total_timesteps"]
    for total, resumed_from in (2048, trained), (3072, "runs/mine/version_0"):
        out = output_of("fit", "--config", CARTPOLE, *flags, total)
        assert f"Resumed from {resumed_from}" in out
        assert torch.load(checkpoint_of(out), weights_only=True)["env_steps"] == total
    assert "Resumed from" not in output_of("fit", "--name", "new", "--auto_resume", *SHORT)


@pytest.mark.parametrize("flags", [["--config", "first/cartpole"], ["--model", "DQN"]])
def test_a_run_resumes_with_what_is_left_out(output_of, flags):
    out = output_of("fit", *flags, "--data.total_timesteps", 2048)
    resumed = output_of("fit", "--ckpt_path", checkpoint_of(out), "--data.total_timesteps", 4096)
    saved = [torch.load(checkpoint_of(x), weights_only=True)["hyper_parameters"] for x in (out, resumed)]
    assert saved[0] == saved[1] and len(saved[0]["_left_out"]) >= 1


@pytest.mark.parametrize("flags", [["--config", "first/cartpole"], ["--model", "DQN"]])
def test_a_run_resumes_with_sizes_that_are_left_out(output_of, flags):
    """The command reads them before the algorithm is the Trainer's."""
    for total in 2048, 4096:
        out = output_of("fit", *flags, "--auto_resume", "--data.total_timesteps", total)
    assert "Resumed from" in out


def test_the_default_root_dir_moves_the_default_loggers_and_the_checkpoints(output_of, tmp_path):
    flags = ["--trainer.default_root_dir", tmp_path / "there", "--name", "mine", "--auto_resume"]
    for total in 1024, 2048:  # the second run resumes
        out = output_of("fit", *SHORT, *flags, "--data.total_timesteps", total)
    assert f"Resumed from {tmp_path}/there/runs/mine/version_0/" in out
    assert {*(tmp_path / "there/runs").iterdir()} >= {tmp_path / "there/runs/tensorboard"}
    saved = tmp_path / "there/runs/mine/version_1/cli_config.yaml"
    assert f"{tmp_path}/there/runs/mine/version_2/" in output_of("fit", "--config", saved)
    out = output_of("fit", "--config", saved, "--name", "other")
    assert f"{tmp_path}/there/runs/other/version_0/" in out
    assert not Path("runs").exists()


def test_a_saved_configuration_has_the_seed_of_the_resumed_run(output_of, trained):
    flags = ["--ckpt_path", trained, "--seed_everything", "7", "--data.total_timesteps", "1536"]
    output_of("fit", "--config", CARTPOLE, *flags)
    saved = yaml.safe_load((trained.parents[2] / "version_1/cli_config.yaml").read_text())
    assert saved["seed_everything"] == 1


def test_a_saved_configuration_is_of_its_place(output_of, tmp_path):
    output_of("fit", *SHORT, "--trainer.default_root_dir", "there")
    saved = ["--config", "there/runs/ppo/version_0/cli_config.yaml", "--data.total_timesteps", "2048"]
    assert "Resumed from there/runs/ppo/version_0/" in output_of("fit", *saved, "--auto_resume")
    logger = ["--trainer.logger", "CSVLogger", "--trainer.logger.name", "ppo", "--trainer.logger.save_dir"]
    output_of("fit", *SHORT, *logger, "own", "--trainer.default_root_dir", "elsewhere")
    assert Path("own/ppo/version_0/metrics.csv").exists(), "its name is that of an algorithm, and its own"


def test_auto_resume_knows_a_class_as_the_environment(output_of):
    env_id = {"class_path": "gymnasium.envs.classic_control.CartPoleEnv"}
    env_id["init_args"] = {"render_mode": "rgb_array"}
    flags = ["--data.env_id", json.dumps(env_id), *SHORT, "--auto_resume"]
    assert "Resumed from" not in output_of("fit", *flags)
    assert "Resumed from" in output_of("fit", *flags, "--data.total_timesteps", "2048")
