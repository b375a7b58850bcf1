"""The spool: what one process has recorded so far, as fixed-size records appended to a file.

Every record is `RECORD` (48 bytes, little endian), so a file cut anywhere is whole up to its last full record.
`docs/trace-format.md` lists the fields of each kind.
"""

from __future__ import annotations

import _thread
import os
import struct
import time
from collections import deque

MAGIC = b"EBBSPOOL"
VERSION = 1

#        kind code small a   b   c   w       x       y       z
RECORD = struct.Struct("<BBHIIIqqqq")

# Kinds. The fields in brackets are those of RECORD that the kind uses.
HEADER = 1  # [code: version, a: pid, b: rank, c: world size, w: MAGIC, x: monotonic ns, y: wall ns, z: local rank]
PHASE = 2  # [code: phase, a: sequence, x: start ns, y: end ns]
GPU_TIMES = 3  # [a: sequence of the phase or operation, x: start ns, y: end ns]
ITERATION = 4  # [a: iteration, b: sequence of its last phase so far, x: end ns]
MEMORY = 5  # [code: pool, small: device, x: time ns, y: bytes]
LINK = 6  # [code: source, small: device, a: generation, b: width, w: window ns, x: time ns, y, z: h2d, d2h B/s]
START = 7  # [a: iteration about to be recorded, x: its start ns]
STOPPED = 8  # [code: reason, x: time ns]: nothing more will be recorded
OP = 9  # [code: name, small: device, a: sequence, b: subgroup, c: resource, w: bytes, x, y: start, end ns, z: parent]

PHASES = ("forward", "backward", "update")
POOLS = ("device", "reserved", "allocated", "heap", "rss", "pinned", "swap", "requested")
LINK_SOURCES = ("nvml-counters", "gpm", "nvml-throughput")
# What DeepSpeed does in an update and a backward, and the kinds of operation of a plan.
OPS = (
    *("overflow check", "gradient norm", "prepare", "unscale", "update", "parameters", "release", "gather", "rest"),
    *("reduce", "gradient down", "gradient up", "clip", "fetch", "flush", "cast", "upload"),
)
RESOURCES = ("host", "cpu", "gpu", "h2d", "d2h")
STOP_REASONS = ("closed", "max-size", "iterations", "fault")

HOST = 0xFFFF  # the `device` of a record about host memory
MISSING = -1  # a value that could not be read
NO_SUBGROUP = 0xFFFFFFFF

_OPS = {name: code for code, name in enumerate(OPS)}
_RESOURCES = {name: code for code, name in enumerate(RESOURCES)}

# A record cannot wait longer than this for the flusher; it keeps one burst from growing without bound.
_BURST = 8192


class Spool:
    """Appends records to one file, from any thread; after the first write that fails it drops everything.

    Records are collected by `put` and reach the file at `flush`, which a thread of the recorder's calls several
    times a second. A forked child must call `abandon`: it shares the file with its parent.
    """

    def __init__(self, path: str, max_bytes: int | None = None) -> None:
        self._fd: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._waiting: deque[bytes] = deque()
        self._left = max_bytes
        self._lock = _thread.allocate_lock()
        self.full = False

    def header(self, rank: int, world_size: int, local_rank: int) -> None:
        """Write the first record: who records, and both clocks read at the same moment."""
        magic = int.from_bytes(MAGIC, "little")
        wall, now = time.time_ns(), time.monotonic_ns()
        self.put(HEADER, VERSION, 0, os.getpid(), rank, world_size, magic, now, wall, local_rank)

    def put(
        self,
        kind: int,
        code: int = 0,
        small: int = 0,
        a: int = 0,
        b: int = 0,
        c: int = 0,
        w: int = 0,
        x: int = 0,
        y: int = 0,
        z: int = 0,
    ) -> None:
        if self._fd is None:
            return
        self._waiting.append(RECORD.pack(kind, code, small, a, b, c, w, x, y, z))
        if len(self._waiting) >= _BURST:
            self.flush()

    def op(
        self,
        sequence: int,
        name: str,
        resource: str,
        start_ns: int,
        end_ns: int,
        subgroup: int | None = None,
        nbytes: int | None = None,
        parent: int | None = None,
        device: int = HOST,
    ) -> None:
        """An operation. parent: the sequence number of the one it lies in. device: of what ran on a GPU. Raises
        KeyError for a name or a resource that is not in the tables."""
        self.put(
            OP,
            _OPS[name],
            device,
            sequence,
            NO_SUBGROUP if subgroup is None else subgroup,
            _RESOURCES[resource],
            MISSING if nbytes is None else nbytes,
            start_ns,
            end_ns,
            MISSING if parent is None else parent,
        )

    def flush(self) -> None:
        """Write what waits. Never raises: a spool that cannot be written is given up, the job goes on."""
        with self._lock:
            data = b"".join([self._waiting.popleft() for _ in range(len(self._waiting))])
            if self._fd is None or not data:
                return
            if self._left is not None:
                self._left -= len(data)
                self.full = self._left <= 0
            try:
                written = os.write(self._fd, data)
            except OSError:
                written = 0
            if written < len(data):
                self.abandon()

    def close(self) -> None:
        self.flush()
        with self._lock:
            self.abandon()

    def abandon(self) -> None:
        """Give the file up without writing what waits. A forked child calls this: it takes no lock."""
        fd, self._fd = self._fd, None
        self._waiting.clear()
        if fd is not None:
            os.close(fd)

    @property
    def alive(self) -> bool:
        return self._fd is not None
