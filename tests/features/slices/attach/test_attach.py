"""Slices of a job that is recorded on demand: in this process by a `Tracer`, and in
real jobs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from ebbtide.analysis.findings import find
from ebbtide.analysis.metrics.holders.holders import holders_at
from ebbtide.analysis.metrics.summary import summarize
from ebbtide.analysis.metrics.windows import find_windows
from ebbtide.analysis.plot.figure import draw
from ebbtide.analysis.timeline.axis import PICTURE, TimeAxis
from ebbtide.analysis.timeline.memory import device_memory_panel
from ebbtide.errors import TraceError
from ebbtide.features.slices.attach import AttachedSlice, attach
from ebbtide.profiler import Trace, Tracer, open_trace
from ebbtide.profiler.agent.options import REQUEST, SliceRequest
from ebbtide.profiler.trace.merge import merge
from tests.conftest import ebbtide_in_process, torch_on_one_thread

_one_thread = pytest.fixture(autouse=True, scope="module")(torch_on_one_thread)

TIMEOUT_S = 60.0


class Job:
    """A training loop in this process."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(64, 64)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self) -> None:
        self.model(torch.ones(8, 64)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        time.sleep(0.002)

    def train_until(self, ended: Callable[[], bool]) -> None:
        """Train until a function returns True."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while not ended():
            assert time.monotonic() < deadline_s
            for _ in range(5):
                self.step()


@contextmanager
def recorded(path: Path) -> Iterator[Job]:
    """Record on demand a job that has trained for some iterations."""
    job = Job()
    with Tracer(path, on_demand=True):
        job.step()
        (spool,) = (path / "spool").glob("agent-*.spool")
        job.train_until(lambda: spool.stat().st_size > 2000)
        yield job


def put_request(path: Path, first: int, end: int) -> int:
    """Write a request as it is, and return its number."""
    request = SliceRequest(time.monotonic_ns(), first, end)
    (path / "spool" / REQUEST).unlink()
    (path / "spool" / REQUEST).symlink_to(request.text())
    return request.number


# A process that learns of a slice says one of these of it.
_MARKS = ("begin", "missed")


class Slices(NamedTuple):
    """A job with slices.

    Attributes:
        trace: Its trace, after it.
        unfinished: The trace as it was in the second slice.
        attached: The slice that was asked for first.
        late_first: The first iteration of the second slice, which the process learned
            of after it.
        allocations: The slice with allocations.
        missed: Iterations at which the process learned of a slice that was over.
        second_error: The error of a second request during the first slice.
        early_error: The error of a request for an iteration that is over.
    """

    trace: Trace
    unfinished: Trace
    attached: AttachedSlice
    late_first: int
    allocations: AttachedSlice
    missed: int | None
    second_error: str
    early_error: str


def recorded_slice(
    job: Job, path: Path, count: int, refused: list[str], **options: Any
) -> AttachedSlice:
    """Ask for slices until one is recorded: on a busy machine a process may learn of
    one when it is over. Add the error of a second request during each."""
    for _ in range(20):
        attached = attach(path, count, **options)
        with pytest.raises(TraceError) as second:
            attach(path, 3)
        refused.append(str(second.value))
        job.train_until(attached.update)
        if attached.recorded(attached.processes[0]) is not None:
            return attached
    pytest.fail("no slice was recorded")


def begun_late(job: Job, path: Path, process: Any) -> int:
    """Ask for slices from iterations that are over until one begins; return the number
    of its request. On a busy machine a process may learn of one when it is over."""
    for _ in range(20):
        process.update()
        reached = process.iteration or 0
        number = put_request(path, reached - 3, reached + 1000)

        def is_known(own: int = number) -> bool:
            process.update()
            return any(process.mark(own, kind) is not None for kind in _MARKS)

        job.train_until(is_known)
        if process.mark(number, "begin") is not None:
            return number
    pytest.fail("no slice was recorded")


@pytest.fixture(scope="module")
def slices(tmp_path_factory: pytest.TempPathFactory) -> Slices:
    path = tmp_path_factory.mktemp("slices") / "run.ebb"
    with recorded(path) as job:
        refused: list[str] = []
        attached = recorded_slice(job, path, 12, refused)
        with pytest.raises(TraceError) as early:
            attach(path, 3, first=5)
        (process,) = attached.processes
        late = begun_late(job, path, process)
        unfinished = open_trace(path)
        job.train_until(
            lambda: process.update() or process.mark(late, "end") is not None
        )
        late_first = process.mark(late, "begin") or 0
        allocations = recorded_slice(
            job, path, 40, refused, poll_ms=0, allocator_iterations=2
        )
        over = put_request(path, 2, late_first)
        job.train_until(
            lambda: process.update() or process.mark(over, "missed") is not None
        )
    return Slices(
        open_trace(path),
        unfinished,
        attached,
        late_first,
        allocations,
        process.mark(over, "missed"),
        refused[0],
        str(early.value),
    )


def detailed(trace: Trace) -> list[tuple[int, int]]:
    """Return the iterations of the slices of the first rank."""
    return [entry.iterations for entry in trace.rank(0).detailed_slices]


def assert_is_slice(iterations: tuple[int, int], request: SliceRequest) -> None:
    """Assert that a slice is the one asked for. On a busy machine a job may read the
    request late."""
    assert request.first <= iterations[0] < request.end
    assert iterations[1] == request.end


def test_attach__records_slices_one_after_another_and_says_which_iterations(
    slices: Slices,
) -> None:
    request = slices.attached.request
    first, late, last = detailed(slices.trace)
    assert_is_slice(first, request)
    assert slices.attached.recorded(slices.attached.processes[0]) == first
    assert late == (slices.late_first, late[1])
    assert late[0] > first[1]
    assert_is_slice(last, slices.allocations.request)
    assert slices.missed is not None
    assert slices.missed > last[1]
    assert [
        entry.allocator_iterations for entry in slices.trace.rank(0).detailed_slices
    ] == [0, 0, 2]
    assert slices.trace.notes == []


def test_attach__opens_a_trace_in_the_middle_of_a_slice(slices: Slices) -> None:
    first, late = detailed(slices.unfinished)
    iterations = slices.unfinished.phases(0)["iteration"].max()
    assert first == detailed(slices.trace)[0]
    assert late == (slices.late_first, iterations + 1)


def test_attach__refuses_a_second_slice_and_iterations_that_are_over(
    slices: Slices,
) -> None:
    request = slices.attached.request
    assert (
        f"iterations {request.first} to {request.end - 1} has not ended yet"
        in slices.second_error
    )
    assert "iteration 5 is too close or over" in slices.early_error


def test_on_demand__reads_memory_in_the_slices_alone(slices: Slices) -> None:
    trace = slices.trace
    heap = trace.memory(0).query("pool == 'heap'")["t_ns"].to_numpy()
    spans = [entry.span_ns for entry in trace.rank(0).detailed_slices]
    inside = [(heap >= start) & (heap <= end) for start, end in spans]
    assert all(within.any() for within in inside)
    # The reading of the background thread that has begun in a slice may end after it.
    late = heap[~np.any(inside, axis=0)]
    slices_before = np.searchsorted([start for start, _ in spans], late)
    assert len(set(slices_before)) == len(late)
    assert 0 not in slices_before
    phases = trace.phases(0)
    for entry in trace.rank(0).detailed_slices:
        rows = phases[
            phases["iteration"].between(entry.iterations[0], entry.iterations[1] - 1)
        ]
        assert entry.span_ns[0] < rows["start_ns"].min()
        assert entry.span_ns[1] == rows["end_ns"].max()
    assert set(phases["iteration"].dropna()) == set(
        range(int(phases["iteration"].max()) + 1)
    )


def test_analysis__does_not_take_iterations_without_details_for_free_memory(
    slices: Slices,
) -> None:
    trace = slices.trace
    numbers = {number for first, end in detailed(trace) for number in range(first, end)}
    windows = find_windows(trace, 2**20)
    iterations = {window.iteration for window in windows.windows}
    # By the time at which the resident memory was sampled first; it is known at all
    # times.
    assert iterations == numbers if windows.pool == "heap" else iterations > numbers
    assert windows.pool in ("heap", "rss")
    summary = summarize(trace)
    assert (summary.free_pool, summary.memory.pool) == (windows.pool, "heap")
    assert all(phase.peak_bytes for phase in summary.phases)
    (remark,) = [
        remark for remark in summary.remarks if remark.startswith("recorded on demand")
    ]
    assert (
        f"details in {len(numbers):,} of {summary.iterations - 2:,} iterations"
        in remark
    )
    assert remark in windows.remarks
    # A busy machine adds findings on times.
    of_memory = {
        "does-not-fit",
        "free-memory",
        "memory-outside-torch",
        "fragmentation",
        "memory-growth",
    }
    assert not of_memory & {finding.rule for finding in find(trace).findings}


def test_analysis__holders_are_known_in_slices_alone(slices: Slices) -> None:
    trace = slices.trace
    first, late, last = (entry.span_ns for entry in trace.rank(0).detailed_slices)
    assert holders_at(trace, 0, (first[1] + late[0]) // 2) is None
    in_first = holders_at(trace, 0, first[1])
    assert in_first is not None
    assert in_first.pool == "heap"
    # Two moments of each parameter, and two counts of steps.
    assert ("optimizer_state", 2 * 4 * (64 * 64 + 64) + 2 * 4) in in_first.by(
        "category"
    )
    in_last = holders_at(trace, 0, (last[0] + last[1]) // 2)
    assert in_last is not None
    assert in_last.pool in ("tensors", "heap")


def test_analysis__lines_of_memory_have_gaps_between_slices(slices: Slices) -> None:
    trace = slices.trace
    start, end = trace.span_ns() or (0, 0)
    axis = TimeAxis(start, start, end, end - start)
    for resolution in (PICTURE, PICTURE._replace(slots=50)):
        panel = device_memory_panel(trace, 0, axis, resolution)
        (line,) = [line for line in panel.lines if line.name == "heap"]
        middles = (line.edges[:-1] + line.edges[1:]) // 2
        for entry, following in pairwise(trace.rank(0).detailed_slices):
            between = (line.edges[:-1] > entry.span_ns[1]) & (
                line.edges[1:] < following.span_ns[0]
            )
            assert np.isnan(line.values[between]).all()
            inside = (middles > entry.span_ns[0]) & (middles < entry.span_ns[1])
            assert not np.isnan(line.values[inside]).any()
    assert draw([trace], kind="memory")


def test_merge__shifts_the_slices(slices: Slices, tmp_path: Path) -> None:
    merged = merge([slices.trace], tmp_path / "merged.ebb")
    assert merged.rank(0).detailed_slices == slices.trace.rank(0).detailed_slices


def test_attach__says_why_a_trace_cannot_be_attached_to(
    slices: Slices, tmp_path: Path
) -> None:
    def error_of(path: Path, *options: str) -> str:
        run = ebbtide_in_process("profile", "--attach", path, *options)
        assert run.returncode == 2
        assert run.stdout == ""
        (line,) = run.stderr.splitlines()
        assert line.startswith("ebbtide: ")
        return line

    twenty = ("--iterations", "20")
    assert "is complete" in error_of(slices.trace.path, *twenty)
    assert "does not exist" in error_of(tmp_path / "gone.ebb", *twenty)
    assert "is not a trace" in error_of(tmp_path, *twenty)
    assert "--iterations" in error_of(slices.trace.path)
    assert "1 to 1,000,000" in error_of(slices.trace.path, "--iterations", "0")
    assert "1 to 1,000,000" in error_of(slices.trace.path, "--steps", "0")
    assert "choose one" in error_of(slices.trace.path, *twenty, "--steps", "20")
    assert "needs an end" in error_of(slices.trace.path, "--iterations", "5:")
    assert "no command" in error_of(slices.trace.path, *twenty, "--", "true")
    assert "takes only" in error_of(slices.trace.path, *twenty, "-o", "other.ebb")
    with pytest.raises(ValueError, match="phases alone"):
        Tracer(tmp_path / "run.ebb", on_demand=True, transfers=True)
    run = ebbtide_in_process("profile", "--on-demand", "--transfers", "--", "true")
    assert (run.returncode, "--attach" in run.stderr) == (2, True)
    path = tmp_path / "run.ebb"
    with Tracer(path):
        Job().step()
        assert "is not recorded on demand" in error_of(path, *twenty)
    path = tmp_path / "on-demand.ebb"
    with Tracer(path, on_demand=True):
        assert "no process" in error_of(path, *twenty)
        Job().step()
        (path / "spool" / "recording.lock").unlink()
        assert "has ended" in error_of(path, *twenty)
