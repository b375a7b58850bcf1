"""Runs tasks in processes of this machine, or on a Dask cluster; outcomes come as they are finished."""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
    wait,
)
from typing import TypeVar

import ebbtide
from ebbtide.errors import UserError

# As often as Dask tries by default.
_MOST_DEATHS = 4
Task = TypeVar("Task")
Result = TypeVar("Result")


class WorkerDied(Exception):
    """What a task comes to that took worker after worker with it."""


def on_this_machine(
    work: Callable[[Task], Result], tasks: Mapping[str, Task], jobs: int
) -> Iterator[tuple[str, Result | WorkerDied]]:
    """(key, outcome) of each task, as they are finished. Raises what `work` raises.

    When a worker dies all that were under way are tried again, each alone, so that only the one at fault can fail.
    """
    waiting = deque(tasks)
    again: deque[str] = deque()
    deaths = Counter[str]()
    while waiting or again:
        now, width = (waiting, jobs) if waiting else (deque([again.popleft()]), 1)
        for key, future in _in_pool(work, tasks, now, width):
            if not isinstance(future.exception(), BrokenExecutor):
                yield key, future.result()
                continue
            deaths[key] += 1
            if deaths[key] == _MOST_DEATHS:
                yield key, WorkerDied(f"its worker died, {_MOST_DEATHS} times")
            else:
                again.append(key)


def on_cluster(
    work: Callable[[Task], Result], tasks: Mapping[str, Task], address: str
) -> Iterator[tuple[str, Result | WorkerDied]]:
    """The same on a Dask cluster, which tries the tasks of a worker that dies on others. Raises UserError where there
    is no cluster at the address, or its workers lack this version of ebbtide."""
    try:
        from distributed import Client, KilledWorker
    except ImportError:
        raise UserError("--scheduler needs dask.distributed: pip install 'ebbtide[dask]'") from None
    # What it would log is told here, in one line.
    for name in ("distributed", "distributed.client"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        client = Client(address, timeout="10s")
    except (OSError, ValueError) as error:
        raise UserError(f"no Dask scheduler answers at {address}: {' '.join(str(error).split())}") from None
    with client:
        # A function without a name goes there by value: one by name would have to be imported there, and a worker that
        # cannot do that ends without a word.
        versions = client.run(lambda: str(importlib.import_module("ebbtide").__version__), on_error="return")
        others = {str(version) for version in versions.values() if version != ebbtide.__version__}
        if others:
            raise UserError(
                f"workers at {address} lack ebbtide {ebbtide.__version__}: install it there ({', '.join(others)})"
            )
        for key, future in _completed(client.get_executor(pure=False), work, tasks, deque(tasks), 1000):
            try:
                yield key, future.result()
            except KilledWorker as error:
                yield key, WorkerDied(f"its workers died: {error}")
            except CancelledError:
                raise UserError(f"the cluster at {address} is gone: the same command goes on where it was") from None


def _in_pool(
    work: Callable[[Task], Result], tasks: Mapping[str, Task], waiting: deque[str], jobs: int
) -> Iterator[tuple[str, Future[Result]]]:
    """Takes tasks until none waits, or the pool is broken."""
    others = set(multiprocessing.active_children())
    # Not forked: threads of numpy and pyarrow do not survive that.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(jobs, len(waiting)), context, initializer=_end_with_parent)
    try:
        yield from _completed(pool, work, tasks, waiting, jobs + 1)
    except BaseException:
        # Nobody waits any more for what is under way.
        for child in set(multiprocessing.active_children()) - others:
            child.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _completed(
    pool: Executor, work: Callable[[Task], Result], tasks: Mapping[str, Task], waiting: deque[str], most: int
) -> Iterator[tuple[str, Future[Result]]]:
    """Keeps up to `most` tasks under way; those that a broken pool does not take stay waiting."""
    running: dict[Future[Result], str] = {}
    broken = False
    # Ctrl-C at a terminal reaches workers too, which inherit what is blocked here: only this process is to act on it.
    while running or (waiting and not broken):
        while waiting and len(running) < most and not broken:
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                running[pool.submit(work, tasks[waiting[0]])] = waiting[0]
                waiting.popleft()
            except BrokenExecutor:
                broken = True
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            yield running.pop(future), future


def _end_with_parent() -> None:
    """Without this a worker outlives a parent that was killed, waiting for work."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()  # type: ignore[func-returns-value]
