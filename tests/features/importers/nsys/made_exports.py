"""SQLite exports of Nsight Systems, made by the schema in NVIDIA's documentation."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

from ebbtide.features.importers.importer import ImportOptions
from ebbtide.features.importers.nsys.importer import NsysImporter
from ebbtide.features.importers.source import Source
from ebbtide.profiler.trace import Trace, TraceBuilder

SESSION_NS = 1_790_857_026_000_000_000
H2D, D2H, D2D = 1, 2, 8
PAGEABLE, PINNED, DEVICE = 0, 1, 2

_TABLES = {
    "StringIds": "id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL",
    "TARGET_INFO_SESSION_START_TIME": (
        "utcEpochNs INTEGER, utcTime TEXT, localTime TEXT"
    ),
    "TARGET_INFO_GPU": (
        "vmId INTEGER NOT NULL, id INTEGER NOT NULL, name TEXT, busLocation TEXT, "
        "totalMemory INTEGER, uuid TEXT, "
        "cuDevice INTEGER"
    ),
    "TARGET_INFO_CUDA_DEVICE": (
        "gpuId INTEGER, cudaId INTEGER NOT NULL, pid INTEGER NOT NULL, uuid TEXT"
    ),
    "MPI_RANKS": "globalTid INTEGER NOT NULL, rank INTEGER NOT NULL",
    "CUPTI_ACTIVITY_KIND_KERNEL": (
        "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, "
        "contextId INTEGER NOT NULL, "
        "streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, "
        "demangledName INTEGER NOT NULL, "
        "shortName INTEGER NOT NULL, gridX INTEGER NOT NULL"
    ),
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": (
        "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, "
        "contextId INTEGER NOT NULL, "
        "streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, graphId "
        "INTEGER NOT NULL"
    ),
    "CUPTI_ACTIVITY_KIND_MEMCPY": (
        "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, "
        "contextId INTEGER NOT NULL, "
        "streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, bytes "
        "INTEGER NOT NULL, "
        "copyKind INTEGER NOT NULL, srcKind INTEGER, dstKind INTEGER"
    ),
    "CUPTI_ACTIVITY_KIND_MEMSET": (
        "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, "
        "contextId INTEGER NOT NULL, "
        "streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, value "
        "INTEGER NOT NULL, "
        "bytes INTEGER NOT NULL, memKind INTEGER"
    ),
    "CUPTI_ACTIVITY_KIND_RUNTIME": (
        "start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, "
        "globalTid INTEGER, "
        "correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL"
    ),
    "CUDA_GPU_MEMORY_USAGE_EVENTS": (
        "start INTEGER NOT NULL, globalPid INTEGER NOT NULL, deviceId INTEGER NOT "
        "NULL, contextId INTEGER NOT NULL, "
        "address INTEGER NOT NULL, pc INTEGER NOT NULL, bytes INTEGER NOT NULL, "
        "memKind INTEGER NOT NULL, "
        "memoryOperationType INTEGER NOT NULL, name TEXT"
    ),
    "NVTX_EVENTS": (
        "start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId "
        "INTEGER, text TEXT, "
        "globalTid INTEGER, textId INTEGER, domainId INTEGER"
    ),
}


def global_pid(pid: int) -> int:
    return (1 << 56) | (pid << 24)


class MadeExport:
    """An export under construction. Times are ns after the start of the session.

    Args:
        path: The file to write.
        pid: The process of rows that name none.
    """

    def __init__(self, path: Path, pid: int = 1234) -> None:
        self.path, self.pid = path, pid
        self._rows: dict[str, list[dict[str, Any]]] = {}
        self._strings: dict[str, int] = {}
        self._correlation = 0

    def string(self, text: str) -> int:
        return self._strings.setdefault(text, len(self._strings) + 1)

    def add(self, table: str, **row: Any) -> MadeExport:
        self._rows.setdefault(table, []).append(row)
        return self

    def session(self, utc_ns: int = SESSION_NS) -> MadeExport:
        return self.add(
            "TARGET_INFO_SESSION_START_TIME",
            utcEpochNs=utc_ns,
            utcTime="x",
            localTime="x",
        )

    def gpu(
        self,
        number: int = 0,
        name: str = "NVIDIA A100-SXM4-80GB",
        memory: int = 80 << 30,
    ) -> MadeExport:
        row = {
            "name": name,
            "totalMemory": memory,
            "uuid": f"GPU-{number}",
            "busLocation": f"0000:0{number}:00.0",
        }
        return self.add("TARGET_INFO_GPU", vmId=0, id=number, cuDevice=number, **row)

    def range(
        self,
        name: str,
        start: int,
        end: int | None,
        pid: int | None = None,
        thread: int = 1,
        **row: Any,
    ) -> MadeExport:
        tid = global_pid(pid or self.pid) | thread
        row = {"text": name, "domainId": 0, **row}
        return self.add(
            "NVTX_EVENTS", start=start, end=end, eventType=59, globalTid=tid, **row
        )

    def kernel(
        self, name: str, start: int, end: int, launched: int | None = None, **row: Any
    ) -> MadeExport:
        names = {
            "demangledName": self.string(name),
            "shortName": self.string(name.split("(")[0]),
            "gridX": 1,
        }
        return self._activity(
            "CUPTI_ACTIVITY_KIND_KERNEL", start, end, launched, **names, **row
        )

    def copy(
        self,
        kind: int,
        start: int,
        end: int,
        size: int,
        launched: int | None = None,
        **row: Any,
    ) -> MadeExport:
        ends = {H2D: (PINNED, DEVICE), D2H: (DEVICE, PINNED)}.get(
            kind, (DEVICE, DEVICE)
        )
        row = {"srcKind": ends[0], "dstKind": ends[1], **row}
        return self._activity(
            "CUPTI_ACTIVITY_KIND_MEMCPY",
            start,
            end,
            launched,
            copyKind=kind,
            bytes=size,
            **row,
        )

    def memset(
        self,
        start: int,
        end: int,
        size: int = 64,
        launched: int | None = None,
        **row: Any,
    ) -> MadeExport:
        return self._activity(
            "CUPTI_ACTIVITY_KIND_MEMSET",
            start,
            end,
            launched,
            value=0,
            bytes=size,
            **row,
        )

    def graph(self, number: int, start: int, end: int, launched: int) -> MadeExport:
        return self._activity(
            "CUPTI_ACTIVITY_KIND_GRAPH_TRACE", start, end, launched, graphId=number
        )

    def memory(
        self, t: int, address: int, size: int, released: bool = False, **row: Any
    ) -> MadeExport:
        row = {
            "globalPid": global_pid(self.pid),
            "deviceId": 0,
            "contextId": 1,
            "pc": 0,
            "memKind": DEVICE,
            **row,
        }
        oper = {"memoryOperationType": int(released), "address": address, "bytes": size}
        return self.add("CUDA_GPU_MEMORY_USAGE_EVENTS", start=t, **oper, **row)

    def _activity(
        self,
        table: str,
        start: int,
        end: int,
        launched: int | None,
        pid: int | None = None,
        thread: int = 1,
        **row: Any,
    ) -> MadeExport:
        self._correlation += 1
        process = global_pid(pid or self.pid)
        if launched is not None:
            call = {
                "eventClass": 0,
                "nameId": self.string("cudaLaunchKernel_v7000"),
                "returnValue": 0,
            }
            call |= {"globalTid": process | thread, "correlationId": self._correlation}
            self.add(
                "CUPTI_ACTIVITY_KIND_RUNTIME", start=launched, end=launched + 5, **call
            )
        row = {
            "deviceId": 0,
            "contextId": 1,
            "streamId": 7,
            "globalPid": process,
            **row,
        }
        return self.add(
            table, start=start, end=end, correlationId=self._correlation, **row
        )

    def write(self) -> Path:
        """Write the file. Tables without rows are left out, as Nsight Systems does."""
        for number, text in ((number, text) for text, number in self._strings.items()):
            self.add("StringIds", id=number, value=text)
        connection = sqlite3.connect(self.path, isolation_level=None)
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("PRAGMA journal_mode = OFF")
        connection.execute("BEGIN")
        for table, rows in self._rows.items():
            connection.execute(f"CREATE TABLE {table} ({_TABLES[table]})")
            for row in rows:
                columns = ", ".join(f'"{name}"' for name in row)
                marks = ", ".join("?" * len(row))
                connection.execute(
                    f"INSERT INTO {table} ({columns}) VALUES ({marks})", [*row.values()]
                )
        connection.execute("COMMIT")
        connection.close()
        return self.path


def training(path: Path, iterations: int = 3, pid: int = 1234) -> MadeExport:
    """Return an export of a job with offloaded optimizer state, to which a test may add
    rows.

    An iteration takes 1 ms: forward (launched from 0 to 100 us, on the GPU from 10 to
    300 us), backward (100 to 200, 300 to 700, with a collective until 720 and a copy of
    gradients on another stream), optimizer (200 to 900, 720 to 950, with copies both
    ways).
    """
    made = MadeExport(path, pid).session().gpu()
    made.memory(0, 0xA000, 1 << 30)
    us = 1000
    for iteration in range(iterations):
        t = (1 + iteration * 1000) * us
        made.range(f"iteration {iteration}", t, t + 1000 * us)
        made.range("forward", t, t + 100 * us).range(
            "backward", t + 100 * us, t + 200 * us
        )
        made.range("optimizer.step", t + 200 * us, t + 900 * us)
        made.memory(t + 5 * us, 0xB000, 1 << 28).memory(
            t + 195 * us, 0xB000, 1 << 28, released=True
        )
        made.copy(H2D, t + 10 * us, t + 20 * us, 4096, t + 5 * us, srcKind=PAGEABLE)
        made.kernel("gemm<float>(float*)", t + 20 * us, t + 300 * us, t + 20 * us)
        made.kernel(
            "gemm_backward(float*)", t + 300 * us, t + 700 * us, t + 120 * us, thread=2
        )
        made.kernel(
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)",
            t + 600 * us,
            t + 720 * us,
            t + 150 * us,
            streamId=20,
            thread=2,
        )
        made.copy(D2H, t + 400 * us, t + 500 * us, 1 << 20, t + 130 * us, streamId=21)
        made.memset(t + 720 * us, t + 722 * us, launched=t + 210 * us)
        made.copy(H2D, t + 730 * us, t + 900 * us, 1 << 21, t + 700 * us)
        made.kernel("multi_tensor_adam(x)", t + 900 * us, t + 950 * us, t + 800 * us)
    return made


def import_in_memory(*paths: Path, phases: dict[str, str] | None = None) -> Trace:
    """Return the trace of exports, without writing it."""
    builder = TraceBuilder("imported")
    sources = [Source(path) for path in paths]
    assert all(NsysImporter().matches(source) for source in sources)
    NsysImporter().import_into(builder, sources, ImportOptions(phases=phases or {}))
    return builder.build()
