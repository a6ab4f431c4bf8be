"""Limit the size of files, so that a write fails as on a full disk."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def limit_file_size(most: int) -> Iterator[None]:
    """Limit the size of each file that this process writes to `most` bytes."""
    had = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, had[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, had)
        signal.signal(signal.SIGXFSZ, handler)
