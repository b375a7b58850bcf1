"""Tells threads that train from those that only run modules, such as a thread that loads data."""

from __future__ import annotations

import _thread
from collections.abc import Iterator
from contextlib import contextmanager

TWO_TRAIN_NOTE = (
    "two threads train at the same time: their phases mix, and those that overlap another thread's are missing; "
    "train one model per process (ebbtide profile records each), or let one thread train at a time"
)


class TrainingThreads:
    """The threads of a process that have had a phase of their own.

    Replicas and autograd's threads work inside the phases of others and never have one.
    """

    def __init__(self) -> None:
        self._local = _thread._local()
        self._numbers: set[int] = set()

    def add_current(self) -> None:
        """Note that the current thread has had a phase."""
        if not getattr(self._local, "trains", False):
            self._local.trains = True
            self._numbers.add(_thread.get_ident())

    def has(self, number: int) -> bool:
        """Return whether the thread of this number, or one that had the number before, has had a phase."""
        return number in self._numbers

    @property
    def trains(self) -> bool:
        """Whether the current thread has had a phase."""
        return getattr(self._local, "trains", False)

    @property
    def is_bystander(self) -> bool:
        """Whether other threads have had phases, and the current one none."""
        return bool(self._numbers) and not getattr(self._local, "trains", False)

    @property
    def in_forward(self) -> bool:
        """Whether the current thread is in a forward that may not be a phase."""
        return getattr(self._local, "in_forward", False)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Mark a forward of the current thread that may not be a phase."""
        self._local.in_forward = True
        try:
            yield
        finally:
            self._local.in_forward = False
