"""Records the sub-steps of an update as rows that tile it: each runs until the next begins."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from ..recorder import Recorder
from ..spool import HOST

# A shorter `rest` counts with the row before it: it is mostly the agent's own time.
_SHORT_NS = 10_000


class _Substep(NamedTuple):
    name: str
    resource: str
    subgroup: int | None
    nbytes: int | None


_REST = _Substep("rest", "host", None, None)


class _Row:
    def __init__(self, sequence: int, substep: _Substep, start_ns: int, mark: Any) -> None:
        self.sequence = sequence
        self.substep = substep
        self.start_ns = self.end_ns = start_ns
        self.mark = mark


class SubstepRecorder:
    """Records what the open update does, from `begin` to `end`. The thread that runs the update calls it.

    Each row is recorded once the next has run for a while, since the next may turn out to be a part of it. Rows on a
    GPU get their device times from marks on the job's stream, as phases do.

    Attributes:
        running: Whether an update is being recorded.
        updates: How many updates of a subgroup have begun in it.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.running = False
        self.updates = 0
        self._recorder = recorder
        self._row: _Row | None = None
        self._previous: _Row | None = None

    def begin(self) -> None:
        """Start with the recorder's open phase, an update; its first sub-step is `rest`."""
        if self._recorder.recording:
            self.running, self.updates = True, 0
            self._row = self._begin_row(_REST, self._recorder.started_ns)

    def switch(self, name: str, resource: str = "host", subgroup: int | None = None, nbytes: int | None = None) -> None:
        """Begin another sub-step now. Never raises."""
        row, substep = self._row, _Substep(name, resource, subgroup, nbytes)
        if not self.running or row is None or substep == row.substep:
            return
        try:
            self._switch(row, substep, time.monotonic_ns())
        except Exception as error:
            self.running = False
            self._recorder.fail(error)

    def _switch(self, row: _Row, substep: _Substep, now_ns: int) -> None:
        previous = self._previous
        if previous is not None and row.substep.name == "rest" and now_ns - row.start_ns < _SHORT_NS:
            previous.end_ns = now_ns
            if previous.substep == substep and previous.mark is None:
                self._row, self._previous = previous, None
                return
        else:
            if previous is not None:
                self._put(previous)
            self._end_row(row, now_ns)
            self._previous = row
        if substep.name == "update":
            self.updates += 1
        self._row = self._begin_row(substep, now_ns)

    def end(self) -> int | None:
        """Record the last rows of the update, and return its end in ns; None if it was not recorded. Never raises."""
        if not self.running or self._row is None:
            return None
        now_ns = time.monotonic_ns()
        try:
            self._end_row(self._row, now_ns)
            for row in (self._previous, self._row):
                if row is not None:
                    self._put(row)
        except Exception as error:
            self._recorder.fail(error)
        self.running, self._row, self._previous = False, None, None
        return now_ns

    @property
    def current(self) -> tuple[str, str, int | None, int | None] | None:
        """The arguments of `switch` of the row that runs; None outside of an update."""
        return self._row.substep if self.running and self._row is not None else None

    @property
    def sequence(self) -> int | None:
        """The sequence number of the row that runs; None outside of an update."""
        return self._row.sequence if self._row is not None else None

    def _begin_row(self, substep: _Substep, now_ns: int) -> _Row:
        mark = self._recorder.gpu.record_mark() if substep.resource == "gpu" else None
        return _Row(self._recorder.next_sequence(), substep, now_ns, mark)

    def _end_row(self, row: _Row, now_ns: int) -> None:
        row.end_ns = now_ns
        if row.mark is not None:
            self._recorder.gpu.add_span(row.sequence, row.mark, self._recorder.gpu.record_mark())

    def _put(self, row: _Row) -> None:
        device = HOST if row.mark is None else row.mark.device
        name, resource, subgroup, nbytes = row.substep
        self._recorder.put_op(row.sequence, name, resource, row.start_ns, row.end_ns, subgroup, nbytes, device=device)
