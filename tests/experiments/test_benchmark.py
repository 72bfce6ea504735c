"""Benchmarks in real processes, their files and reports, and the comparison of two benchmarks."""

import contextlib
import fcntl
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from ppo_lightning import DQN, ConfigError
from ppo_lightning.experiments import benchmark as command
from ppo_lightning.experiments import curves, provenance
from ppo_lightning.experiments import report as reports
from ppo_lightning.experiments.compare import compare
from ppo_lightning.experiments.curves import curve
from ppo_lightning.experiments.jobs import Job, jobs_of
from ppo_lightning.experiments.report import (
    family_of,
    interval,
    published,
    read_csv,
    results_of,
    table,
    write_csv,
)
from ppo_lightning.experiments.runner import Runner, metrics_of
from tests.helpers import ROOT, Forked, command_line

RECIPE = ROOT / "configs/ppo/classic.yaml"
SHORT = ["--data.total_timesteps", "8192", "--data.eval_episodes", "1"]


def start(folder, *flags, seeds=("1", "2")):
    """Start a benchmark in a process."""
    own = ["--recipes", str(RECIPE), "--seeds", *seeds, "--workers", "2", "--output", str(folder)]
    return Forked(folder.parent, command_line, "benchmark", *own, *SHORT, *flags)


def trained_in(folder):
    """Return the processes of runs in folders below ``folder``."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found += [process.name] * (f"\0{folder}/" in (process / "cmdline").read_text())
    return found


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("benchmark") / "whole"
    process = start(folder)
    out, errors = process.communicate(timeout=180)
    assert process.returncode == 0, errors
    return folder, out, errors


@pytest.mark.integration
def test_a_benchmark_writes_runs_curves_a_table_and_pictures(finished):
    folder, out, errors = finished
    runs, curves = read_csv(folder / "runs.csv"), read_csv(folder / "curves.csv")
    assert [(run["recipe"], run["env_id"], run["seed"], run["env_steps"]) for run in runs] == [
        ("classic", "CartPole-v1", "1", "8192"),
        ("classic", "CartPole-v1", "2", "8192"),
    ]
    assert all(10 < float(run["episodic_return"]) < 200 and float(run["eval_return"]) >= 8 for run in runs)
    assert {point["seed"] for point in curves} == {"1", "2"}
    steps, seconds = (
        [float(point[key]) for point in curves if point["seed"] == "1"] for key in ("env_steps", "seconds")
    )
    assert steps == sorted(steps) and steps[-1] == 8192
    assert seconds == sorted(seconds) and 0 < seconds[-1] <= float(runs[0]["wall_seconds"])
    for name in ("curves_env_steps", "curves_seconds"):
        assert (folder / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
        assert "<svg" in (folder / f"{name}.svg").read_text()[:1000]
    report = (folder / "report.md").read_text()
    mean = np.mean([float(run["episodic_return"]) for run in runs])
    assert f"| classic | CartPole-v1 | 2 | 8 192 | {mean:.1f} ±" in report
    assert "490.0 ± 6.1 (500 000 steps)" in report, "CleanRL's"
    for part in ("commit ", "torch ", "processors", "ppo-lightning benchmark --recipes", "runs at a time: 2"):
        assert part in report
    assert report.startswith(out.split("\n\n")[0].rstrip()[:200])
    assert "classic-1 has finished" in errors and "classic-2 has finished" in errors


@pytest.mark.integration
def test_flags_may_add_a_logger(tmp_path):
    logger = ["--trainer.logger+", "TensorBoardLogger", "--trainer.logger.save_dir", str(tmp_path / "mine")]
    process = start(tmp_path / "runs", *logger, "--data.total_timesteps", "1024", seeds=["1"])
    _, errors = process.communicate(timeout=180)
    assert process.returncode == 0, errors
    assert list(tmp_path.glob("mine/**/events.*")) and len(read_csv(tmp_path / "runs")) == 1


@pytest.mark.parametrize(
    ("named", "flags", "threads", "num_steps"),
    [
        ("flags", ["--model.gamma", "0.5"], "1", 128),
        ("threads", [], "2", 128),
        ("recipe", [], "1", 64),
    ],
)
def test_a_folder_with_runs_of_other_settings_is_refused(
    named, flags, threads, num_steps, finished, tmp_path, capsys
):
    """A report of these runs that names the present command would be wrong."""
    folder, recipe = finished[0], tmp_path / "classic.yaml"
    recipe.write_text(RECIPE.read_text().replace("num_steps: 128", f"num_steps: {num_steps}"))
    before = (folder / "report.md").read_text()
    args = ["--recipes", str(recipe), "--seeds", "1", "2", "--threads", threads, "--output", str(folder)]
    with pytest.raises(ConfigError, match=rf"classic-1 .*other settings \({named}\): .*--output"):
        command.main([*args, *SHORT, *flags])
    assert capsys.readouterr().out == ""
    assert (folder / "report.md").read_text() == before


def test_a_comment_in_a_recipe_is_no_other_setting(finished, tmp_path):
    recipe = tmp_path / "classic.yaml"
    recipe.write_text(f"# A comment.\n{RECIPE.read_text()}")
    Runner(finished[0], 1, 1).require_same_settings(jobs_of([recipe], [1, 2], [], tuple(SHORT)))


def test_a_report_leaves_no_run_out(finished):
    """It would lose the rows of seed 1 in runs.csv."""
    with pytest.raises(ConfigError, match=r"runs that the report would leave out \(classic-1\): add"):
        command.main(["--recipes", str(RECIPE), "--seeds", "2", "3", "--output", str(finished[0]), *SHORT])


def test_a_report_has_the_commits_and_versions_of_its_runs(finished, tmp_path, monkeypatch):
    """Seed 2 was interrupted and resumed by another version of the package."""
    folder, jobs = tmp_path / "resumed", jobs_of([RECIPE], [1, 2], [], tuple(SHORT))
    shutil.copytree(finished[0], folder)
    first = json.loads((folder / "runs/classic-2/job.json").read_text())["sources"][0]["commit"]
    monkeypatch.setattr(provenance, "commit", lambda: "c0ffee0000")
    runner = Runner(folder, 1, 1)
    runner.record_attempt(jobs[1])
    reports.write_report(runner, jobs, ["ppo-lightning", "benchmark"])
    old, new = (line for line in (folder / "report.md").read_text().splitlines() if "commit" in line)
    assert old.startswith(f"- commit {first}; Python ")
    assert new.startswith("- commit c0ffee0000; Python ")
    commits = [run["commit"] for run in read_csv(folder / "runs.csv")]
    assert commits == [first, f"{first} + c0ffee0000"]


@pytest.mark.integration
def test_a_run_that_a_signal_ended_alone_resumes(finished, tmp_path):
    """As one whose process is killed on a shared machine, but not its benchmark."""
    process = start(tmp_path / "it", "--data.rollouts_per_epoch", "2", seeds=("1",))
    while not list(tmp_path.glob("it/runs/*/runs/ppo_classic/version_0/checkpoints/*.ckpt")):
        assert process.poll() is None
        time.sleep(0.05)
    for number in trained_in(tmp_path / "it"):
        os.kill(int(number), signal.SIGTERM)
    _, errors = process.communicate(timeout=180)
    assert process.returncode == 0, errors
    assert list(tmp_path.glob("it/runs/*/runs/ppo_classic/version_1"))
    (run,), whole = read_csv(tmp_path / "it/runs.csv"), read_csv(finished[0] / "runs.csv")[0]
    for name in ("env_steps", "episodic_return"):
        assert run[name] == whole[name]


@pytest.mark.slow
def test_a_finished_benchmark_trains_nothing_again(finished):
    folder, out, _ = finished
    began = time.monotonic()
    again, _ = start(folder).communicate(timeout=60)
    assert again == out
    assert time.monotonic() - began < 30


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_benchmark_resumes(number, finished, tmp_path):
    flags = ["--data.total_timesteps", "8192", "--data.rollouts_per_epoch", "2"]
    process = start(tmp_path / "broken", *flags)
    while not list(tmp_path.glob("broken/runs/*/runs/ppo_classic/version_0/checkpoints/*.ckpt")):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    process.communicate(timeout=60)
    end = time.monotonic() + 20
    while (left := trained_in(tmp_path)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not left, "no run goes on by itself"
    assert list(tmp_path.glob("broken/runs/*/runs/ppo_classic/version_0/checkpoints/preempted.ckpt"))
    if number == signal.SIGTERM:
        assert process.returncode == 143
        return
    again = start(tmp_path / "broken", *flags)
    _, errors = again.communicate(timeout=180)
    assert again.returncode == 0, errors
    broken, whole = (read_csv(folder / "runs.csv") for folder in (tmp_path / "broken", finished[0]))
    for a, b in zip(broken, whole, strict=True):
        assert a["episodic_return"] == b["episodic_return"] and a["env_steps"] == b["env_steps"]
    curves = read_csv(tmp_path / "broken/curves.csv")
    for seed in "12":
        steps, seconds = (
            [float(p[key]) for p in curves if p["seed"] == seed] for key in ("env_steps", "seconds")
        )
        assert steps == sorted(set(steps)), "each step once"
        assert seconds == sorted(seconds)


@pytest.mark.slow
def test_a_run_that_fails_is_named_and_the_others_are_reported(tmp_path):
    flags = ["--env_ids", "CartPole-v1", "Nonsense-v1", "--data.total_timesteps", "1024"]
    process = start(tmp_path / "fails", *flags, seeds=["1"])
    out, errors = process.communicate(timeout=180)
    assert process.returncode == 1
    assert "failed with code 2: error: env_id 'Nonsense-v1' is not an environment" in errors
    assert "| classic CartPole-v1 | CartPole-v1 | 1 |" in out
    assert "1 of 2 runs have finished." in (tmp_path / "fails/report.md").read_text()


def test_recipes_that_are_not_there_or_have_the_same_name_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"neither a file nor a bundled recipe .*nothing.yaml"):
        jobs_of([tmp_path / "nothing.yaml"], [1], [], ())
    other = tmp_path / "classic.yaml"
    other.write_text(RECIPE.read_text())
    for name in ("a b", "a_b"):  # whose folders would be one
        (tmp_path / f"{name}.yaml").write_text(RECIPE.read_text())
    with pytest.raises(ConfigError, match="two are called a_b"):
        jobs_of([tmp_path / "a b.yaml", tmp_path / "a_b.yaml"], [1], [], ())
    with pytest.raises(ConfigError, match="two are called classic"):
        jobs_of([RECIPE, other], [1], [], ())


def test_a_folder_has_one_benchmark_at_a_time(refusal_of, tmp_path):
    (tmp_path / "one/runs").mkdir(parents=True)
    with (tmp_path / "one/runs/lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sentence = refusal_of("benchmark", "--recipes", RECIPE, "--seeds", "1", "--output", "one", *SHORT)
    assert "Another benchmark runs in one." in sentence
    assert os.listdir(tmp_path / "one/runs") == ["lock"]


def test_a_benchmark_without_workers_is_refused(refusal_of):
    assert "at least 1" in refusal_of("benchmark", "--recipes", RECIPE, "--workers", "0")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[1, 2]", "is no recipe"),
        ("", "is no recipe"),
        ("data: null", "is no recipe"),
        ("model: !!python/object:os.abort {}", "is not YAML"),
    ],
)
def test_what_is_no_recipe_is_refused_before_the_first_run(text, sentence, tmp_path):
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(ConfigError, match=rf"^--recipes \S+recipe\.yaml {sentence}"):
        jobs_of([tmp_path / "recipe.yaml"], [1], [], ())


def test_a_recipe_without_settings_of_data_has_the_defaults(tmp_path):
    (tmp_path / "recipe.yaml").write_text("model: {init_args: {gamma: 0.9}}")
    (job,) = jobs_of([tmp_path / "recipe.yaml"], [1], [], ())
    assert (job.settings["env_id"], job.settings["total_timesteps"]) == ("CartPole-v1", 500_000)


SET = ["--seed_everything", "--seed_everything=3", "--num_threads", "--ckpt_path", "--auto_resume"]
SET += ["--name", "--trainer.logger=false", "--trainer.default_root_dir", "--print_config"]  # no metrics
SET += ["--config", "-c", "--data=it.yaml", "--trainer"]  # files, which the report does not read


@pytest.mark.parametrize("flag", SET)
def test_what_a_benchmark_sets_is_refused(flag):
    """Otherwise all seeds of a recipe would be the same run."""
    with pytest.raises(ConfigError, match=rf"^{flag}: a benchmark has --recipes, --seeds"):
        jobs_of([RECIPE], [1, 2], [], (flag,))
    assert jobs_of([RECIPE], [1], [], ("--trainer.logger+", "WandbLogger"))


def test_a_seed_that_is_given_twice_runs_once():
    assert [job.seed for job in jobs_of([RECIPE], [2, 1, 2], [], ())] == [2, 1]


def test_flags_override_the_recipe():
    (job,) = jobs_of([RECIPE], [3], ["Acrobot-v1"], ("--data.total_timesteps=10", "--data.num_envs", "7"))
    assert job.name == "classic_Acrobot-v1-3"
    settings = job.settings
    assert (settings["env_id"], settings["total_timesteps"], settings["num_envs"]) == ("Acrobot-v1", 10, 7)


def write_attempts(folder, *attempts):
    """Write the metrics of attempts, with the settings that `fit` saves beside them."""
    for version, rows in enumerate(attempts):
        path = folder / f"runs/r/version_{version}/metrics.csv"
        path.parent.mkdir(parents=True)
        path.with_name("cli_config.yaml").touch()
        names = dict.fromkeys(name for row in rows for name in row)
        write_csv(path, [dict.fromkeys(names, "") | row for row in rows])


def throughputs(*rows):
    return [{"step": step, "charts/SPS": throughput} for step, throughput in rows]


@pytest.mark.parametrize(
    ("attempts", "expected"),
    [
        # The first attempt was killed after 300 steps; its checkpoint was saved after 200 steps.
        (
            ([(100, 50), (200, 50), (300, 50)], [(300, 100), (400, 100)]),
            [(100, 2.0), (200, 4.0), (300, 5.0), (400, 6.0)],
        ),
        # The newest checkpoint, of step 250, was damaged after the second attempt.
        (
            ([(100, 50), (200, 50), (300, 50)], [(300, 100), (400, 100)], [(200, 50), (300, 50)]),
            [(100, 2.0), (200, 4.0), (300, 6.0)],
        ),
        # The first attempt was killed before its first checkpoint.
        (([(100, 100), (200, 100)], [(100, 200), (200, 200)]), [(100, 0.5), (200, 1.0)]),
    ],
)
def test_metrics_of_a_resumed_run_have_each_step_once_and_its_time(tmp_path, attempts, expected):
    write_attempts(tmp_path, *(throughputs(*rows) for rows in attempts))
    assert [(int(row["step"]), float(row["seconds"])) for row in metrics_of(tmp_path)] == expected


@pytest.mark.parametrize("more", [[], [(300, 50)]])
def test_an_attempt_that_begins_with_an_evaluation_keeps_the_rows_before_it(tmp_path, more):
    """A signal cut the evaluation after 200 steps, perhaps the last one of the run."""
    evaluation = {"step": 200, "eval/episodic_return": 7.0}
    write_attempts(tmp_path, throughputs((100, 50), (200, 50)), [evaluation, *throughputs(*more)])
    found = [(int(row["step"]), row.get("eval/episodic_return", "")) for row in metrics_of(tmp_path)]
    assert found == [(100, ""), (200, ""), (200, "7.0"), *((step, "") for step, _ in more)]


def test_an_evaluation_in_the_folder_of_a_run_is_no_attempt_of_it(tmp_path):
    write_attempts(tmp_path, throughputs((100, 50)), [{"step": 0, "eval/episodic_return": 1.0}])
    (tmp_path / "runs/r/version_1/cli_config.yaml").unlink()
    assert [row["step"] for row in metrics_of(tmp_path)] == ["100"]


def test_a_run_without_metrics_ends_in_one_sentence(tmp_path):
    (job,) = jobs_of([RECIPE], [1], [], ())
    runner = Runner(tmp_path, 1, 1)
    with pytest.raises(ConfigError, match=r"classic-1 has no .*metrics.csv"):
        results_of(runner, job)


def test_the_row_of_a_run_is_that_of_its_end_whatever_checkpoints_it_has(tmp_path):
    (job,) = jobs_of([RECIPE], [1], [], ())
    runner = Runner(tmp_path, 1, 1)
    runner.folder_of(job).mkdir(parents=True)
    runner.record_attempt(job)
    runner.record(job, finished=True, seconds=9)
    names = ("step", "charts/episodic_return", "charts/avg_episodic_return", "eval/episodic_return")
    rows = [(512, 20.0, 20.0, ""), (1024, 60.0, 40.00001, ""), (1024, "", "", 90.0)]
    write_attempts(runner.folder_of(job), [dict(zip(names, row, strict=True)) for row in rows])
    run, curve = results_of(runner, job)
    assert (run["env_steps"], run["episodic_return"], run["eval_return"]) == (1024, 40.0, 90.0)
    assert [point["episodic_return"] for point in curve] == ["20.0", "60.0"]


@pytest.mark.parametrize(
    ("env_id", "family", "mean"),
    [
        ("CartPole-v1", "classic", 490.04),
        ("HalfCheetah-v4", "mujoco", 1442.64),
        ("HalfCheetah-v4", "best", 1442.64),
        ("HalfCheetah-v4", "sac", 9635),
        ("ALE/Berzerk-v5", "atari", 992.88),
        ("Berzerk-v5", "atari_envpool", 992.88),
        ("ALE/Breakout-v5", "atari", 414.66),
        ("ALE/Pong-v5", "elsewhere", 20.36),
        ("ALE/MontezumaRevenge-v5", "atari", 0.08),
        ("starpilot", "procgen", 30.99),
        ("BallInCupCatch-v1", "dm_control", 900.78),
        ("dm_control/humanoid_CMU-run-v0", "rpo", 0.8),
        ("HumanoidCMURun-v1", "rpo", 0.8),
        ("atari/pong_v3", "selfplay", 4153.6),
    ],
)
def test_published_results_are_found(env_id, family, mean):
    found = published(env_id, family)
    assert float(found["mean"]) == mean
    assert "CleanRL" in found["source"]
    assert published("MyEnv-v0", family) is None
    assert published("ALE/Pong-v5", "sac") is None, "not PPO's"


class OwnDQN(DQN):
    pass


def test_the_algorithm_decides_which_published_result_is_shown(tmp_path):
    data = "data:\n  env_id: CartPole-v1\n"
    (tmp_path / "mine.yaml").write_text(f"model:\n  class_path: ppo_lightning.DQN\n{data}")
    (tmp_path / "plain.yaml").write_text(data)
    dqn, ppo = (Job("", tmp_path / f"{name}.yaml", 1) for name in ("mine", "plain"))
    assert published("CartPole-v1", family_of(dqn))["mean"] == "488.7"
    assert published("CartPole-v1", family_of(ppo))["recipe"] == "classic"
    for name in ("DQN", "ppo_lightning.DQN", f"{__name__}.OwnDQN"):
        job = Job("", tmp_path / "plain.yaml", 1, ("--model", name))
        assert published("CartPole-v1", family_of(job))["mean"] == "488.7"
    discrete_sac = Job("", tmp_path / "plain.yaml", 1, ("--model", "ppo_lightning.DiscreteSAC"))
    assert published("CartPole-v1", family_of(discrete_sac)) is None, "not PPO's"


@pytest.mark.parametrize(
    ("env_id", "family", "measured", "shown"),
    [
        ("Mine-v0", "", {"episodic_return": (0.9712, 0.9765)}, "| 0.974 ± 0.004 ["),
        ("Mine-v0", "", {"episodic_return": (7.5, 8.0)}, "| 7.75 ± 0.35 ["),
        ("Mine-v0", "", {"episodic_return": (486.9, 454.4)}, "| 470.6 ± 23.0 ["),
        ("Mine-v0", "", {"episodic_return": ("nan", 8.0)}, "| nan ± nan ["),  # no episode has ended
        # Published returns of one run have no deviation; the steps are the published ones.
        (
            "ALE/MontezumaRevenge-v5",
            "rnd",
            {"env_steps": ("3000000000", "1000")},
            "| 7100.00 (2 000 000 000 steps) |",
        ),
        ("dm_control/acrobot-swingup-v0", "dm_control", {}, "| 27.84 ± 9.25 (steps not published) |"),
        ("atari/pong_v3", "selfplay", {"episodic_length": ("800", "802")}, "], length 801.0 |"),
        ("atari/pong_v3", "selfplay", {"episodic_length": ("800", "802")}, "| length 4153.6 ± 190.8 (20 000"),
    ],
)
def test_a_table_shows_three_digits_and_what_is_published(env_id, family, measured, shown):
    run = {"recipe": "mine", "env_id": env_id, "env_steps": "1000", "wall_seconds": "9"}
    measured = {"episodic_return": (7, 7)} | measured
    runs = [run | {name: str(both[i]) for name, both in measured.items()} for i in (0, 1)]
    assert shown in table(runs, {"mine": published(env_id, family)})


def test_a_class_with_arguments_is_reported_by_its_name(tmp_path):
    recipe = tmp_path / "mine.yaml"
    data = {"env_id": {"class_path": "tests.environments.Counter", "init_args": {"terminate_at": 9}}}
    recipe.write_text(json.dumps({"data": data}))
    (job,) = jobs_of([recipe], [1], [], ())
    assert job.settings["env_id"] == "tests.environments.Counter"


def test_an_installed_package_has_no_commit_of_the_repository_around_it(tmp_path, monkeypatch):
    assert provenance.commit() != "unknown"
    for arguments in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "Mine"]):
        identity = ["-c", "user.name=me", "-c", "user.email=me@localhost"]
        subprocess.run(["git", "-C", tmp_path, *identity, *arguments], check=True)
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "provenance.py"))
    assert provenance.commit() == "unknown"


@pytest.mark.integration
def test_a_recipe_may_name_a_module_of_the_current_folder(tmp_path, monkeypatch):
    text = "import gymnasium\n\ndef make():\n    return gymnasium.make('CartPole-v1')\n"
    (tmp_path / "my_own_env.py").write_text(text)
    (tmp_path / "mine.yaml").write_text("data: {env_id: my_own_env.make}")
    monkeypatch.chdir(tmp_path)
    command.main(["--recipes", "mine.yaml", "--seeds", "1", "--output", "out", *SHORT])
    assert read_csv(Path("out/runs.csv"))[0]["env_id"] == "my_own_env.make"


def test_an_interval_is_students_or_welchs_needs_two_runs_and_may_be_a_point():
    """The quantiles of t are those of a table, for 2, 4 and 2.94 degrees of freedom."""
    assert interval([1.0, 2.0, 3.0]) == pytest.approx((2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5), abs=1e-3)
    assert interval([1.0, 2.0, 3.0], [0.0, 1.0, 2.0]) == pytest.approx(
        (1 - 2.776 * (2 / 3) ** 0.5, 1 + 2.776 * (2 / 3) ** 0.5), abs=1e-3
    )
    spread = 3.221 * (1 / 3 + 4 / 3) ** 0.5
    assert interval([1.0, 2.0, 3.0], [0.0, 2.0, 4.0]) == pytest.approx((-spread, spread), abs=5e-2)
    assert np.isnan(interval([1.0])).all() and np.isnan(interval([1.0, 2.0], [1.0])).all()
    assert interval([5.0, 5.0], [3.0, 3.0]) == (2, 2)


# Pictures


def test_a_learning_curve_is_whole_though_few_episodes_end():
    """Acrobot's first episodes are longer than the window of the mean, which once broke the curve."""
    rows = [{"env_steps": step, "episodic_return": step / 10} for step in (100, 300, 1000)]
    found = curve(rows, "env_steps", np.linspace(0, 1000, 101))
    assert found.mask[:10].all(), "nothing before the first episode"
    assert not found.mask[10:].any()
    assert found[[10, 30, 100]].tolist() == [10, 30, 100]
    assert (np.diff(found[14:31]) > 0).all(), "it leads from one point to the next"
    assert (np.diff(found[34:]) > 0).all()


def test_a_run_that_begins_after_the_shortest_run_has_no_curve(tmp_path):
    """It once ended the report: a run that compiles beside other programs has its first point late."""
    points = [
        {"recipe": "one", "seed": seed, "seconds": seconds, "episodic_return": 1.0}
        for seed, all_seconds in ((1, (1, 2)), (2, (5, 6)))
        for seconds in all_seconds
    ]
    assert curve(points[2:], "seconds", np.linspace(0, 2, 101)).mask.all()
    curves.draw(points, "seconds", {}, tmp_path / "curves")
    assert (tmp_path / "curves.png").exists()


# Comparing


FOUR_AND_FOUR = {"a": [10, 11, 12, 13], "b": [11, 12, 10, 13]}


def runs_file(path, **recipes):
    path.parent.mkdir(exist_ok=True)
    rows = [
        {"recipe": recipe, "seed": seed, "episodic_return": value}
        for recipe, values in recipes.items()
        for seed, value in enumerate(values)
    ]
    write_csv(path, rows)
    return path


def test_a_recipe_that_became_worse_is_found_and_the_command_says_so(tmp_path, run_cli):
    draw = functools.partial(np.random.default_rng(0).normal, scale=10, size=5)
    before = runs_file(tmp_path / "a.csv", good=draw(100), bad=draw(100))
    after = runs_file(tmp_path / "b.csv", good=draw(100), bad=draw(50), new=[1, 2])
    better = runs_file(tmp_path / "c.csv", good=draw(100), bad=draw(150))
    code, text, _ = run_cli("compare", before, after)
    assert code == 1
    rows = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| ")}
    assert "**worse**" in rows["bad"]
    assert "worse" not in rows["good"]
    assert "b.csv: new." in text
    assert run_cli("compare", before, better)[0] == 0


def test_recipes_of_one_environment_are_compared_by_it(tmp_path):
    paths = [tmp_path / f"{name}.csv" for name in FOUR_AND_FOUR]
    for path, (name, values) in zip(paths, FOUR_AND_FOUR.items(), strict=True):
        rows = [f"{name},Hopper-v4,{seed},{value}" for seed, value in enumerate(values)]
        path.write_text("\n".join(["recipe,env_id,seed,episodic_return", *rows]) + "\n")
    with pytest.raises(ConfigError, match=r"share no recipe: .* --by env_id"):
        compare(*paths)
    text, code = compare(*paths, by="env_id")
    assert "| Hopper-v4 | 4, 4 |" in text and code == 0
    paths[0].write_text(paths[0].read_text() + "other,Hopper-v4,0,1\n")
    with pytest.raises(ConfigError, match="the same env_id and seed"):
        compare(*paths, by="env_id")


def test_runs_of_other_environments_or_lengths_are_named(tmp_path):
    paths = [tmp_path / name for name in ("a.csv", "b.csv", "c.csv")]
    for path, task in zip(paths, ("Hopper-v4,1000", "Hopper-v4,2000", "Hopper-v5,1000"), strict=True):
        rows = [f"hopper,{seed},{task},{seed}" for seed in range(4)]
        path.write_text("\n".join(["recipe,seed,env_id,env_steps,episodic_return", *rows]) + "\n")
    assert "same task" not in compare(paths[0], paths[0])[0]
    mixed = tmp_path / "mixed.csv"
    mixed.write_text(paths[0].read_text().replace("hopper,1,Hopper-v4,1000", "hopper,1,Hopper-v4,2000"))
    assert "1000 steps of Hopper-v4 and 2000 steps of Hopper-v4 after." in compare(paths[0], mixed)[0]
    for path, task in zip(paths[1:], ("2000 steps of Hopper-v4", "1000 steps of Hopper-v5"), strict=True):
        said = f"hopper is not the same task: 1000 steps of Hopper-v4 before, {task} after."
        assert said in compare(paths[0], path)[0]


@pytest.mark.parametrize(
    ("after", "sentence"),
    [
        ({"kept": range(10, 15)}, "lost has 0 of 5 runs in .*b.csv: train as many."),
        ({"kept": range(10, 15), "lost": [1, 1, 1]}, "lost has 3 of 5 runs in"),
    ],
)
def test_recipes_and_seeds_lost_in_the_second_file_are_a_failure(after, sentence, tmp_path):
    """All or some seeds of a recipe crashed; the other runs are as good as before."""
    before = runs_file(tmp_path / "a.csv", kept=range(10, 15), lost=[1, 1, 1, 1, 1])
    text, code = compare(before, runs_file(tmp_path / "b.csv", **after))
    assert code == 1 and re.search(sentence, text)


def test_other_seeds_of_another_folder_may_be_used_if_they_are_as_many(tmp_path):
    files = [runs_file(tmp_path / name / "runs.csv", one=values) for name, values in FOUR_AND_FOUR.items()]
    files[1].write_text(files[1].read_text().replace("one,", "one,10"))
    assert compare(*(file.parent for file in files)) == compare(*files)
    assert compare(*files)[1] == 0


@pytest.mark.parametrize(("count", "recipes", "needed"), [(2, 1, 3), (3, 2, 4), (1, 1, 3)])
def test_runs_too_few_for_a_test_have_an_exit_code_of_their_own(count, recipes, needed, tmp_path, run_cli):
    """With three seeds and two recipes, the smallest possible p is 0.05, but the test needs 0.025."""
    names = ["one", "two"][:recipes]
    before = runs_file(tmp_path / "a.csv", **{name: 101.0 + np.arange(count) for name in names})
    after = runs_file(tmp_path / "b.csv", **{name: -999.0 - np.arange(count) for name in names})
    code, text, _ = run_cli("compare", before, after)
    assert code == 3
    sentence = f"has too few runs for a test ({count} and {count}): train {needed} seeds each."
    assert f"{names[-1]} {sentence}" in text
    enough = (dict.fromkeys(names, level - np.arange(needed)) for level in (101.0, -999.0))
    files = (runs_file(tmp_path / f"enough{number}.csv", **returns) for number, returns in enumerate(enough))
    assert compare(*files)[1] == 1, "so many seeds show it"


def test_files_that_are_no_runs_are_refused(tmp_path):
    good, twice, nan = (runs_file(tmp_path / f"{name}.csv", one=[1, 2]) for name in ("a", "twice", "nan"))
    twice.write_text(f"{twice.read_text()}one,1,3\n")
    nan.write_text(f"{nan.read_text()}one,2,nan\n")
    large = runs_file(tmp_path / "large.csv", one=["x" * 200_000])
    for bad, message in (
        (large, "needs the columns .*field larger than field limit"),
        (tmp_path / "none.csv", "needs the columns"),
        (runs_file(tmp_path / "b.csv", two=[1, 2]), "share no"),
        (twice, "line 4 .recipe one, seed 1.: an earlier line"),
        (nan, "line 4 .recipe one, seed 2.: the return is nan"),
        (tmp_path, "needs the columns .*runs.csv"),
    ):
        with pytest.raises(ConfigError, match=message):
            compare(good, bad)
