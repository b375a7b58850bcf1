"""The iteration at which a slice begins, from the spools of several ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebbtide.errors import TraceError
from ebbtide.features.slices.attach import attach
from ebbtide.profiler.agent.options import (
    MAX_ITERATIONS,
    REQUEST,
    Options,
    read_request,
)
from ebbtide.profiler.agent.spool import (
    DETAIL_MARKS,
    DETAILS,
    ITERATION,
    STOPPED,
    Spool,
)
from ebbtide.profiler.recording.lifecycle import first_meta
from ebbtide.profiler.recording.lock import lock_recording
from ebbtide.profiler.trace.files import write_meta

SECOND_NS = 10**9


@pytest.fixture
def recording(tmp_path: Path) -> Iterator[Path]:
    """A recording on demand in which no process has begun."""
    path = tmp_path / "run.ebb"
    (path / "spool").mkdir(parents=True)
    write_meta(
        path,
        first_meta(["job"], Options(memory=False, on_demand=True), {"name": "host"}),
    )
    lock = lock_recording(path, os.getpid())
    yield path
    os.close(lock)


def spool_of(
    recording: Path,
    rank: int,
    last: int,
    length_ns: int,
    age_ns: int = 0,
    pid: int | None = None,
) -> Spool:
    """Write the spool of a running process, by default this one's parent for rank 1.

    Args:
        recording: The trace.
        rank: The rank.
        last: The last finished iteration.
        length_ns: Length of an iteration.
        age_ns: The time since its end.
        pid: The process.
    """
    pid = pid or (os.getppid() if rank else os.getpid())
    spool = Spool(str(recording / "spool" / f"agent-host-{pid}.{rank:x}.spool"))
    spool.put_header(rank, 2, rank)
    ended_ns = time.monotonic_ns() - age_ns
    for iteration in range(max(last - 30, 0), last + 1):
        spool.put(ITERATION, a=iteration, x=ended_ns - (last - iteration) * length_ns)
    spool.flush()
    return spool


def test_attach__begins_a_second_ahead_of_the_rank_that_is_furthest(
    recording: Path,
) -> None:
    spools = [
        spool_of(recording, rank, last, SECOND_NS // 10)
        for rank, last in ((0, 97), (1, 100))
    ]
    attached = attach(
        recording, 20, poll_ms=2.5, allocator_iterations=3, transfers=True
    )
    # Iteration 101 has begun just now; the tenth after it begins in a second.
    assert attached.request.first in (111, 112)
    assert read_request(str(recording / "spool")) == attached.request
    assert (
        attached.request.end - attached.request.first,
        attached.request.poll_ms,
    ) == (20, 2.5)
    assert [process.rank for process in attached.processes] == [0, 1]
    number, first, end = (
        attached.request.number,
        attached.request.first,
        attached.request.end,
    )
    begins = (first, first + 5)
    for spool, begin in zip(spools, begins, strict=True):
        assert not attached.update()
        spool.put(DETAILS, DETAIL_MARKS.index("begin"), a=begin, w=number)
        spool.put(ITERATION, a=end - 1)
        spool.put(DETAILS, DETAIL_MARKS.index("end"), a=end, w=number)
        spool.flush()
    assert attached.update()
    assert [attached.recorded(process) for process in attached.processes] == [
        (first, end),
        (first + 5, end),
    ]
    assert attach(recording, 1).request.number > number


@pytest.mark.parametrize(
    ("age_ns", "first"),
    [(0, 12), (8 * SECOND_NS, 12), (95 * SECOND_NS // 10, 13), (10**13, 13)],
)
def test_attach__begins_at_the_next_boundary_that_every_rank_can_see_in_time(
    age_ns: int, first: int, recording: Path
) -> None:
    # Iteration 11 runs for so long, of ten seconds; the last one pauses, for an
    # evaluation.
    spool_of(recording, 0, 10, 10 * SECOND_NS, age_ns)
    assert attach(recording, 1).request.first == first


def test_attach__waits_for_running_ranks_only(recording: Path) -> None:
    spool_of(recording, 0, 5, SECOND_NS // 100)
    stopped = spool_of(recording, 1, 9, SECOND_NS // 100)
    stopped.put(STOPPED)
    stopped.flush()
    # beyond the largest process id of Linux
    spool_of(recording, 2, 10_000, SECOND_NS // 100, pid=2**22 + 1)
    attached = attach(recording, 2)
    assert [process.rank for process in attached.processes] == [0]
    assert 100 < attached.request.first < 200


def test_attach__takes_iterations_that_are_named_if_they_are_ahead(
    recording: Path,
) -> None:
    spool_of(recording, 0, 5, SECOND_NS // 100)
    with pytest.raises(TraceError, match="iteration 100 is too close"):
        attach(recording, 2, first=100)
    with pytest.raises(TraceError, match="1 to 1,000,000 iterations"):
        attach(recording, MAX_ITERATIONS + 1)
    assert not os.path.lexists(recording / "spool" / REQUEST)
    assert attach(recording, 2, first=200).request.first == 200


def test_attach__says_that_no_iteration_has_ended(recording: Path) -> None:
    Spool(str(recording / "spool" / f"agent-host-{os.getpid()}.0.spool")).put_header(
        0, 1, 0
    )
    (recording / "spool" / f"agent-host-{os.getppid()}.0.spool").write_bytes(b"EBB")
    with pytest.raises(TraceError, match="attach again after its first iteration"):
        attach(recording, 2)
