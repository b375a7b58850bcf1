"""Measures how fast a folder's file system reads and writes the state of a subgroup, without the page cache."""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path

from ebbtide.errors import MachineError
from ebbtide.interleave.calibrate.record import Record, Setup, Timing
from ebbtide.interleave.engine.runtime.storage.direct_file import memory_file_system
from ebbtide.machines.storage import StoragePath

# The state of a subgroup of 1e8 parameters, 12 B each; there are two files of this size. Of the free space they take at
# most a tenth together.
_FILE_BYTES = 1_200_000_000
_MOST_OF_FREE_SPACE = 0.1
_BLOCK_BYTES = 8 << 20
_LEAST_BLOCKS = 4
# Threads per direction: with one, the device idles between requests.
_THREADS = 2
# A slow device is measured with smaller files: filling them takes at most so many windows.
_FILL_WINDOWS = 2
_ROUNDS = 3
WINDOWS = 3 + _FILL_WINDOWS


def measure_storage(folder: Path, setup: Setup, record: Record) -> None:
    """Measure sequential reads and writes of a folder, alone and both at once, and add the path to the record.

    The files have no names while they are measured, so nothing is left behind however the process ends. Without
    O_DIRECT they are written through the page cache with fsync, and dropped from it before they are read."""
    try:
        with _Files(folder, setup.ranks.local_count) as files:
            files.fill(_FILL_WINDOWS * setup.window_s)
            # In turn, since the speed of a drive that others use changes from second to second.
            seconds_per_byte: dict[tuple[bool, bool], list[float]] = {}
            for _ in range(_ROUNDS):
                for directions in ((True, False), (False, True), (True, True)):
                    setup.ranks.wait()
                    rate = files.rate(setup.window_s / _ROUNDS, *directions)
                    seconds_per_byte.setdefault(directions, []).append(1 / rate)
            is_direct, size = files.is_direct, files.size
    except OSError as error:
        raise MachineError(f"--storage {folder}: {error.strerror or error}") from None
    timings = [Timing.from_runs(runs) for runs in seconds_per_byte.values()]
    read, write, both = (1 / timing.seconds for timing in timings)
    free = os.statvfs(folder)
    record.storage.append(
        StoragePath(
            read_bytes_per_s=read,
            write_bytes_per_s=write,
            bytes=free.f_bavail * free.f_frsize / setup.ranks.local_count,
            duplex_bytes_per_s=both,
            path=str(folder.resolve()),
        )
    )
    kind = "O_DIRECT" if is_direct else "the page cache, with fsync (no O_DIRECT here)"
    threads = f"{_THREADS} threads, blocks of {_BLOCK_BYTES >> 20} MiB, files of {size / 1e6:,.0f} MB, by {kind}"
    least_steady = max(timings, key=lambda timing: timing.spread)
    record.describe(f"storage[{len(record.storage) - 1}]", threads, least_steady)
    if not is_direct:
        record.notes.append(f"--storage {folder}: no O_DIRECT, measured through the page cache with fsync")
    if (kind_of := memory_file_system(folder)) is not None:
        record.notes.append(f"--storage {folder} is a {kind_of}, which is host memory: its rates are not of a drive")


class _Files:
    """Two files without a name, one to read and one to write."""

    def __init__(self, folder: Path, ranks: int) -> None:
        if not folder.is_dir():
            raise MachineError(f"--storage {folder} is not a folder")
        space = os.statvfs(folder)
        free = space.f_bavail * space.f_frsize / ranks
        blocks = int(min(_FILE_BYTES, _MOST_OF_FREE_SPACE * free / 2)) // _BLOCK_BYTES
        if blocks < _LEAST_BLOCKS:
            raise MachineError(
                f"--storage {folder} has {free / 1e6:,.0f} MB free, too little to measure: free "
                f"{2 * _LEAST_BLOCKS * _BLOCK_BYTES / _MOST_OF_FREE_SPACE / 1e6:,.0f} MB, or name another folder"
            )
        self._blocks = blocks
        self._folder = folder
        self._files: list[int] = []
        self._stop = threading.Event()

    def __enter__(self) -> _Files:
        self.is_direct = True
        self._files = [self._open() for _ in range(2)]
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for file in self._files:
            os.close(file)

    @property
    def size(self) -> int:
        """Bytes of each file."""
        return self._blocks * _BLOCK_BYTES

    def _open(self) -> int:
        named, name = tempfile.mkstemp(prefix=".ebbtide-storage-", dir=self._folder)
        try:
            direct = os.open(name, os.O_RDWR | os.O_DIRECT)
        except OSError:
            self.is_direct = False
            return named
        finally:
            os.unlink(name)
        os.close(named)
        return direct

    def fill(self, limit_s: float) -> None:
        """Write both files once, since first writes are slower; they become smaller if that takes too long."""
        end = time.perf_counter() + limit_s
        with _block_buffer() as buffer:
            for block in range(self._blocks):
                for file in self._files:
                    _write(file, buffer, block)
                if time.perf_counter() > end and block + 1 >= _LEAST_BLOCKS:
                    self._blocks = block + 1
                    break
        for file in self._files:
            os.fsync(file)

    def rate(self, window_s: float, reads: bool, writes: bool) -> float:
        """Return how many bytes/s are read from one file, and written to the other one, for a time."""
        moves = [*[self._read] * reads, *[self._write] * writes]
        self._stop.clear()
        begin = time.perf_counter()
        with ThreadPoolExecutor(_THREADS * len(moves)) as pool:
            parts = [pool.submit(self._move, move, number) for move in moves for number in range(_THREADS)]
            try:
                time.sleep(window_s)
            finally:
                self._stop.set()
        return sum(part.result() for part in parts) / (time.perf_counter() - begin)

    def _move(self, move: Callable[[int, mmap.mmap], None], number: int) -> int:
        """Move every so many-th block of a file again and again, one at least, until told to stop; return the bytes."""
        moved = 0
        with _block_buffer() as buffer:
            for block in cycle(range(number, self._blocks, _THREADS)):
                move(block, buffer)
                moved += _BLOCK_BYTES
                if self._stop.is_set():
                    break
        return moved

    def _read(self, block: int, buffer: mmap.mmap) -> None:
        if not self.is_direct:
            os.posix_fadvise(self._files[0], block * _BLOCK_BYTES, _BLOCK_BYTES, os.POSIX_FADV_DONTNEED)
        if os.preadv(self._files[0], [buffer], block * _BLOCK_BYTES) != _BLOCK_BYTES:
            raise OSError("a read ended early")

    def _write(self, block: int, buffer: mmap.mmap) -> None:
        _write(self._files[1], buffer, block)
        if not self.is_direct:
            os.fdatasync(self._files[1])


def _write(file: int, buffer: mmap.mmap, block: int) -> None:
    if os.pwritev(file, [buffer], block * _BLOCK_BYTES) != _BLOCK_BYTES:
        raise OSError("a write ended early: the file system is full")


@contextmanager
def _block_buffer() -> Iterator[mmap.mmap]:
    """Provide memory for a block, aligned to pages as O_DIRECT requires."""
    with mmap.mmap(-1, _BLOCK_BYTES) as buffer:
        # Some drives compress, and some file systems leave out blocks of zeros.
        buffer.write(os.urandom(_BLOCK_BYTES))
        yield buffer
