"""Writes the records of one process: operations, memory, device times, the end, and a
trace for errors alone."""

from __future__ import annotations

import _thread
import contextlib
import functools
import itertools
import json
import os
import platform
import signal
import socket
import sys
import time
from collections.abc import Iterable
from typing import Any, Callable

from .cuda_streams import own_stream
from .gpu_clock import DeviceSpan, EventMark, GpuClock
from .job_info import JobInfo
from .memory_reader import MemoryReader, Reading
from .options import Options
from .spool import GPU_TIMES, STOP_REASONS, STOPPED, Spool, process_name

_FLUSH_SECONDS = 0.25
_FORK_SECONDS = 0.1
# Memory readings between phase boundaries may take one part in this number of the time.
_POLL_SHARE = 500


def _run(recorder: Any, spool: Spool, memory: MemoryReader) -> None:
    """Flush the spool, and read memory where phases are longer than the poll interval.

    Where they are shorter, this thread looks ever less often: each time it wakes costs
    the job tens of microseconds.
    """
    flushed_s = time.monotonic()
    pause_s = 0.0
    while recorder.live and spool.is_open:
        interval_s = max(recorder.poll_ms / 1e3, memory.cost_ns * _POLL_SHARE / 1e9)
        if not recorder.poll_ms:
            interval_s = _FLUSH_SECONDS
        if recorder.wake.acquire(True, max(pause_s, interval_s)):
            pause_s = 0.0
        try:
            # The first reading is taken at a phase, whose device this thread then
            # reads.
            if recorder.poll_ms and recorder.recording and memory.read_ns:
                now_ns = time.monotonic_ns()
                if now_ns - memory.read_ns < interval_s * 1e9:
                    pause_s = min(2 * max(pause_s, interval_s), _FLUSH_SECONDS)
                else:
                    pause_s = 0.0
                    recorder.put_memory(now_ns, memory.read())
            if time.monotonic() - flushed_s >= _FLUSH_SECONDS:
                spool.flush()
                for listener in recorder.on_flush:
                    listener()
                flushed_s = time.monotonic()
                if spool.full:
                    recorder.close("max-size")
        except Exception as error:
            recorder.fail(error)


class ProcessRecorder:
    """Records a process into a spool from `_open_files` on; `recorder.Recorder` adds
    its phases."""

    def __init__(self, torch: Any, directory: str, options: Options) -> None:
        self.live = True
        self.errors_only = options.errors_only
        self.on_iteration: list[Callable[[int], None]] = []
        self.on_update: list[Callable[[], None]] = []
        # called with an exception of the job
        self.on_error: list[Callable[[BaseException], None]] = []
        self.on_close: list[Callable[[], object]] = []
        # called with the records that were written
        self.on_records: list[Callable[[bytes], None]] = []
        # called by the background thread a few times a second
        self.on_flush: list[Callable[[], None]] = []
        # called in a forked child, which has no other function
        self.on_restart: list[Callable[[], None]] = []
        self.directory = directory
        self.torch = torch
        self.options = options
        self._memory = MemoryReader(torch, options.memory)
        self._reset()
        os.register_at_fork(
            before=self._flush_before_fork, after_in_child=self._restart_in_child
        )

    def _reset(self) -> None:
        """Set this process's own state, which a forked child begins anew."""
        self.job_info = JobInfo(self.torch, self.directory)
        # when the spool was created, in ns of CLOCK_MONOTONIC; 0 before
        self.opened_ns = 0
        self.gpu = GpuClock(self.torch.cuda, functools.partial(own_stream, self.torch))
        self._spool: Spool | None = None
        self._recording = self.options.first == 0
        self._memory.enabled = self.options.memory
        # Interval of the background thread's readings of memory, in ms; 0: it makes
        # none.
        self.poll_ms = self.options.poll_ms if self.options.memory else 0.0
        # The background thread waits for it between its turns; it is released to begin
        # one at once.
        self.wake = _thread.allocate_lock()
        self.wake.acquire()
        self._sequences = itertools.count(1)
        self._notes: set[str] = set()

    @property
    def recording(self) -> bool:
        """Whether operations reach the trace now: the spool is open, and these
        iterations are to be recorded."""
        return self.live and self._recording and self._spool is not None

    @property
    def spool(self) -> Spool | None:
        """The file that is written; None before the first phase."""
        return self._spool

    def next_sequence(self) -> int:
        """Return the next number in the one sequence of phases and operations.

        An operation belongs to an iteration if its number precedes the number of the
        iteration's last phase.
        """
        return next(self._sequences)

    def record_op(self, /, *op: Any, **fields: Any) -> None:
        """Add a row to the table `ops`, from any thread.

        Its arguments are as `Spool.put_op` documents them. Never raises.
        """
        self.put_op(self.next_sequence(), *op, **fields)

    def put_op(self, sequence: int, /, *op: Any, **fields: Any) -> None:
        """Add a row with a number of `next_sequence` and arguments of `Spool.put_op`.

        Never raises.
        """
        if self.recording and self._spool is not None:
            try:
                self._spool.put_op(sequence, *op, **fields)
            except Exception as error:
                self.fail(error)

    def _open_files(self, iteration: int) -> None:
        """Begin to write, at the beginning of an iteration. Raises OSError if the spool
        cannot be created."""
        self.opened_ns = time.monotonic_ns()
        ranks, name = self.job_info.read_ranks(), process_name(self.job_info.host)
        spool = Spool(
            os.path.join(self.directory, f"agent-{name}.spool"),
            self.options.max_bytes,
            self.on_records,
        )
        spool.put_header(*ranks)
        spool.flush()
        self._spool = spool
        self.job_info.begin(name)
        for listener in self.on_iteration:
            listener(iteration)
        # Not a thread of `threading`: the job neither lists it nor waits for it.
        _thread.start_new_thread(_run, (self, spool, self._memory))

    def mark_time(self) -> EventMark | None:
        """Mark the current time of the device. Never raises."""
        try:
            return self.gpu.record_mark() if self.recording else None
        except Exception as error:
            self.fail(error)
        return None

    def read_memory(self, device: int | None = None) -> list[Reading]:
        """Return readings of memory now, of a device of CUDA, or else of the last
        phase's device."""
        return self._memory.read(device)

    def report_error(self, error: BaseException) -> None:
        """Pass an exception of the job on to `on_error`. Never raises."""
        try:
            for listener in self.on_error:
                listener(error)
        except Exception as fault:
            self.fail(fault)

    def flush(self) -> None:
        """Write what was recorded so far to the spool, if there is one."""
        if self._spool is not None:
            self._spool.flush()

    def put_memory(self, time_ns: int, readings: list[Reading]) -> None:
        """Append readings of memory to the spool, if there is one."""
        if self._spool is not None:
            for pool, device, size in readings:
                self._spool.put_memory(pool, device, time_ns, size)

    def _put_gpu_times(self, spans: Iterable[DeviceSpan]) -> None:
        for span in spans:
            self.put(GPU_TIMES, a=span.sequence, x=span.start_ns, y=span.end_ns)

    def put(self, /, *record: Any, **fields: int) -> None:
        """Append a record to the spool, if there is one."""
        if self._spool is not None:
            self._spool.put(*record, **fields)

    def note_once(self, text: str) -> None:
        """Add a note for the reader of the trace, once."""
        if text not in self._notes:
            self._notes.add(text)
            self.job_info.note(text)

    def close(self, reason: str = "closed") -> None:
        """Stop recording; the job goes on. Safe to call twice."""
        if not self.live:
            return
        try:
            for listener in self.on_close:
                listener()
            self._put_gpu_times(self.gpu.drain(1.0))
        except Exception as error:
            self.job_info.note(f"the recorder failed while closing: {error!r}")
        self._close_spool(reason)

    def _close_spool(self, reason: str) -> None:
        """Write why the recording ends, and close the spool.

        The reason is one of `spool.STOP_REASONS`.
        """
        self.live = False
        if self._spool is not None:
            self._spool.put(STOPPED, STOP_REASONS.index(reason), x=time.monotonic_ns())
            self._spool.close()
            self.job_info.write()

    def fail(self, error: BaseException) -> None:
        """Stop recording after a fault of the recorder, with a note in the trace.

        The job goes on. An exception of the job's own signal handler, which ran
        meanwhile, is raised again.
        """
        if self.live:
            self.live = False
            self.job_info.note(f"recording ended by a fault of the recorder: {error!r}")
            # A profiler that runs on would crash the process at its end.
            for listener in self.on_close:
                with contextlib.suppress(Exception):
                    listener()
            self._close_spool("fault")
        if _is_of_signal_handler(error):
            raise error

    def _flush_before_fork(self) -> None:
        """Write what is pending: a process that becomes a daemon leaves by `os._exit`.
        A signal handler may fork while the thread that it interrupts writes."""
        if self._spool is not None:
            self._spool.flush(_FORK_SECONDS)

    def _restart_in_child(self) -> None:
        """Record a forked child as a process of its own, from its first phase on.

        The files that are open are the parent's.
        """
        if self._spool is not None:
            self._spool.detach()
        # The captures have begun in the parent, and a hook that is left in place does
        # nothing once `live` is False.
        for listeners in (
            self.on_iteration,
            self.on_update,
            self.on_error,
            self.on_records,
            self.on_flush,
            self.on_close,
        ):
            listeners.clear()
        self._reset()
        for listener in self.on_restart:
            listener()


def _is_of_signal_handler(error: BaseException) -> bool:
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = [
        getattr(getattr(handler, "__func__", handler), "__code__", None)
        for handler in handlers
    ]
    entry = error.__traceback__
    while entry is not None and entry.tb_frame.f_code not in codes:
        entry = entry.tb_next
    return entry is not None


# As in `profiler/trace/schema.py`, which the agent does not import.
SPOOL = "spool"
FORMAT = {"format": "ebbtide-trace", "schema": 1}


def spool_folder(path: str) -> str:
    """Return the spools of a new trace: PATH, else PATH-2, ... All ranks look before
    the first error."""
    stem, extension = os.path.splitext(os.path.abspath(path))
    for number in itertools.count(1):
        trace = f"{stem}{'' if number == 1 else f'-{number}'}{extension}"
        if not os.path.exists(os.path.join(trace, "meta.json")):
            return os.path.join(trace, SPOOL)
    raise AssertionError


def first_meta(command: list[str], host: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of a trace that has just begun.

    Its clock is CLOCK_MONOTONIC of this host.
    """
    wall_ns, monotonic_ns = time.time_ns(), time.monotonic_ns()
    return {
        "state": "recording",
        "source": "recorded",
        "command": command,
        "cwd": os.getcwd(),
        "started_wall_ns": wall_ns,
        "started_ns": monotonic_ns,
        "clock": {
            "name": "monotonic",
            "host": host["name"],
            "wall_offset_ns": wall_ns - monotonic_ns,
        },
        "host": host,
        "ranks": [],
        "notes": [],
    }


def write_first_files(spools: str) -> None:
    """Create a trace and its folder of spools, unless another rank has."""
    os.makedirs(spools, exist_ok=True)
    host = {
        "name": socket.gethostname(),
        "kernel": platform.release(),
        "cpu": {"name": None, "cores": os.cpu_count()},
    }
    meta = {
        **FORMAT,
        **first_meta(list(getattr(sys, "orig_argv", sys.argv)), host),
        "options": {"allocator_iterations": 0, "transfers": False, "memory": True},
        "notes": ["only out-of-memory errors were recorded"],
    }
    with (
        contextlib.suppress(FileExistsError),
        open(os.path.join(os.path.dirname(spools), "meta.json"), "x") as file,
    ):
        json.dump(meta, file)
