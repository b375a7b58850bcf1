"""`CopyCapture` (`--transfers`) with the real profiler of torch and its CPU activity
instead of CUPTI's."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity

from ebbtide.features.slices.agent.detailed_capture import CopyCapture
from ebbtide.profiler.agent.options import Options

PROFILE = torch.autograd.profiler.profile


class FakeRecorder:
    """The part of a recorder that CopyCapture uses."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes: list[str] = []
        self.job_info = SimpleNamespace(
            note=self.notes.append, path=lambda name: str(folder / name)
        )

    def on(self, torch: Any) -> FakeRecorder:
        """Record with a torch."""
        self.torch = torch
        return self


@pytest.fixture
def recorder(tmp_path: Path) -> FakeRecorder:
    return FakeRecorder(tmp_path)


def torch_with_gpu(**cuda: Any) -> Any:
    activities = SimpleNamespace(CUDA=ProfilerActivity.CPU)
    return SimpleNamespace(
        cuda=SimpleNamespace(is_initialized=lambda: True, **cuda),
        autograd=torch.autograd,
        _C=torch._C,
        profiler=SimpleNamespace(
            profile=torch.profiler.profile, ProfilerActivity=activities
        ),
    )


@pytest.fixture
def copies(recorder: FakeRecorder) -> Iterator[CopyCapture]:
    copies = CopyCapture(
        recorder.on(torch_with_gpu()), Options(last=100, transfers=True)
    )  # type: ignore[arg-type]
    yield copies
    copies.close()


def slices(recorder: FakeRecorder) -> list[Path]:
    return sorted(recorder.folder.glob("copies-*.json"))


def test_copy_capture__writes_slices_of_whole_iterations_named_for_their_spans(
    copies: CopyCapture, recorder: FakeRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ebbtide.features.slices.agent.detailed_capture._SLICE_NS", 0)
    before_ns = time.monotonic_ns()
    for iteration in range(3):
        copies.enter_iteration(iteration)
        torch.ones(8).sum()
    copies.close()
    bounds = [
        int(bound) for path in slices(recorder) for bound in path.stem.split("-")[1:]
    ]
    assert len(bounds) == 6
    assert bounds == sorted(bounds)
    assert before_ns < bounds[0]
    for path in slices(recorder):
        names = {
            event.get("name") for event in json.loads(path.read_text())["traceEvents"]
        }
        assert "aten::ones" in names
    assert recorder.notes == []


def test_copy_capture__ends_when_the_job_starts_a_profiler(
    copies: CopyCapture, recorder: FakeRecorder
) -> None:
    copies.enter_iteration(0)
    torch.ones(8).sum()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as job_profiler:
        torch.zeros(8).sum()
    assert any(event.key == "aten::zeros" for event in job_profiler.key_averages())
    copies.enter_iteration(1)
    copies.close()
    assert len(slices(recorder)) == 1
    (note,) = recorder.notes
    assert "a profiler of its own" in note


def test_copy_capture__leaves_a_running_profiler_alone(
    copies: CopyCapture, recorder: FakeRecorder
) -> None:
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as job_profiler:
        copies.enter_iteration(0)
        torch.zeros(8).sum()
    assert any(event.key == "aten::zeros" for event in job_profiler.key_averages())
    copies.close()
    assert slices(recorder) == []
    assert len(recorder.notes) == 1


def test_copy_capture__profiles_only_the_requested_iterations(
    recorder: FakeRecorder,
) -> None:
    copies = CopyCapture(
        recorder.on(torch_with_gpu()),  # type: ignore[arg-type]
        Options(first=2, last=4, transfers=True),
    )
    for iteration in range(6):
        copies.enter_iteration(iteration)
        torch.full((iteration + 1,), 1.0)
    copies.close()
    # The first slice is a single iteration; no second one is paused for, since the
    # iterations are limited.
    assert len(slices(recorder)) == 2
    events = [
        event
        for path in slices(recorder)
        for event in json.loads(path.read_text())["traceEvents"]
    ]
    assert sum(event.get("name") == "aten::full" for event in events) == 2


def record_slices(
    recorder: FakeRecorder,
    monkeypatch: pytest.MonkeyPatch,
    iterations_ns: list[int],
    stop_ns: int,
) -> list[int]:
    """Run iterations of 5,000 events and of these lengths; return those that a slice
    covers."""
    now_ns, events = [1_000], [0]
    monkeypatch.setattr(
        "ebbtide.features.slices.agent.detailed_capture.time.monotonic_ns",
        lambda: now_ns[0],
    )

    class Profiler:
        profiler = None

        def __init__(self, activities: Any) -> None:
            self.first_event = events[0]

        def start(self) -> None:
            pass

        def stop(self) -> None:
            now_ns[0] += stop_ns

        def export_chrome_trace(self, path: str) -> None:
            Path(path).write_bytes(bytes(250 * (events[0] - self.first_event)))

    fake = torch_with_gpu()
    fake.profiler.profile = Profiler
    copies = CopyCapture(recorder.on(fake), Options(transfers=True))  # type: ignore[arg-type]
    covered = []
    for iteration, iteration_ns in enumerate(iterations_ns):
        copies.enter_iteration(iteration)
        covered += [iteration] * (copies._profiler.running is not None)
        now_ns[0] += iteration_ns
        events[0] += 5_000
    copies.close()
    return covered


def test_copy_capture__limits_the_events_of_a_slice_and_its_share_of_the_time(
    recorder: FakeRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_slices(recorder, monkeypatch, [100_000_000] * 2_000, stop_ns=50_000_000)
    sizes = [path.stat().st_size for path in recorder.folder.glob("copies-*.json")]
    # What the device still ran while the profiler stopped is in the slice.
    bounds = [
        int(bound)
        for bound in sorted(recorder.folder.glob("copies-*.json"))[0].stem.split("-")[
            1:
        ]
    ]
    assert bounds == [1_000, 150_001_000]
    # In 200 s there is time for 3 s of stopping, or 60 slices; pauses that grow leave
    # fewer.
    assert 15 < len(sizes) < 30
    assert max(sizes) <= 25_000 * 250


@pytest.mark.parametrize(
    ("stop_ns", "fewest"), [(50_000_000, 20), (200_000_000, 15), (600_000_000, 3)]
)
def test_copy_capture__covers_several_iterations_of_a_job_of_a_few_seconds(
    recorder: FakeRecorder, monkeypatch: pytest.MonkeyPatch, stop_ns: int, fewest: int
) -> None:
    lengths = [250_000_000] * 10 + [3_250_000_000] + [250_000_000] * 10
    assert len(record_slices(recorder, monkeypatch, lengths, stop_ns)) >= fewest


def test_copy_capture__leaves_the_profiler_of_another_thread_running(
    copies: CopyCapture, recorder: FakeRecorder
) -> None:
    copies.enter_iteration(0)
    thread = threading.Thread(target=copies.stop)
    thread.start()
    thread.join()
    assert slices(recorder) == []
    assert recorder.notes == [
        "copies were not recorded to the end: the recording ended on another thread"
    ]
    copies._profiler.stop()


def test_copy_capture__restores_torchs_profiler(recorder: FakeRecorder) -> None:
    before = dict(PROFILE.__dict__)
    copies = CopyCapture(recorder.on(torch_with_gpu()), Options(transfers=True))  # type: ignore[arg-type]
    assert PROFILE.__dict__["__enter__"] is not before["__enter__"]
    copies.close()
    assert dict(PROFILE.__dict__) == before
