"""Runs tasks in processes of this machine, or on a Dask cluster, and yields each
outcome as it is finished."""

import importlib
import logging
import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from functools import partial
from typing import Any, TypeVar

from ebbtide.errors import UserError
from ebbtide.extras import missing_text

# The default of Dask.
_MAX_DEATHS = 4
Task = TypeVar("Task")
Outcome = TypeVar("Outcome")


class WorkerDied(Exception):
    """The outcome of a task whose workers died, one after the other."""


def run_locally(
    work: Callable[[Task], Outcome], tasks: Mapping[str, Task], jobs: int
) -> Iterator[tuple[str, Outcome | WorkerDied]]:
    """Run tasks in `jobs` processes.

    Yield (key, outcome) of each as it is finished, and raise errors of `work`.

    When a worker dies, all tasks that were running are repeated one at a time, so that
    only the task at fault fails."""
    waiting = deque(tasks)
    to_repeat: deque[str] = deque()
    deaths = Counter[str]()
    while waiting or to_repeat:
        queue, processes = (
            (waiting, jobs) if waiting else (deque([to_repeat.popleft()]), 1)
        )
        for key, future in _run_in_pool(work, tasks, queue, processes):
            if not isinstance(future.exception(), futures.BrokenExecutor):
                yield key, future.result()
                continue
            deaths[key] += 1
            if deaths[key] == _MAX_DEATHS:
                yield key, WorkerDied(f"its worker died, {_MAX_DEATHS} times")
            else:
                to_repeat.append(key)


def runner(jobs: int, scheduler: str | None) -> Callable[..., Iterator[Any]]:
    """Return `run_on_cluster` for an address, else `run_locally` in `jobs` processes,
    without this argument."""
    if scheduler is not None:
        return partial(run_on_cluster, address=scheduler)
    return partial(run_locally, jobs=jobs)


def run_on_cluster(
    work: Callable[[Task], Outcome], tasks: Mapping[str, Task], address: str
) -> Iterator[tuple[str, Outcome | WorkerDied]]:
    """Run tasks on a Dask cluster; yield (key, outcome) of each.

    The cluster repeats the tasks of a dead worker on others. Raises errors of `work`,
    and UserError where no cluster answers, or its workers lack this version of ebbtide.
    """
    try:
        from distributed import Client, KilledWorker
    except ImportError:
        raise UserError(f"--scheduler: {missing_text('distributed')}") from None
    # Its log messages would repeat the one-line errors below.
    for name in ("distributed", "distributed.client"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        client = Client(address, timeout="10s")
    except (OSError, ValueError) as error:
        raise UserError(
            f"no Dask scheduler answers at {address}: {' '.join(str(error).split())}"
        ) from None
    with client:
        # A lambda is sent by value; a worker that cannot import a named function ends
        # without a message.
        own = str(importlib.import_module("ebbtide").__version__)
        versions = client.run(
            lambda: str(importlib.import_module("ebbtide").__version__),
            on_error="return",
        )
        others = {str(version) for version in versions.values() if version != own}
        if others:
            raise UserError(
                f"workers at {address} lack ebbtide {own}: install it there "
                f"({', '.join(others)})"
            )
        for key, future in _completed(
            client.get_executor(pure=False), work, tasks, deque(tasks), 1000
        ):
            try:
                yield key, future.result()
            except KilledWorker as error:
                yield key, WorkerDied(f"its workers died: {error}")
            except futures.CancelledError:
                raise UserError(
                    f"the cluster at {address} has ended: run the same command again "
                    "to continue"
                ) from None


def _run_in_pool(
    work: Callable[[Task], Outcome],
    tasks: Mapping[str, Task],
    waiting: deque[str],
    jobs: int,
) -> Iterator[tuple[str, futures.Future[Outcome]]]:
    """Run tasks until none is waiting or the pool is broken.

    Yield (key, future) of each.
    """
    others = set(multiprocessing.active_children())
    # Not forked: threads of numpy and pyarrow do not survive a fork.
    context = multiprocessing.get_context("spawn")
    pool = futures.ProcessPoolExecutor(
        min(jobs, len(waiting)), context, initializer=_end_with_parent
    )
    try:
        yield from _completed(pool, work, tasks, waiting, jobs + 1)
    except BaseException:
        # Nobody waits for the running tasks any more.
        for child in set(multiprocessing.active_children()) - others:
            child.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _completed(
    pool: futures.Executor,
    work: Callable[[Task], Outcome],
    tasks: Mapping[str, Task],
    waiting: deque[str],
    max_running: int,
) -> Iterator[tuple[str, futures.Future[Outcome]]]:
    """Keep up to `max_running` tasks running.

    Tasks that a broken pool does not take stay in `waiting`.
    """
    running: dict[futures.Future[Outcome], str] = {}
    broken = False
    # Ctrl-C at a terminal reaches workers, too. They inherit blocked signals, so that
    # only this process reacts to it.
    while running or (waiting and not broken):
        while waiting and len(running) < max_running and not broken:
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                running[pool.submit(work, tasks[waiting[0]])] = waiting[0]
                waiting.popleft()
            except futures.BrokenExecutor:
                broken = True
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for future in futures.wait(running, return_when=futures.FIRST_COMPLETED).done:
            yield running.pop(future), future


def _end_with_parent() -> None:
    """End this worker when its parent ends. Otherwise a worker of a killed parent would
    wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()  # type: ignore[func-returns-value]
