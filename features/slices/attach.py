"""Checks that a recording can serve a request for a detailed slice, and writes the
request."""

import contextlib
import fcntl
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ebbtide.errors import TraceError
from ebbtide.profiler.agent import spool as kinds
from ebbtide.profiler.agent.options import (
    MAX_ITERATIONS,
    REQUEST,
    SliceRequest,
    parse_request,
)
from ebbtide.profiler.agent.spool import process_id
from ebbtide.profiler.recording.lifecycle import require_linux, spool_folder
from ebbtide.profiler.recording.lock import job_runs
from ebbtide.profiler.recording.spools.process_tail import SpoolTail
from ebbtide.profiler.recording.spools.records import RECORD, ended_by_updates
from ebbtide.profiler.sampler.processes import process_runs
from ebbtide.profiler.trace.files import is_locked, read_meta
from ebbtide.profiler.trace.metadata import parse_meta

# The end of a long spool, from where it is read first: some thousand iterations.
_FIRST_BYTES = 100_000 * RECORD.itemsize
# Iterations that the length of an iteration is the mean of.
_RECENT = 20
# A slice begins so long after its request: processes look for requests four times a
# second.
_LEAD_NS = 1_000_000_000
_ENDED = "the job of {path} has ended: only a running job can be attached to"
_NO_ITERATION = (
    "no process of {path} has finished an iteration with an optimizer of torch: attach "
    "again after its first iteration"
)


class ProcessProgress:
    """A process of a recording, as far as it is written. `iteration`: the last finished
    one; None before."""

    def __init__(self, path: Path) -> None:
        self.pid = process_id(path.name)
        self.rank = 0
        self.opened_ns = self.ended_ns = 0
        self.iteration: int | None = None
        self.stopped = False
        # Number of a request, and one of `spool.DETAIL_MARKS` -> the iteration of the
        # mark.
        self._marks: dict[tuple[int, str], int] = {}
        self._spool = SpoolTail(path, _FIRST_BYTES)
        self._ends: dict[int, int] = {}
        self.update()

    @property
    def runs(self) -> bool:
        """Whether the process runs and records."""
        return not self.stopped and process_runs(self.pid)

    @property
    def iteration_ns(self) -> int:
        """Mean length of the last iterations, ns.

        For a first one, it is the length since the recording began.
        """
        ends = list(self._ends.values())
        if len(ends) < 2:
            return max(self.ended_ns - self.opened_ns, 1)
        return max((ends[-1] - ends[0]) // (len(ends) - 1), 1)

    def update(self) -> None:
        records = self._spool.read()
        header = self._spool.header
        if header is not None:
            self.rank, self.opened_ns = int(header["b"]), int(header["x"])
        for record in records[ended_by_updates(records)]:
            self.iteration, self.ended_ns = int(record["a"]), int(record["x"])
            self._ends[self.iteration] = self.ended_ns
        for iteration in list(self._ends)[:-_RECENT]:
            del self._ends[iteration]
        for record in records[records["kind"] == kinds.DETAILS]:
            self._marks.setdefault(
                (int(record["w"]), kinds.DETAIL_MARKS[record["code"]]), int(record["a"])
            )
        self.stopped = self.stopped or bool((records["kind"] == kinds.STOPPED).any())

    def mark(self, number: int, kind: str) -> int | None:
        """Return the iteration of a mark of a request; None without such a mark."""
        return self._marks.get((number, kind))


def training_processes(spools: Path) -> list[ProcessProgress]:
    """Return the running processes that have finished an iteration, by rank. OSError:
    the recording has ended."""
    spool_order = sorted(
        map(ProcessProgress, spools.glob("agent-*.spool")),
        key=lambda process: process.opened_ns,
    )
    # A process that executes another program begins a new spool.
    newest = {process.pid: process for process in spool_order}
    processes = [
        process
        for process in newest.values()
        if process.iteration is not None and process.runs
    ]
    return sorted(processes, key=lambda process: (process.rank, process.pid))


@dataclass(frozen=True)
class AttachedSlice:
    """A slice that was asked for."""

    path: Path
    request: SliceRequest
    processes: list[ProcessProgress]

    def update(self) -> bool:
        """Read what the processes have recorded since the last time.

        Return whether all have ended with the slice.
        """
        running = False
        for process in self.processes:
            # Before its spool is read: a process that ends meanwhile has written its
            # whole spool.
            runs = process.runs
            # The spools are removed once the recording is finished.
            with contextlib.suppress(OSError):
                process.update()
            running = running or (runs and not _is_over(process, self.request))
        return not running

    def recorded(self, process: ProcessProgress) -> tuple[int, int] | None:
        """Return the first iteration of a process with details so far, and the end,
        which is excluded."""
        begin = process.mark(self.request.number, "begin")
        end = process.mark(self.request.number, "end")
        if end is None and process.iteration is not None:
            end = min(process.iteration + 1, self.request.end)
        return None if begin is None or end is None or end <= begin else (begin, end)


def attach(
    path: Path,
    count: int,
    first: int | None = None,
    poll_ms: float = 25.0,
    allocator_iterations: int = 0,
    transfers: bool = False,
) -> AttachedSlice:
    """Ask a job that is recorded for details of `count` iterations from `first` on;
    None: soon, the same on all ranks.

    `poll_ms`: interval of memory readings between phase boundaries, in ms; 0: none."""
    require_linux()
    if not 1 <= count <= MAX_ITERATIONS:
        raise TraceError(
            f"a slice has 1 to {MAX_ITERATIONS:,} iterations, not {count:,}"
        )
    if allocator_iterations > count:
        raise TraceError(
            f"--allocator-iterations {allocator_iterations:,} is more than "
            f"--iterations {count:,}"
        )
    _check_recording(path)
    spools = spool_folder(path)
    try:
        with _locked(spools):
            processes = training_processes(spools)
            if not processes:
                raise TraceError(
                    (_NO_ITERATION if job_runs(path) else _ENDED).format(path=path)
                )
            _refuse_second(spools / REQUEST, processes)
            now_ns = time.monotonic_ns()
            first = _possible_first(
                first, max(_first_iteration(process, now_ns) for process in processes)
            )
            poll_us = round(poll_ms * 1e3)
            request = SliceRequest(
                now_ns, first, first + count, poll_us, allocator_iterations, transfers
            )
            _replace(spools / REQUEST, request.text())
    except OSError as error:
        if not is_locked(path):
            raise TraceError(_ENDED.format(path=path)) from None
        raise TraceError(
            f"cannot ask for details in {path}: {error.strerror or error}"
        ) from None
    return AttachedSlice(path, request, processes)


def _check_recording(path: Path) -> None:
    meta = parse_meta(read_meta(path), path)
    if meta.state == "complete":
        raise TraceError(f"{path} is complete: only a running job can be attached to")
    if not is_locked(path):
        raise TraceError(_ENDED.format(path=path))
    if not meta.options.on_demand:
        raise TraceError(
            f"{path} is not recorded on demand: its recording has details already; "
            "start the job with "
            "`ebbtide profile --on-demand` to attach to it"
        )


@contextlib.contextmanager
def _locked(spools: Path) -> Iterator[None]:
    """Let no other `ebbtide profile --attach` make a request in the block."""
    fd = os.open(spools, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _refuse_second(link: Path, processes: list[ProcessProgress]) -> None:
    """Raise TraceError if a slice that was asked for before has not ended."""
    try:
        request = parse_request(os.readlink(link))
    except OSError:
        return
    if request is None or all(_is_over(process, request) for process in processes):
        return
    raise TraceError(
        f"a slice of iterations {request.first} to {request.end - 1} has not ended "
        "yet: attach again after it"
    )


def _is_over(process: ProcessProgress, request: SliceRequest) -> bool:
    """Return whether a process has recorded a slice, has missed it, or never had to
    look for it."""
    if (
        process.opened_ns >= request.number
        or process.mark(request.number, "missed") is not None
    ):
        return True
    begun, ended = (
        process.mark(request.number, kind) is not None for kind in ("begin", "end")
    )
    # The marks of an old request may be further back in the spool than this process has
    # read.
    passed = process.iteration is not None and process.iteration > request.end
    return ended or (
        passed and not begun and time.monotonic_ns() - request.number > _LEAD_NS
    )


def _possible_first(first: int | None, earliest: int) -> int:
    if first is not None and first < earliest:
        raise TraceError(
            f"iteration {first} is too close or over: the first one that all ranks can "
            f"begin at is {earliest}"
        )
    return earliest if first is None else first


def _first_iteration(process: ProcessProgress, now_ns: int) -> int:
    """Return the first iteration that begins `_LEAD_NS` from now or later if iterations
    stay as long as they are."""
    length_ns = process.iteration_ns
    # An evaluation or a checkpoint may have stopped the iterations for a while.
    elapsed_ns = min(max(now_ns - process.ended_ns, 0), length_ns)
    return (
        (process.iteration or 0)
        + 1
        + max(1, math.ceil((elapsed_ns + _LEAD_NS) / length_ns))
    )


def _replace(link: Path, text: str) -> None:
    """Replace a symbolic link as a whole."""
    new = link.with_name(f"{link.name}.new")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new)
    os.symlink(text, new)
    os.replace(new, link)
