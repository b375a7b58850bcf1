"""Host memory that launches on a GPU use: how long it is kept."""

from __future__ import annotations

import weakref
from typing import ClassVar

import pytest
import torch

from ebbtide.interleave.engine.numerics.triton_kernel import SharedHostMemory


class FakeEvent:
    """An event that a test lets pass."""

    made: ClassVar[list[FakeEvent]]

    def __init__(self, blocking: bool) -> None:
        self.passed = False
        self.waits = 0
        self.made.append(self)

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.waits += 1
        self.passed = True


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[FakeEvent]:
    made: list[FakeEvent] = []
    monkeypatch.setattr(FakeEvent, "made", made, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    return made


def test_keep__holds_memory_of_dropped_results_until_the_launch_is_done(
    events: list[FakeEvent],
) -> None:
    """Else torch would give the memory to others while the kernel still writes to
    it."""
    host_memory = SharedHostMemory(pinned=True)

    def keep_more() -> weakref.ref[torch.Tensor]:
        memory = torch.zeros(3)
        host_memory.keep(memory)
        return weakref.ref(memory)

    first, second = keep_more(), keep_more()
    assert first() is not None
    # Launches on another stream may be done before.
    events[1].passed = True
    third = keep_more()
    assert (first() is not None, second() is not None) == (True, True)
    events[0].passed = True
    fourth = keep_more()
    assert (first(), second()) == (None, None)
    assert (third() is not None, fourth() is not None) == (True, True)


def test_keep__returns_a_function_that_waits_once(events: list[FakeEvent]) -> None:
    wait = SharedHostMemory(pinned=True).keep(torch.zeros(3))
    assert [event.waits for event in events] == [0]
    wait()
    wait()
    assert [event.waits for event in events] == [1]


def test_keep__has_no_events_if_launches_are_done_at_once(
    events: list[FakeEvent],
) -> None:
    host_memory = SharedHostMemory(pinned=False)
    memory = host_memory.allocate(5, torch.float64)
    assert (memory.shape, memory.dtype, memory.is_pinned()) == (
        (5,),
        torch.float64,
        False,
    )
    host_memory.keep(memory)()
    assert events == []
