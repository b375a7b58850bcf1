"""Records the updates that SuperOffload's worker process does while the backward of the job continues."""

from __future__ import annotations

import functools
import time
from collections import deque
from typing import Any, Callable
from weakref import WeakKeyDictionary

from ..recorder import Recorder

# The key that the worker adds to its results: start and end of the task in ns.
_TIMES = "ebbtide_times_ns"
_UNOBSERVED_NOTE = (
    "SuperOffload's worker process is not recorded: its updates last from their submission to the receipt of their "
    "result, which includes waiting; `ebbtide profile` records the worker's own times"
)


class SuperOffloadWorker:
    """Records each update and rollback of the worker process as a row on the resource `worker`.

    The agent in the worker adds the time of each task to its result. The job records it when it receives the result.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        # The submission times of the tasks in flight, the oldest first: the worker does one after the other.
        self._submitted_ns: WeakKeyDictionary[Any, deque[int]] = WeakKeyDictionary()

    def wrap_worker(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the main function of the worker process, which stays importable under its own name."""

        @functools.wraps(original)
        def worker(param_queue: Any, result_queue: Any, *args: Any, **kwargs: Any) -> Any:
            tasks = _TaskQueue(param_queue)
            return original(tasks, _ResultQueue(result_queue, tasks), *args, **kwargs)

        return worker

    def wrap_submit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the method that sends a task to the worker."""

        @functools.wraps(original)
        def submit(owner: Any, *args: Any, **kwargs: Any) -> Any:
            self._submitted_ns.setdefault(owner, deque()).append(time.monotonic_ns())
            return original(owner, *args, **kwargs)

        return submit

    def wrap_receive(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the method that returns the next result of the worker, or None."""

        @functools.wraps(original)
        def receive(owner: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(owner, *args, **kwargs)
            if isinstance(result, dict):
                times = result.pop(_TIMES, None)
                in_flight = self._submitted_ns.get(owner)
                submitted_ns = in_flight.popleft() if in_flight else None
                if self._recorder.recording:
                    self._record(result, times, submitted_ns)
            return result

        return receive

    def _record(self, result: Any, times: tuple[int, int] | None, submitted_ns: int | None) -> None:
        recorder = self._recorder
        if times is None:
            if submitted_ns is None:
                return  # submitted before the recording began
            times = submitted_ns, time.monotonic_ns()
            recorder.note_once(_UNOBSERVED_NOTE)
        name = "rollback" if result.get("event_type") == "rollback" else "update"
        recorder.record_op(name, "worker", *times, subgroup=result.get("sub_group_id"))


class _Queue:
    """A queue with all that the original one has."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)


class _TaskQueue(_Queue):
    """The worker's queue of tasks, which notes when a task is received."""

    received_ns = 0

    def get(self, *args: Any) -> Any:
        task = self._queue.get(*args)
        self.received_ns = time.monotonic_ns()
        return task


class _ResultQueue(_Queue):
    """The worker's queue of results, which adds the times of the task to each."""

    def __init__(self, queue: Any, tasks: _TaskQueue) -> None:
        super().__init__(queue)
        self._tasks = tasks

    def put(self, result: Any, *args: Any) -> None:
        if isinstance(result, dict) and "error" not in result:
            result[_TIMES] = self._tasks.received_ns, time.monotonic_ns()
        self._queue.put(result, *args)
