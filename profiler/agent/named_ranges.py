"""Records the ranges that a job names itself: `ebbtide.step("rollout")`."""

from __future__ import annotations

import contextlib
from _thread import get_ident
from collections import deque
from collections.abc import Iterator
from time import monotonic_ns
from typing import Any, Callable

from .spool import MARK, MARK_NAME, NAME_CHUNK_BYTES

# Called when a range begins, with its name; each returns a function to call at its end.
# None of them raises.
LISTENERS: list[Callable[[str], Callable[[], None]]] = []
_MAX_NAME_BYTES = 3 * NAME_CHUNK_BYTES
# Ranges that have ended before the first phase, when the spool is opened.
_MAX_EARLY = 256


@contextlib.contextmanager
def named_range(name: str) -> Iterator[None]:
    """Name what runs inside; nothing happens where nobody records."""
    ends = [begin(name) for begin in tuple(LISTENERS)]
    try:
        yield
    finally:
        for end in reversed(ends):
            end()


class NamedRanges:
    """Writes named ranges to the spool of a recorder, with device times on a GPU."""

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder
        self._spool: Any = None
        self._numbers: dict[str, int] = {}
        self._early: deque[tuple[str, int, int, int]] = deque(maxlen=_MAX_EARLY)

    def begin(self, name: str) -> Callable[[], None]:
        """Begin a range; return the function that ends it."""
        recorder = self._recorder
        start_mark = recorder.mark_time()
        start_ns = monotonic_ns()

        def end() -> None:
            end_ns = monotonic_ns()
            if not recorder.recording:
                # Before the first phase it is not certain that this process trains.
                if recorder.live and recorder.options.first == 0:
                    self._early.append((name, get_ident(), start_ns, end_ns))
                return
            try:
                self._put_early()
                sequence = self._put(name, get_ident(), start_ns, end_ns)
                recorder.gpu.add_span(sequence, start_mark, recorder.mark_time())
                recorder.put_finished_spans()
            except Exception as error:
                recorder.fail(error)

        return end

    def _put_early(self) -> None:
        while self._early:
            self._put(*self._early.popleft())

    def _put(self, name: str, thread: int, start_ns: int, end_ns: int) -> int:
        sequence: int = self._recorder.next_sequence()
        number = self._number(name)
        self._recorder.put(
            MARK, a=sequence, b=number, w=thread % 2**62, x=start_ns, y=end_ns
        )
        return sequence

    def _number(self, name: str) -> int:
        """Return the number of a name in the spool, which has it from now on."""
        recorder = self._recorder
        # A forked child has another spool.
        if self._spool is not recorder.spool:
            self._spool, self._numbers = recorder.spool, {}
        if name in self._numbers:
            return self._numbers[name]
        number = self._numbers[name] = len(self._numbers)
        text = str(name).encode(errors="replace")[:_MAX_NAME_BYTES]
        for chunk, first in enumerate(range(0, max(len(text), 1), NAME_CHUNK_BYTES)):
            part = text[first : first + NAME_CHUNK_BYTES].ljust(NAME_CHUNK_BYTES, b"\0")
            words = [
                int.from_bytes(part[at : at + 8], "little", signed=True)
                for at in range(0, NAME_CHUNK_BYTES, 8)
            ]
            recorder.put(MARK_NAME, chunk, 0, number, 0, 0, *words)
        return number


def record_named_ranges(recorder: Any) -> Callable[[], None]:
    """Record named ranges from now on; return the function that ends it."""
    begin = NamedRanges(recorder).begin
    LISTENERS.append(begin)

    def remove() -> None:
        with contextlib.suppress(ValueError):
            LISTENERS.remove(begin)

    return remove
