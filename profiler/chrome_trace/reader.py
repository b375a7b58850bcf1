"""Reads Chrome traces, as torch's profiler writes them in JSON, in constant memory up
to where the file breaks off."""

import re
from collections.abc import Iterator
from io import BufferedIOBase
from typing import Any

from ebbtide.errors import UserError
from ebbtide.profiler.chrome_trace.events import (
    MAX_BASE_NS,
    Event,
    JsonWindow,
    UnreadableJson,
    read_event,
    read_events,
    read_value,
)

CHUNK = 1 << 20
# The top-level keys that are kept; a trace may have other keys with values of any size.
_META = frozenset(
    {"baseTimeNanoseconds", "deviceProperties", "distributedInfo", "host_name"}
)
_EVENT_LIST = "traceEvents"
# The text between two events.
_GAP = re.compile(rb"\}\s*,\s*\Z")
_MAX_GAP_BYTES = 64
# A file with more skipped events than this, and more skipped than valid ones, is not a
# trace.
_MAX_SKIPPED = 10_000


class ChromeTrace:
    """Chrome trace that is being read from a stream of bytes."""

    def __init__(self, stream: BufferedIOBase, chunk: int = CHUNK) -> None:
        # The top-level values that are kept. Complete once `batches` has ended, since
        # values may follow the events.
        self.meta: dict[str, Any] = {}
        self.count = 0
        self.skipped = 0
        # Reason why reading stopped before the end of the trace; None if it did not.
        self.stop_reason: str | None = None
        self._window = JsonWindow(stream, chunk)

    @property
    def base_ns(self) -> int:
        """Unix time in ns at which the trace's times begin, 0 if they are Unix times;
        valid after the last batch."""
        base = self.meta.get("baseTimeNanoseconds")
        return base if isinstance(base, int) and abs(base) <= MAX_BASE_NS else 0

    def batches(self) -> Iterator[list[Event]]:
        """Yield all events in their order."""
        has_list = False
        try:
            for batch in self._top_level():
                has_list = True
                self.count += len(batch)
                yield batch
        except (UnreadableJson, UserError) as error:
            if isinstance(error, UserError) and not self.count:
                raise
            self.stop_reason = str(error)
        if not has_list or (self.stop_reason and not self.count):
            raise ValueError(self.stop_reason or f"it has no {_EVENT_LIST}")

    def _top_level(self) -> Iterator[list[Event]]:
        window = self._window
        if window.peek() == b"[":
            yield from self._event_list()
            return
        window.expect(b"{")
        while window.peek() == b'"':
            key = read_value(window.next_value())
            window.expect(b":")
            if key == _EVENT_LIST and window.peek() == b"[":
                yield from self._event_list()
            elif key in _META:
                self.meta[key] = read_value(window.next_value())
            else:
                window.next_value()
        window.expect(b"}")

    def _event_list(self) -> Iterator[list[Event]]:
        self._window.expect(b"[")
        while True:
            decoded = self._decode_window()
            if decoded is not None:
                yield decoded
                continue
            batch: list[Event] = []
            try:
                closed = self._decode_one_by_one(batch)
            finally:
                yield batch
            if closed:
                return
            self._window.extend()

    def _decode_window(self) -> list[Event] | None:
        """Decode the complete events in the window at once. None if there are fewer
        than two, or one is invalid."""
        data, begin = self._window.data, self._window.skip_separators()
        next_begin = len(data)
        while (next_begin := data.rfind(b"{", begin, next_begin)) > begin:
            gap = _GAP.search(data, max(begin, next_begin - _MAX_GAP_BYTES), next_begin)
            if gap is not None:
                text = data[begin : gap.start() + 1]
                batch = read_events(text)
                if batch is not None:
                    self._window.position = next_begin
                return batch
        return None

    def _decode_one_by_one(self, batch: list[Event]) -> bool:
        """Append the complete events in the window to `batch`. Return whether the list
        of events ends after them."""
        while (text := self._window.buffered_value()) is not None:
            if text == b"]":
                return True
            event = read_event(text)
            if event is None:
                self.skipped += 1
                if self.skipped > _MAX_SKIPPED + self.count:
                    raise UnreadableJson("it has text that is not JSON")
            else:
                batch.append(event)
        return False
