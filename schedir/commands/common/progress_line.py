"""Show the progress of long work on one line of a terminal."""

from __future__ import annotations

import sys
from shutil import get_terminal_size


class ProgressLine:
    """A line on standard error that is overwritten while a long task runs.

    It prints nothing if standard error is not a terminal.
    """

    def __init__(self) -> None:
        self.is_shown = sys.stderr.isatty()

    def show(self, text: str) -> None:
        """Replace the text of the line.

        Args:
            text: The new text, which is cut to the width of the terminal.
        """
        if self.is_shown:
            line = text[: get_terminal_size().columns - 1]  # a line that wraps cannot be cleared
            print(f"\r{line}\x1b[K", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Replace the line by an empty one."""
        self.show("")
