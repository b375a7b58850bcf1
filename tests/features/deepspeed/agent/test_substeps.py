"""The rows that tile an update, on a fake clock and a fake device."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.features.deepspeed.agent import zero_substeps
from ebbtide.features.deepspeed.agent.zero_substeps import SubstepRecorder
from ebbtide.profiler.agent import gpu_clock
from ebbtide.profiler.agent.gpu_clock import GpuClock
from tests.profiler.agent.test_gpu_clock import MS, US, FakeCuda

REST = ("rest", "host", None, None)


class FakeRecorder:
    """The part of a recorder that SubstepRecorder uses; it keeps the rows."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.recording = True
        self.started_ns = cuda.now
        self.gpu = GpuClock(cuda)
        self.rows: list[tuple[Any, ...]] = []
        self.devices: list[int] = []
        self._number = 0

    def next_sequence(self) -> int:
        self._number += 1
        return self._number

    def put_op(self, sequence: int, *row: Any, device: int) -> None:
        self.rows.append((sequence, *row))
        self.devices.append(device)

    def fail(self, error: BaseException) -> None:
        raise error


def record_update(
    cuda: FakeCuda, plan: list[tuple[int, tuple[Any, ...]]]
) -> FakeRecorder:
    """Record an update that follows a plan: each entry is how long it waits (ns) and
    what it switches to."""
    recorder = FakeRecorder(cuda)
    update = SubstepRecorder(recorder)  # type: ignore[arg-type]
    update.begin()
    for length_ns, substep in plan:
        cuda.now += length_ns
        update.switch(*substep)
    cuda.now += 30 * US
    update.end()
    return recorder


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    cuda = FakeCuda()
    monkeypatch.setattr(gpu_clock, "time", cuda)
    monkeypatch.setattr(zero_substeps, "time", cuda)
    return cuda


def test_substep_recorder__adds_a_short_rest_to_the_row_before(cuda: FakeCuda) -> None:
    one, two = ("update", "cpu", 1, None), ("parameters", "host", 1, 64)
    start = cuda.now
    plan = [
        (50 * US, one),
        (100 * US, REST),
        (9 * US, two),
        (20 * US, REST),
        (11 * US, one),
        (5 * US, REST),
        (US, one),
    ]
    rows = record_update(cuda, plan).rows
    assert [
        (row[1], (row[3] - start) // US, (row[4] - start) // US, *row[5:])
        for row in rows
    ] == [
        ("rest", 0, 50, None, None),
        ("update", 50, 159, 1, None),
        ("parameters", 159, 179, 1, 64),
        ("rest", 179, 190, None, None),
        ("update", 190, 226, 1, None),  # continued after a short rest
    ]


kinds = st.sampled_from(
    [
        REST,
        ("update", "cpu", 0, None),
        ("update", "gpu", 1, None),
        ("gather", "host", None, None),
    ]
)


@given(st.lists(st.tuples(st.integers(0, 40 * US), kinds)))
def test_substep_recorder__tiles_the_update(
    plan: list[tuple[int, tuple[Any, ...]]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        cuda = FakeCuda()
        patch.setattr(gpu_clock, "time", cuda)
        patch.setattr(zero_substeps, "time", cuda)
        recorder = record_update(cuda, plan)
        rows = recorder.rows
        assert [recorder.started_ns, *(row[4] for row in rows)] == [
            *(row[3] for row in rows),
            rows[-1][4],
        ]
        assert rows[-1][4] == cuda.now or rows[-1][2] == "gpu"
        assert [row[0] for row in rows] == sorted({row[0] for row in rows})
        assert all(row[4] - row[3] >= 10 * US for row in rows[1:] if row[1] == "rest")
        assert all(row[4] >= row[3] for row in rows)


def test_substep_recorder__gives_device_times_to_rows_on_a_gpu(cuda: FakeCuda) -> None:
    recorder = FakeRecorder(cuda)
    update = SubstepRecorder(recorder)  # type: ignore[arg-type]
    cuda.launch(5 * MS)  # the device lags
    free_ns = cuda.busy[0, None]
    update.begin()
    update.switch("update", "gpu", 0)
    cuda.launch(2 * MS)
    update.switch("update", "cpu", 1)
    cuda.now += MS
    update.end()
    assert list(recorder.gpu.finished_spans()) == []
    cuda.now += 10 * MS
    ((sequence, start, end),) = recorder.gpu.finished_spans()
    on_gpu = next(row for row in recorder.rows if row[2] == "gpu")
    assert sequence == on_gpu[0]
    assert (start, end) == (
        pytest.approx(free_ns, abs=US),
        pytest.approx(free_ns + 2 * MS, abs=US),
    )
    assert recorder.devices[recorder.rows.index(on_gpu)] == 0
    assert on_gpu[4] - on_gpu[3] < MS


def test_substep_recorder__does_nothing_outside_a_recording(cuda: FakeCuda) -> None:
    recorder = FakeRecorder(cuda)
    recorder.recording = False
    update = SubstepRecorder(recorder)  # type: ignore[arg-type]
    update.begin()
    update.switch("update", "gpu", 0)
    assert update.end() is None
    assert (recorder.rows, cuda.events) == ([], [])
