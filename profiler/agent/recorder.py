"""What happened, in order: phases, their iterations, and memory at each boundary and between them."""

from __future__ import annotations

import _thread
import itertools
import os
import time
from typing import Any, Callable
from weakref import WeakSet

from .gpu_clock import GpuClock
from .iterations import IterationRule
from .job_info import Facts
from .memory_reader import MemoryLine, Reading
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
# Of the time, readings between the boundaries, and those where a phase begins, may take one part in so many.
_POLL_SHARE = 500
_START_SHARE = 1000


class Recorder:
    """Records one process into one spool.

    A phase is opened by `enter` and closed by `leave`. Only one is open at a time: whatever begins inside it, on
    this thread or another (autograd's device threads, replicas), belongs to it, and `enter` says so by False.
    Nothing is written, and no thread started, before the first phase.
    """

    def __init__(self, torch: Any, directory: str, options: Options) -> None:
        self.live = True
        self.busy = False  # a phase is open
        self.phase = self.started_ns = 0  # of the open phase
        self.recomputes = False  # a module was called inside a backward
        self.stepped: list[Any] = []  # the optimizers that stepped in the open phase
        self.modules: WeakSet[Any] = WeakSet()  # the outermost modules that ran forward
        self.facts = Facts(torch, directory)
        self.on_iteration: list[Callable[[int], None]] = []  # called with the number of the next iteration
        self.on_close: list[Callable[[], None]] = []
        self._directory = directory
        self._options = options
        self._door = _thread.allocate_lock()
        self._spool: Spool | None = None
        self._recording = options.first == 0
        self._rule = IterationRule()
        self._memory = MemoryLine(torch)
        self.gpu = GpuClock(torch.cuda)
        self._backwards = 0
        self._numbers = itertools.count(1)
        self._last_phase = self._read_ns = 0
        self._start_mark: Any = None
        os.register_at_fork(after_in_child=self._abandon)

    # -- phases ------------------------------------------------------------------------------------------------

    def enter(self, phase: int) -> bool:
        """A phase begins; True: it is the outermost, and `leave` must follow on this thread."""
        if not self.live:
            return False
        if phase == BACKWARD:
            self._backwards += 1
        if not self._door.acquire(False):
            return False
        try:
            self.busy = True
            self.stepped.clear()
            self.phase = phase
            if self._recording:
                if self._spool is None:
                    self._open()
                # What the last phase ended with mostly still holds: only its end is worth a reading each time.
                stale = time.monotonic_ns() - self._read_ns > self._memory.cost_ns * _START_SHARE
                readings = self._memory.read() if stale else []
                self._start_mark = self.gpu.mark()
                self.started_ns = time.monotonic_ns()
                self._put_memory(self.started_ns, readings)
        except Exception as error:
            self.fail(error)
        return True

    def leave(self, keep: bool = True, at: int | None = None) -> None:
        """The open phase ends, or has ended `at` that time (ns); `keep` False: it was none after all."""
        try:
            if self.live:
                self._left(at or time.monotonic_ns(), keep)
        except Exception as error:
            self.fail(error)
        finally:
            self.busy = False
            self._door.release()

    def _left(self, now: int, keep: bool) -> None:
        iteration = None
        if self.stepped:
            iteration = self._rule.stepped(self.stepped, self._backwards)
            keep = keep and iteration is not None
        if self._recording and self._spool is not None:
            mark, self._start_mark, start_mark = self.gpu.mark(), None, self._start_mark
            self._put_memory(now, self._memory.read())
            self._read_ns = time.monotonic_ns()
            if keep:
                self._last_phase = next(self._numbers)
                self._spool.put(PHASE, self.phase, a=self._last_phase, x=self.started_ns, y=now)
                self.gpu.span(self._last_phase, start_mark, mark)
            else:
                self.gpu.drop(start_mark)
                self.gpu.drop(mark)
            self._put_gpu_times(self.gpu.finished())
        if iteration is not None:
            self._iteration_ended(iteration, now)
        self.stepped.clear()

    def _iteration_ended(self, index: int, now: int) -> None:
        """Iteration `index` ended now, as far as can be told: a second optimizer may still extend it."""
        options = self._options
        if self._recording and self._spool is not None:
            self._spool.put(ITERATION, a=index, b=self._last_phase, x=now)
            self.facts.training(self.modules, self.stepped)
            if options.last is not None and index >= options.last:
                self.close("iterations")
                return
            if self._spool.full:
                self.close("max-size")
                return
        elif index + 1 >= options.first:
            self._recording = True
            self._open()
        if index + 1 == options.first and self._spool is not None:
            self._spool.put(START, a=options.first, x=now)
        for listener in self.on_iteration:
            listener(index + 1)

    # -- operations --------------------------------------------------------------------------------------------

    @property
    def recording(self) -> bool:
        """Whether rows reach the trace now: it is open, and these iterations were asked for."""
        return self.live and self._recording and self._spool is not None

    def number(self) -> int:
        """The next in the one sequence of phases and operations: what comes before the end of an iteration's last
        phase is of that iteration."""
        return next(self._numbers)

    def op(
        self,
        name: str,
        resource: str,
        start_ns: int,
        end_ns: int,
        subgroup: int | None = None,
        nbytes: int | None = None,
    ) -> None:
        """A row of the table `ops`, from any thread. name: of `spool.OPS`; resource: of `spool.RESOURCES`; times: ns
        of CLOCK_MONOTONIC; nbytes: what it moved. Never raises."""
        self.row(self.number(), name, resource, start_ns, end_ns, subgroup, nbytes)

    def row(self, sequence: int, *op: Any, **more: Any) -> None:
        """The same, with a number that `number` gave it, and further arguments of `Spool.op`."""
        if self.recording and self._spool is not None:
            try:
                self._spool.op(sequence, *op, **more)
            except Exception as error:
                self.fail(error)

    # -- the spool ---------------------------------------------------------------------------------------------

    def _open(self) -> None:
        rank, world_size, local_rank = self.facts.place()
        name = f"{self.facts.host}-{os.getpid()}"
        limit = self._options.max_bytes
        self._spool = Spool(os.path.join(self._directory, f"agent-{name}.spool"), limit)
        self._spool.header(rank, world_size, local_rank)
        self._spool.flush()
        self.facts.begin(name)
        for listener in self.on_iteration:
            listener(self._rule.index + 1)
        _thread.start_new_thread(self._beat, ())

    def _beat(self) -> None:
        """Flush several times a second, and read memory between the boundaries. Not a `threading` thread: the
        job's own list of threads stays its own, and its exit does not wait for this one."""
        flushed = time.monotonic()
        while self.live and self._spool is not None and self._spool.alive:
            period = self._options.poll_ms / 1e3
            time.sleep(max(period, self._memory.cost_ns * _POLL_SHARE / 1e9) if period else _FLUSH_SECONDS)
            try:
                if period and self._recording:
                    self._put_memory(time.monotonic_ns(), self._memory.read())
                if time.monotonic() - flushed >= _FLUSH_SECONDS:
                    self._spool.flush()
                    flushed = time.monotonic()
                    if self._spool.full:
                        self.close("max-size")
            except Exception as error:
                self.fail(error)

    def _put_memory(self, now: int, readings: list[Reading]) -> None:
        for pool, device, size in readings:
            self.put(MEMORY, pool, device, x=now, y=size)

    def _put_gpu_times(self, times: Any) -> None:
        for sequence, start, end in times:
            self.put(GPU_TIMES, a=sequence, x=start, y=end)

    def put(self, *record: Any, **fields: int) -> None:
        """Append a record to the spool, if there is one."""
        if self._spool is not None:
            self._spool.put(*record, **fields)

    def beside(self, name: str) -> str:
        """The path of a further file of this process in the spool's folder."""
        return os.path.join(self._directory, f"{self.facts.host}-{os.getpid()}-{name}")

    # -- the end -----------------------------------------------------------------------------------------------

    def close(self, reason: str = "closed") -> None:
        """Record nothing more; the job goes on. Safe to call twice."""
        if not self.live:
            return
        try:
            for listener in self.on_close:
                listener()
            self._put_gpu_times(self.gpu.drain(1.0))
        except Exception as error:
            self.facts.note(f"the recorder failed while closing: {error!r}")
        self.live = False
        if self._spool is not None:
            self.put(STOPPED, STOP_REASONS.index(reason), x=time.monotonic_ns())
            self._spool.close()
            self.facts.write()

    def fail(self, error: BaseException) -> None:
        """A fault of the recorder's own: say so in the trace, and leave the job alone from here on."""
        if self.live:
            self.live = False
            self.facts.note(f"recording ended by a fault of the recorder: {error!r}")
            if self._spool is not None:
                self.put(STOPPED, STOP_REASONS.index("fault"), x=time.monotonic_ns())
                self._spool.close()
                self.facts.write()

    def _abandon(self) -> None:
        """In a forked child: the spool is the parent's."""
        self.live = False
        if self._spool is not None:
            self._spool.abandon()
