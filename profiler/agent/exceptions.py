"""Sees exceptions that end a thread, and keeps the frames of the hooks out of their tracebacks."""

from __future__ import annotations

import dis
import os
import sys
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Callable

_FOLDER = os.path.dirname(os.path.abspath(__file__)) + os.sep
_PROFILER_FOLDER = os.path.dirname(os.path.dirname(_FOLDER)) + os.sep
_MAX_CHAIN = 100


class ExceptionHooks:
    """Calls `see` with each exception that nothing handles, then the hooks that were there before, from creation on."""

    def __init__(self, see: Callable[[BaseException], None]) -> None:
        self._see = see
        self._previous = sys.excepthook
        self._previous_of_threads = threading.excepthook
        self._own: tuple[Any, Any] = (self._hook, self._thread_hook)
        sys.excepthook, threading.excepthook = self._own

    def remove(self) -> None:
        """Restore the hooks that the job has not replaced since."""
        if sys.excepthook is self._own[0]:
            sys.excepthook = self._previous
        if threading.excepthook is self._own[1]:
            threading.excepthook = self._previous_of_threads

    def _hook(self, kind: Any, error: BaseException, traceback: Any) -> None:
        self._handle(error)
        self._previous(kind, error, traceback)

    def _thread_hook(self, arguments: Any) -> None:
        self._handle(arguments.exc_value)
        self._previous_of_threads(arguments)

    def _handle(self, error: BaseException | None) -> None:
        try:
            for link in _chain(error):
                self._see(link)
                remove_hook_frames(link.__traceback__)
        except Exception:
            pass  # the exception of the job is to be printed in any case


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception, and those that it was raised from or while they were handled, each once."""
    pending, done = [error], set[int]()
    while pending and len(done) < _MAX_CHAIN:
        link = pending.pop()
        if link is not None and id(link) not in done:
            done.add(id(link))
            yield link
            pending += [link.__cause__, link.__context__]


def propagates(error: BaseException) -> bool:
    """Return whether an exception passes through a hook now; else the job handles it, and calls a hook meanwhile."""
    entry = error.__traceback__
    return entry is not None and entry.tb_frame.f_code.co_filename.startswith(_PROFILER_FOLDER)


def remove_hook_frames(traceback: TracebackType | None) -> None:
    """Make a traceback that of a job without hooks. Its first entry stays, which is the job's own."""
    previous = None
    while traceback is not None:
        following = traceback.tb_next
        while following is not None and following.tb_frame.f_code.co_filename.startswith(_FOLDER):
            following = following.tb_next
        if following is not traceback.tb_next:
            traceback.tb_next = following
            if previous is not None:
                previous.tb_next = traceback = _without_hook(traceback)
        previous, traceback = traceback, following


def _without_hook(entry: TracebackType) -> TracebackType:
    """Return an entry of a traceback at the call that the frame makes without hooks. A module that is called has two
    ways to go on, and the hook is in the other one (`phase_hooks.OutermostCall`)."""
    frame = entry.tb_frame
    module = frame.f_locals.get("self")
    compiled = getattr(module, "__dict__", {}).get("_compiled_call_impl")
    if frame.f_code.co_name != "_wrapped_call_impl" or compiled is not None:
        return entry
    line_number = None
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.argval == "_call_impl":
            starts = dis.findlinestarts(frame.f_code)
            line_number = [number for start, number in starts if start <= instruction.offset][-1]
        if line_number is not None and instruction.opname.startswith("CALL"):
            return TracebackType(entry.tb_next, frame, instruction.offset, line_number)
    return entry
