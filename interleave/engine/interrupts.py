"""Interrupts (Ctrl-C and other signals) that wait until state is whole again."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

# Those whose handlers jobs replace by functions that may raise.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Return a context in which no signal handler runs; the handlers of all signals that arrive run at its end.

    It is for work that must not be left half done. Python runs handlers on the main thread, so on any other one there
    is nothing to defer."""
    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler):
                    stack.enter_context(_deferred(number, handler))
        yield


@contextmanager
def _deferred(number: int, handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    frames: list[FrameType | None] = []
    try:
        signal.signal(number, lambda _, frame: frames.append(frame))
        yield
    finally:
        signal.signal(number, handler)
        for frame in frames:
            handler(number, frame)
