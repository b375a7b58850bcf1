"""The spool: the file to which one process appends what it has recorded.

Its records have 48 bytes, little endian.

A file that is cut off can be read up to its last full record. `docs/trace-format.md`
lists the fields of each kind.
"""

from __future__ import annotations

import _thread
import os
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence

# Jobs may rely on the numbers of their descriptors, which are the lowest free ones.
_LOWEST_DESCRIPTOR = 400
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW


class CheckedFile:
    """Appends to a new file, and never to another one. Raises OSError if it cannot be
    created, and nothing else. A job may close descriptors by their numbers, as daemons
    do, and open files of its own under the same numbers: a descriptor of another file
    is left alone, and the file opened again by its path."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._size = 0
        self._fd: int | None = _raise_number(
            os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o644)
        )
        status = os.fstat(self._fd)
        self._identity = status.st_dev, status.st_ino

    def write(self, data: bytes) -> bool:
        """Append `data`; return whether all of the data was written.

        After False nothing can be written any more.
        """
        try:
            if not self._is_own() and not self._reopen():
                return False
            if self._fd is None or not within_limit(self._size + len(data)):
                return False
            self._size += len(data)
            return os.write(self._fd, data) == len(data)
        except OSError:
            return False

    def close(self) -> None:
        """Close the file, unless its descriptor belongs to another file by now."""
        try:
            own = self._is_own()
            fd, self._fd = self._fd, None
            if own and fd is not None:
                os.close(fd)
        except OSError:
            pass

    def _is_own(self) -> bool:
        """Return whether the descriptor still is of the created file.

        The file must have all that was written to it.
        """
        if self._fd is None:
            return False
        try:
            status = os.fstat(self._fd)
        except OSError:
            return False
        return (
            status.st_dev,
            status.st_ino,
        ) == self._identity and status.st_size == self._size

    def _reopen(self) -> bool:
        """Open the created file again.

        Return False if it was removed, replaced or truncated.
        """
        self._fd = None
        self._fd = _raise_number(os.open(self._path, _FLAGS))
        if self._is_own():
            return True
        self.close()
        return False


def _raise_number(fd: int) -> int:
    """Move a descriptor to a high number, if the process may have that many."""
    import fcntl  # Readers of traces import this module, on systems without it, too.

    try:
        high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _LOWEST_DESCRIPTOR)
    except (OSError, ValueError):
        return fd
    os.close(fd)
    return high


def within_limit(size: int) -> bool:
    """Return whether a file of this size is allowed.

    To write beyond the limit would raise SIGXFSZ in the job.
    """
    import resource  # As above.

    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return limit == resource.RLIM_INFINITY or size <= limit


MAGIC = b"EBBSPOOL"
VERSION = 1

#        kind code small a   b   c   w       x       y       z
RECORD = struct.Struct("<BBHIIIqqqq")
_PACK = RECORD.pack

# Kinds. The fields in brackets are the fields of RECORD that the kind uses. [code:
# version, a: pid, b: rank, c: world size, w: MAGIC, x: monotonic ns, y: wall ns, z:
# local rank]
HEADER = 1
# [code: phase, small: ON_DEVICE if its GPU_TIMES follow, a: sequence, b: micro-batch or
# 0, c: number of the module or 0, x: start ns, y: end ns]
PHASE = 2
GPU_TIMES = 3  # [a: sequence of the phase or operation, x: start ns, y: end ns]
# [code: of ITERATION_MARKS, a: iteration, b: sequence of its last phase so far, x: end
# ns]
ITERATION = 4
MEMORY = 5  # [code: pool, small: device, x: time ns, y: bytes]
# [code: source, small: device, a: generation, b: width, w: window ns, x: time ns, y, z:
# h2d, d2h B/s]
LINK = 6
START = 7  # [a: iteration about to be recorded, x: its start ns]
STOPPED = 8  # [code: reason, x: time ns]: nothing more will be recorded
# [code: name, small: device, a: sequence, b: subgroup, c: resource, w: bytes, x, y:
# start, end ns, z: parent]
OP = 9
# [code: quantity, small: device, x: time ns, y: value in the unit of GPU_QUANTITIES]
GPU_STATE = 10
# [code: of DETAIL_MARKS, small: 1 if copies, a: iteration, b: allocator iterations, w:
# request, x: time]
DETAILS = 11
# [code: chunk of the name, from 0, a: number of the name, w, x, y, z: its UTF-8 bytes]
MARK_NAME = 12
# [a: sequence, b: number of the name, w: thread, x: start ns, y: end ns]
MARK = 13
# The bytes of a chunk.
NAME_CHUNK_BYTES = 32

# Equal to `ebbtide.phases.PHASES`, which the agent cannot import. The order gives the
# codes.
PHASES = ("forward", "backward", "update")
POOLS = (
    "device",
    "reserved",
    "allocated",
    "heap",
    "rss",
    "pinned",
    "swap",
    "requested",
    "cgroup",
)
LINK_SOURCES = ("nvml-counters", "gpm", "nvml-throughput")
# In %, %, mW, MHz, MHz, degrees Celsius, and the bits of NVML's clock event reasons.
GPU_QUANTITIES = (
    *("utilization", "memory_utilization", "power", "sm_clock", "memory_clock"),
    *("temperature", "throttle_reasons"),
)
# The sub-steps of DeepSpeed's updates and backwards, the kinds of operation of a plan,
# and what only DeepSpeed's SuperOffload and ZeRO-Infinity have (and ZenFlow, in 0.2.0
# only). The last one is a part of `other`.
OPS = (
    *(
        "overflow check",
        "gradient norm",
        "prepare",
        "unscale",
        "update",
        "parameters",
        "release",
        "gather",
        "rest",
    ),
    *(
        "reduce",
        "gradient down",
        "gradient up",
        "clip",
        "fetch",
        "flush",
        "cast",
        "upload",
    ),
    *(
        "wait",
        "rollback",
        "selective update",
        "select columns",
        "parameters down",
        "read",
        "write",
    ),
    *("gradient read", "gradient write", "forward without gradients"),
    # Of a kind, or a lane, that a feature adds.
    "other",
)
# `worker` is another process of the job, on the CPU. The kinds of storage are about
# files for optimizer state.
RESOURCES = (
    "host",
    "cpu",
    "gpu",
    "h2d",
    "d2h",
    "worker",
    "storage_read",
    "storage_write",
    "other",
)
STOP_REASONS = ("closed", "max-size", "iterations", "fault")
# An iteration ends with an update; as long as none was seen, it has ended before a
# forward, or is open.
ITERATION_MARKS = ("updated", "ended", "open")
# A detailed slice begins at its first iteration, ends before an iteration, or did not
# begin in time.
DETAIL_MARKS = ("begin", "end", "missed")

ON_DEVICE = 1
HOST = 0xFFFF  # the `device` of a record about host memory
MISSING = -1  # a value that could not be read
NO_SUBGROUP = 0xFFFFFFFF

_OP_CODES = {name: code for code, name in enumerate(OPS)}
_RESOURCE_CODES = {name: code for code, name in enumerate(RESOURCES)}

# Flushes at the ends of iterations may take one part in this number of the time: a file
# system may be slow.
_FLUSH_SHARE = 1000
# Pending records that force a flush: a burst cannot grow without bound before the next
# regular one.
_MAX_PENDING = 8192


def process_name(host: str) -> str:
    """Return a name for the files of this process image.

    A program that it executes later gets another one.
    """
    return f"{host}-{os.getpid()}.{time.monotonic_ns():x}"


def process_id(spool_name: str) -> int:
    """Return the process id in the file name of a spool."""
    return int(spool_name.removesuffix(".spool").rpartition("-")[2].partition(".")[0])


class Spool:
    """Appends records to one new file, from any thread.

    `put` collects the records and `flush` writes them; after a failed write all are
    dropped. A forked child must call `detach`. `max_bytes`: size from which on `full`
    is set; None: no limit. `listeners` are called with what is written. Raises OSError
    if there is no new file at `path`.
    """

    def __init__(
        self,
        path: str,
        max_bytes: int | None = None,
        listeners: Sequence[Callable[[bytes], None]] = (),
    ) -> None:
        self._listeners = listeners
        self._file: CheckedFile | None = CheckedFile(path)
        self._pending: deque[bytes] = deque()
        self._remaining_bytes = max_bytes
        self._lock = _thread.allocate_lock()
        self._flushed_ns = self._flush_cost_ns = 0
        self.full = False

    def put_header(self, rank: int, world_size: int, local_rank: int) -> None:
        """Append the first record: the recorded process, and both clocks read at the
        same moment."""
        magic = int.from_bytes(MAGIC, "little")
        wall_ns, monotonic_ns = time.time_ns(), time.monotonic_ns()
        self.put(
            HEADER,
            VERSION,
            0,
            os.getpid(),
            rank,
            world_size,
            magic,
            monotonic_ns,
            wall_ns,
            local_rank,
        )

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
        if self._file is None:
            return
        self._pending.append(_PACK(kind, code, small, a, b, c, w, x, y, z))
        if len(self._pending) >= _MAX_PENDING:
            self.flush()

    def put_phase(
        self,
        phase: int,
        sequence: int,
        micro_batch: int,
        source: int,
        start_ns: int,
        end_ns: int,
        device_flag: int = 0,
    ) -> None:
        """Append a phase; `device_flag`: ON_DEVICE or 0. This and `put_memory` take
        half the time of `put`."""
        if self._file is not None:
            self._pending.append(
                _PACK(
                    PHASE,
                    phase,
                    device_flag,
                    sequence,
                    micro_batch,
                    source,
                    0,
                    start_ns,
                    end_ns,
                    0,
                )
            )

    def put_memory(self, pool: int, device: int, time_ns: int, nbytes: int) -> None:
        if self._file is not None:
            self._pending.append(
                _PACK(MEMORY, pool, device, 0, 0, 0, 0, time_ns, nbytes, 0)
            )

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
        """Append an operation. Times are in ns of CLOCK_MONOTONIC. `parent`: number of
        the operation that contains it. `device`: the number of the GPU that ran it, or
        of the path on storage."""
        self.put(
            OP,
            _OP_CODES.get(name, _OP_CODES["other"]),
            device,
            sequence,
            NO_SUBGROUP if subgroup is None else subgroup,
            _RESOURCE_CODES.get(resource, _RESOURCE_CODES["other"]),
            MISSING if nbytes is None else nbytes,
            start_ns,
            end_ns,
            MISSING if parent is None else parent,
        )

    def flush(self, timeout_s: float = -1) -> None:
        """Write the pending records, unless another flush takes longer than `timeout_s`
        (negative: wait for its end).

        Never raises: if a write fails, the spool is closed and the job goes on."""
        if not self._lock.acquire(True, timeout_s):
            return
        try:
            data = b"".join(
                [self._pending.popleft() for _ in range(len(self._pending))]
            )
            if self._file is None or not data:
                return
            if self._remaining_bytes is not None:
                self._remaining_bytes -= len(data)
                self.full = self._remaining_bytes <= 0
            begun_ns = time.monotonic_ns()
            written = self._file.write(data)
            for listener in self._listeners:
                listener(data)
            now_ns = time.monotonic_ns()
            # The least cost of late: a single one may contain the time of other
            # processes.
            self._flush_cost_ns = min(
                now_ns - begun_ns, 2 * self._flush_cost_ns or now_ns - begun_ns
            )
            self._flushed_ns = now_ns
            if not written:
                self.detach()
        finally:
            self._lock.release()

    def flush_if_cheap(self) -> None:
        """Write the pending records, unless such flushes take too much of the time."""
        if time.monotonic_ns() - self._flushed_ns >= _FLUSH_SHARE * self._flush_cost_ns:
            self.flush()

    def close(self) -> None:
        """Write the pending records and close the file."""
        self.flush()
        with self._lock:
            self.detach()

    def detach(self) -> None:
        """Close the file without writing the pending records. Takes no lock, since a
        forked child calls it."""
        file, self._file = self._file, None
        self._pending.clear()
        if file is not None:
            file.close()

    @property
    def is_open(self) -> bool:
        return self._file is not None
