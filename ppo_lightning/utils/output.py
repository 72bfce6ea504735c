"""Messages during a run."""

from typing import IO

from tqdm import tqdm


def say(message: str, stream: IO[str] | None = None) -> None:
    """Print a message above the progress bars, one line at a time.

    In a notebook, Rich prints the rest of a text after a newline again and again.

    Args:
        message: One or several lines.
        stream: By default standard output.
    """
    for line in message.splitlines():
        tqdm.write(line, file=stream)
