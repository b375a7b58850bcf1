"""Device times of phases, on a fake device whose streams lag behind the host."""

from __future__ import annotations

import struct
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ebbtide.profiler.agent import gpu_clock
from ebbtide.profiler.agent.gpu_clock import GpuClock

US, MS, S = 1_000, 1_000_000, 1_000_000_000


class FakeEvent:
    """A torch.cuda.Event; `passed_ns` is the host time at which the device passes
    it."""

    def __init__(self, cuda: FakeCuda, enable_timing: bool) -> None:
        cuda.check()
        assert enable_timing
        self.cuda = cuda
        self.passed_ns: int | None = None
        self.device = -1
        cuda.events.append(self)

    def record(self, stream: int | None = None) -> None:
        self.cuda.check()
        self.device = self.cuda.device
        self.cuda.now += 300
        queue = (self.device, None if self.cuda.one_queue else stream)
        self.passed_ns = max(self.cuda.now, self.cuda.busy[queue])
        self.cuda.now += 500
        self.cuda.recorded.append((self, stream))

    def query(self) -> bool:
        self.cuda.check()
        return self.passed_ns is None or self.cuda.now >= self.passed_ns

    def elapsed_time(self, end: FakeEvent) -> float:
        self.cuda.check()
        assert self.device == end.device
        assert None not in (self.passed_ns, end.passed_ns)
        assert self.query() is end.query() is True
        milliseconds = (end.passed_ns - self.passed_ns) * (1 + self.cuda.drift) / 1e6
        return float(struct.unpack("f", struct.pack("f", milliseconds))[0])


class FakeCuda:
    """torch.cuda over a device timeline, and the host's clock `now`; also replaces the
    module `time`."""

    def __init__(self) -> None:
        self.now = 5_000 * S
        self.device = 0
        self.initialized = True
        self.capturing = False
        self.one_queue = False  # as with CUDA_DEVICE_MAX_CONNECTIONS=1
        self.drift = 0.0
        # until when, by (device, stream)
        self.busy: defaultdict[tuple[int, int | None], int] = defaultdict(int)
        self.events: list[FakeEvent] = []
        self.recorded: list[tuple[FakeEvent, int | None]] = []

    def launch(self, nanoseconds: int, stream: int | None = None) -> None:
        """Queue work of this length, without waiting for it."""
        self.busy[self.device, stream] = (
            max(self.now, self.busy[self.device, stream]) + nanoseconds
        )

    def check(self) -> None:
        assert self.initialized, "this would have initialized CUDA"
        assert not self.capturing, "this would have broken the capture"

    def is_initialized(self) -> bool:
        return self.initialized

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def current_device(self) -> int:
        self.check()
        return self.device

    def Stream(self, device: int) -> int:
        self.check()
        return device + 100

    def Event(self, enable_timing: bool = False) -> FakeEvent:
        return FakeEvent(self, enable_timing)

    def monotonic_ns(self) -> int:
        return self.now

    def monotonic(self) -> float:
        return self.now / S

    def sleep(self, seconds: float) -> None:
        self.now += round(seconds * S)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    cuda = FakeCuda()
    monkeypatch.setattr(gpu_clock, "time", cuda)
    return cuda


def phase(
    clock: GpuClock, cuda: FakeCuda, sequence: int, work_ns: int = MS
) -> tuple[Any, Any]:
    """Record a phase that takes the host 10 us and the device `work_ns`; return its two
    marks."""
    start = clock.record_mark()
    cuda.launch(work_ns)
    cuda.now += 10 * US
    end = clock.record_mark()
    clock.add_span(sequence, start, end)
    return start, end


def true_times(marks: tuple[Any, Any]) -> tuple[int, int]:
    return marks[0][1].passed_ns, marks[1][1].passed_ns


def anchors(cuda: FakeCuda) -> list[FakeEvent]:
    return [event for event, stream in cuda.recorded if stream is not None]


def test_gpu_clock__does_nothing_before_cuda_is_initialized(cuda: FakeCuda) -> None:
    clock = GpuClock(cuda)
    cuda.initialized = False
    assert phase(clock, cuda, 1) == (None, None)
    assert list(clock.finished_spans()) == []
    assert list(clock.drain(1.0)) == []
    assert cuda.events == []


def test_gpu_clock__records_and_queries_nothing_during_a_capture(
    cuda: FakeCuda,
) -> None:
    clock = GpuClock(cuda)
    marks = phase(clock, cuda, 1)
    cuda.now += S
    cuda.capturing = True
    assert phase(clock, cuda, 2) == (None, None)
    assert list(clock.finished_spans()) == []
    cuda.capturing = False
    assert [sequence for sequence, _, _ in clock.finished_spans()] == [1]
    assert len(cuda.recorded) == 3
    assert marks[0] is not None


def test_gpu_clock__drops_a_phase_that_ends_in_a_capture(cuda: FakeCuda) -> None:
    clock = GpuClock(cuda)
    start = clock.record_mark()
    cuda.capturing = True
    clock.add_span(1, start, clock.record_mark())
    cuda.capturing = False
    cuda.now += S
    assert list(clock.finished_spans()) == []
    assert clock.record_mark()[1] is start[1]  # its event is used again


def test_gpu_clock__converts_times_of_a_lagging_device_to_the_host_clock(
    cuda: FakeCuda,
) -> None:
    clock = GpuClock(cuda)
    cuda.launch(300 * MS)
    true = [true_times(phase(clock, cuda, n, 7 * MS)) for n in range(5)]
    assert true[0][0] > cuda.now + 290 * MS  # it lags
    cuda.now += S
    spans = list(clock.finished_spans())
    assert [sequence for sequence, _, _ in spans] == [0, 1, 2, 3, 4]
    for (_, start, end), (true_start, true_end) in zip(spans, true, strict=True):
        assert start == pytest.approx(true_start, abs=US)
        assert end == pytest.approx(true_end, abs=US)


def test_finished_spans__yields_a_phase_once_the_device_has_passed_it(
    cuda: FakeCuda,
) -> None:
    clock = GpuClock(cuda)
    ends = [true_times(phase(clock, cuda, n))[1] for n in range(3)]
    assert list(clock.finished_spans()) == []
    cuda.now = ends[0] - 1
    assert list(clock.finished_spans()) == []
    cuda.now = ends[1]
    assert [sequence for sequence, _, _ in clock.finished_spans()] == [0, 1]
    cuda.now = ends[2]
    assert [sequence for sequence, _, _ in clock.finished_spans()] == [2]
    assert list(clock.finished_spans()) == []


def test_finished_spans__keeps_the_order_over_two_devices(cuda: FakeCuda) -> None:
    clock = GpuClock(cuda)
    first = phase(clock, cuda, 1, 50 * MS)
    cuda.device = 1
    second = phase(clock, cuda, 2)
    cuda.now = second[1][1].passed_ns + MS
    assert list(clock.finished_spans()) == []
    cuda.now = first[1][1].passed_ns
    spans = list(clock.finished_spans())
    assert [sequence for sequence, _, _ in spans] == [1, 2]
    assert spans[1][2] == pytest.approx(second[1][1].passed_ns, abs=US)
    assert len(anchors(cuda)) == 2  # one on each device


def test_add_span__drops_a_span_over_two_devices(cuda: FakeCuda) -> None:
    clock = GpuClock(cuda)
    start = clock.record_mark()
    cuda.device = 1
    end = clock.record_mark()
    clock.add_span(1, start, end)
    cuda.now += S
    assert list(clock.finished_spans()) == []
    assert clock.record_mark()[1] is end[1]
    cuda.device = 0
    assert clock.record_mark()[1] is start[1]


def test_gpu_clock__reuses_events_that_were_read(cuda: FakeCuda) -> None:
    clock = GpuClock(cuda)
    for n in range(50):
        phase(clock, cuda, n)
        cuda.now += 5 * MS
        assert [sequence for sequence, _, _ in clock.finished_spans()] == [n]
    assert len(cuda.events) == 3  # two and the anchor
    pending = [event for n in range(4) for _, event, _ in phase(clock, cuda, n)]
    assert len(set(map(id, pending))) == 8


def test_release_mark__makes_the_event_available_again(cuda: FakeCuda) -> None:
    clock = GpuClock(cuda)
    mark = clock.record_mark()
    clock.release_mark(mark)
    clock.release_mark(None)
    assert clock.record_mark()[1] is mark[1]
    assert clock.record_mark()[1] is not mark[1]


def test_gpu_clock__corrects_drift_by_a_new_anchor_every_ten_seconds(
    cuda: FakeCuda,
) -> None:
    clock = GpuClock(cuda)
    cuda.drift = 20e-6  # of the device's clock: 2 ms in the 100 s of this test
    start_ns = cuda.now
    while cuda.now < start_ns + 100 * S:
        marks = phase(clock, cuda, 1)
        cuda.now += 2 * MS
        ((_, start, end),) = clock.finished_spans()
        since = cuda.now - anchors(cuda)[-1].passed_ns
        assert since < 11 * S
        assert start == pytest.approx(marks[0][1].passed_ns, abs=US + since * 20e-6)
        assert end == pytest.approx(marks[1][1].passed_ns, abs=US + since * 20e-6)
        cuda.now += 500 * MS
    assert 9 <= len(anchors(cuda)) <= 11


def test_gpu_clock__converts_a_phase_pending_during_a_new_anchor(
    cuda: FakeCuda,
) -> None:
    clock = GpuClock(cuda)
    old = phase(clock, cuda, 1, 12 * S)
    cuda.now += 11 * S
    new = phase(clock, cuda, 2)
    assert len(anchors(cuda)) == 2
    cuda.now += 3 * S
    spans = list(clock.finished_spans())
    for (_, start, end), marks in zip(spans, (old, new), strict=True):
        # float32 over 11 s
        assert start == pytest.approx(marks[0][1].passed_ns, abs=2 * US)
        assert end == pytest.approx(marks[1][1].passed_ns, abs=2 * US)


def test_drain__waits_for_the_device_for_a_limited_time(cuda: FakeCuda) -> None:
    clock = GpuClock(cuda)
    phase(clock, cuda, 1, 300 * MS)
    phase(clock, cuda, 2, 10 * S)
    start_ns = cuda.now
    assert [sequence for sequence, _, _ in clock.drain(1.0)] == [1]
    assert cuda.now - start_ns < 1.1 * S


def test_drain__asks_nothing_of_the_device_on_a_thread_without_marks(
    cuda: FakeCuda,
) -> None:
    clock = GpuClock(cuda)
    phase(clock, cuda, 1)
    cuda.now += S
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: list(clock.drain(1.0))).result() == []
    assert len(list(clock.drain(1.0))) == 1


def test_finished_spans__waits_for_an_anchor(cuda: FakeCuda) -> None:
    clock = GpuClock(cuda)
    cuda.launch(50 * MS, stream=100)  # the anchor's own stream is held up
    phase(clock, cuda, 1)
    cuda.now += 10 * MS
    assert list(clock.finished_spans()) == []
    cuda.now += 50 * MS
    assert len(list(clock.finished_spans())) == 1


def test_gpu_clock__never_places_a_phase_before_its_launch(cuda: FakeCuda) -> None:
    cuda.one_queue = True
    clock = GpuClock(cuda)
    cuda.launch(50 * MS)
    phase(clock, cuda, 1)
    cuda.now += S  # the device is idle again
    launched = cuda.now
    phase(clock, cuda, 2)
    cuda.now += S
    _, (_, start, _) = clock.finished_spans()
    assert start >= launched - US
