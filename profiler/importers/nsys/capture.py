"""The data type between the readers of Nsight Systems' files and the trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from ebbtide.profiler.chrome_trace.gpu_activities import COMMUNICATION, KINDS, TRANSFER, kind_of

COMPUTE, COPY, MEMSET = (KINDS.index(kind) for kind in ("compute", "copy", "memset"))
MEMSET_NAME = "Memset (Device)"
HOST_TO_DEVICE, DEVICE_TO_HOST, ON_DEVICE = "HtoD", "DtoH", "DtoD"
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


def copy_kind(direction: str) -> int:
    """Return the kind of a copy. direction: HOST_TO_DEVICE, DEVICE_TO_HOST or ON_DEVICE (also between devices)."""
    return COPY if direction == ON_DEVICE else TRANSFER


def copy_name(direction: str, host_memory: str | None, unified: bool = False) -> str:
    """Return the name of a copy; `host_memory`: `Pinned`, `Pageable` or None; `unified`: moved by the driver."""
    name = f"Memcpy {direction}"
    if unified:
        return f"{name} (Unified)"
    if direction == ON_DEVICE or host_memory is None:
        return name
    ends = ("Device", host_memory) if direction == DEVICE_TO_HOST else (host_memory, "Device")
    return f"{name} ({' -> '.join(ends)})"


def separate_collectives(work: pd.DataFrame, names: Sequence[str]) -> None:
    """Give the kernels of NCCL and RCCL their kind. work: columns `kind` and `name`, a position in names."""
    collective = np.array([kind_of("kernel", name) == COMMUNICATION for name in names], bool)
    if len(work):
        work.loc[(work["kind"] == COMPUTE) & collective[work["name"]], "kind"] = COMMUNICATION


def integer_frame(columns: tuple[str, ...]) -> pd.DataFrame:
    """Return an empty frame of int64 columns."""
    return pd.DataFrame(np.empty((0, len(columns)), np.int64), columns=[*columns])


@dataclass
class Capture:
    """Contents of one or more files of Nsight Systems. Times are ns after the start of the session. A process is a
    serialized id (`globalPid`). Negative ids are those of processes that are not known."""

    names: list[str] = field(default_factory=list)  # Texts that the columns `name` refer to by position
    # Kernels, copies and memsets: WORK_COLUMNS; `kind` is a position in `gpu_activities.KINDS`, or TRANSFER. Copies
    # have the names that torch's profiler gives them: `Memcpy HtoD (Pinned -> Device)`.
    work: pd.DataFrame = field(default_factory=lambda: integer_frame(WORK_COLUMNS))
    launches: pd.DataFrame = field(default_factory=lambda: integer_frame(LAUNCH_COLUMNS))
    # NVTX ranges: RANGE_COLUMNS; also gpu_start and gpu_end, the span of the work launched in a range, in reports that
    # have it (MISSING where a range launched none).
    ranges: pd.DataFrame = field(default_factory=lambda: integer_frame(RANGE_COLUMNS))
    # Allocations and releases of device memory: MEMORY_COLUMNS; None where they were not recorded.
    memory: pd.DataFrame | None = None
    # Entries of devices in the trace's metadata, by process id and number of the device; the process id is MISSING in
    # entries that hold for all processes.
    devices: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)
    ranks: dict[int, int] = field(default_factory=dict)
    memory_remedy: str = "nsys profile --cuda-memory-usage=true"
    ranges_remedy: str = "nsys profile --trace=cuda,nvtx"
    session_ns: int | None = None  # Unix time of the start of the session; None where the file does not state it
    notes: list[str] = field(default_factory=list)  # Lines about what is missing or unusual


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
