"""Show on a terminal that a command is at work, and how far it is.

Rich is imported only when something is shown.
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

# Seconds before a command shows that it is at work. Most commands end earlier.
DELAY: Final = 1.0


class _ActivityLine:
    """A line with a text, a bar and the elapsed time, on standard error."""

    def __init__(self, text: str) -> None:
        self._text, self._lock, self._is_closed = text, Lock(), False
        self._start = monotonic()
        self._display: Progress | None = None
        self._timer = Timer(DELAY, self.update)
        self._timer.daemon = True
        self._timer.start()

    def update(
        self, text: str | None = None, done: float | None = None, total: float | None = None
    ) -> None:
        """Show the line, with a new text and state of the bar if they are given."""
        with self._lock:
            if self._is_closed:
                return
            self._text = self._text if text is None else text
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


_current: _ActivityLine | None = None


@contextmanager
def show_activity(text: str) -> Iterator[None]:
    """Show a line on standard error if the block takes more than `DELAY` seconds.

    It shows nothing if standard error is not a terminal.

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
    """Replace the text of the line that `show_activity` shows. Outside of it, do nothing.

    Args:
        text: The new text.
        done: The part of the work that is done. None shows a bar without an end.
        total: All of the work, in the same unit.
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
        redirect_stdout=False,  # which may be a pipe, although standard error is a terminal
        expand=True,
    )
