"""Tells threads that train from threads that only run modules.

A thread that loads data, for example, only runs modules.
"""

from __future__ import annotations

import _thread
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

TWO_TRAIN_NOTE = (
    "two threads train at the same time: their phases mix, and those that overlap "
    "another thread's are missing; "
    "train one model per process (ebbtide profile records each), or let one thread "
    "train at a time"
)


NOT_READ_NOTE = (
    "several threads train: what their parameters, gradients and optimizer state hold "
    "is not recorded, since autograd "
    "may replace a gradient of one thread while another reads it"
)


class _Writer:
    """A thread that may replace gradients, as long as it lives."""


class TrainingThreads:
    """The threads of a process that train, and those that may replace gradients.

    A thread trains once it had a phase of its own (replicas and autograd's threads
    never have). Autograd replaces gradients without the interpreter's lock, and a
    thread that reads one meanwhile may crash the process: tensors of the job are read
    in `quiet` moments only.
    """

    def __init__(self, torch: Any) -> None:
        self._local = _thread._local()
        self._numbers: set[int] = set()
        # -1 outside of a backward; on autograd's threads the backward belongs to
        # another thread.
        self._backward_number = torch._C._current_graph_task_id
        # A thread-local object dies with its thread.
        self._writers: WeakSet[_Writer] = WeakSet()
        # Held while tensors are read. A signal handler may run a backward meanwhile, on
        # the same thread.
        self._reading = _thread.RLock()

    def add_current(self) -> None:
        """Note that the current thread has had a phase."""
        if not getattr(self._local, "trains", False):
            self._local.trains = True
            self._numbers.add(_thread.get_ident())
            self._add_writer()

    def enter_backward(self) -> None:
        """Note that a backward begins on the current thread. The first one waits until
        no tensor is read."""
        if not self.writes and self._backward_number() < 0:
            self._add_writer()

    def _add_writer(self) -> None:
        if not self.writes:
            with self._reading:
                self._local.writer = writer = _Writer()
                self._writers.add(writer)

    @property
    def writes(self) -> bool:
        """Whether the current thread has had a phase.

        A backward counts, too, unless it is a part of another thread's.
        """
        return hasattr(self._local, "writer")

    @property
    def several(self) -> bool:
        """Whether several threads that live may replace gradients."""
        return len(self._writers) > 1

    @contextmanager
    def quiet(self) -> Iterator[bool]:
        """Give whether no other thread trains and no backward runs, so that tensors of
        the job can be read in the block."""
        with self._reading:
            own = getattr(self._local, "writer", None)
            yield self._backward_number() < 0 and all(
                writer is own for writer in list(self._writers)
            )

    def has(self, number: int) -> bool:
        """Return whether the thread of this number has had a phase.

        A thread that had the number before counts as well.
        """
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
