"""Records forwards without gradients.

Reference models, generation and evaluation run such forwards.
"""

from __future__ import annotations

from _thread import get_ident
from time import monotonic_ns
from typing import Any

from .gpu_clock import EventMark
from .spool import HOST

NAME = "forward without gradients"
# Calls that follow each other so closely make one row: a job may call small modules
# 10,000 times a second.
_MAX_GAP_NS = 100_000


class ForwardsWithoutGradients:
    """Records the outermost forwards without gradients, in the table `ops`: by threads
    that train, while grad mode is off and no phase is open.

    None are recorded before the first phase, so a process that only infers stays
    without a trace."""

    def __init__(self, recorder: Any) -> None:
        # Whether one runs, to which belong the modules that it calls.
        self.active = False
        self._recorder = recorder
        # The row that the next call of the same thread may extend; no row: 0.
        self.start_ns = self._end_ns = self._thread = 0
        self._start_mark: EventMark | None = None
        self._end_mark: EventMark | None = None

    def begin(self) -> bool:
        """Begin a forward; return whether it is recorded. If so, `end` must follow."""
        now_ns, thread = monotonic_ns(), get_ident()
        if (
            now_ns - self._end_ns < _MAX_GAP_NS
            and self.start_ns
            and self._thread == thread
        ):
            self.active = True
            return True
        recorder = self._recorder
        if not recorder.recording or not recorder.threads.trains:
            return False
        self.put()
        self._thread = thread
        self._start_mark = recorder.mark_time()
        self.start_ns = now_ns if self._start_mark is None else monotonic_ns()
        self.active = True
        return True

    def end(self) -> None:
        """End the forward. It is dropped if phases ran in it. Never raises."""
        self.active = False
        recorder = self._recorder
        if recorder.last_end_ns > self.start_ns:
            self._drop()
            return
        self._end_ns = monotonic_ns()
        if self._start_mark is not None:
            last, self._end_mark = self._end_mark, recorder.mark_time()
            recorder.gpu.release_mark(last)

    def put(self) -> None:
        """Write the row, if there is one: a phase begins, or another row. Never
        raises."""
        start_ns, recorder = self.start_ns, self._recorder
        if not start_ns or self.active:
            return
        start_mark, end_mark = self._start_mark, self._end_mark
        self.start_ns, self._start_mark, self._end_mark = 0, None, None
        sequence = recorder.next_sequence()
        on_gpu = (
            start_mark is not None
            and end_mark is not None
            and start_mark.device == end_mark.device
        )
        try:
            resource, device = (
                ("gpu", start_mark.device)
                if on_gpu and start_mark is not None
                else ("host", HOST)
            )
            recorder.put_op(
                sequence, NAME, resource, start_ns, self._end_ns, device=device
            )
            recorder.gpu.add_span(sequence, start_mark, end_mark)
            recorder.put_finished_spans()
        except Exception as error:
            recorder.fail(error)

    def _drop(self) -> None:
        for mark in (self._start_mark, self._end_mark):
            self._recorder.gpu.release_mark(mark)
        self.start_ns, self._start_mark, self._end_mark = 0, None, None
