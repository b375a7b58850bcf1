"""A file that is written through a descriptor which is checked before each use."""

from __future__ import annotations

import fcntl
import os
import resource

# Jobs may rely on the numbers of their descriptors, which are the lowest free ones.
_LOWEST_DESCRIPTOR = 400


class CheckedFile:
    """Appends to a new file, and never to another one.

    A job may close descriptors by their numbers, as daemons do, and open files of its own under the same numbers. So
    before each write and close the descriptor is compared with the file that was created. If it is another file's, it
    is left alone, and the file is opened again by its path. Nothing here raises except the constructor.

    Raises:
        OSError: If the file cannot be created.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._size = 0
        self._fd: int | None = _raise_number(os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o644))
        status = os.fstat(self._fd)
        self._identity = status.st_dev, status.st_ino

    def write(self, data: bytes) -> bool:
        """Append `data`; return whether all of it was written. After False nothing can be written any more."""
        try:
            if not self._is_own() and not self._reopen():
                return False
            if self._fd is None or not within_limit(self._size + len(data)):
                return False
            self._size += len(data)
            return os.write(self._fd, data) == len(data)
        except OSError:
            return False

    def close(self) -> None:
        """Close the file, unless its descriptor belongs to another file by now."""
        try:
            own = self._is_own()
            fd, self._fd = self._fd, None
            if own and fd is not None:
                os.close(fd)
        except OSError:
            pass

    def _is_own(self) -> bool:
        """Return whether the descriptor still is that of the created file, with all that was written to it."""
        if self._fd is None:
            return False
        try:
            status = os.fstat(self._fd)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self._identity and status.st_size == self._size

    def _reopen(self) -> bool:
        """Open the created file again; return False if it was removed, replaced or truncated."""
        self._fd = None
        self._fd = _raise_number(os.open(self._path, _FLAGS))
        if self._is_own():
            return True
        self.close()
        return False


_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW


def _raise_number(fd: int) -> int:
    """Move a descriptor to a high number, if the process may have so many."""
    try:
        high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _LOWEST_DESCRIPTOR)
    except (OSError, ValueError):
        return fd
    os.close(fd)
    return high


def within_limit(size: int) -> bool:
    """Return whether a file of this size is allowed: to write beyond the limit would raise SIGXFSZ in the job."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return limit == resource.RLIM_INFINITY or size <= limit
