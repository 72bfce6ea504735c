"""Fixtures of the tests of commands."""

import sys

import pytest

from ppo_lightning.commands import cli


@pytest.fixture
def run_cli(tmp_path, monkeypatch, capsys):
    """Return a function that runs the command line in a folder of the test and returns the output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ppo-lightning"])

    def run(*args):
        cli.main([str(arg) for arg in args])
        return capsys.readouterr().out

    return run
