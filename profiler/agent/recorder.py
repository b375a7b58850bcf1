"""Records phases, their iterations, and memory at each phase boundary.

The phases come from `phase_hooks.py`, `deepspeed/phase_hooks.py` and `Tracer.phase`.
"""

from __future__ import annotations

import _thread
import time
from typing import Any
from weakref import WeakKeyDictionary

from .gpu_clock import EventMark
from .iterations import IterationRule
from .phase_record import BACKWARD, FORWARD, PhaseRecord
from .process_recorder import ProcessRecorder
from .spool import ITERATION, PHASE, START
from .threads import TWO_TRAIN_NOTE, TrainingThreads

# Memory readings at the start of a phase may take one part in so many of the time.
_START_SHARE = 1000
# Flushes at the ends of iterations may take one part in so many of the time: a file system may be slow.
_FLUSH_SHARE = 20


class Recorder(ProcessRecorder):
    """Records the phases of one process, and all that `ProcessRecorder` records.

    `enter` opens a phase and `leave` closes it. Only one phase is open at a time: whatever begins inside it, on this
    thread or another (autograd's device threads, replicas), belongs to it, and `enter` returns False.

    Attributes:
        in_phase: Whether a phase is open.
        phase: Code of the open phase.
        started_ns: Start of the open phase.
        recomputes: Whether a module was called inside a backward.
        stepped: The optimizers that stepped in the open phase.
        modules: The outermost modules that ran forward, with a number of each.
        micro_batch: Number of the micro-batch that a pipeline schedule works on, from 1; 0: not known.
        source: Number of the outermost module of the open phase, if it is a forward; else 0.
        parts: The open update, if it may call a closure.
        threads: The threads that have had phases.
        deferred: Phases that are not yet written, since the open update decides about them; None: none are held back.
    """

    def _reset(self) -> None:
        super()._reset()
        self.in_phase = False
        self.phase = self.started_ns = 0
        self.recomputes = False
        self.stepped: list[Any] = []
        self.modules: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self.micro_batch = self.source = 0
        self.parts: Any = None
        self.deferred: list[PhaseRecord] | None = None
        self.threads = TrainingThreads()
        self._phase_lock = _thread.allocate_lock()
        self._owner = 0
        self._owner_trains = False
        self._rule = IterationRule()
        self._backwards = self._boundaries = 0
        self._after_backward = False
        self._last_phase = self._last_reading_ns = 0
        self._start_mark: EventMark | None = None

    def enter(self, phase: int) -> bool:
        """Open a phase.

        Returns:
            Whether it is the outermost one. If so, `leave` must follow on this thread.
        """
        if not self.live:
            return False
        if phase == BACKWARD:
            self._backwards += 1
        if not self._acquire():
            return False
        try:
            self.in_phase = True
            self.stepped.clear()
            self.phase = phase
            self.source = 0
            if self._rule.index < 0:
                self._count_boundaries(phase)
            if self._recording:
                if self._spool is None:
                    self._open_files(self._rule.index + 1)
                # The last reading, at the end of the phase before, mostly still holds: only an end is read each time.
                stale = time.monotonic_ns() - self._last_reading_ns > self._memory.cost_ns * _START_SHARE
                readings = self._memory.read() if stale else []
                self._start_mark = self.gpu.record_mark()
                self.started_ns = time.monotonic_ns()
                self.put_memory(self.started_ns, readings)
        except Exception as error:
            self.fail(error)
        return True

    def leave(self, keep: bool = True, end_ns: int | None = None) -> None:
        """Close the open phase.

        Args:
            keep: Whether it was a phase; False drops it.
            end_ns: Its end, if it has ended already; None: now.
        """
        if not self.in_phase:
            return  # a forked child of the phase
        try:
            parts, self.parts = self.parts, None
            if self.live:
                self._end_phase(end_ns or time.monotonic_ns(), keep, parts)
        except Exception as error:
            self.fail(error)
        finally:
            self.release_phase()

    def _acquire(self) -> bool:
        thread = _thread.get_ident()
        if self._phase_lock.acquire(False):
            self._owner, self._owner_trains = thread, self.threads.trains
            return True
        if self._owner != thread and self._owner_trains and self.threads.trains:
            self.note_once(TWO_TRAIN_NOTE)
        return False

    def add_forward(self, source: int, start_ns: int, start_mark: EventMark | None) -> None:
        """Add a forward that ends now, by a thread that had no phase before.

        If phases of other threads overlap it, it is dropped.
        """
        self.threads.add_current()
        if self._last_reading_ns > start_ns or not self.enter(FORWARD):
            self.gpu.release_mark(start_mark)
            return
        self.gpu.release_mark(self._start_mark)
        self.source, self.started_ns, self._start_mark = source, start_ns, start_mark
        self.leave()

    def release_phase(self) -> None:
        """Let the next phase begin, whether or not this one is recorded."""
        self.in_phase = False
        self._owner = 0
        self._phase_lock.release()

    def _end_phase(self, end_ns: int, keep: bool, parts: Any) -> None:
        iteration = None
        if self.stepped:
            iteration = self._rule.add_update(self.stepped, self._backwards)
            keep = keep and iteration is not None
        if parts is not None:
            keep = parts.finish(end_ns, keep) and keep
        if keep:
            self.threads.add_current()
        if self._recording and self._spool is not None:
            record = self.end_record(end_ns)
            if keep:
                self._last_phase = record.sequence
                self._put_phase(record)
            else:
                self.release_marks(record)
            self._put_gpu_times(self.gpu.finished_spans())
        if iteration is not None:
            self._end_iteration(iteration, end_ns)
        self.stepped.clear()

    def end_record(self, end_ns: int) -> PhaseRecord:
        """Return the record of the open phase, which ends now, and read memory."""
        end_mark, self._start_mark, start_mark = self.gpu.record_mark(), None, self._start_mark
        self.put_memory(end_ns, self._memory.read())
        self._last_reading_ns = time.monotonic_ns()
        sequence, started_ns = self.next_sequence(), self.started_ns
        return PhaseRecord(
            self.phase, sequence, self.micro_batch, self.source, started_ns, end_ns, start_mark, end_mark
        )

    def extend_back(self, first: PhaseRecord) -> None:
        """Let the open phase begin where `first` began."""
        self.gpu.release_mark(self._start_mark)
        self.gpu.release_mark(first.end_mark)
        self.started_ns, self._start_mark = first.start_ns, first.start_mark

    def release_marks(self, record: PhaseRecord) -> None:
        """Reuse the events of a phase that is dropped."""
        self.gpu.release_mark(record.start_mark)
        self.gpu.release_mark(record.end_mark)

    def _put_phase(self, record: PhaseRecord) -> None:
        if self.deferred is not None:
            self.deferred.append(record)
            return
        phase, sequence, micro_batch, source, start_ns, end_ns, start_mark, end_mark = record
        self.put(PHASE, phase, a=sequence, b=micro_batch, c=source, x=start_ns, y=end_ns)
        self.gpu.add_span(sequence, start_mark, end_mark)

    def settle(self, keep: bool, deferred_outside: list[PhaseRecord] | None) -> None:
        """Write the phases that were held back, or drop them.

        Args:
            keep: Whether they are written.
            deferred_outside: The phases that an update around this one holds back, to which these are added then.
        """
        records, self.deferred = self.deferred or [], deferred_outside
        for record in records:
            if keep:
                self._put_phase(record)
            else:
                self.release_marks(record)

    def count_step(self, stepped: list[Any]) -> None:
        """Account for an update that has no phase of its own."""
        iteration = self._rule.add_update(stepped, self._backwards)
        if iteration is not None:
            self._end_iteration(iteration, time.monotonic_ns())

    def _end_iteration(self, iteration: int, end_ns: int) -> None:
        """Note that an iteration has ended, as far as is known now: a second optimizer may still extend it."""
        options = self._options
        if self._recording and self._spool is not None:
            self._spool.put(ITERATION, a=iteration, b=self._last_phase, x=end_ns)
            self._spool.flush_if_cheap(_FLUSH_SHARE)
            self.files.job_info.add_training(self.modules, self.stepped)
            if options.last is not None and iteration >= options.last:
                self.close("iterations")
                return
            if self._spool.full:
                self.close("max-size")
                return
        elif iteration + 1 >= options.first:
            self._recording = True
            self._open_files(self._rule.index + 1)
        if iteration + 1 == options.first and self._spool is not None:
            self._spool.put(START, a=options.first, x=end_ns)
        for listener in self.on_iteration:
            listener(iteration + 1)

    def _count_boundaries(self, phase: int) -> None:
        """Start to record where the first iteration to record begins, while no optimizer is known.

        The reader of the spool counts the same boundaries, unless an optimizer steps later: they were micro-steps then.
        """
        boundary = phase == FORWARD and self._after_backward
        self._after_backward = phase == BACKWARD or (self._after_backward and phase != FORWARD)
        self._boundaries += boundary
        if boundary and not self._recording and self._boundaries == self._options.first:
            self._recording = True
            self._open_files(self._rule.index + 1)
            self.put(START, a=self._options.first, x=time.monotonic_ns())
