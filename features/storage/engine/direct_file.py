"""A file, and its file system, that is read and written without the page cache, in
large blocks by several threads."""

import errno
import fcntl
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.forks import (
    Rest,
    WorkQueue,
    follow_forks,
    fork_generation,
)
from ebbtide.units import bytes_text

# Offsets, lengths and addresses of direct I/O are multiples of this.
PAGE = 4096
BLOCK_BYTES = 8 << 20
# A smaller piece is not worth a second request.
_MIN_BLOCK_BYTES = 1 << 20
# With one thread the drive idles between requests.
THREADS = 2
_IN_MEMORY = ("tmpfs", "ramfs")
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)


def aligned(nbytes: int) -> int:
    """Return a number of bytes, rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


class NoSpace(EngineError):
    """A file system has too little free space."""


class DirectFile:
    """A file that one process reads and writes.

    It has O_DIRECT if the file system has it; it is created if it does not exist.
    Offsets are multiples of PAGE, and memory is whole pages. Methods raise EngineError
    if it is in use or ends early, or the disk is full. With `is_read_only` it must
    exist, and may be in use by this process with `is_shared`.
    """

    def __init__(
        self, path: Path, is_read_only: bool = False, is_shared: bool = False
    ) -> None:
        self.path = path
        self._flags = os.O_RDONLY if is_read_only else os.O_RDWR | os.O_CREAT
        # Whether the page cache is left out.
        self.is_direct = True
        try:
            self._descriptor = self._open()
        except OSError as error:
            raise EngineError(f"{path} cannot be opened: {error.strerror}") from None
        lock = fcntl.LOCK_SH if is_read_only else fcntl.LOCK_EX
        try:
            fcntl.flock(
                self._descriptor, fcntl.LOCK_UN if is_shared else lock | fcntl.LOCK_NB
            )
        except OSError:
            os.close(self._descriptor)
            raise EngineError(
                f"{path} is in use by another optimizer, of this process or another: "
                "name another folder for each"
            ) from None
        # In bytes, when it was opened.
        self.size = os.fstat(self._descriptor).st_size
        self._generation = fork_generation()
        self._pool = WorkQueue("ebbtide-storage", THREADS)
        follow_forks(self, Rest.QUEUES)

    @property
    def is_own(self) -> bool:
        """Whether this process opened the file, and not one that it was forked from."""
        return self._generation == fork_generation()

    @property
    def _file(self) -> int:
        if not self.is_own:
            raise EngineError(
                f"{self.path} belongs to the process that this one was forked from: "
                "use the optimizer there"
            )
        return self._descriptor

    def before_fork(self) -> None:
        """Do nothing: the fork waits for the pool."""

    def after_fork(self, in_child: bool) -> None:
        if in_child and self._descriptor >= 0:
            # Else the lock of the file would last as long as the child.
            os.close(self._descriptor)
            self._descriptor = -1

    def read(self, offset: int, memory: memoryview) -> None:
        """Read as many bytes as the memory has."""
        self._move("read", os.preadv, offset, memory)

    def write(self, offset: int, memory: memoryview) -> None:
        self._move("written", os.pwritev, offset, memory)

    def allocate(self, offset: int, nbytes: int) -> None:
        """Reserve space, so that no write fails later for lack of it.

        The size of the file is as before if this fails.
        """
        size = os.fstat(self._file).st_size
        try:
            os.posix_fallocate(self._file, offset, nbytes)
        except OSError as error:
            os.ftruncate(self._file, size)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise EngineError(
                    f"{self.path} cannot be extended: {error.strerror}"
                ) from None
            raise self.lacks_space(nbytes) from None

    @property
    def free_bytes(self) -> int:
        """Free space of the file system."""
        space = os.fstatvfs(self._file)
        return space.f_bavail * space.f_frsize

    def lacks_space(self, nbytes: int) -> "NoSpace":
        """Return the error for a file that needs `nbytes` more than there are."""
        return NoSpace(
            f"{self.path} needs {bytes_text(nbytes)} more, and "
            f"{bytes_text(self.free_bytes)} are free: free space, "
            "name another folder, or give state more host memory (host_memory_budget)"
        )

    def truncate(self) -> None:
        os.ftruncate(self._file, 0)

    def synchronize(self) -> None:
        """Wait until all that was written is on the drive."""
        try:
            os.fdatasync(self._file)
        except OSError as error:
            raise EngineError(
                f"{self.path} cannot be written to its drive: {error.strerror}"
            ) from None

    def drop_cache(self, offset: int, nbytes: int) -> None:
        """Drop a part from the page cache; the next read comes from the drive."""
        os.posix_fadvise(self._file, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        self._pool.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self) -> int:
        flags = self._flags | os.O_CLOEXEC
        try:
            return os.open(self.path, flags | os.O_DIRECT, 0o600)
        except OSError as error:
            if error.errno not in _NO_DIRECT:
                raise
        self.is_direct = False
        return os.open(self.path, flags, 0o600)

    def _move(
        self, verb: str, move: Callable[..., int], offset: int, memory: memoryview
    ) -> None:
        """Move blocks in both threads.

        Return when all have moved, even if one cannot.
        """
        # As many blocks of the same size for each thread, so that they end together.
        rounds = -(-len(memory) // (THREADS * BLOCK_BYTES))
        block_bytes = max(
            _MIN_BLOCK_BYTES, aligned(-(-len(memory) // (THREADS * rounds)))
        )
        blocks = [
            (start, min(start + block_bytes, len(memory)))
            for start in range(0, len(memory), block_bytes)
        ]
        tasks = [
            self._pool.submit(
                self._move_blocks, verb, move, offset, memory, blocks[number::THREADS]
            )
            for number in range(min(THREADS, len(blocks)))
        ]
        errors = [error for task in tasks if (error := task.exception()) is not None]
        if errors:
            raise errors[0]

    def _move_blocks(
        self,
        verb: str,
        move: Callable[..., int],
        offset: int,
        memory: memoryview,
        blocks: Sequence[tuple[int, int]],
    ) -> None:
        for start, end in blocks:
            while start < end:
                try:
                    moved = move(self._file, [memory[start:end]], offset + start)
                except OSError as error:
                    raise EngineError(
                        f"{self.path} cannot be {verb}: {error.strerror}"
                    ) from None
                if not moved:
                    raise EngineError(
                        f"{self.path} ends early: it was cut short after it was opened"
                    )
                # The rest of a short read or write starts at a whole page again.
                start += moved if moved == end - start else moved // PAGE * PAGE


def memory_file_system(folder: Path) -> str | None:
    """Return the type of a folder's file system if its files are in host memory.

    An example is "tmpfs"; else return None.
    """
    kind = file_system(folder)
    return kind if kind in _IN_MEMORY else None


def file_system(folder: Path) -> str | None:
    """Return the type of the file system of a folder.

    Examples are "ext4" or "tmpfs"; None if it is not known.
    """
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == number:
            return rest.split()[0]
    return None
