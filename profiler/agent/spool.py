"""The spool: the file to which one process appends what it has recorded, as records of a fixed size.

Every record is a `RECORD` (48 bytes, little endian), so a file that is cut off anywhere can be read up to its last full
record. `docs/trace-format.md` lists the fields of each kind.
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

# Equal to `ebbtide.phases.PHASES`, which the agent cannot import. The order gives the codes.
PHASES = ("forward", "backward", "update")
POOLS = ("device", "reserved", "allocated", "heap", "rss", "pinned", "swap", "requested")
LINK_SOURCES = ("nvml-counters", "gpm", "nvml-throughput")
# The sub-steps of DeepSpeed's updates and backwards, and the kinds of operation of a plan.
OPS = (
    *("overflow check", "gradient norm", "prepare", "unscale", "update", "parameters", "release", "gather", "rest"),
    *("reduce", "gradient down", "gradient up", "clip", "fetch", "flush", "cast", "upload"),
)
RESOURCES = ("host", "cpu", "gpu", "h2d", "d2h")
STOP_REASONS = ("closed", "max-size", "iterations", "fault")

HOST = 0xFFFF  # the `device` of a record about host memory
MISSING = -1  # a value that could not be read
NO_SUBGROUP = 0xFFFFFFFF

_OP_CODES = {name: code for code, name in enumerate(OPS)}
_RESOURCE_CODES = {name: code for code, name in enumerate(RESOURCES)}

# Pending records that force a flush: a burst cannot grow without bound before the next regular one.
_MAX_PENDING = 8192


class Spool:
    """Appends records to one file, from any thread. After the first write that fails it drops every record.

    `put` collects records, and `flush` writes them; a thread of the recorder flushes several times a second. A forked
    child must call `detach`, because it shares the file with its parent.

    Args:
        path: The file; it is created if it does not exist.
        max_bytes: Size from which on `full` is set; None: no limit.

    Attributes:
        full: Whether `max_bytes` were written.
    """

    def __init__(self, path: str, max_bytes: int | None = None) -> None:
        self._fd: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._pending: deque[bytes] = deque()
        self._remaining_bytes = max_bytes
        self._lock = _thread.allocate_lock()
        self.full = False

    def put_header(self, rank: int, world_size: int, local_rank: int) -> None:
        """Append the first record: the recorded process, and both clocks read at the same moment."""
        magic = int.from_bytes(MAGIC, "little")
        wall_ns, monotonic_ns = time.time_ns(), time.monotonic_ns()
        self.put(HEADER, VERSION, 0, os.getpid(), rank, world_size, magic, monotonic_ns, wall_ns, local_rank)

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
        """Append a record; its kind gives the meaning of the other fields."""
        if self._fd is None:
            return
        self._pending.append(RECORD.pack(kind, code, small, a, b, c, w, x, y, z))
        if len(self._pending) >= _MAX_PENDING:
            self.flush()

    def put_op(
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
        """Append an operation.

        Args:
            sequence: Its number, unique among phases and operations.
            name: One of `OPS`.
            resource: One of `RESOURCES`.
            start_ns: Start in ns of CLOCK_MONOTONIC.
            end_ns: End in ns of CLOCK_MONOTONIC.
            subgroup: The subgroup it works on, if any.
            nbytes: Bytes it moves, if any.
            parent: Sequence number of the operation that contains it, if any.
            device: Device number, for an operation that ran on a GPU.

        Raises:
            KeyError: For an unknown name or resource.
        """
        self.put(
            OP,
            _OP_CODES[name],
            device,
            sequence,
            NO_SUBGROUP if subgroup is None else subgroup,
            _RESOURCE_CODES[resource],
            MISSING if nbytes is None else nbytes,
            start_ns,
            end_ns,
            MISSING if parent is None else parent,
        )

    def flush(self) -> None:
        """Write the pending records. Never raises: if a write fails, the spool is closed and the job goes on."""
        with self._lock:
            data = b"".join([self._pending.popleft() for _ in range(len(self._pending))])
            if self._fd is None or not data:
                return
            if self._remaining_bytes is not None:
                self._remaining_bytes -= len(data)
                self.full = self._remaining_bytes <= 0
            try:
                written = os.write(self._fd, data)
            except OSError:
                written = 0
            if written < len(data):
                self.detach()

    def close(self) -> None:
        """Write the pending records and close the file."""
        self.flush()
        with self._lock:
            self.detach()

    def detach(self) -> None:
        """Close the file without writing the pending records. Takes no lock, since a forked child calls it."""
        fd, self._fd = self._fd, None
        self._pending.clear()
        if fd is not None:
            os.close(fd)

    @property
    def is_open(self) -> bool:
        """Whether records are still written."""
        return self._fd is not None
