"""Chrome traces (JSON, as torch's profiler writes them), read in pieces: the memory this takes does not grow with the
file. What is odd in them is mended or skipped, and where they break off, what stands before counts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ebbtide.errors import UserError
from ebbtide.profiler.chrome_trace.events import MOST_BASE_NS, Event, read_event, read_events, read_value
from ebbtide.profiler.chrome_trace.json_window import BrokenOff, Stream, Window

CHUNK = 1 << 20
# The top-level keys that are kept; a trace may hold others of any size.
_META = frozenset({"baseTimeNanoseconds", "deviceProperties", "distributedInfo", "host_name"})
_EVENT_LIST = "traceEvents"
# What stands between two events.
_GAP = re.compile(rb"\}\s*,\s*\Z")
_LONGEST_GAP = 64
# Beyond so many, and as many as were read, it is no trace.
_MOST_SKIPPED = 10_000


class ChromeTrace:
    """A trace being read from a stream of bytes.

    meta: those of its top-level values that are kept, complete once `batches` has ended, since some may stand after the
    events. count, skipped: events read, and events without a time that can be. trouble: why the trace ended before its
    end, None where it did not.
    """

    def __init__(self, stream: Stream, chunk: int = CHUNK) -> None:
        self.meta: dict[str, Any] = {}
        self.count = 0
        self.skipped = 0
        self.trouble: str | None = None
        self._window = Window(stream, chunk)

    @property
    def base_ns(self) -> int:
        """Unix ns at which its times begin, known once all is read; 0 where they are Unix times themselves."""
        base = self.meta.get("baseTimeNanoseconds")
        return base if isinstance(base, int) and abs(base) <= MOST_BASE_NS else 0

    def batches(self) -> Iterator[list[Event]]:
        """All events, in their order. Raises ValueError for what is no Chrome trace, and what the stream raises before
        the first event."""
        listed = False
        try:
            for batch in self._top():
                listed = True
                self.count += len(batch)
                yield batch
        except (BrokenOff, UserError) as error:
            if isinstance(error, UserError) and not self.count:
                raise
            self.trouble = str(error)
        if not listed or (self.trouble and not self.count):
            raise ValueError(self.trouble or f"it has no {_EVENT_LIST}")

    def _top(self) -> Iterator[list[Event]]:
        window = self._window
        if window.peek() == b"[":
            yield from self._list()
            return
        window.expect(b"{")
        while window.peek() == b'"':
            key = read_value(window.value())
            window.expect(b":")
            if key == _EVENT_LIST and window.peek() == b"[":
                yield from self._list()
            elif key in _META:
                self.meta[key] = read_value(window.value())
            else:
                window.value()
        window.expect(b"}")

    def _list(self) -> Iterator[list[Event]]:
        self._window.expect(b"[")
        while True:
            quickly = self._at_once()
            if quickly is not None:
                yield quickly
                continue
            batch: list[Event] = []
            try:
                closed = self._one_by_one(batch)
            finally:
                yield batch
            if closed:
                return
            self._window.more()

    def _at_once(self) -> list[Event] | None:
        """The events up to the last whole one in the window; None where they are not to be had so quickly."""
        data, begin = self._window.data, self._window.skip()
        follows = len(data)
        while (follows := data.rfind(b"{", begin, follows)) > begin:
            gap = _GAP.search(data, max(begin, follows - _LONGEST_GAP), follows)
            if gap is not None:
                text = data[begin : gap.start() + 1]
                batch = read_events(text)
                if batch is not None:
                    self._window.at = follows
                return batch
        return None

    def _one_by_one(self, batch: list[Event]) -> bool:
        """Add the whole events in the window to `batch`. Returns whether their list ends after them."""
        while (text := self._window.whole()) is not None:
            if text == b"]":
                return True
            event = read_event(text)
            if event is None:
                self.skipped += 1
                if self.skipped > _MOST_SKIPPED + self.count:
                    raise BrokenOff("it is damaged")
            else:
                batch.append(event)
        return False
