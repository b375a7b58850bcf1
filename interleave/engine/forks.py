"""Forks of the process: what has threads is at rest during a fork, and the child goes on with threads of its own."""

import ctypes
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from enum import IntEnum
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar

log = logging.getLogger("ebbtide")

P = ParamSpec("P")
T = TypeVar("T")


class Rest(IntEnum):
    """The order in which things come to rest: calls of the job, then what these have begun."""

    CALLS = 0
    OPERATIONS = 1
    QUEUES = 2
    POOLS = 3


class ForkFollower(Protocol):
    """An object with threads. Forks call both methods on the thread that forks."""

    def before_fork(self) -> None:
        """End the work in flight, and begin no other."""

    def after_fork(self, in_child: bool) -> None:
        """Go on. In the child no other thread is left."""


class _Forks:
    """The followers of forks by their identity, in weak references, and the locks that a child makes anew."""

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
        self._followers[key] = rest, weakref.ref(follower, lambda _: self._followers.pop(key, None))

    def before(self) -> None:
        self._lock.acquire()
        # A copy at once: other threads may add some.
        ordered = sorted(self._followers.copy().values(), key=lambda entry: entry[0])
        followers = [follower for _, reference in ordered if (follower := reference()) is not None]
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
os.register_at_fork(before=_forks.before, after_in_parent=_forks.in_parent, after_in_child=_forks.in_child)


def follow_forks(follower: ForkFollower, rest: Rest) -> None:
    """Call the methods of an object, which is not kept alive, at every fork."""
    _forks.add(follower, rest)


def fork_generation() -> int:
    """Return a number that differs between a process and its forked children."""
    return _forks.generation


def fork_lock() -> Any:
    """Return a re-entrant lock that is free in a forked child, unless the thread that forks has acquired it."""
    lock = threading.RLock()
    _forks.locks.add(lock)
    return lock


class ForkedPool:
    """A pool of threads. A fork waits for the calls in it, and the child has new threads. Arguments are those of
    ThreadPoolExecutor."""

    def __init__(self, threads: int, name: str, initializer: Callable[..., None] | None = None, *initargs: Any) -> None:
        self._new = functools.partial(ThreadPoolExecutor, threads, name, initializer=initializer, initargs=initargs)
        self._pool = self._new()
        self._running: set[Future[Any]] = set()
        follow_forks(self, Rest.POOLS)

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call a function on a thread of the pool."""
        future = self._pool.submit(call, *args, **kwargs)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future

    def shutdown(self) -> None:
        """End the threads, after the calls in flight."""
        self._pool.shutdown()

    def before_fork(self) -> None:
        if threading.current_thread() not in self._pool._threads:
            wait(self._running.copy())

    def after_fork(self, in_child: bool) -> None:
        if in_child:
            self._running.clear()
            self._pool = self._new()


def _log_errors(call: Callable[[], None]) -> None:
    """Call a function. A fork cannot be refused, so that errors are logged."""
    try:
        call()
    except Exception as error:
        log.error("ebbtide: at a fork of the process: %s", error)


def _end_openmp_threads() -> None:
    """End the threads that OpenMP keeps for this one: a child would wait for them, in torch's own operations, too."""
    pause = _openmp_pause()
    if pause is not None:
        pause(_OMP_PAUSE_HARD)


# omp_pause_hard of OpenMP 5.0; threads begin anew with the next operation.
_OMP_PAUSE_HARD = 2


@functools.cache
def _openmp_pause() -> Any:
    """Return omp_pause_resource_all of the OpenMP runtime that torch has loaded; None if there is none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith(("libgomp", "libiomp5", "libomp")):
            return getattr(ctypes.CDLL(path), "omp_pause_resource_all", None)
    return None
