"""AdaptiveRunner: engines that are deleted end on a thread of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from ebbtide.interleave.engine.adaptive import runner
from ebbtide.interleave.engine.adaptive.runner import AdaptiveRunner
from ebbtide.interleave.engine.options import OptimizerOptions

WAIT_S = 30


def deleted_with_lock(name: str) -> tuple[bool, bool]:
    """Delete a runner on a thread of a name that has a lock, which its end needs.

    Return whether the deletion was over before the end, and whether the end came.
    """
    own = AdaptiveRunner(OptimizerOptions.of_arguments(policy="zero-offload"))
    runners = [own]
    del own
    lock, ended = threading.Lock(), threading.Event()

    def end() -> None:
        if lock.acquire(timeout=WAIT_S):
            ended.set()

    runners[0]._closers.insert(0, end)
    was_over_first = []

    def delete() -> None:
        with lock:
            runners.clear()
            was_over_first.append(not ended.is_set())

    thread = threading.Thread(target=delete, name=name)
    thread.start()
    thread.join()
    return was_over_first[0], ended.wait(WAIT_S)


def test_deletion__does_not_wait_for_what_needs_locks_of_its_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "_DELETION_WAIT_S", 0.1)
    assert deleted_with_lock("job") == (True, True)


def test_deletion__does_not_wait_on_threads_of_engines() -> None:
    assert deleted_with_lock("ebbtide-cpu_0") == (True, True)


@pytest.mark.parametrize("delete", [AdaptiveRunner.close, lambda own: None])
def test_deletion__has_ended_when_it_returns(
    delete: Callable[[AdaptiveRunner], None],
) -> None:
    own = AdaptiveRunner(OptimizerOptions.of_arguments(policy="zero-offload"))
    calls: list[str] = []
    own._closers.insert(0, lambda: calls.append("ended"))
    delete(own)
    del own
    assert calls == ["ended"]
