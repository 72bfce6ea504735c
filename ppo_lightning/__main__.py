"""Entry point of ``python -m ppo_lightning`` and ``ppo-lightning``."""

import gc
import os
import signal
import sys

from ppo_lightning.commands.options import run_without_imports
from ppo_lightning.utils.output import LastingStream
from ppo_lightning.utils.watch import end_with_the_launcher


def main() -> None:
    """Run the command line, and print help without importing PyTorch."""
    if "OMP_WAIT_POLICY" not in os.environ:
        # OpenMP spin count (default: 300 000). While idle threads spin, EnvPool's threads have no core.
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    if not sys.flags.safe_path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # modules of the user, as with `python -m`
    if run_without_imports(sys.argv[1:]):
        return
    sys.stdout, sys.stderr = LastingStream(sys.stdout), LastingStream(sys.stderr)
    end_with_the_launcher()
    gc.disable()  # imports make no garbage: to look for some takes a fifth of their time
    try:
        from ppo_lightning.commands import cli

        gc.freeze()
        gc.enable()
        cli.main()
    except KeyboardInterrupt:  # no traceback where somebody ends a command
        raise SystemExit(128 + signal.SIGINT) from None


if __name__ == "__main__":
    main()
