"""Records phases, their iterations, and memory at each phase boundary and between them.

The phases come from `phase_hooks.py`, `deepspeed/phase_hooks.py` and `Tracer.phase`.
"""

from __future__ import annotations

import _thread
import itertools
import os
import time
from collections.abc import Iterable
from typing import Any, Callable
from weakref import WeakSet

from .gpu_clock import DeviceSpan, EventMark, GpuClock
from .iterations import IterationRule
from .job_info import JobInfo
from .memory_reader import MemoryReader, Reading
from .options import Options
from .spool import (
    GPU_TIMES,
    ITERATION,
    MEMORY,
    PHASE,
    PHASES,
    START,
    STOP_REASONS,
    STOPPED,
    Spool,
)

FORWARD, BACKWARD, UPDATE = range(len(PHASES))

_FLUSH_SECONDS = 0.25
# Memory readings between phase boundaries, and those at the start of a phase, may take one part in so many of the time.
_POLL_SHARE = 500
_START_SHARE = 1000


class Recorder:
    """Records one process into one spool.

    `enter` opens a phase and `leave` closes it. Only one phase is open at a time: whatever begins inside it, on this
    thread or another (autograd's device threads, replicas), belongs to it, and `enter` returns False. Nothing is
    written, and no thread is started, before the first phase.

    Attributes:
        live: Whether anything is still recorded.
        in_phase: Whether a phase is open.
        phase: Code of the open phase.
        started_ns: Start of the open phase.
        recomputes: Whether a module was called inside a backward.
        stepped: The optimizers that stepped in the open phase.
        modules: The outermost modules that ran forward.
        job_info: The description of the job.
        on_iteration: Functions to call with the number of each iteration that begins.
        on_close: Functions to call when the recording ends.
        gpu: The clock of the device.
    """

    def __init__(self, torch: Any, directory: str, options: Options) -> None:
        self.live = True
        self.in_phase = False
        self.phase = self.started_ns = 0
        self.recomputes = False
        self.stepped: list[Any] = []
        self.modules: WeakSet[Any] = WeakSet()
        self.job_info = JobInfo(torch, directory)
        self.on_iteration: list[Callable[[int], None]] = []
        self.on_close: list[Callable[[], None]] = []
        self._directory = directory
        self._options = options
        self._phase_lock = _thread.allocate_lock()
        self._spool: Spool | None = None
        self._recording = options.first == 0
        self._rule = IterationRule()
        self._memory = MemoryReader(torch)
        self.gpu = GpuClock(torch.cuda)
        self._backwards = 0
        self._sequences = itertools.count(1)
        self._last_phase = self._last_reading_ns = 0
        self._start_mark: EventMark | None = None
        os.register_at_fork(after_in_child=self._detach_after_fork)

    # -- phases ------------------------------------------------------------------------------------------------

    def enter(self, phase: int) -> bool:
        """Open a phase.

        Returns:
            Whether it is the outermost one. If so, `leave` must follow on this thread.
        """
        if not self.live:
            return False
        if phase == BACKWARD:
            self._backwards += 1
        if not self._phase_lock.acquire(False):
            return False
        try:
            self.in_phase = True
            self.stepped.clear()
            self.phase = phase
            if self._recording:
                if self._spool is None:
                    self._open_spool()
                # The last reading, at the end of the phase before, mostly still holds: only an end is read each time.
                stale = time.monotonic_ns() - self._last_reading_ns > self._memory.cost_ns * _START_SHARE
                readings = self._memory.read() if stale else []
                self._start_mark = self.gpu.record_mark()
                self.started_ns = time.monotonic_ns()
                self._put_memory(self.started_ns, readings)
        except Exception as error:
            self.fail(error)
        return True

    def leave(self, keep: bool = True, end_ns: int | None = None) -> None:
        """Close the open phase.

        Args:
            keep: Whether it was a phase; False drops it.
            end_ns: Its end, if it has ended already; None: now.
        """
        try:
            if self.live:
                self._end_phase(end_ns or time.monotonic_ns(), keep)
        except Exception as error:
            self.fail(error)
        finally:
            self.in_phase = False
            self._phase_lock.release()

    def _end_phase(self, end_ns: int, keep: bool) -> None:
        iteration = None
        if self.stepped:
            iteration = self._rule.add_update(self.stepped, self._backwards)
            keep = keep and iteration is not None
        if self._recording and self._spool is not None:
            end_mark, self._start_mark, start_mark = self.gpu.record_mark(), None, self._start_mark
            self._put_memory(end_ns, self._memory.read())
            self._last_reading_ns = time.monotonic_ns()
            if keep:
                self._last_phase = self.next_sequence()
                self._spool.put(PHASE, self.phase, a=self._last_phase, x=self.started_ns, y=end_ns)
                self.gpu.add_span(self._last_phase, start_mark, end_mark)
            else:
                self.gpu.release_mark(start_mark)
                self.gpu.release_mark(end_mark)
            self._put_gpu_times(self.gpu.finished_spans())
        if iteration is not None:
            self._end_iteration(iteration, end_ns)
        self.stepped.clear()

    def _end_iteration(self, iteration: int, end_ns: int) -> None:
        """Note that an iteration has ended, as far as is known now: a second optimizer may still extend it."""
        options = self._options
        if self._recording and self._spool is not None:
            self._spool.put(ITERATION, a=iteration, b=self._last_phase, x=end_ns)
            self.job_info.add_training(self.modules, self.stepped)
            if options.last is not None and iteration >= options.last:
                self.close("iterations")
                return
            if self._spool.full:
                self.close("max-size")
                return
        elif iteration + 1 >= options.first:
            self._recording = True
            self._open_spool()
        if iteration + 1 == options.first and self._spool is not None:
            self._spool.put(START, a=options.first, x=end_ns)
        for listener in self.on_iteration:
            listener(iteration + 1)

    # -- operations --------------------------------------------------------------------------------------------

    @property
    def recording(self) -> bool:
        """Whether operations reach the trace now: the spool is open, and these iterations are to be recorded."""
        return self.live and self._recording and self._spool is not None

    def next_sequence(self) -> int:
        """Return the next number in the one sequence of phases and operations.

        An operation belongs to an iteration if its number precedes that of the iteration's last phase.
        """
        return next(self._sequences)

    def record_op(
        self,
        name: str,
        resource: str,
        start_ns: int,
        end_ns: int,
        subgroup: int | None = None,
        nbytes: int | None = None,
    ) -> None:
        """Add a row to the table `ops`, from any thread. Never raises.

        Args:
            name: One of `spool.OPS`.
            resource: One of `spool.RESOURCES`.
            start_ns: Start in ns of CLOCK_MONOTONIC.
            end_ns: End in ns of CLOCK_MONOTONIC.
            subgroup: The subgroup it works on, if any.
            nbytes: Bytes it moves, if any.
        """
        self.put_op(self.next_sequence(), name, resource, start_ns, end_ns, subgroup, nbytes)

    def put_op(self, sequence: int, *op: Any, **fields: Any) -> None:
        """Add a row with a number of `next_sequence` and any arguments of `Spool.put_op`. Never raises."""
        if self.recording and self._spool is not None:
            try:
                self._spool.put_op(sequence, *op, **fields)
            except Exception as error:
                self.fail(error)

    # -- the spool ---------------------------------------------------------------------------------------------

    def _open_spool(self) -> None:
        rank, world_size, local_rank = self.job_info.read_ranks()
        name = f"{self.job_info.host}-{os.getpid()}"
        max_bytes = self._options.max_bytes
        self._spool = Spool(os.path.join(self._directory, f"agent-{name}.spool"), max_bytes)
        self._spool.put_header(rank, world_size, local_rank)
        self._spool.flush()
        self.job_info.begin(name)
        for listener in self.on_iteration:
            listener(self._rule.index + 1)
        _thread.start_new_thread(self._flush_loop, ())

    def _flush_loop(self) -> None:
        """Flush several times a second, and read memory between phase boundaries.

        This is not a `threading` thread: the job's list of threads does not change, and its exit does not wait.
        """
        flushed_s = time.monotonic()
        while self.live and self._spool is not None and self._spool.is_open:
            period_s = self._options.poll_ms / 1e3
            time.sleep(max(period_s, self._memory.cost_ns * _POLL_SHARE / 1e9) if period_s else _FLUSH_SECONDS)
            try:
                if period_s and self._recording:
                    self._put_memory(time.monotonic_ns(), self._memory.read())
                if time.monotonic() - flushed_s >= _FLUSH_SECONDS:
                    self._spool.flush()
                    flushed_s = time.monotonic()
                    if self._spool.full:
                        self.close("max-size")
            except Exception as error:
                self.fail(error)

    def _put_memory(self, time_ns: int, readings: list[Reading]) -> None:
        for pool, device, size in readings:
            self.put(MEMORY, pool, device, x=time_ns, y=size)

    def _put_gpu_times(self, spans: Iterable[DeviceSpan]) -> None:
        for sequence, start_ns, end_ns in spans:
            self.put(GPU_TIMES, a=sequence, x=start_ns, y=end_ns)

    def put(self, *record: Any, **fields: int) -> None:
        """Append a record to the spool, if there is one."""
        if self._spool is not None:
            self._spool.put(*record, **fields)

    def file_path(self, name: str) -> str:
        """Return the path of a further file of this process in the spool's folder."""
        return os.path.join(self._directory, f"{self.job_info.host}-{os.getpid()}-{name}")

    # -- the end -----------------------------------------------------------------------------------------------

    def close(self, reason: str = "closed") -> None:
        """Stop recording; the job goes on. Safe to call twice.

        Args:
            reason: One of `spool.STOP_REASONS`.
        """
        if not self.live:
            return
        try:
            for listener in self.on_close:
                listener()
            self._put_gpu_times(self.gpu.drain(1.0))
        except Exception as error:
            self.job_info.note(f"the recorder failed while closing: {error!r}")
        self.live = False
        self._close_spool(reason)

    def fail(self, error: BaseException) -> None:
        """Stop recording after a fault of the recorder, with a note in the trace; the job goes on."""
        if self.live:
            self.live = False
            self.job_info.note(f"recording ended by a fault of the recorder: {error!r}")
            self._close_spool("fault")

    def _close_spool(self, reason: str) -> None:
        if self._spool is not None:
            self.put(STOPPED, STOP_REASONS.index(reason), x=time.monotonic_ns())
            self._spool.close()
            self.job_info.write()

    def _detach_after_fork(self) -> None:
        """Leave the spool to the parent, in a forked child."""
        self.live = False
        if self._spool is not None:
            self._spool.detach()
