"""Measures in a second how fast a folder is read and written, for plans; `ebbtide calibrate --storage` is exact."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ebbtide import host_limits
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.runtime.storage.direct_file import DirectFile
from ebbtide.machines.storage import StoragePath

_FILE_BYTES = 64 << 20
# In pieces, since this is host memory that the job may not have.
_RANDOM_BYTES = 1 << 20
# The part of the free space that the two files may take together.
_MOST_OF_FREE_SPACE = 0.1
_ROUNDS = 3


def probe_storage(folder: Path) -> StoragePath:
    """Measure reads and writes of a folder, alone and both at once, as state is read and written.

    Args:
        folder: The folder. Its files are removed.

    Raises:
        EngineError: It cannot be written, or has too little free space.
    """
    space = os.statvfs(folder)
    free = space.f_bavail * space.f_frsize
    if free * _MOST_OF_FREE_SPACE < 2 * _FILE_BYTES:
        raise EngineError(f"storage {folder} has {free / 1e6:,.0f} MB free, too little: name another folder")
    files: list[DirectFile] = []
    try:
        for number in range(2):
            path = folder / f".ebbtide-probe-{os.getpid()}-{number}"
            files.append(DirectFile(path))
            path.unlink()
        with mmap.mmap(-1, _FILE_BYTES) as pages:
            # Some drives compress, and some file systems leave out blocks of zeros.
            for _ in range(_FILE_BYTES // _RANDOM_BYTES):
                pages.write(os.urandom(_RANDOM_BYTES))
            with memoryview(pages) as memory:
                return _measured(folder, files[0], files[1], memory, free)
    finally:
        for file in files:
            file.close()


def _measured(folder: Path, read: DirectFile, written: DirectFile, memory: memoryview, free: float) -> StoragePath:
    for file in (read, written):
        # First writes are slower.
        file.write(0, memory)
        file.synchronize()

    def read_all() -> None:
        read.read(0, memory)

    def write_all() -> None:
        written.write(0, memory)
        if not written.is_direct:
            written.synchronize()

    def both() -> None:
        reader = threading.Thread(target=read_all)
        reader.start()
        write_all()
        reader.join()

    return StoragePath(
        read_bytes_per_s=_FILE_BYTES / _min_seconds(read_all),
        write_bytes_per_s=_FILE_BYTES / _min_seconds(write_all),
        bytes=free / host_limits.local_ranks(),
        duplex_bytes_per_s=2 * _FILE_BYTES / _min_seconds(both),
        path=str(folder.resolve()),
    )


def _min_seconds(work: Callable[[], None]) -> float:
    times_s = []
    for _ in range(_ROUNDS):
        begin_s = time.perf_counter()
        work()
        times_s.append(time.perf_counter() - begin_s)
    return min(times_s)
