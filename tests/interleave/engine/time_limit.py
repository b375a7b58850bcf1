"""A time limit for code that may wait without end."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """Return a context that raises TimeoutError in the main thread when it takes too
    long, also while that waits."""

    def end(*_: Any) -> None:
        raise TimeoutError(f"{what} has not ended after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, end)
    # Again, should what is cleaned up wait, too. The time limit of the whole test goes
    # on behind this one.
    left_s, _ = signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, left_s)
