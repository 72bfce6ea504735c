"""Search spaces, studies that several processes share, and the command in real processes."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from ppo_lightning import ConfigError
from ppo_lightning.commands import cli
from ppo_lightning.commands import study as studies
from ppo_lightning.commands.report import read_csv
from ppo_lightning.commands.runner import DONE, Runner
from ppo_lightning.commands.search_space import (
    flags_of,
    read_space,
    value_in,
    values_of_flags,
    with_values,
)
from ppo_lightning.commands.tuner import AGGREGATES, SHARES, ActiveTrial, Tuner

optuna = pytest.importorskip("optuna")
ROOT = Path(__file__).parents[2]
CARTPOLE, ACROBOT = (ROOT / f"configs/classic/{name}.yaml" for name in ("cartpole", "acrobot"))
SPACE = """
targets:
  CartPole-v1: [0, 500]
  Acrobot-v1: [-500, -80]
parameters:
  model.learning_rate: {low: 1e-4, high: 1e-2, log: true}
  model.clip_vloss: {choices: [true, false]}
  model.clip_coef: {low: 0.1, high: 0.3, when: {model.clip_vloss: true}}
  model.update_epochs: {low: 2, high: 8, step: 2}
"""
SHORT = ["--data.total_timesteps", "2048", "--data.eval_episodes", "1"]
State = optuna.trial.TrialState


def space_of(folder, text=SPACE):
    path = folder / "space.yaml"
    path.write_text(text)
    return read_space(path)


# The search space


def test_values_are_sampled_within_the_space(tmp_path):
    space = space_of(tmp_path)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    drawn = [space.suggest(study.ask()) for _ in range(200)]
    rates = np.log10([values["model.learning_rate"] for values in drawn])
    assert -4 <= rates.min() < -3.8 and -2.2 < rates.max() <= -2
    assert abs(np.median(rates) + 3) < 0.2, "on a logarithmic scale"
    assert {values["model.update_epochs"] for values in drawn} == {2, 4, 6, 8}
    for values in drawn:
        assert ("model.clip_coef" in values) == values["model.clip_vloss"]


def test_lists_can_be_choices(tmp_path):
    space = space_of(tmp_path, "parameters: {model.agent.hidden: {choices: [[64, 64], [256]]}}")
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    drawn = [space.suggest(study.ask())["model.agent.hidden"] for _ in range(20)]
    assert [64, 64] in drawn and [256] in drawn
    assert flags_of({"model.agent.hidden": [64, 64]}) == ("--model.agent.hidden", "[64, 64]")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("parameters: {gamma: {low: 0, high: 1}}", "gamma: the name must begin with model., data."),
        ("parameters: {model.gamma: {low: 1, high: 0}}", "low must be below high"),
        ("parameters: {model.gamma: {low: 0, high: 1, log: true}}", "above 0 for log"),
        ("parameters: {model.gamma: {low: 0, hihg: 1}}", "give choices, or low and high"),
        ("parameters: {model.gamma: {low: 0}}", "None is not a number"),
        ("parameters: {model.gamma: {choices: [1], low: 0}}", "give choices, or low and high"),
        ("parameters: {model.gamma: {choices: [1], when: {model.x: 1}}}", "when names model.x"),
        ("parameters: {model.gamma: {choices: [1]}}\ntargets: {A-v0: [1, 0]}", "targets of A-v0 must be two"),
        ("model: {gamma: 1}", "needs the key parameters"),
        ("parameters: {model.gamma: {choices: [1]}, model.gamma: {choices: [2]}}", "twice"),
    ],
)
def test_a_space_that_is_wrong_is_refused_in_one_sentence(text, sentence, tmp_path):
    with pytest.raises(ConfigError, match=sentence):
        space_of(tmp_path, text)


def test_a_recipe_takes_values_and_keeps_the_others():
    recipe = yaml.safe_load(CARTPOLE.read_text())
    values = {"model.gamma": 0.9, "model.agent.hidden": [32], "data.num_envs": 8}
    values["model.class_path"] = "ppo_lightning.RPO"
    changed = with_values(recipe, values)
    assert changed["model"]["init_args"]["gamma"] == 0.9
    assert changed["model"]["class_path"] == "ppo_lightning.RPO"
    assert changed["model"]["init_args"]["agent"]["init_args"] == {"hidden": [32]}
    assert changed["data"] == recipe["data"] | {"num_envs": 8}
    assert all(value_in(changed, name) == value for name, value in values.items() if "class" not in name)
    assert recipe == yaml.safe_load(CARTPOLE.read_text()), "the recipe itself is unchanged"


def test_values_that_a_recipe_leaves_out_are_the_defaults(tmp_path):
    recipe = yaml.safe_load(CARTPOLE.read_text())
    assert value_in(recipe, "model.learning_rate") == 2.5e-4
    assert value_in(recipe, "model.agent.no_such_thing") is None
    space = space_of(tmp_path)
    values = space.values_of([recipe, recipe])
    assert values == {
        "model.learning_rate": 2.5e-4,
        "model.clip_vloss": True,
        "model.clip_coef": 0.2,
        "model.update_epochs": 4,
    }
    assert space.values_of([recipe, with_values(recipe, {"model.clip_coef": 0.1})]) is None, "recipes differ"
    assert space.values_of([with_values(recipe, {"model.clip_coef": 0.5})]) is None, "outside of the space"


def test_flags_and_values_are_each_other():
    values = {
        "model.anneal_lr": False,
        "data.num_envs": 3,
        "model.learning_rate": 1e-3,
        "data.env_id": "A-v0",
    }
    assert values_of_flags(flags_of(values)) == values
    assert values_of_flags(["--data.num_envs=3"]) == {"data.num_envs": 3}
    for flags in (["--auto_resume"], ["--seed_everything", "3"]):
        with pytest.raises(ConfigError, match="only --model"):
            values_of_flags(flags)


def test_scores_are_linear_between_the_targets(tmp_path):
    space = space_of(tmp_path)
    assert [space.score("Acrobot-v1", value) for value in (-500, -290, -80)] == [0, 0.5, 1]
    assert space.score("Other-v0", 7) == 7
    scores = [0.0, 0, 0, 1, 1, 10, 10, 10]
    assert [AGGREGATES[name](scores) for name in ("mean", "median", "iqm")] == [4, 1, 3]


# Studies


@pytest.fixture(params=["journal", "sqlite"])
def storage(request, tmp_path):
    return str(tmp_path / "study.journal") if request.param == "journal" else f"sqlite:///{tmp_path}/study.db"


def opened(storage, **settings):
    return studies.open_study(storage, "tune", optuna.pruners.NopPruner(), settings)


def test_a_study_is_joined_with_the_same_settings_only(storage):
    opened(storage, flags="", seeds=3).ask()
    assert len(opened(storage, flags="", seeds=3).trials) == 1
    with pytest.raises(ConfigError, match=r"other settings \(seeds\)"):
        opened(storage, flags="", seeds=2)


def test_a_storage_that_cannot_be_opened_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be opened"):
        opened(f"sqlite:///{tmp_path}/no/such/folder/study.db")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be opened"):
        opened(str(tmp_path / "file/study.journal"))


def test_a_trial_is_queued_again_once(storage):
    study, other = opened(storage), opened(storage)
    study.enqueue_trial({"x": 0.25}, user_attrs={"start": True})
    trial = study.ask()
    trial.suggest_float("x", 0, 1)
    (seen,) = other.trials
    studies.requeue(study, study.trials[0])
    studies.requeue(other, seen)
    assert [trial.state for trial in study.trials] == [State.FAIL, State.WAITING]
    again = study.ask()
    assert again.suggest_float("x", 0, 1) == 0.25
    assert again.user_attrs == {"start": True, "runs": 0}
    studies.requeue(study, study.trials[1])
    assert study.trials[2].user_attrs["runs"] == 0, "the runs of the first trial"


def hold_a_trial(storage, pipe):
    trial = opened(storage).ask()
    trial.set_user_attr("owner", studies.owner())
    trial.suggest_float("x", 0, 1)
    pipe.send(trial.number)
    time.sleep(60)


@pytest.mark.integration
def test_a_killed_process_is_found_and_a_living_one_is_not(storage, monkeypatch):
    monkeypatch.setattr(studies, "DEAD", 0.3)
    context = multiprocessing.get_context("spawn")
    processes = []
    for _ in range(2):
        receive, send = context.Pipe(False)
        processes.append(context.Process(target=hold_a_trial, args=(storage, send), daemon=True))
        processes[-1].start()
        assert receive.poll(60)
        receive.recv()
    study = opened(storage)
    stale = studies.StaleTrials(study)
    assert stale.find(set()) == []
    processes[0].kill()
    processes[0].join()
    assert stale.find(set()) == [], "its runs may be saving"
    time.sleep(0.5)
    assert [trial.number for trial in stale.find(set())] == [0]
    assert stale.find({0}) == [], "not the trials of this process"
    processes[1].kill()


def test_a_silent_process_on_another_machine_is_given_up(storage, monkeypatch):
    monkeypatch.setattr(studies, "SILENT", 0.3)
    study = opened(storage)
    trial = study.ask()
    trial.set_user_attr("owner", {"machine": "elsewhere", "pid": 1, "token": ""})
    stale = studies.StaleTrials(study)
    for beat in range(3):
        trial.set_user_attr("beat", beat)
        assert stale.find(set()) == []
        time.sleep(0.2)
    time.sleep(0.3)
    assert [found.number for found in stale.find(set())] == [0]


# Trials of one process


def tuner_of(folder, pruner=None, num_seeds=2, recipes=(CARTPOLE, ACROBOT)):
    study = optuna.create_study(direction="maximize", pruner=pruner or optuna.pruners.NopPruner())
    runner = Runner(folder, workers=1, threads=1)
    runner.display.say = lambda line: None
    return Tuner(study, runner, space_of(folder), recipes, (), num_seeds, 10, "mean")


def progress_of(tuner, job, returns, total=500_000):
    """Write the metrics of a run: a return after each eighth of its steps."""
    path = tuner.runner.folder_of(job) / "runs/r/version_0/metrics.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [f"{total * (eighth + 1) // 8},{value},1000" for eighth, value in enumerate(returns)]
    path.write_text("\n".join(["step,charts/episodic_return,charts/SPS", *rows]) + "\n")


def test_scores_are_reported_after_equal_shares_of_all_recipes(tmp_path):
    tuner = tuner_of(tmp_path)
    tuner.enqueue_start()
    active = tuner._ask()
    assert [[job.name for job in jobs] for jobs in active.jobs] == [
        [f"{name}_trial_0-{seed}" for name in ("cartpole", "acrobot")] for seed in (1, 2)
    ]
    assert all(job.flags == () for jobs in active.jobs for job in jobs), "the recipes as they are"
    cartpole, acrobot = active.jobs[0]
    progress_of(tuner, cartpole, [50, 100, 150, 200, 250])
    tuner._advance(active)
    assert active.step == 0, "Acrobot has not begun"
    progress_of(tuner, acrobot, [-500, -290, -290])
    tuner._advance(active)
    (trial,) = tuner.study.trials
    assert trial.intermediate_values == {1: pytest.approx((100 / 500 + 0.5) / 2)}
    progress_of(tuner, acrobot, [-500, -290, -290, -80])
    tuner._advance(active)
    assert tuner.study.trials[0].intermediate_values[2] == pytest.approx((200 / 500 + 1) / 2)


@pytest.mark.parametrize("is_start", [False, True])
def test_a_hopeless_trial_is_pruned_within_a_run_but_never_the_start(is_start, tmp_path):
    tuner = tuner_of(tmp_path, optuna.pruners.MedianPruner(n_startup_trials=1), recipes=(CARTPOLE,))
    good = dict.fromkeys(range(1, 2 * SHARES + 1), 0.9)
    tuner.study.add_trial(optuna.trial.create_trial(value=0.9, intermediate_values=good))
    if is_start:
        tuner.enqueue_start()
    active = tuner._ask()
    progress_of(tuner, active.jobs[0][0], [10, 20, 20])
    tuner._advance(active)
    state = tuner.study.trials[1].state
    assert state == (State.RUNNING if is_start else State.PRUNED)
    assert (active in tuner.active) == is_start


def test_a_run_that_fails_prunes_its_trial_and_the_start_ends_the_study(tmp_path):
    tuner = tuner_of(tmp_path)
    active = tuner._ask()
    tuner.runner.failed[active.jobs[0][1]] = 1
    tuner._advance(active)
    (trial,) = tuner.study.trials
    assert trial.state == State.PRUNED and trial.user_attrs["error"] == "acrobot_trial_0-1 failed"
    assert not tuner.active
    tuner.enqueue_start()
    start = tuner._ask()
    tuner.runner.failed[start.jobs[0][0]] = 1
    with pytest.raises(ConfigError, match="fail as they are"):
        tuner._advance(start)


def test_a_run_that_is_killed_resumes_once(tmp_path):
    tuner = tuner_of(tmp_path)
    active = tuner._ask()
    cartpole, acrobot = active.jobs[0]
    tuner.runner.failed[acrobot] = -signal.SIGKILL
    tuner._advance(active)
    assert active in tuner.active and not tuner.runner.failed
    tuner.runner.folder_of(cartpole).mkdir(parents=True)
    (tuner.runner.folder_of(cartpole) / DONE).write_text("{}")
    assert tuner._next_job() == acrobot
    tuner.runner.failed[acrobot] = -signal.SIGKILL
    tuner._advance(active)
    assert tuner.study.trials[0].state == State.PRUNED


def test_no_trial_is_asked_beyond_the_number(tmp_path):
    tuner = tuner_of(tmp_path)
    tuner.num_trials = 2
    assert all(isinstance(tuner._ask(), ActiveTrial) for _ in range(2))
    assert tuner._ask() is None
    studies.requeue(tuner.study, tuner.study.trials[0])
    tuner._next_ask = 0
    again = tuner._ask()
    assert again.jobs[0][0].name == "cartpole_trial_0-1", "a queued trial is not beyond it"


def test_runs_of_another_study_are_not_used(tmp_path):
    tuner = tuner_of(tmp_path)
    active = tuner._ask()
    job = active.jobs[0][0]
    tuner.runner.folder_of(job).mkdir(parents=True)
    tuner.runner.record(job)
    (tuner.runner.folder_of(job) / DONE).write_text("{}")
    with pytest.raises(ConfigError, match="other settings"):
        tuner_of(tmp_path)._ask()


# The command


def test_settings_are_checked_before_the_first_trial(tmp_path, capsys):
    space_of(tmp_path)
    base = ["tune", "--recipes", str(CARTPOLE), "--space", str(tmp_path / "space.yaml")]
    base += ["--output", str(tmp_path / "out")]
    for args, sentence in (
        (["--trials", "0"], "--trials (0) must be at least 1."),
        (["--seed_everything", "3"], "only --model.*"),
        (
            ["--data.env_id", "Acrobot-v1", "--model.gama", "0.9"],
            "'gama' is unknown: did you mean model.gamma, ",
        ),
    ):
        with pytest.raises(SystemExit, match="2"):
            cli.main([*base, *args])
        assert sentence in capsys.readouterr().err
    space_of(tmp_path, "parameters: {model.gamma: {choices: [0.9, 0.99]}}")
    with pytest.raises(SystemExit, match="2"):
        cli.main([*base, "--recipes", str(CARTPOLE), str(ACROBOT)])
    assert "several environments need targets; add CartPole-v1" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def start(folder, *flags):
    """Start ``tune`` in a new process."""
    own = ["--recipes", str(CARTPOLE), str(ACROBOT), "--space", str(folder / "space.yaml"), "--seeds", "1"]
    own += ["--output", str(folder / "out"), *SHORT, "--data.env_kwargs.max_episode_steps", "100"]
    command = [sys.executable, "-m", "ppo_lightning", "tune", *own, *flags]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    return subprocess.Popen(command, **pipes)


@pytest.mark.slow
def test_a_study_is_completed_although_a_process_is_killed(tmp_path):
    """Two processes share the study; the first is killed during a run, and the second takes its trial up."""
    space_of(tmp_path)
    flags = ["--trials", "3", "--fresh_seeds", "2"]
    first = start(tmp_path, *flags)
    while not list(tmp_path.glob("out/runs/*/runs/*/version_0/metrics.csv")):
        assert first.poll() is None, first.communicate()[1]
        time.sleep(0.1)
    second = start(tmp_path, *flags)
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=60)
    out, errors = second.communicate(timeout=500)
    assert second.returncode == 0, errors
    study = opened(str(tmp_path / "out/study.journal"))
    finished = [trial for trial in study.trials if trial.state in (State.COMPLETE, State.PRUNED)]
    assert len(finished) == 3
    (lost,) = (trial for trial in study.trials if trial.state == State.FAIL)
    (again,) = (trial for trial in finished if "runs" in trial.user_attrs)
    assert again.user_attrs == again.user_attrs | {"runs": lost.number, "start": True}
    assert "is taken up again: its process has ended" in errors
    assert "recipes as they are" in errors
    starting = next(trial for trial in finished if "start" in trial.user_attrs)
    assert study.best_value >= starting.value
    for name in ("cartpole", "acrobot"):
        recipe = tmp_path / f"out/best_{name}.yaml"
        assert f"trial {study.best_trial.number} of ppo-lightning tune" in recipe.read_text()
        command = [sys.executable, "-m", "ppo_lightning", "fit", "--config", str(recipe), "--print_config"]
        printed = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout
        for key, value in values_of_flags(flags_of(study.best_params)).items():
            assert yaml.safe_load(printed)["model"]["init_args"][key.removeprefix("model.")] == value
    for plot in ("optimization_history", "parallel_coordinate"):
        assert (tmp_path / f"out/{plot}.png").stat().st_size > 10_000
        assert "plotly" in (tmp_path / f"out/{plot}.html").read_text()
    if study.best_trial.number != starting.number:
        for side in ("start", "best"):
            runs = read_csv(tmp_path / f"out/comparison/{side}/runs.csv")
            assert {run["seed"] for run in runs} == {"2", "3"}, "seeds that no trial has used"
        assert "fresh seeds" in out and "| cartpole | 2, 2 |" in out


@pytest.mark.slow
def test_an_interrupted_study_resumes(tmp_path):
    space_of(tmp_path)
    first = start(tmp_path, "--trials", "1")
    while not list(tmp_path.glob("out/runs/*/runs/*/version_0/metrics.csv")):
        assert first.poll() is None, first.communicate()[1]
        time.sleep(0.1)
    first.send_signal(signal.SIGINT)
    out, _ = first.communicate(timeout=60)
    assert first.returncode == 130
    assert "the same command resumes the study" in out
    states = [trial.state for trial in opened(str(tmp_path / "out/study.journal")).trials]
    assert states == [State.FAIL, State.WAITING], "in the queue at once"
    out, errors = start(tmp_path, "--trials", "1").communicate(timeout=200)
    assert "No trial is better than the recipes as they are." in out, errors
    tries = (tmp_path / "out/runs/cartpole_trial_0-1/seconds.txt").read_text().split()
    assert len(tries) == 2, "the run was resumed"
