"""Measures how fast a folder's file system reads and writes state.

The page cache is not used.
"""

import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from threading import Event

from ebbtide import host_limits
from ebbtide.features.storage.engine.direct_file import PAGE, DirectFile
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.machines.machine import StoragePath
from ebbtide.units import bytes_text

PIECE_BYTES = 32 << 20
# The part of the free space that both files may take together.
_MOST_OF_FREE_SPACE = 0.1
_ROUNDS = 3
_PROBED_BYTES = 2 * PIECE_BYTES
# Moves a piece at an offset.
_Move = Callable[[int], None]


class StorageFiles:
    """Two files without a name, one to read and one to write.

    Nothing is left behind however the process ends.

    `max_bytes` is the size of each, where the free space for this one of the ranks
    allows it. Raises EngineError if the folder cannot be written, or has too little
    free space."""

    def __init__(self, folder: Path, max_bytes: int, ranks: int) -> None:
        if not folder.is_dir():
            raise EngineError(f"{folder} is not a folder")
        space = os.statvfs(folder)
        self.free_bytes = space.f_bavail * space.f_frsize / ranks
        file_bytes = int(min(max_bytes, _MOST_OF_FREE_SPACE * self.free_bytes / 2))
        # Small where there is little space: state may be small, too.
        self._piece_bytes = min(PIECE_BYTES, file_bytes // PAGE * PAGE)
        if not self._piece_bytes:
            needed_bytes = 2 * PAGE / _MOST_OF_FREE_SPACE
            raise EngineError(
                f"{folder} has {bytes_text(self.free_bytes)} free, too little to "
                "measure: free "
                f"{bytes_text(needed_bytes)}, or name another folder"
            )
        self._pieces = file_bytes // self._piece_bytes
        self._files: list[DirectFile] = []
        pages = mmap.mmap(-1, self._piece_bytes)
        # Some drives compress, and some file systems leave out blocks of zeros.
        pages.write(os.urandom(self._piece_bytes))
        self._memory = memoryview(pages)
        try:
            for number in range(2):
                self._files.append(
                    DirectFile(folder / f".ebbtide-storage-{os.getpid()}-{number}")
                )
                self._files[-1].path.unlink()
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        """Bytes of each file."""
        return self._pieces * self._piece_bytes

    @property
    def is_direct(self) -> bool:
        return self._files[0].is_direct

    def close(self) -> None:
        for file in self._files:
            file.close()

    def fill(self, limit_s: float = float("inf")) -> None:
        """Write both files once, since first writes are slower; they become smaller if
        that takes too long."""
        end_s = time.perf_counter() + limit_s
        for number in range(self._pieces):
            for file in self._files:
                file.write(number * self._piece_bytes, self._memory)
            if time.perf_counter() > end_s:
                self._pieces = number + 1
                break
        for file in self._files:
            file.synchronize()

    def rates(
        self, window_s: float = 0.0, wait: Callable[[], None] = lambda: None
    ) -> tuple[list[float], ...]:
        """Return the bytes/s of reads, of writes and of both at once, measured in
        rounds that share a window for each kind.

        They take turns, since a drive that others use changes its speed by the second;
        `wait` is called before each.
        """
        kinds: tuple[list[_Move], ...] = (
            [self._read],
            [self._write],
            [self._read, self._write],
        )
        rates: tuple[list[float], ...] = ([], [], [])
        for _ in range(_ROUNDS):
            for moves, own in zip(kinds, rates, strict=True):
                wait()
                own.append(self._rate(window_s / _ROUNDS, moves))
        return rates

    def _rate(self, window_s: float, moves: list[_Move]) -> float:
        stop = Event()
        begin_s = time.perf_counter()
        with ThreadPoolExecutor(len(moves)) as pool:
            moved = [pool.submit(self._repeat, move, stop) for move in moves]
            try:
                time.sleep(window_s)
            finally:
                stop.set()
        return sum(task.result() for task in moved) / (time.perf_counter() - begin_s)

    def _repeat(self, move: _Move, stop: Event) -> int:
        """Move the pieces of a file again and again, one at least; return the bytes."""
        for number in count():
            move(number % self._pieces * self._piece_bytes)
            if stop.is_set():
                break
        return (number + 1) * self._piece_bytes

    def _read(self, offset: int) -> None:
        if not self.is_direct:
            self._files[0].drop_cache(offset, self._piece_bytes)
        self._files[0].read(offset, self._memory)

    def _write(self, offset: int) -> None:
        self._files[1].write(offset, self._memory)
        if not self.is_direct:
            self._files[1].synchronize()


def probe_storage(folder: Path) -> StoragePath:
    """Measure a folder in a moment. Raises as StorageFiles."""
    files = StorageFiles(folder, _PROBED_BYTES, host_limits.local_ranks())
    try:
        files.fill()
        read, write, both = map(max, files.rates())
    finally:
        files.close()
    return StoragePath(read, write, files.free_bytes, both, path=str(folder.resolve()))
