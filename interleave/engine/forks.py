"""Forks of the process.

What has threads is at rest during a fork, and the child goes on with threads of its
own.
"""

import ctypes
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

from ebbtide.interleave.engine.errors import EngineError

log = logging.getLogger("ebbtide")

# Time after which a wait looks at the state again.
_LOOK_S = 0.1

P = ParamSpec("P")
T = TypeVar("T")


class Rest(IntEnum):
    """The order in which things come to rest.

    Calls of the job come first, then what these have begun.
    """

    CALLS = 0
    OPERATIONS = 1
    QUEUES = 2


class ForkFollower(Protocol):
    """An object with threads. Forks call both methods on the thread that forks."""

    def before_fork(self) -> None:
        """End the work in flight, and begin no other."""

    def after_fork(self, in_child: bool) -> None:
        """Go on. In the child no other thread is left."""


class _Forks:
    """The followers of forks, and the locks that a child makes anew.

    Followers are kept by their identity, in weak references.
    """

    def __init__(self) -> None:
        # How many forks this process is away from its first ancestor with ebbtide.
        self.generation = 0
        self.locks: weakref.WeakSet[Any] = weakref.WeakSet()
        self._followers: dict[int, tuple[Rest, weakref.ref[Any]]] = {}
        # Two threads may fork at the same time, and a signal handler within a fork.
        self._lock = threading.RLock()
        self._prepared: list[list[ForkFollower]] = []

    def add(self, follower: ForkFollower, rest: Rest) -> None:
        key = id(follower)
        self._followers[key] = (
            rest,
            weakref.ref(follower, lambda _: self._followers.pop(key, None)),
        )

    def before(self) -> None:
        self._lock.acquire()
        # A copy at once: other threads may add some.
        ordered = sorted(self._followers.copy().values(), key=lambda entry: entry[0])
        followers = [
            follower
            for _, reference in ordered
            if (follower := reference()) is not None
        ]
        prepared: list[ForkFollower] = []
        self._prepared.append(prepared)
        for follower in followers:
            prepared.append(follower)
            _log_errors(follower.before_fork)
        if followers:
            _log_errors(_end_openmp_threads)

    def in_parent(self) -> None:
        for follower in reversed(self._prepared.pop()):
            _log_errors(functools.partial(follower.after_fork, False))
        self._lock.release()

    def in_child(self) -> None:
        self.generation += 1
        for lock in list(self.locks):
            if not lock._is_owned():
                lock._at_fork_reinit()
        for follower in reversed(self._prepared.pop()):
            _log_errors(functools.partial(follower.after_fork, True))
        self._lock.release()


_forks = _Forks()
os.register_at_fork(
    before=_forks.before,
    after_in_parent=_forks.in_parent,
    after_in_child=_forks.in_child,
)


def follow_forks(follower: ForkFollower, rest: Rest) -> None:
    """Call the methods of an object, which is not kept alive, at every fork."""
    _forks.add(follower, rest)


def fork_generation() -> int:
    """Return a number that differs between a process and its forked children."""
    return _forks.generation


def fork_lock() -> Any:
    """Return a re-entrant lock that is free in a forked child unless the thread that
    forks has acquired it."""
    lock = threading.RLock()
    _forks.locks.add(lock)
    return lock


class Completion:
    """An event that is set once, by a thread that never waits for its waiters.

    Its waiters are the threads that wait for it.

    `threading.Event` and `Future` have a lock that a waiting thread may hold when a
    signal handler interrupts it: a fork in the handler, which waits for the work, would
    wait for ever."""

    def __init__(self) -> None:
        self.is_set = False
        self._pending = threading.Lock()
        self._pending.acquire()

    def set(self) -> None:
        self.is_set = True
        self._pending.release()

    def wait(self, timeout_s: float = -1) -> bool:
        """Return whether it is set, after at most the given time.

        A negative time is no limit.
        """
        if not self.is_set and self._pending.acquire(timeout=timeout_s):
            self._pending.release()
        return self.is_set


class ForkCondition(threading.Condition):
    """A condition with a `fork_lock`. A signal handler may use it while its thread
    waits or notifies."""

    def __init__(self) -> None:
        super().__init__(fork_lock())

    def wait_for(self, predicate: Callable[[], T]) -> T:  # type: ignore[override]
        """Wait until a function returns a true value, and return it."""
        # A handler that waits, after this has looked and before it is among those that
        # are notified, lets others change the state: nobody would notify it.
        while not (result := predicate()):
            self.wait(_LOOK_S)
        return result

    def notify_all(self) -> None:
        """Wake all that wait. The lock is acquired."""
        # The condition of `threading` raises IndexError where a handler notifies while
        # it waits.
        for waiter in tuple(self._waiters):  # type: ignore[attr-defined]
            with suppress(RuntimeError):
                waiter.release()
            with suppress(ValueError):
                self._waiters.remove(waiter)  # type: ignore[attr-defined]


class QueuedCall(Generic[T]):
    """A call on another thread, with its result or its exception."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call: Callable[[], T] | None = call
        self._completion = Completion()
        self._result: T
        self._error: BaseException | None = None

    def run(self) -> None:
        assert self._call is not None
        try:
            self._result = self._call()
        except BaseException as error:
            self._error = error
        finally:
            self._call = None
            self._completion.set()

    def exception(self) -> BaseException | None:
        """Wait for the call, and return what it has raised."""
        self._completion.wait()
        return self._error

    def result(self) -> T:
        """Wait for the call, and return its result. Raises what it has raised."""
        error = self.exception()
        if error is None:
            return self._result
        try:
            raise error
        finally:
            # The error has this frame.
            del error


class WorkQueue:
    """Work that threads begin in order. They start with the first work, and end with
    this object. A fork waits for the work, and the child has threads of its own.

    A pool of `concurrent.futures` would not do: in a signal handler within its
    `submit`, a fork hangs.

    Args:
        name: The name of the threads.
        threads: Their number.
        initializer: What each calls at first.
        initargs: The arguments of that.
    """

    def __init__(
        self,
        name: str,
        threads: int = 1,
        initializer: Callable[..., None] | None = None,
        *initargs: Any,
    ) -> None:
        self._name = name
        self._count = threads
        self._initialize = (
            None if initializer is None else functools.partial(initializer, *initargs)
        )
        self._lock = fork_lock()
        self._set_up()
        follow_forks(self, Rest.QUEUES)

    def _set_up(self) -> None:
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._end = weakref.finalize(self, _end_threads, self._queue, self._count)

    @property
    def is_started(self) -> bool:
        """Whether there was any work."""
        return bool(self._threads)

    def put(self, work: Callable[[], object]) -> None:
        """Let a thread do work, which must not raise."""
        self._queue.put(work)
        if not self._threads:
            with self._lock:
                if not self._threads:
                    self._start()

    def submit(
        self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> QueuedCall[T]:
        """Let a thread call a function."""
        if not self._end.alive:
            raise EngineError(f"the threads {self._name} have ended")
        queued = QueuedCall(functools.partial(call, *args, **kwargs))
        self.put(queued.run)
        return queued

    def close(self) -> None:
        """Do all work and end the threads."""
        self._end()
        if threading.current_thread() not in self._threads:
            for thread in self._threads:
                thread.join()

    def before_fork(self) -> None:
        threads = self._threads
        if threads and threading.current_thread() not in threads:
            are_idle = Completion()
            barrier = threading.Barrier(len(threads), action=are_idle.set)
            for _ in threads:
                self._queue.put(barrier.wait)
            # Another thread may close it meanwhile.
            while all(thread.is_alive() for thread in threads) and not are_idle.wait(
                _LOOK_S
            ):
                pass

    def after_fork(self, in_child: bool) -> None:
        if in_child and self._end.detach():
            self._set_up()

    def _start(self) -> None:
        target = functools.partial(_do_all, self._queue, self._initialize)
        threads = [
            threading.Thread(target=target, name=f"{self._name}_{number}", daemon=True)
            for number in range(self._count)
        ]
        for thread in threads:
            thread.start()
        self._threads = threads


def _do_all(
    queue: SimpleQueue[Callable[[], object] | None],
    initialize: Callable[[], None] | None,
) -> None:
    if initialize is not None:
        initialize()
    while (work := queue.get()) is not None:
        work()
        # Else it would be kept alive until there is other work.
        del work


def _end_threads(queue: SimpleQueue[Callable[[], object] | None], count: int) -> None:
    for _ in range(count):
        queue.put(None)


def _log_errors(call: Callable[[], None]) -> None:
    """Call a function. A fork cannot be refused, so that errors are logged."""
    try:
        call()
    except Exception as error:
        log.error("ebbtide: at a fork of the process: %s", error)


def _end_openmp_threads() -> None:
    """End the threads that OpenMP keeps for this one.

    A child would wait for them, in torch's own operations, too.
    """
    pause = _openmp_pause()
    if pause is not None:
        pause(_OMP_PAUSE_HARD)


# omp_pause_hard of OpenMP 5.0; threads begin anew with the next operation.
_OMP_PAUSE_HARD = 2


@functools.cache
def _openmp_pause() -> Any:
    """Return omp_pause_resource_all of the OpenMP runtime that torch has loaded.

    Return None if there is none.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith(("libgomp", "libiomp5", "libomp")):
            return getattr(ctypes.CDLL(path), "omp_pause_resource_all", None)
    return None
