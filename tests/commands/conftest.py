"""Runs of the command line, and what they print."""

import re
from pathlib import Path

import pytest

from tests.helpers import RECIPE as CARTPOLE

SHORT = ["--data.total_timesteps", "1024", "--data.eval_episodes", "2"]


@pytest.fixture(autouse=True)
def shipped(own_defaults):
    """Commands have the defaults of a user."""


@pytest.fixture
def trained(output_of):
    """Return the checkpoint of a short run of CartPole."""
    return checkpoint_of(output_of("fit", "--config", CARTPOLE, *SHORT))


def checkpoint_of(out):
    """Return the path of the checkpoint that ``fit`` prints."""
    return Path(out.split("checkpoint: ")[1].splitlines()[0])


def metric(out, name):
    """Read a number from the table that Lightning prints, with or without rich."""
    return float(re.search(rf"{name}\s[\s│]*([\d.]+)", out).group(1))
