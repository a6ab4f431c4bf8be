"""Show the progress of a command in a line on the terminal.

Rich is imported only when the line is shown, because the import takes time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, Timer
from time import monotonic
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.progress import Progress

# Seconds before the line is shown, if the command does not report progress. Most commands end
# earlier, and show no line.
DELAY: Final = 1.0


class _ActivityLine:
    """A line with a text, a bar and the elapsed time, on standard error."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._lock = Lock()
        self._is_closed = False
        self._start = monotonic()
        self._display: Progress | None = None
        self._timer = Timer(DELAY, self.update)
        self._timer.daemon = True
        self._timer.start()

    def update(
        self, text: str | None = None, done: float | None = None, total: float | None = None
    ) -> None:
        """Show the line. Arguments that are not None change its text and its bar."""
        with self._lock:
            if self._is_closed:
                return
            if text is not None:
                self._text = text
            if self._display is None:
                self._display = _make_display()
                self._display.add_task(self._text, total=None)
                self._display.tasks[0].start_time = self._start
                self._display.start()
            (task,) = self._display.task_ids
            self._display.update(task, description=self._text, completed=done, total=total)

    def close(self) -> None:
        """Remove the line."""
        self._timer.cancel()
        with self._lock:
            self._is_closed = True
            if self._display is not None:
                self._display.stop()


# The line of the outermost `show_activity`, or None.
_current: _ActivityLine | None = None


@contextmanager
def show_activity(text: str) -> Iterator[None]:
    """Show a line on standard error while the block runs.

    The line appears after `DELAY` seconds, or at the first call of `show_progress`. It does not
    appear if standard error is not a terminal.

    Args:
        text: The text of the line, until `show_progress` changes it.
    """
    global _current
    if _current is not None or not sys.stderr.isatty():
        yield
        return
    _current = _ActivityLine(text)
    try:
        yield
    finally:
        _current.close()
        _current = None


def show_progress(text: str, done: float | None = None, total: float | None = None) -> None:
    """Change the text and the bar of the line of `show_activity`, if there is one.

    Args:
        text: The new text.
        done: The amount of work that is done, in any unit. None keeps the last amount.
        total: The total amount of work. None keeps the last total. Without a total, the bar shows
            only activity.
    """
    if _current is not None:
        _current.update(text, done, total)


def _make_display() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Column

    return Progress(
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, ratio=1)),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,  # Standard output may be a pipe.
        expand=True,
    )
