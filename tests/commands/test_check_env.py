"""``ppo-lightning check-env``: lines and exit codes."""

import functools

import pytest

MODULE = """
from tests.envs.broken_envs import Walk, Whole

def make(shift=0):
    return Walk() if shift == 0 else Whole()
"""


@pytest.fixture
def run(run_cli, monkeypatch, tmp_path):
    (tmp_path / "own_env.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)  # as the program does with the current folder
    return functools.partial(run_cli, "check-env")


def test_a_clean_environment_of_the_current_folder(run):
    code, out, _ = run("own_env.make", "--steps", "300")
    assert code == 0
    assert out.startswith("own_env.make, backend gymnasium: 4 environments played 300 steps each at random, ")
    assert out.endswith("0 errors, 0 warnings, 0 notes.\n")


def test_an_error_has_exit_code_1_and_arguments_reach_the_function(run):
    code, out, _ = run("own_env.make", "--env_kwargs.shift", "1", "--num_envs", "2", "--steps", "100")
    assert code == 1
    assert "the observation has fractions, and its space int64: declare a Box of float32" in out
    assert "\n    A run would end there. [exception]\n" in out
    assert "1 error, 0 warnings" in out


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["CartPol-v1"], "did you mean CartPole-v1"),
        (["own_env.nothing"], "cannot be imported"),
        (["CartPole-v1", "--backend", "nope"], "invalid choice: 'nope'"),
        (["CartPole-v1", "--num_envs", "0"], "data.num_envs is 0"),
        (["CartPole-v1", "--steps", "0"], "steps"),
        (["CartPole-v1", "--env_kwargs.speed", "3"], "data.env_kwargs does not fit"),
        ([], "env_id"),
    ],
)
def test_wrong_arguments_have_exit_code_2(run, args, sentence):
    code, out, err = run(*args)
    assert code == 2
    assert sentence in err and "Traceback" not in err
    assert not out
