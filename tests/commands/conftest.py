"""The command line in the process of the test."""

import re
import sys
from pathlib import Path

import pytest

from ppo_lightning.commands import cli

CARTPOLE = str(Path(__file__).parents[2] / "configs/classic/cartpole.yaml")
SHORT = ["--data.total_timesteps", "1024", "--data.eval_episodes", "2"]


@pytest.fixture
def run_cli(tmp_path, monkeypatch, capsys):
    """Return a function that runs the command line in a folder of the test: exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ppo-lightning"])

    def run(*args):
        code = 0
        try:
            cli.main([str(arg) for arg in args])
        except SystemExit as end:
            code = end.code or 0
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def trained(run_cli):
    """Return the checkpoint of a short run of CartPole."""
    code, out, err = run_cli("fit", "--config", CARTPOLE, *SHORT)
    assert code == 0, err
    return checkpoint_of(out)


def checkpoint_of(out):
    """Return the path of the checkpoint that ``fit`` prints."""
    return Path(out.split("checkpoint: ")[1].splitlines()[0])


def metric(out, name):
    """Read a number from the table that Lightning prints, with or without rich."""
    return float(re.search(rf"{name}\s[\s│]*([\d.]+)", out).group(1))
