"""The rows that tile an update: one runs until the next begins."""

from __future__ import annotations

import time
from typing import Any

from ..recorder import Recorder
from ..spool import HOST

# Rest that lasts less goes to the row before it: it is mostly ours.
_SHORT_NS = 10_000


class _Row:
    def __init__(self, sequence: int, what: tuple[str, str, int | None, int | None], start_ns: int, mark: Any) -> None:
        self.sequence = sequence
        self.what = what  # name, resource, subgroup, bytes
        self.start_ns = self.end_ns = start_ns
        self.mark = mark


class SubSteps:
    """Tells what the open update is doing, from `begin` to `end`; used by the thread that runs the update.

    Each row is recorded once the next has run for a while, since the next may turn out to be part of it. Rows on a
    GPU get their device times from marks on the job's stream, as phases do.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.running = False
        self.updates = 0  # how many subgroups' updates have begun
        self._recorder = recorder
        self._row: _Row | None = None
        self._before: _Row | None = None

    def begin(self) -> None:
        """The open phase of the recorder is an update; what it does first is `rest`."""
        if self._recorder.recording:
            self.running, self.updates = True, 0
            self._row = self._begun(("rest", "host", None, None), self._recorder.started_ns)

    def switch(self, name: str, resource: str = "host", subgroup: int | None = None, nbytes: int | None = None) -> None:
        """From here on the update does this. Never raises."""
        row, what = self._row, (name, resource, subgroup, nbytes)
        if not self.running or row is None or what == row.what:
            return
        try:
            self._switch(row, what, time.monotonic_ns())
        except Exception as error:
            self.running = False
            self._recorder.fail(error)

    def _switch(self, row: _Row, what: tuple[str, str, int | None, int | None], now: int) -> None:
        before = self._before
        if before is not None and row.what[0] == "rest" and now - row.start_ns < _SHORT_NS:
            before.end_ns = now
            if before.what == what and before.mark is None:
                self._row, self._before = before, None
                return
        else:
            if before is not None:
                self._put(before)
            self._ended(row, now)
            self._before = row
        if what[0] == "update":
            self.updates += 1
        self._row = self._begun(what, now)

    def end(self) -> int | None:
        """The update is over; when (ns), or None where it was not followed. Never raises."""
        if not self.running or self._row is None:
            return None
        now = time.monotonic_ns()
        try:
            self._ended(self._row, now)
            for row in (self._before, self._row):
                if row is not None:
                    self._put(row)
        except Exception as error:
            self._recorder.fail(error)
        self.running, self._row, self._before = False, None, None
        return now

    @property
    def sequence(self) -> int | None:
        """Of the row that runs."""
        return self._row.sequence if self._row is not None else None

    def _begun(self, what: tuple[str, str, int | None, int | None], now: int) -> _Row:
        mark = self._recorder.gpu.mark() if what[1] == "gpu" else None
        return _Row(self._recorder.number(), what, now, mark)

    def _ended(self, row: _Row, now: int) -> None:
        row.end_ns = now
        if row.mark is not None:
            self._recorder.gpu.span(row.sequence, row.mark, self._recorder.gpu.mark())

    def _put(self, row: _Row) -> None:
        device = HOST if row.mark is None else row.mark[0]
        name, resource, subgroup, nbytes = row.what
        self._recorder.row(row.sequence, name, resource, row.start_ns, row.end_ns, subgroup, nbytes, device=device)
