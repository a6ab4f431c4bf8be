"""Lock a directory for one process at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path

_UNSUPPORTED_ERRNOS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # what a file system may say


class LockHeldError(Exception):
    """A lock that another process has; `owner` is what that wrote of itself, "" if nothing."""

    def __init__(self, owner: str) -> None:
        super().__init__(owner)
        self.owner = owner


class DirectoryLock:
    """A lock of the system's, on a file that is open here: with the last process that has it open
    it goes, however that ends.  The file may stay, and means nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = -1

    @property
    def is_held(self) -> bool:
        """Whether it is held here, by the file that has its name."""
        return self._file >= 0 and self._is_at_path()

    def acquire(self) -> str:
        """Take it.  Returns what the file system says if it has no locks, and "" where it has.

        Raises LockHeldError if another process has it, and OSError.
        """
        while True:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._file = os.open(self.path, flags, 0o666)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_at_path():
                    os.ftruncate(self._file, 0)
                    own = f"process {os.getpid()} on {socket.gethostname()}\n"
                    os.write(self._file, own.encode())
                    return ""
            except OSError as error:
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    owner = os.pread(self._file, 200, 0).decode(errors="replace").strip()
                    self._close()
                    raise LockHeldError(owner if owner.isprintable() else "") from None
                if error.errno in _UNSUPPORTED_ERRNOS:
                    return error.strerror or "no locks"
                self._close()
                raise
            self._close()  # it was removed by who had it before

    def release(self) -> None:
        """Let others have it.  Its file is removed before, so that it is nobody else's."""
        with suppress(OSError):
            if self._is_at_path():
                self.path.unlink()
        self._close()

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _is_at_path(self) -> bool:
        """Whether the open file is the one that has the name."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._file))
        except OSError:
            return False
