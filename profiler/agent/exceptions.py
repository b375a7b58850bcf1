"""Sees exceptions that end a thread, and keeps hooks out of their tracebacks."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from typing import Any, Callable

from .frames import without_hidden

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_OWN_FOLDERS = tuple(os.path.join(_ROOT, name, "") for name in ("profiler", "features"))
_MAX_CHAIN = 100


class ExceptionHooks:
    """Calls `see` with each unhandled exception, from creation on.

    The hooks that were there before are called next.
    """

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
        self._previous(kind, error, without_hidden(traceback))

    def _thread_hook(self, arguments: Any) -> None:
        self._handle(arguments.exc_value)
        self._previous_of_threads(arguments)

    def _handle(self, error: BaseException | None) -> None:
        try:
            for link in _chain(error):
                self._see(link)
                # Python 3.10 has kept the entries
                link.__traceback__ = without_hidden(link.__traceback__)
        except Exception:
            pass  # the exception of the job is to be printed in any case


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and all that it was raised from, or while they were handled,
    each once."""
    pending, done = [error], set[int]()
    while pending and len(done) < _MAX_CHAIN:
        link = pending.pop()
        if link is not None and id(link) not in done:
            done.add(id(link))
            yield link
            pending += [link.__cause__, link.__context__]


def propagates(error: BaseException) -> bool:
    """Return whether an exception passes through a hook now.

    Otherwise the job handles it, and calls a hook meanwhile.
    """
    entry = error.__traceback__
    return entry is not None and entry.tb_frame.f_code.co_filename.startswith(
        _OWN_FOLDERS
    )
