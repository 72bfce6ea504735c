"""``python -m ppo_lightning`` and ``ppo-lightning``."""

import os
import sys

from ppo_lightning.options import answer
from ppo_lightning.watch import end_with_the_launcher


def main() -> None:
    """Run the command line; help is printed before anything large is imported."""
    if not sys.flags.safe_path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # for modules of the user, as `python -m` does
    if answer(sys.argv[1:]):
        return
    end_with_the_launcher()
    from ppo_lightning import cli

    cli.main()


if __name__ == "__main__":
    main()
