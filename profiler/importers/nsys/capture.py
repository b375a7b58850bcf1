"""The data type between the reader of Nsight Systems' exports and the trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd

from ebbtide.profiler.chrome_trace.gpu_activities import KINDS

COMPUTE, COPY, MEMSET = (KINDS.index(kind) for kind in ("compute", "copy", "memset"))
# Value of an integer that was not recorded.
MISSING = -1
# Larger values are not times after the start of a session; added to a Unix time they would overflow.
MAX_TIME = 1 << 62
_MAX_DEVICES = 1024
# The low bits of a serialized thread id (`globalTid`) are the thread, the next 24 the process.
_THREAD_BITS = 24
_ID_MASK = (1 << _THREAD_BITS) - 1
WORK_COLUMNS = ("process", "start", "end", "device", "stream", "correlation", "kind", "name", "bytes")
LAUNCH_COLUMNS = ("process", "correlation", "start", "end", "thread", "name")
RANGE_COLUMNS = ("process", "thread", "start", "end", "name")
MEMORY_COLUMNS = ("process", "device", "t", "address", "bytes", "released")


@dataclass(frozen=True)
class Capture:
    """Contents of an export of Nsight Systems. Times are ns after the start of the session. A process is a serialized
    id (`globalPid`), MISSING where it is not known."""

    names: list[str]  # Texts that the columns `name` refer to by position
    # Kernels, copies and memsets: WORK_COLUMNS; `kind` is a position in `gpu_activities.KINDS`, or TRANSFER. Copies
    # have the names that torch's profiler gives them: `Memcpy HtoD (Pinned -> Device)`.
    work: pd.DataFrame
    launches: pd.DataFrame  # LAUNCH_COLUMNS
    ranges: pd.DataFrame  # NVTX ranges: RANGE_COLUMNS
    # Allocations and releases of device memory: MEMORY_COLUMNS; None where they were not recorded.
    memory: pd.DataFrame | None
    # Entries of devices in the trace's metadata, by process id and number of the device; the process id is MISSING in
    # entries that hold for all processes.
    devices: dict[tuple[int, int], dict[str, Any]]
    ranks: dict[int, int]
    session_ns: int | None  # Unix time of the start of the session; None where the file does not state it
    notes: list[str]  # Lines about what is missing or unusual


def are_spans(rows: pd.DataFrame) -> pd.Series[bool]:
    """Return which rows have a start and an end that can be times. Work that never ended has 0 as its end."""
    return rows["start"].between(0, MAX_TIME) & (rows["end"] >= rows["start"]) & (rows["end"] <= MAX_TIME)


def are_devices(numbers: pd.Series) -> pd.Series[bool]:
    """Return which numbers can be those of devices of a process."""
    return numbers.between(0, _MAX_DEVICES - 1)


def process_of(global_ids: pd.Series) -> pd.Series:
    """Return the process part of serialized ids (`globalTid`, `globalPid`), which is the same for all its threads."""
    return global_ids.where(global_ids == MISSING, global_ids & ~_ID_MASK)


def thread_of(global_ids: pd.Series) -> pd.Series:
    """Return the thread ids in serialized thread ids."""
    return global_ids.where(global_ids == MISSING, global_ids & _ID_MASK)


def pid_of(process: int) -> int | None:
    """Return the process id in a serialized process id; None where it was not recorded."""
    return None if process < 0 else process >> _THREAD_BITS & _ID_MASK
