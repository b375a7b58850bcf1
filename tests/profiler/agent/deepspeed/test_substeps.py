"""The rows that tile an update, on a made-up clock and a made-up device."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.profiler.agent import gpu_clock
from ebbtide.profiler.agent.deepspeed import substeps
from ebbtide.profiler.agent.deepspeed.substeps import SubSteps
from ebbtide.profiler.agent.gpu_clock import GpuClock
from tests.profiler.agent.test_gpu_clock import MS, US, Cuda

REST = ("rest", "host", None, None)


class Recorder:
    """What SubSteps needs of one: it keeps the rows."""

    def __init__(self, cuda: Cuda) -> None:
        self.recording = True
        self.started_ns = cuda.now
        self.gpu = GpuClock(cuda)
        self.rows: list[tuple[Any, ...]] = []
        self.devices: list[int] = []
        self._number = 0

    def number(self) -> int:
        self._number += 1
        return self._number

    def row(self, sequence: int, *row: Any, device: int) -> None:
        self.rows.append((sequence, *row))
        self.devices.append(device)

    def fail(self, error: BaseException) -> None:
        raise error


def followed(cuda: Cuda, plan: list[tuple[int, tuple[Any, ...]]]) -> Recorder:
    """What is recorded of an update that goes on for so long (ns) each time before it switches."""
    recorder = Recorder(cuda)
    steps = SubSteps(recorder)  # type: ignore[arg-type]
    steps.begin()
    for length, what in plan:
        cuda.now += length
        steps.switch(*what)
    cuda.now += 30 * US
    steps.end()
    return recorder


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    monkeypatch.setattr(gpu_clock, "time", cuda)
    monkeypatch.setattr(substeps, "time", cuda)
    return cuda


def test_a_short_rest_goes_to_the_row_before_it(cuda: Cuda) -> None:
    one, two = ("update", "cpu", 1, None), ("parameters", "host", 1, 64)
    start = cuda.now
    plan = [(50 * US, one), (100 * US, REST), (9 * US, two), (20 * US, REST), (11 * US, one), (5 * US, REST), (US, one)]
    rows = followed(cuda, plan).rows
    assert [(row[1], (row[3] - start) // US, (row[4] - start) // US, *row[5:]) for row in rows] == [
        ("rest", 0, 50, None, None),
        ("update", 50, 159, 1, None),
        ("parameters", 159, 179, 1, 64),
        ("rest", 179, 190, None, None),
        ("update", 190, 226, 1, None),  # it went on after a short rest
    ]


kinds = st.sampled_from([REST, ("update", "cpu", 0, None), ("update", "gpu", 1, None), ("gather", "host", None, None)])


@given(st.lists(st.tuples(st.integers(0, 40 * US), kinds)))
def test_rows_tile_the_update_whatever_comes(plan: list[tuple[int, tuple[Any, ...]]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        cuda = Cuda()
        patch.setattr(gpu_clock, "time", cuda)
        patch.setattr(substeps, "time", cuda)
        recorder = followed(cuda, plan)
        rows = recorder.rows
        assert [recorder.started_ns, *(row[4] for row in rows)] == [*(row[3] for row in rows), rows[-1][4]]
        assert rows[-1][4] == cuda.now or rows[-1][2] == "gpu"
        assert [row[0] for row in rows] == sorted({row[0] for row in rows})
        assert all(row[4] - row[3] >= 10 * US for row in rows[1:] if row[1] == "rest")
        assert all(row[4] >= row[3] for row in rows)


def test_rows_on_a_gpu_get_device_times(cuda: Cuda) -> None:
    recorder = Recorder(cuda)
    steps = SubSteps(recorder)  # type: ignore[arg-type]
    cuda.launch(5 * MS)  # the device lags
    behind = cuda.busy[0, None]
    steps.begin()
    steps.switch("update", "gpu", 0)
    cuda.launch(2 * MS)
    steps.switch("update", "cpu", 1)
    cuda.now += MS
    steps.end()
    assert list(recorder.gpu.finished()) == []
    cuda.now += 10 * MS
    ((sequence, start, end),) = recorder.gpu.finished()
    on_gpu = next(row for row in recorder.rows if row[2] == "gpu")
    assert sequence == on_gpu[0]
    assert (start, end) == (pytest.approx(behind, abs=US), pytest.approx(behind + 2 * MS, abs=US))
    assert recorder.devices[recorder.rows.index(on_gpu)] == 0
    assert on_gpu[4] - on_gpu[3] < MS


def test_nothing_is_told_where_nothing_is_recorded(cuda: Cuda) -> None:
    recorder = Recorder(cuda)
    recorder.recording = False
    steps = SubSteps(recorder)  # type: ignore[arg-type]
    steps.begin()
    steps.switch("update", "gpu", 0)
    assert steps.end() is None
    assert (recorder.rows, cuda.events) == ([], [])
