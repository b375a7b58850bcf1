"""Records phases, their iterations, and memory at each phase boundary."""

from __future__ import annotations

import _thread
import sys
import time
from typing import Any, Callable, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from .exceptions import propagates
from .gpu_clock import EventMark
from .iteration_rule import (
    BACKWARD,
    FORWARD,
    UPDATE,
    IterationRule,
    UnsteppedIterations,
    live_keys,
)
from .memory_reader import PhaseReadings
from .process_recorder import ProcessRecorder, write_first_files
from .spool import ITERATION, ON_DEVICE, START
from .threads import NOT_READ_NOTE, TWO_TRAIN_NOTE, TrainingThreads
from .without_gradients import ForwardsWithoutGradients

Tensors = TypeVar("Tensors")


class PhaseRecord(NamedTuple):
    """A finished phase. `micro_batch` and `source` count from 1; 0: not known."""

    phase: int
    sequence: int
    micro_batch: int
    source: int
    start_ns: int
    end_ns: int
    start_mark: EventMark | None
    end_mark: EventMark | None


class Recorder(ProcessRecorder):
    """Records the phases of one process, and all that `ProcessRecorder` records.
    `enter` opens a phase and `leave` closes it. Only one phase is open at a time:
    whatever begins inside it, on this thread or another (autograd's device threads,
    replicas), belongs to it, and `enter` returns False."""

    def _reset(self) -> None:
        super()._reset()
        self.in_phase = False
        self.phase = self.started_ns = 0
        self.recomputes = False
        self.stepped: list[Any] = []
        # the outermost that ran forward -> number
        self.modules: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        # the outermost module of the open forward; `source`: its number, or 0
        self.called: Any = None
        self.batch: dict[str, Any] = {}
        self.optimizers: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
        # micro-batch that a pipeline schedule works on, from 1; 0: not known
        self.micro_batch = self.source = 0
        self.parts: Any = None
        # phases that the open update decides about; None: none
        self.deferred: list[PhaseRecord] | None = None
        self.threads = TrainingThreads(self.torch)
        self.without_gradients = ForwardsWithoutGradients(self)
        self._cuda_in_use = self.torch.cuda.is_initialized
        self._phase_lock = _thread.allocate_lock()
        self._owner = self._last_owner = 0
        self._rule = IterationRule()
        self._unstepped = UnsteppedIterations()
        self._backwards = 0
        self._last_phase = self.last_end_ns = 0
        self._previous = FORWARD
        self._readings = PhaseReadings(self._memory)
        self._start_mark: EventMark | None = None

    @property
    def iteration(self) -> int:
        """Number of the current iteration, as far as optimizers have stepped."""
        return self._rule.index + 1

    def read_memory_every(self, poll_ms: float | None) -> None:
        """Begin to read memory at phase boundaries and every `poll_ms` ms, or stop.

        0 reads at boundaries only; None stops reading.
        """
        self._memory.enabled, self.poll_ms = poll_ms is not None, poll_ms or 0.0
        self._readings = PhaseReadings(self._memory)
        if self._memory.enabled:
            self.put_memory(self.last_end_ns, self._memory.read_here())
            if self.wake.locked():
                self.wake.release()

    def begin(self) -> bool:
        """Begin to write, if not yet begun; return False if nothing is recorded now."""
        if not self.live or not self._recording:
            return False
        if self._spool is None:
            self._open_files(self.iteration)
        return True

    def begin_error(self) -> bool:
        """Begin to write an error, and return whether it is kept.

        The first error creates a trace of errors alone.
        """
        if not self.errors_only:
            return self.begin()
        if self.live and self._spool is None:
            write_first_files(self.directory)
            self._open_files(self.iteration)
        return self.live

    def model_and_optimizers(self) -> tuple[list[Any], list[Any]]:
        """Return the outermost modules and the optimizers that are known by now."""
        modules = [
            *live_keys(self.modules),
            *([] if self.called is None else [self.called]),
        ]
        optimizers = (
            *self._rule.optimizers,
            *live_keys(self.optimizers),
            *self.stepped,
        )
        return modules, list({id(o): o for o in optimizers}.values())

    def read_tensors(
        self, read: Callable[[list[Any], list[Any]], Tensors]
    ) -> Tensors | None:
        """Call a function that reads the outermost modules and the optimizers, and
        return its result.

        Return None while a backward runs, or another thread may replace them, which
        becomes a note."""
        with self.threads.quiet() as quiet:
            if quiet:
                return read(*self.model_and_optimizers())
        if self.threads.several:
            self.note_once(NOT_READ_NOTE)
        return None

    def enter(self, phase: int) -> bool:
        """Open a phase; return whether it is the outermost one. If so, `leave` must
        follow on this thread."""
        if not self.live:
            return False
        if phase == BACKWARD:
            self._backwards += 1
        if not self._phase_lock.acquire(False):
            self._note_threads()
            return False
        try:
            self._owner = _thread.get_ident()
            self.in_phase = True
            self.phase = phase
            self.source = 0
            if self._recording or self._starts_at(phase):
                self._begin_phase(phase)
        except Exception as error:
            self.fail(error)
        return True

    def _note_threads(self) -> None:
        """Note that another thread, which trains as this one, has an open phase."""
        if (
            self._owner != _thread.get_ident()
            and self.threads.writes
            and self.threads.has(self._owner)
        ):
            self.note_once(TWO_TRAIN_NOTE)

    def _begin_phase(self, phase: int) -> None:
        """Read memory and mark the start of a phase."""
        if self._spool is None and not self.begin():
            return
        if self.without_gradients.start_ns:
            self.without_gradients.put()
        if phase == UPDATE:
            for listener in tuple(self.on_update):
                listener()
        readings, now_ns = self._readings, time.monotonic_ns()
        if phase == FORWARD and self._previous != FORWARD:
            readings.begin_step(now_ns)
        self._previous = phase
        if now_ns >= readings.due_ns:
            self.put_memory(now_ns, readings.read(now_ns))
            now_ns = time.monotonic_ns()
        if self._cuda_in_use():
            self._start_mark = self.gpu.record_mark()
            now_ns = time.monotonic_ns()
        self.started_ns = now_ns

    def leave(self, keep: bool = True, end_ns: int | None = None) -> None:
        """Close the open phase, and keep it or not. It ends now, if it has not ended
        already at `end_ns`."""
        if not self.in_phase:
            return  # a forked child of the phase
        try:
            error = sys.exc_info()[1]
            if error is not None and propagates(error):
                self.report_error(error)
            if self.live:
                self._close_phase(keep, end_ns or time.monotonic_ns())
        except Exception as fault:
            self.fail(fault)
        finally:
            self.release_phase()

    def _close_phase(self, keep: bool, end_ns: int) -> None:
        iteration = None
        if self.stepped:
            iteration = self._rule.add_update(self.stepped, self._backwards)
            keep = keep and iteration is not None
        if self.parts is not None:
            parts, self.parts = self.parts, None
            keep = parts.finish(end_ns, keep) and keep
        if keep and self._owner != self._last_owner:
            self._last_owner = self._owner
            self.threads.add_current()
        if self._recording and self._spool is not None:
            self._end_phase(end_ns, keep)
        elif keep and self._rule.index < 0:
            self._unstepped.add(self.phase, 0)
        if iteration is not None:
            self._end_iteration(iteration, end_ns)
        self.stepped.clear()

    def add_forward(
        self, source: int, start_ns: int, start_mark: EventMark | None
    ) -> None:
        """Add a forward that ends now, by a thread without phases, unless phases of
        others overlap it."""
        self.threads.add_current()
        if self.last_end_ns > start_ns or not self.enter(FORWARD):
            self.gpu.release_mark(start_mark)
            return
        self.gpu.release_mark(self._start_mark)
        self.source, self.started_ns, self._start_mark = source, start_ns, start_mark
        self.leave()

    def release_phase(self) -> None:
        """Let the next phase begin, whether or not this one is recorded."""
        self.called = self.parts = None
        self.in_phase = False
        self._phase_lock.release()

    def _end_phase(self, end_ns: int, keep: bool) -> None:
        self.last_end_ns = end_ns
        record = self.end_record(end_ns)
        if keep:
            self._last_phase = record.sequence
            self._put_phase(record)
        else:
            self.release_marks(record)
        self.put_finished_spans()

    def put_finished_spans(self) -> None:
        """Write the device times that are known by now."""
        if self.gpu.pending:
            self._put_gpu_times(self.gpu.finished_spans())

    def close(self, reason: str = "closed") -> None:
        """Stop recording; the job goes on. Safe to call twice."""
        self.without_gradients.put()
        super().close(reason)

    def end_record(self, end_ns: int) -> PhaseRecord:
        """Return the record of the open phase, which ends now, and read memory."""
        start_mark, end_mark = self._start_mark, None
        if start_mark is not None or self._cuda_in_use():
            self._start_mark, end_mark = None, self.gpu.record_mark()
        if self._readings.at_ends:
            self.put_memory(end_ns, self._readings.read(end_ns))
        sequence = next(self._sequences)
        return PhaseRecord(
            self.phase,
            sequence,
            self.micro_batch,
            self.source,
            self.started_ns,
            end_ns,
            start_mark,
            end_mark,
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
        phase, sequence, micro_batch, source, start_ns, end_ns, start_mark, end_mark = (
            record
        )
        on_device = False
        if start_mark is not None or end_mark is not None:
            on_device = self.gpu.add_span(sequence, start_mark, end_mark)
        if self._spool is not None:
            flag = ON_DEVICE if on_device else 0
            self._spool.put_phase(
                phase, sequence, micro_batch, source, start_ns, end_ns, flag
            )
        if self._rule.index < 0:
            self._put_unstepped(phase, sequence, end_ns)

    def _put_unstepped(self, phase: int, sequence: int, end_ns: int) -> None:
        """Note where iterations end while no optimizer steps."""
        news = self._unstepped.add(phase, sequence)
        if news is not None:
            mark, iteration, last_sequence = news
            if last_sequence:
                self.put(ITERATION, mark, a=iteration, b=last_sequence, x=end_ns)

    def settle(self, keep: bool, deferred_outside: list[PhaseRecord] | None) -> None:
        """Write the phases that were held back, or drop them.

        An update around this one may hold them back too.
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
        """Note that an iteration has ended, as far as is known now.

        A second optimizer may still extend it.
        """
        options = self.options
        if self._recording and self._spool is not None:
            self._spool.put(ITERATION, a=iteration, b=self._last_phase, x=end_ns)
            self._spool.flush_if_cheap()
            self.job_info.add_training(
                live_keys(self.modules), self.stepped, self.recomputes, self.batch
            )
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

    def _starts_at(self, phase: int) -> bool:
        """Start recording if it starts with this phase, and return whether it does.

        Without optimizer steps, it starts with the first iteration to record.
        """
        first = self.options.first
        if (
            self._rule.index >= 0
            or not self._unstepped.begins(phase)
            or self._unstepped.number + 1 != first
        ):
            return False
        self._recording = True
        self._open_files(self.iteration)
        self.put(START, a=first, x=time.monotonic_ns())
        return True
