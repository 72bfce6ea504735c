"""``python -m ppo_lightning`` and ``ppo-lightning``."""

import ctypes
import os
import signal
import sys

HELP = """usage: ppo-lightning COMMAND [--config RECIPE.yaml] [--OPTION VALUE ...]

PPO with TorchRL rollouts and PyTorch Lightning. The commands, each with its own --help:

  fit       train; with --ckpt_path, go on with a run
  validate  play whole episodes with a trained agent (--ckpt_path)
  test      the same, under other names
  predict   the actions of a trained agent for stored observations
  play      a video of a trained agent
  profile   where the time of a recipe goes on this machine, and what would make it faster

The first: ppo-lightning fit --config configs/classic/cartpole.yaml
"""


def main() -> None:
    """Runs the command line; the list of commands is there before anything large is imported."""
    if sys.argv[1:] in (["--help"], ["-h"]):
        print(HELP, end="")
        return
    end_with_the_launcher()
    from ppo_lightning import cli

    cli.main()


def end_with_the_launcher() -> None:
    """Lets a rank that another process has started end with that process, whatever it waits for (on Linux).

    Otherwise one whose launcher is killed before they have met waits half an hour for it.
    """
    if "LOCAL_RANK" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    main()
