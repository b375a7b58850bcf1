"""The data type between the readers of Nsight Systems' files and the trace."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

# Value of an integer that was not recorded.
MISSING = -1
# Larger values are not times after the start of a session; added to a Unix time they would overflow.
MAX_TIME = 1 << 62
_MAX_DEVICES = 1024
# The low bits of a serialized thread id (`globalTid`) are the thread, the next 24 the process.
_THREAD_BITS = 24
_ID_MASK = (1 << _THREAD_BITS) - 1

WORK_COLUMNS = ("process", "start", "end", "device", "stream", "correlation", "kind", "name", "bytes")
LAUNCH_COLUMNS = ("process", "correlation", "start")
RANGE_COLUMNS = ("process", "thread", "start", "end", "name")
MEMORY_COLUMNS = ("process", "device", "t", "address", "bytes", "released")


def integer_frame(columns: tuple[str, ...]) -> pd.DataFrame:
    """Return an empty frame of int64 columns."""
    return pd.DataFrame(np.empty((0, len(columns)), np.int64), columns=[*columns])


@dataclass
class Capture:
    """Contents of one or more files of Nsight Systems. Times are ns after the start of the session.

    A process is a serialized id (`globalPid`). Negative ids are those of processes that are not known.

    Attributes:
        names: Texts that the columns `name` refer to by position.
        work: Kernels, copies and memsets: WORK_COLUMNS; `kind` is a position in `gpu_activities.kinds.KINDS`, or
            TRANSFER. Copies have the names that torch's profiler gives them: `Memcpy HtoD (Pinned -> Device)`.
        launches: Calls that launched work: LAUNCH_COLUMNS.
        ranges: NVTX ranges: RANGE_COLUMNS; also gpu_start and gpu_end, the span of the work launched in a range, in
            reports that have it (MISSING where a range launched none).
        memory: Allocations and releases of device memory: MEMORY_COLUMNS; None where they were not recorded.
        devices: Entries of devices in the trace's metadata, by process id and number of the device; the process id is
            MISSING in entries that hold for all processes.
        ranks: Rank of each process for which the file has it.
        memory_remedy: Way to get the use of memory, where there is none.
        ranges_remedy: Way to get ranges, where there are none.
        session_ns: Unix time of the start of the session; None where the file does not state it.
        notes: Lines about what is missing or unusual.
    """

    names: list[str] = field(default_factory=list)
    work: pd.DataFrame = field(default_factory=lambda: integer_frame(WORK_COLUMNS))
    launches: pd.DataFrame = field(default_factory=lambda: integer_frame(LAUNCH_COLUMNS))
    ranges: pd.DataFrame = field(default_factory=lambda: integer_frame(RANGE_COLUMNS))
    memory: pd.DataFrame | None = None
    devices: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)
    ranks: dict[int, int] = field(default_factory=dict)
    memory_remedy: str = "nsys profile --cuda-memory-usage=true"
    ranges_remedy: str = "nsys profile --trace=cuda,nvtx"
    session_ns: int | None = None
    notes: list[str] = field(default_factory=list)


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


def process_of_pid(pids: pd.Series) -> pd.Series:
    """Return the serialized process ids, without host, of process ids."""
    valid = pids.between(0, _ID_MASK)
    return (pids.where(valid, 0) * (1 << _THREAD_BITS)).where(valid, MISSING)
