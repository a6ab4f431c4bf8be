"""Locks that give one process at a time exclusive use of a directory."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path

# Errors of a file system that does not support locks.
_UNSUPPORTED_ERRNOS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class LockHeldError(Exception):
    """Another process has the lock.

    Args:
        owner: The text that the other process wrote into the lock file: its PID and host, or "".
    """

    def __init__(self, owner: str) -> None:
        super().__init__(owner)
        self.owner = owner


class DirectoryLock:
    """A lock of the operating system on an open file.

    Forked processes share the open file. The system releases the lock when the last of these
    processes closes the file or dies. The lock file may then still exist, but it locks nothing.

    Args:
        path: The lock file. It need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = -1

    @property
    def is_held(self) -> bool:
        """Return whether this object has the lock file open, and the file is still at `path`.

        If the file system supports locks, this object then has the lock.
        """
        return self._file >= 0 and self._is_at_path()

    def acquire(self) -> str:
        """Acquire the lock without waiting, and write this process's PID and host into the file.

        Returns:
            "" if the lock was acquired. If the file system does not support locks, the message of
            its error.

        Raises:
            LockHeldError: Another process has the lock.
            OSError: The file cannot be opened or locked for another reason.
        """
        while True:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._file = os.open(self.path, flags, 0o666)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_at_path():
                    os.ftruncate(self._file, 0)
                    process = f"process {os.getpid()} on {socket.gethostname()}\n"
                    os.write(self._file, process.encode())
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
            # The previous owner removed the file after this process opened it. Try again.
            self._close()

    def release(self) -> None:
        """Remove the lock file and release the lock.

        The file is removed first, while no other process can have its lock.
        """
        with suppress(OSError):
            if self._is_at_path():
                self.path.unlink()
        self._close()

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _is_at_path(self) -> bool:
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._file))
        except OSError:
            return False
