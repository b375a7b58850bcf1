"""Reads SQLite exports of Nsight Systems.

Its documentation has the schema (SQLite schema reference).

Tables without rows are not exported, and columns differ between versions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ebbtide.features.importers.nsys.database import Database
from ebbtide.profiler.chrome_trace.gpu_activities import (
    COMMUNICATION,
    KINDS,
    TRANSFER,
    kind_of,
)

KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
COPIES = "CUPTI_ACTIVITY_KIND_MEMCPY"
MEMSETS = "CUPTI_ACTIVITY_KIND_MEMSET"
CALLS = "CUPTI_ACTIVITY_KIND_RUNTIME"
RANGES = "NVTX_EVENTS"
MEMORY = "CUDA_GPU_MEMORY_USAGE_EVENTS"
# An export has at least one of them; the last ones are in exports without work of a
# GPU.
EXPORT_TABLES = (
    KERNELS, GRAPHS, COPIES, MEMSETS, CALLS, RANGES, "META_DATA_EXPORT",
    "META_DATA_CAPTURE", "ANALYSIS_DETAILS", "TARGET_INFO_SYSTEM_ENV", "OSRT_API",
)  # fmt: skip

COMPUTE, COPY, MEMSET = (KINDS.index(kind) for kind in ("compute", "copy", "memset"))
# Value of an integer that was not recorded.
MISSING = -1
# Larger values are not times after the start of a session; added to a Unix time they
# would overflow.
_MAX_TIME = 1 << 62
_MAX_DEVICES = 1024
# The low bits of a serialized thread id (`globalTid`) are the thread, the next 24 the
# process.
_THREAD_BITS = 24
_ID_MASK = (1 << _THREAD_BITS) - 1
_WORK_COLUMNS = (
    "process",
    "start",
    "end",
    "device",
    "stream",
    "correlation",
    "kind",
    "name",
    "bytes",
)
RANGE_COLUMNS = ("process", "thread", "start", "end", "name")
_MEMORY_COLUMNS = ("process", "device", "t", "address", "bytes", "released")

_ACTIVITY = ("start", "end", "deviceId", "streamId")
_OPTIONAL = {"correlationId": MISSING, "globalPid": MISSING}
_PUSH_POP, _START_END, _DOMAIN = 59, 60, 75
# CUDA_MEMCPY_KIND_*: to and from the host, arrays and unified memory included. 9 is a
# copy within the host.
_H2D, _D2H, _HOST_TO_HOST, _UNKNOWN_COPY, _FIRST_UNIFIED = (
    (1, 3, 11),
    (2, 4, 12),
    9,
    0,
    11,
)
# CUDA_MEMOPR_MEMORY_KIND_*
_HOST_MEMORY = {0: "Pageable", 1: "Pinned"}
_DEVICE, _ARRAY, _STATIC = 2, 3, 5
_MAX_COPY_BYTES = 1 << 44
_GPUS = "TARGET_INFO_GPU"
_CUDA_DEVICES = "TARGET_INFO_CUDA_DEVICE"
_SESSION = "TARGET_INFO_SESSION_START_TIME"
_MPI_RANKS = "MPI_RANKS"
_MAX_MEMORY_BYTES = 1 << 44
_MAX_RANK = 10_000_000
# 2001 to 2096: other values are not Unix times in ns.
_FIRST_TIME, _LAST_TIME = 10**18, 4 * 10**18


@dataclass(frozen=True)
class Capture:
    """Contents of an export of Nsight Systems. Times are ns after the start of the
    session. A process is a serialized id (`globalPid`), MISSING where it is not
    known."""

    names: list[str]  # Texts that the columns `name` refer to by position
    # Kernels, copies and memsets: _WORK_COLUMNS; `kind` is a position in
    # `gpu_activities.KINDS`, or TRANSFER. Copies have the names that torch's profiler
    # gives them: `Memcpy HtoD (Pinned -> Device)`.
    work: pd.DataFrame
    launches: pd.DataFrame  # CUDA calls: process, correlation, start, end, thread, name
    ranges: pd.DataFrame  # NVTX ranges: RANGE_COLUMNS
    # Allocations and releases of device memory: _MEMORY_COLUMNS; None where they were
    # not recorded.
    memory: pd.DataFrame | None
    # Devices in the trace's metadata by process id (MISSING: of all processes) and
    # number.
    devices: dict[tuple[int, int], dict[str, Any]]
    ranks: dict[int, int]
    # Unix time of the start of the session; None where the file does not state it
    session_ns: int | None
    notes: list[str]  # Lines about what is missing or unusual


def read_capture(database: Database) -> Capture:
    """Read what an export holds about GPUs and NVTX ranges."""
    names, notes = _Names(), list[str]()
    memsets = _work(
        database.integers(MEMSETS, _ACTIVITY, _OPTIONAL),
        MEMSET,
        names.of_text("Memset (Device)"),
    )
    parts = [
        _kernels(database, names),
        _graphs(database, names, notes),
        _copies(database, names),
        memsets,
    ]
    launches, ranges = _calls(database, names), _ranges(database, names)
    texts = names.resolve(database)
    return Capture(
        texts,
        _with_collectives(pd.concat(parts, ignore_index=True), texts),
        launches,
        _with_domains(ranges, texts),
        _memory(database) if MEMORY in database.tables else None,
        read_devices(database),
        read_mpi_ranks(database),
        read_session_start(database),
        notes,
    )


def _with_collectives(work: pd.DataFrame, texts: list[str]) -> pd.DataFrame:
    """Give the kernels of NCCL and RCCL their kind."""
    collective = np.array(
        [kind_of("kernel", text) == COMMUNICATION for text in texts], bool
    )
    return work.assign(
        kind=work["kind"].mask(
            (work["kind"] == COMPUTE) & collective[work["name"]], COMMUNICATION
        )
    )


class _Names:
    """Numbers texts: texts of StringIds by their ids, others as they come."""

    def __init__(self) -> None:
        self._ids: dict[int, int] = {}
        self._texts: list[str | None] = []
        self._numbers: dict[str, int] = {}

    def of_ids(self, ids: pd.Series) -> pd.Series:
        """Return the number of the text of each id."""
        unique, positions = np.unique(ids, return_inverse=True)
        for identifier in map(int, unique):
            if identifier not in self._ids:
                self._ids[identifier] = len(self._texts)
                self._texts.append(None)
        numbers = np.array(
            [self._ids[int(identifier)] for identifier in unique], np.int64
        )
        return pd.Series(numbers[positions], ids.index, dtype=np.int64)

    def of_text(self, text: str) -> int:
        """Return the number of a text."""
        if text not in self._numbers:
            self._numbers[text] = len(self._texts)
            self._texts.append(text)
        return self._numbers[text]

    def resolve(self, database: Database) -> list[str]:
        """Return all texts by their number."""
        texts = list(self._texts)
        for identifier, text in database.labels("StringIds", "id", "value"):
            if identifier in self._ids:
                texts[self._ids[identifier]] = text
        return ["(unnamed)" if text is None else text for text in texts]


def _work(rows: pd.DataFrame, kind: Any, name: Any, **columns: Any) -> pd.DataFrame:
    """Return rows of _WORK_COLUMNS. Work whose end was not recorded is left out."""
    work = rows.rename(
        columns={
            "deviceId": "device",
            "streamId": "stream",
            "correlationId": "correlation",
        }
    )
    columns = {
        "process": _process_of(rows["globalPid"]),
        "kind": kind,
        "name": name,
        "bytes": MISSING,
        **columns,
    }
    work = work.assign(**columns)
    return work.loc[
        _are_spans(work) & _are_devices(work["device"]), [*_WORK_COLUMNS]
    ].astype(np.int64)


def _kernels(database: Database, names: _Names) -> pd.DataFrame:
    full = (
        "demangledName" if "demangledName" in database.columns(KERNELS) else "shortName"
    )
    rows = database.integers(KERNELS, _ACTIVITY, {**_OPTIONAL, full: MISSING})
    return _work(rows, COMPUTE, names.of_ids(rows[full]))


def _graphs(database: Database, names: _Names, notes: list[str]) -> pd.DataFrame:
    """Return the CUDA graphs that were recorded as wholes, without their kernels."""
    rows = database.integers(GRAPHS, _ACTIVITY, {**_OPTIONAL, "graphId": MISSING})
    if len(rows):
        notes.append(
            f"{len(rows)} launches of CUDA graphs were recorded as wholes and count as "
            "compute: what ran in them, "
            "copies and collectives included, is not known (nsys profile "
            "--cuda-graph-trace=node)"
        )
    unique, positions = np.unique(rows["graphId"], return_inverse=True)
    numbers = np.array(
        [names.of_text(f"CUDA graph {number}") for number in unique], np.int64
    )
    return _work(rows, COMPUTE, numbers[positions])


def _copies(database: Database, names: _Names) -> pd.DataFrame:
    optional = {**_OPTIONAL, "srcKind": MISSING, "dstKind": MISSING}
    rows = database.integers(COPIES, (*_ACTIVITY, "bytes", "copyKind"), optional)
    rows = rows[rows["copyKind"] != _HOST_TO_HOST].reset_index(drop=True)
    sorts, positions = np.unique(
        rows[["copyKind", "srcKind", "dstKind"]], axis=0, return_inverse=True
    )
    described = [_kind_and_name(*sort) for sort in sorts.tolist()]
    kinds, numbers = (
        [kind for kind, _ in described],
        [names.of_text(name) for _, name in described],
    )
    size = rows["bytes"].where(rows["bytes"].between(0, _MAX_COPY_BYTES), MISSING)
    kind, name = (
        np.array(values, np.int64)[positions.ravel()] for values in (kinds, numbers)
    )
    return _work(rows, kind, name, bytes=size)


def _kind_and_name(copy: int, source: int, target: int) -> tuple[int, str]:
    """Return the kind and name of a copy by its kind in CUPTI.

    Where that is not known, they follow from its memories.
    """
    if copy in _H2D or (
        copy == _UNKNOWN_COPY and source in _HOST_MEMORY and target == _DEVICE
    ):
        host = _HOST_MEMORY.get(source)
        kind, name, ends = TRANSFER, "Memcpy HtoD", f" ({host} -> Device)"
    elif copy in _D2H or (
        copy == _UNKNOWN_COPY and target in _HOST_MEMORY and source == _DEVICE
    ):
        host = _HOST_MEMORY.get(target)
        kind, name, ends = TRANSFER, "Memcpy DtoH", f" (Device -> {host})"
    else:
        kind, name, ends, host = COPY, "Memcpy DtoD", "", None
    if copy >= _FIRST_UNIFIED:
        return kind, f"{name} (Unified)"
    return kind, name + ends if host else name


def _calls(database: Database, names: _Names) -> pd.DataFrame:
    """Return the CUDA calls that have started work."""
    optional = {
        "correlationId": MISSING,
        "globalTid": MISSING,
        "end": MISSING,
        "nameId": MISSING,
    }
    rows = database.integers(CALLS, ("start",), optional)
    rows = rows[(rows["correlationId"] > 0) & rows["start"].between(0, _MAX_TIME)]
    return rows.rename(columns={"correlationId": "correlation"}).assign(
        process=_process_of(rows["globalTid"]),
        end=rows["end"]
        .clip(upper=_MAX_TIME)
        .where(rows["end"] >= rows["start"], rows["start"]),
        thread=_thread_of(rows["globalTid"]),
        name=names.of_ids(rows["nameId"]),
    )


def _ranges(database: Database, names: _Names) -> pd.DataFrame:
    """Return RANGE_COLUMNS, and `domain`.

    The latter is the number of the name of the range's domain, MISSING for the default
    one.
    """
    optional = {
        "end": MISSING,
        "eventType": _PUSH_POP,
        "globalTid": MISSING,
        "textId": MISSING,
        "domainId": 0,
    }
    rows = database.integers(RANGES, ("start",), optional)
    texts = pd.Series(
        [text for (text,) in database.texts(RANGES, "text")], dtype=object
    )
    rows["process"], rows["thread"] = (
        _process_of(rows["globalTid"]),
        _thread_of(rows["globalTid"]),
    )
    rows["name"] = names.of_ids(rows["textId"])
    own_text = texts.notna().to_numpy(bool)
    rows.loc[own_text, "name"] = [names.of_text(text) for text in texts[own_text]]
    domains = rows[rows["eventType"] == _DOMAIN].drop_duplicates(
        ["process", "domainId"], keep="last"
    )
    domains = domains[["process", "domainId", "name"]].rename(
        columns={"name": "domain"}
    )
    ended = rows["eventType"].isin((_PUSH_POP, _START_END)) & _are_spans(rows)
    ranges = rows[ended].merge(domains, "left", on=["process", "domainId"])
    ranges["domain"] = ranges["domain"].fillna(MISSING).astype(np.int64)
    return ranges[[*RANGE_COLUMNS, "domain"]]


def _with_domains(ranges: pd.DataFrame, texts: list[str]) -> pd.DataFrame:
    """Put domains before the names of ranges outside the default one.

    An example is `NCCL:ncclAllReduce`; the names are added to `texts`.
    """
    pairs = ranges[["domain", "name"]].to_numpy()
    unique, positions = np.unique(pairs, axis=0, return_inverse=True)
    numbers = []
    for domain, name in unique.tolist():
        numbers.append(name if domain == MISSING else len(texts))
        if domain != MISSING:
            texts.append(f"{texts[domain]}:{texts[name]}")
    return ranges.assign(name=np.array(numbers, np.int64)[positions.ravel()]).drop(
        columns="domain"
    )


def _memory(database: Database) -> pd.DataFrame:
    required = (
        "start",
        "globalPid",
        "deviceId",
        "address",
        "bytes",
        "memKind",
        "memoryOperationType",
    )
    rows = database.integers(MEMORY, required, {})
    rows = rows[rows["memKind"].isin((_DEVICE, _ARRAY, _STATIC)) & (rows["bytes"] > 0)]
    memory = rows.rename(
        columns={"deviceId": "device", "start": "t", "memoryOperationType": "released"}
    )
    memory = memory.assign(process=_process_of(rows["globalPid"]))
    valid = (
        memory["t"].between(0, _MAX_TIME)
        & _are_devices(memory["device"])
        & (memory["bytes"] <= _MAX_COPY_BYTES)
    )
    return memory.loc[valid, [*_MEMORY_COLUMNS]]


def read_devices(database: Database) -> dict[tuple[int, int], dict[str, Any]]:
    """Return the entries of devices by process and CUDA's number of the device in it.
    That counts the devices that the process may use, from 0; the ids of the table of
    GPUs are of the host. A second table relates them, except in old versions."""
    figures = database.integers(_GPUS, (), {"id": MISSING, "totalMemory": MISSING})
    texts = database.texts(_GPUS, "name", "uuid", "busLocation")
    entries = {
        number: {
            "name": name or None,
            "capacity_bytes": capacity if 0 < capacity <= _MAX_MEMORY_BYTES else None,
            "uuid": uuid or None,
            "pci_bus_id": bus or None,
        }
        for (number, capacity), (name, uuid, bus) in zip(
            figures.itertuples(index=False, name=None), texts, strict=True
        )
    }
    devices = {(MISSING, number): entry for number, entry in entries.items()}
    uses = database.integers(_CUDA_DEVICES, ("cudaId", "pid"), {"gpuId": MISSING})
    for device, pid, number in uses.itertuples(index=False, name=None):
        if number in entries:
            devices[pid, device] = {**entries[number], "index": number}
    return devices


def read_mpi_ranks(database: Database) -> dict[int, int]:
    """Return the rank of each process that initialized MPI."""
    ranks = database.integers(_MPI_RANKS, ("globalTid", "rank"), {})
    ranks = ranks[ranks["rank"].between(0, _MAX_RANK)]
    return dict(
        zip(
            _process_of(ranks["globalTid"]).tolist(),
            ranks["rank"].tolist(),
            strict=True,
        )
    )


def read_session_start(database: Database) -> int | None:
    """Return the Unix time in ns from which the export's times count.

    Return None where it was not recorded.
    """
    times = database.integers(_SESSION, (), {"utcEpochNs": MISSING})["utcEpochNs"]
    times = times[times.between(_FIRST_TIME, _LAST_TIME)]
    return int(times.iloc[0]) if len(times) else None


def _are_spans(rows: pd.DataFrame) -> pd.Series[bool]:
    """Return which rows have a start and an end that can be times. Work that never
    ended has 0 as its end."""
    return (
        rows["start"].between(0, _MAX_TIME)
        & (rows["end"] >= rows["start"])
        & (rows["end"] <= _MAX_TIME)
    )


def _are_devices(numbers: pd.Series) -> pd.Series[bool]:
    """Return which numbers can be a process's device numbers."""
    return numbers.between(0, _MAX_DEVICES - 1)


def _process_of(global_ids: pd.Series) -> pd.Series:
    """Return the process part of serialized ids (`globalTid`, `globalPid`), the same
    for all threads of a process."""
    return global_ids.where(global_ids == MISSING, global_ids & ~_ID_MASK)


def _thread_of(global_ids: pd.Series) -> pd.Series:
    """Return the thread ids in serialized thread ids."""
    return global_ids.where(global_ids == MISSING, global_ids & _ID_MASK)


def pid_of(process: int) -> int | None:
    """Return the process id in a serialized one; None where it was not recorded."""
    return None if process < 0 else process >> _THREAD_BITS & _ID_MASK
