"""Measures how fast a folder's file system reads and writes subgroup state.

The page cache is not used.
"""

from contextlib import closing
from pathlib import Path

from ebbtide.errors import MachineError
from ebbtide.features.calibrate.record import MeasurementRecord, Setup, Timing
from ebbtide.features.storage.engine.direct_file import (
    BLOCK_BYTES,
    THREADS,
    memory_file_system,
)
from ebbtide.features.storage.engine.speed import StorageFiles
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.machines.machine import StoragePath

# The state of a subgroup of 1e8 parameters, 12 B each.
_FILE_BYTES = 1_200_000_000
# A slow device is measured with smaller files: filling them takes at most this many
# windows.
_FILL_WINDOWS = 2
WINDOWS = 3 + _FILL_WINDOWS


def measure_storage(folder: Path, setup: Setup, record: MeasurementRecord) -> None:
    """Measure sequential reads and writes of a folder alone and both at once; the path
    is added to the record."""
    try:
        with closing(
            StorageFiles(folder, _FILE_BYTES, setup.ranks.local_count)
        ) as files:
            files.fill(_FILL_WINDOWS * setup.window_s)
            rates = files.rates(setup.window_s, setup.ranks.wait)
    except EngineError as error:
        raise MachineError(f"--storage {error}") from None
    timings = [Timing.from_runs([1 / rate for rate in own]) for own in rates]
    read, write, both = (1 / timing.seconds for timing in timings)
    record.storage.append(
        StoragePath(read, write, files.free_bytes, both, path=str(folder.resolve()))
    )
    kind = (
        "O_DIRECT"
        if files.is_direct
        else "the page cache, with fsync (no O_DIRECT here)"
    )
    blocks = f"blocks of {BLOCK_BYTES >> 20} MiB, files of {files.size / 1e6:,.0f} MB"
    least_steady = max(timings, key=lambda timing: timing.spread)
    record.describe(
        f"storage[{len(record.storage) - 1}]",
        f"{THREADS} threads, {blocks}, by {kind}",
        least_steady,
    )
    if not files.is_direct:
        record.notes.append(
            f"--storage {folder}: no O_DIRECT, measured through the page cache with "
            "fsync"
        )
    if (kind_of := memory_file_system(folder)) is not None:
        record.notes.append(
            f"--storage {folder} is a {kind_of}, which is host memory: its rates are "
            "not of a drive"
        )
