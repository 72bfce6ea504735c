"""Search spaces, studies that several processes share, and the command in real processes."""

import argparse
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from ppo_lightning import ConfigError
from ppo_lightning.experiments import tune
from ppo_lightning.experiments.jobs import jobs_of
from ppo_lightning.experiments.report import read_csv
from ppo_lightning.experiments.runner import Runner
from ppo_lightning.experiments.tune import SHARES, Tuner, read_space
from tests.helpers import ROOT, Forked, command_line, forks

optuna = pytest.importorskip("optuna")
CARTPOLE, ACROBOT = Path("classic/cartpole"), Path("classic/acrobot")  # two tasks of one recipe
SPACE = """
targets:
  CartPole-v1: [0, 500]
  Acrobot-v1: [-500, -80]
parameters:
  model.learning_rate: {low: 1e-4, high: 1e-2, log: true}
  model.clip_vloss: {choices: [true, false]}
  model.agent.hidden_sizes: {choices: [[64, 64], [32]]}
  model.update_epochs: {low: 2, high: 8, step: 2}
"""
SHORT = (
    *("--data.total_timesteps", "2048", "--data.eval_episodes", "1"),
    *("--data.env_kwargs.max_episode_steps", "100"),
)
State = optuna.trial.TrialState


@pytest.fixture
def space_file(tmp_path):
    path = tmp_path / "space.yaml"
    path.write_text(SPACE)
    return path


def tuner_of(folder, flags=(), **options):
    """Return the part of a study of one process."""
    names = {"recipes": [CARTPOLE, ACROBOT], "space": folder / "space.yaml", "output": folder / "out"}
    numbers = {"trials": 1, "seeds": 2, "first_seed": 1, "workers": 1, "threads": 1}
    options = argparse.Namespace(**names | numbers | {"storage": None, "study": "tune"} | options)
    options.output.mkdir(exist_ok=True)
    return Tuner(options, flags, *read_space(options.space))


def finish(folder, flags, returns, num_trial=0, random_steps=0, seeds=(1, 2)):
    """Write the files of a trial's finished runs: a return after each eighth of the steps of a recipe.

    Those of the second seed are in reverse. RND makes random steps before the training.
    """
    runner = Runner(folder / f"out/trials/{num_trial}", workers=1, threads=1)
    for job in jobs_of([CARTPOLE, ACROBOT], seeds, [], flags):
        path = runner.folder_of(job) / "runs/r/version_0/metrics.csv"
        path.parent.mkdir(parents=True)
        path.with_name("cli_config.yaml").touch()  # of a `fit`
        runner.record_attempt(job)
        values = returns[job.label][:: 1 if job.seed == seeds[0] else -1]
        steps = [random_steps + 500_000 * (k + 1) // 8 for k in range(len(values))]
        rows = [f"{step},{value},1000" for step, value in zip(steps, values, strict=True)]
        path.write_text("\n".join(["step,charts/avg_episodic_return,charts/SPS", *rows]))
        runner.record(job, finished=True)


# The search space


def test_values_are_sampled_within_the_space(tmp_path, space_file):
    tuner = tuner_of(tmp_path, flags=("--data.num_envs", "2"))
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    found = [tuner.flags_of(study.ask()) for _ in range(200)]
    assert all(flags[:2] == ("--data.num_envs", "2") for flags in found)
    drawn = [dict(zip(flags[::2], flags[1::2], strict=True)) for flags in found]
    rates = np.log10([float(values["--model.learning_rate"]) for values in drawn])
    assert -4 <= rates.min() < -3.8 and -2.2 < rates.max() <= -2
    assert abs(np.median(rates) + 3) < 0.2, "on a logarithmic scale"
    assert {values["--model.update_epochs"] for values in drawn} == {"2", "4", "6", "8"}
    assert {values["--model.clip_vloss"] for values in drawn} == {"true", "false"}
    assert {values["--model.agent.hidden_sizes"] for values in drawn} == {"[64, 64]", "[32]"}


def test_a_step_that_is_no_integer_makes_numbers(space_file):
    space_file.write_text("parameters: {model.gamma: {low: 0, high: 1, step: 0.25}}")
    ((name, distribution),) = read_space(space_file)[0].items()
    assert name == "model.gamma" and distribution.step == 0.25


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("parameters: {model.gamma: {low: 1, high: 0}}", "model.gamma: .*low"),
        ("parameters: {model.gamma: {low: 0, high: 1, log: true}}", "model.gamma: .*log"),
        ("parameters: {model.gamma: {low: 0, high: 1, hihg: 1}}", "model.gamma: .*hihg"),
        ("parameters: {model.gamma: {low: 0}}", "model.gamma: .*high"),
        ("parameters: {model.gamma: {choices: [1], low: 0}}", "model.gamma: .*low"),
        ("parameters: {model.gamma: {choices: []}}", "model.gamma: .*choices"),
        ("parameters: {model.gamma: {choices: [1]}}\ntargets: {A-v0: [1, 0]}", "A-v0: .*not below"),
        ("parameters: {model.gamma: {choices: [1]}}\ntargets: {A-v0: 1}", "A-v0: .*two returns"),
        ("model: {gamma: 1}", "parameters"),
    ],
)
def test_a_space_that_is_wrong_is_refused_in_one_sentence(text, sentence, space_file):
    space_file.write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        read_space(space_file)


# Studies


def test_a_study_is_joined_with_the_same_settings_only(tmp_path, space_file):
    tuner_of(tmp_path).study.ask()
    assert len(tuner_of(tmp_path, workers=2).study.trials) == 1
    assert not tuner_of(tmp_path, study="other", seeds=2).study.trials
    with pytest.raises(ConfigError, match=r"other settings \(seeds\)"):
        tuner_of(tmp_path, seeds=3)
    with pytest.raises(ConfigError, match=r"other settings \(first_seed\)"):
        tuner_of(tmp_path, first_seed=2)
    with pytest.raises(ConfigError, match=r"other settings \(flags\)"):
        tuner_of(tmp_path, flags=("--data.num_envs", "2"))


@pytest.mark.parametrize("storage", ["sqlite:////no/such/folder/study.db", "study.journal"])
def test_a_storage_that_cannot_be_opened_is_refused(storage, tmp_path, space_file):
    with pytest.raises(ConfigError, match=f"--storage {storage} cannot be opened"):
        tuner_of(tmp_path, storage=storage)


# Trials of one process


@pytest.mark.parametrize("first_seed", [1, 11])
def test_scores_are_means_over_recipes_after_equal_shares_of_each_seed(first_seed, tmp_path, space_file):
    returns = {"cartpole": ["", *range(100, 450, 50)], "acrobot": [-500, -290, *[-80] * 6]}
    finish(tmp_path, (), returns, seeds=(first_seed, first_seed + 1))
    tuner = tuner_of(tmp_path, first_seed=first_seed)
    tuner.run()
    (trial,) = tuner.study.trials
    first = [(100 / 500 + 0.5) / 2, (200 / 500 + 1) / 2, (300 / 500 + 1) / 2, (400 / 500 + 1) / 2]
    second = [(350 / 500 + 1) / 2, (250 / 500 + 1) / 2, (150 / 500 + 1) / 2, (100 / 500 + 0) / 2]
    expected = first + [(first[3] + score) / 2 for score in second]
    assert trial.intermediate_values == pytest.approx(dict(enumerate(expected, start=1)))
    assert trial.value == pytest.approx((first[3] + second[3]) / 2) and trial.params == {}


def test_the_last_score_is_that_of_the_end_whatever_random_steps_came_first(tmp_path, space_file):
    finish(tmp_path, (), {"cartpole": [*range(100, 500, 50)], "acrobot": [-500] * 8}, random_steps=100_000)
    tuner = tuner_of(tmp_path)
    tuner.run()
    assert tuner.study.trials[0].value == pytest.approx((450 / 500 + 100 / 500) / 2 / 2)


@pytest.mark.parametrize("is_start", [False, True])
def test_a_hopeless_trial_is_pruned_but_never_the_start(is_start, tmp_path, space_file):
    tuner = tuner_of(tmp_path, trials=6)
    good = dict.fromkeys(range(1, 2 * SHARES + 1), 0.9)
    for _ in range(5):
        tuner.study.add_trial(optuna.trial.create_trial(value=0.9, intermediate_values=good))
    values = {
        "model.learning_rate": 1e-3,
        "model.clip_vloss": "true",
        "model.agent.hidden_sizes": "[32]",
        "model.update_epochs": 2,
    }
    tuner.study.enqueue_trial({} if is_start else values, user_attrs={"start": True} if is_start else {})
    if not is_start:  # the study has a start
        tuner.study.add_trial(
            optuna.trial.create_trial(state=State.FAIL, user_attrs={"start": True}, system_attrs={})
        )
    flags = () if is_start else tuner.flags_of(optuna.trial.FixedTrial(values))
    finish(tmp_path, flags, {"cartpole": [10] * 8, "acrobot": [-500] * 8}, num_trial=5)
    tuner.run()
    trial = tuner.study.trials[5]
    assert trial.state == (State.COMPLETE if is_start else State.PRUNED)
    assert len(trial.intermediate_values) == (2 * SHARES if is_start else 1)


def test_a_recipe_without_an_episode_end_has_no_score(tmp_path, space_file):
    finish(tmp_path, (), {"cartpole": [""] * 8, "acrobot": [-80] * 8})
    with pytest.raises(ConfigError, match="no episode ended"):
        tuner_of(tmp_path).run()


def test_runs_of_another_study_are_not_used(tmp_path, space_file):
    finish(tmp_path, ("--data.num_envs", "2"), {"cartpole": [10] * 8, "acrobot": [-500] * 8})
    with pytest.raises(ConfigError, match="other settings"):
        tuner_of(tmp_path).run()


@pytest.mark.integration
def test_a_run_that_fails_prunes_its_trial_and_the_start_ends_the_study(tmp_path, space_file):
    """A batch of 512 rows has no three minibatches of one size."""
    options = {"recipes": [CARTPOLE], "seeds": 1, "trials": 2}
    space_file.write_text("parameters: {model.num_minibatches: {choices: [3]}}")
    tuner = tuner_of(tmp_path, SHORT, **options)
    tuner.run()
    assert [trial.state for trial in tuner.study.trials] == [State.COMPLETE, State.PRUNED]
    tuner = tuner_of(tmp_path, (*SHORT, "--model.num_minibatches", "3"), output=tmp_path / "other", **options)
    with pytest.raises(ConfigError, match="cartpole-1 failed"):
        tuner.run()


def hold_a_trial(folder, pipe):
    def hold(trial):
        trial.set_user_attr("runs", trial.number)
        time.sleep(1)  # the first heartbeat is written
        pipe.send(trial.number)
        time.sleep(60)

    tuner = tuner_of(folder)
    tuner.study.enqueue_trial({}, user_attrs={"start": True})
    tuner.study.optimize(hold, n_trials=1)


@pytest.mark.integration
def test_the_trial_of_a_killed_process_is_retried_after_its_heartbeats_end(tmp_path, space_file, monkeypatch):
    receive, send = forks().Pipe(False)
    process = forks().Process(target=hold_a_trial, args=(tmp_path, send), daemon=True)
    process.start()
    assert receive.poll(60) and receive.recv() == 0
    process.kill()
    process.join()
    finish(tmp_path, (), {"cartpole": [100] * 8, "acrobot": [-80] * 8})
    monkeypatch.setattr(tune, "HEARTBEAT", 1)
    began = time.monotonic()
    tuner = tuner_of(tmp_path)
    tuner.run()
    assert time.monotonic() - began > 2 * tune.HEARTBEAT - 1, "a living process would keep its trial"
    failed, again = tuner.study.trials
    assert (failed.state, again.state) == (State.FAIL, State.COMPLETE)
    assert again.user_attrs == {"start": True, "runs": 0}, "the runs of the first attempt"


# The command


GAMMA = "parameters: {model.gamma: {choices: [0.9, 0.99]}}"


@pytest.mark.parametrize(
    ("space", "args", "sentence"),
    [
        (SPACE, ["--trials", "0"], "must be at least 1."),
        (SPACE, ["--seed_everything", "3"], "a benchmark has --recipes, --seeds"),
        (SPACE, ["--data.env_id", "Acrobot-v1", "--model.gama", "0.9"], "did you mean --model.gamma"),
        (GAMMA.replace("gamma", "gama"), [], "did you mean --model.gamma"),
        (GAMMA.replace("model.", ""), [], "'--gamma' is unknown: did you mean --model.gamma"),
        (GAMMA.replace("0.99", "high"), [], "gamma: Expected a float. Got value: high"),
        (f"{GAMMA}\ntargets: {{CartPole-v0: [0, 500]}}", [], "CartPole-v1: they name CartPole-v0"),
        (GAMMA, ["--recipes", CARTPOLE, ACROBOT], "Acrobot-v1, CartPole-v1: they name none"),
    ],
)
def test_settings_are_checked_before_the_first_trial(space, args, sentence, space_file, refusal_of):
    space_file.write_text(space)
    base = ["tune", "--recipes", CARTPOLE, "--space", space_file, "--output", "out"]
    assert sentence in refusal_of(*base, *args)
    assert not space_file.with_name("out").exists()


def run_fast(*args):
    """Run ``tune`` with fast heartbeats."""
    tune.HEARTBEAT = 3
    tune.FRESH_SEEDS = 1
    command_line("tune", *args)


def start(folder, *flags):
    own = ["--recipes", str(CARTPOLE), str(ACROBOT), "--space", str(folder / "space.yaml"), "--seeds", "1"]
    own += ["--first_seed", "5"]
    return Forked(folder, run_fast, *own, "--output", str(folder / "out"), *SHORT, *flags)


def wait_for_metrics(folder, process):
    while not list(folder.glob("out/trials/*/runs/*/runs/*/version_0/metrics.csv")):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.1)


@pytest.mark.slow
def test_a_study_is_completed_although_a_process_is_killed(tmp_path, space_file):
    """Two processes share the study; the first is killed during a run, and the second retries its trial."""
    first = start(tmp_path, "--trials", "3")
    wait_for_metrics(tmp_path, first)
    second = start(tmp_path, "--trials", "3")
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=60)
    out, errors = second.communicate(timeout=500)
    assert second.returncode == 0, errors
    study = tuner_of(tmp_path, SHORT, seeds=1, first_seed=5).study
    finished = [trial for trial in study.trials if trial.state in (State.COMPLETE, State.PRUNED)]
    (lost,) = (trial for trial in study.trials if trial.state == State.FAIL)
    (again,) = (trial for trial in finished if "start" in trial.user_attrs)
    assert len(finished) == 3 and again.user_attrs["runs"] == lost.number
    assert study.best_value >= again.value
    for name in ("cartpole", "acrobot"):
        recipe = tmp_path / f"out/best/{name}.yaml"
        command = [sys.executable, "-m", "ppo_lightning", "fit", "--config", str(recipe), "--print_config"]
        printed = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout
        assert yaml.safe_load(printed)["data"]["total_timesteps"] == 2048
        settings = yaml.safe_load(printed)["model"]["init_args"]
        for key in ("learning_rate", "update_epochs"):
            assert settings[key] == study.best_params.get(f"model.{key}", settings[key])
    if study.best_trial.number != again.number:
        for side in ("start", f"trial_{study.best_trial.number}"):
            runs = read_csv(tmp_path / f"out/comparison/{side}/runs.csv")
            assert {run["seed"] for run in runs} == {"6"}, "a seed that no trial has used"
        assert "| cartpole | 1, 1 |" in out


@pytest.mark.slow
def test_an_interrupted_study_resumes(tmp_path, space_file):
    first = start(tmp_path, "--trials", "1")
    wait_for_metrics(tmp_path, first)
    first.send_signal(signal.SIGINT)
    out, _ = first.communicate(timeout=60)
    assert first.returncode == 130
    assert "the same command resumes the study" in out
    out, errors = start(tmp_path, "--trials", "1").communicate(timeout=200)
    assert "No trial is better than the recipes as they are." in out, errors
    assert "Resumed from" in (tmp_path / "out/trials/0/runs/cartpole-5/log.txt").read_text()
