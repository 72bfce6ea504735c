"""``ppo-lightning check-env``: lines, exit codes, and the fastest setting."""

import pytest

from ppo_lightning.commands import check_env
from ppo_lightning.commands.cli import main

MODULE = """
from tests.envs.broken_envs import Walk, Whole

def make(shift=0):
    return Walk() if shift == 0 else Whole()
"""


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    (tmp_path / "own_env.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # as the program does with the current folder

    def run(*args):
        code = 0
        try:
            main(["check-env", *args])
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return run


def test_a_clean_environment_of_the_current_folder(run):
    code, out, _ = run("own_env.make", "--steps", "300")
    assert code == 0
    assert out.startswith("own_env.make, backend gymnasium: 4 environments played 300 steps each at random, ")
    assert "A step of one environment takes" in out
    assert out.endswith("0 errors, 0 warnings, 0 notes.\n")


def test_an_error_has_exit_code_1_and_arguments_reach_the_function(run):
    code, out, _ = run("own_env.make", "--env_kwargs.shift", "1", "--num_envs", "2", "--steps", "100")
    assert code == 1
    assert "\nerror: The observation has fractions" in out
    assert "\n    Declare a Box of dtype float32. [space]\n" in out
    assert "1 error, 0 warnings" in out


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["CartPol-v1"], "did you mean CartPole-v1"),
        (["own_env.nothing"], "cannot be imported"),
        (["CartPole-v1", "--backend", "nope"], "invalid choice: 'nope'"),
        (["CartPole-v1", "--num_envs", "0"], "data.num_envs is 0"),
        (["CartPole-v1", "--env_kwargs.speed", "3"], "data.env_kwargs does not fit"),
        ([], "env_id"),
    ],
)
def test_wrong_arguments_have_exit_code_2(run, args, sentence):
    code, out, err = run(*args)
    assert code == 2
    assert sentence in err and "Traceback" not in err
    assert not out


@pytest.mark.parametrize(
    ("times", "sentence"),
    [
        ({"gymnasium": 30e-6, "envpool": 20e-6}, "data.backend 'envpool' is the fastest"),
        ({"gymnasium": 30e-6, "envpool": 29e-6}, "No other setting"),
        ({"gymnasium": 5e-3, "envpool": 1e-3}, "data.backend 'envpool' is the fastest"),
        ({}, "No setting could be timed"),
    ],
)
def test_the_fastest_setting(times, sentence):
    assert sentence in check_env.fastest_setting(times, "gymnasium", 4)


def test_all_backends_of_an_environment_are_timed():
    times = check_env.step_times(check_env.EnvFactory("CartPole-v1"), 2, 1e-5)
    assert next(iter(times)) == "gymnasium"
    assert {"gymnasium", "vectorized"} <= set(times) <= {"gymnasium", "vectorized", "torch", "envpool"}
    assert all(seconds > 0 for seconds in times.values())
