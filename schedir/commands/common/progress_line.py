"""Show the progress of long work on one line of a terminal."""

from __future__ import annotations

import sys
from shutil import get_terminal_size


class ProgressLine:
    """A line on standard error that is written over; elsewhere than on a terminal, nothing."""

    def __init__(self) -> None:
        self.is_shown = sys.stderr.isatty()

    def show(self, text: str) -> None:
        """Write it in the place of what stands there."""
        if self.is_shown:
            line = text[: get_terminal_size().columns - 1]  # a line that wraps cannot be cleared
            print(f"\r{line}\x1b[K", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Leave an empty line."""
        self.show("")
