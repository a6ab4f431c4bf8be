"""Limit the size of files, so that a write fails as on a full disk."""

from __future__ import annotations

import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def limit_file_size(most: int) -> Iterator[None]:
    """Limit the size of each file that this process writes to `most` bytes.

    Python must not write bytecode meanwhile: a truncated file would break later imports.
    """
    had = resource.getrlimit(resource.RLIMIT_FSIZE)
    had_no_bytecode = sys.dont_write_bytecode
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, had[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, had)
        sys.dont_write_bytecode = had_no_bytecode
        signal.signal(signal.SIGXFSZ, handler)
