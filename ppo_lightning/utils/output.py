"""Messages during a run, and a standard output that ends none."""

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from typing import IO, Any

from ppo_lightning.errors import first_line


class LastingStream:
    """Stream that loses text and raises nothing on a full disk, in a closed pipe or if it is not Unicode."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream or open(os.devnull, "w")  # noqa: SIM115
        if hasattr(self._stream, "reconfigure"):
            self._stream.reconfigure(errors="replace")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text if possible."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Write what is buffered if possible."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()


@contextlib.contextmanager
def accessory(name: str) -> Iterator[None]:
    """Turn an error of what only shows a run, such as a video, into a warning."""
    try:
        yield
    except (Exception, SystemExit) as error:  # packages, displays, disks and environments raise many types
        warnings.warn(f"{name} failed ({type(error).__name__}: {first_line(error)}).", stacklevel=3)


def say(message: str, stream: IO[str] | None = None) -> None:
    """Print a message above the progress bars, one line at a time.

    In a notebook, Rich prints the rest of a text after a newline again and again.
    """
    from tqdm import tqdm

    for line in message.splitlines():
        tqdm.write(line, file=stream or sys.stdout)
