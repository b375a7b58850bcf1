"""`--transfers` with the real profiler of torch, its CPU activity in place of CUPTI's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity

from ebbtide.profiler.agent.detailed_capture import Copies
from ebbtide.profiler.agent.options import Options

PROFILE = torch.autograd.profiler.profile


class Recorder:
    """As much of the recorder as Copies sees."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes: list[str] = []
        self.facts = SimpleNamespace(note=self.notes.append)

    def beside(self, name: str) -> str:
        return str(self.folder / name)


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(tmp_path)


def with_gpu(**cuda: Any) -> Any:
    activities = SimpleNamespace(CUDA=ProfilerActivity.CPU)
    return SimpleNamespace(
        cuda=SimpleNamespace(is_initialized=lambda: True, **cuda),
        autograd=torch.autograd,
        _C=torch._C,
        profiler=SimpleNamespace(profile=torch.profiler.profile, ProfilerActivity=activities),
    )


@pytest.fixture
def copies(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> Iterator[Copies]:
    monkeypatch.setattr("ebbtide.profiler.agent.detailed_capture._SLICE_SECONDS", 0.0)
    copies = Copies(recorder, with_gpu(), Options(transfers=True))  # type: ignore[arg-type]
    yield copies
    copies.close()


def slices(recorder: Recorder) -> list[Path]:
    return sorted(recorder.folder.glob("copies-*.json"))


def test_slices_end_at_iterations_and_hold_events(copies: Copies, recorder: Recorder) -> None:
    for iteration in range(3):
        copies.at_iteration(iteration)
        torch.ones(8).sum()
    copies.close()
    assert len(slices(recorder)) == 3
    for path in slices(recorder):
        names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
        assert "aten::ones" in names
    assert recorder.notes == []


def test_a_profiler_of_the_jobs_own_is_given_way_to(copies: Copies, recorder: Recorder) -> None:
    copies.at_iteration(0)
    torch.ones(8).sum()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as own:
        torch.zeros(8).sum()
    assert any(event.key == "aten::zeros" for event in own.key_averages())
    copies.at_iteration(1)
    copies.close()
    assert len(slices(recorder)) == 1
    (note,) = recorder.notes
    assert "a profiler of its own" in note


def test_a_profiler_that_already_runs_is_left_alone(copies: Copies, recorder: Recorder) -> None:
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as own:
        copies.at_iteration(0)
        torch.zeros(8).sum()
    assert any(event.key == "aten::zeros" for event in own.key_averages())
    copies.close()
    assert slices(recorder) == []
    assert len(recorder.notes) == 1


def test_iterations_outside_the_range_are_not_profiled(recorder: Recorder) -> None:
    copies = Copies(recorder, with_gpu(), Options(first=2, last=4, transfers=True))  # type: ignore[arg-type]
    for iteration in range(6):
        copies.at_iteration(iteration)
        torch.full((iteration + 1,), 1.0)
    copies.close()
    (path,) = slices(recorder)
    events = json.loads(path.read_text())["traceEvents"]
    assert sum(event.get("name") == "aten::full" for event in events) == 2


def test_torchs_profiler_is_as_it_was_afterwards(recorder: Recorder) -> None:
    before = dict(PROFILE.__dict__)
    copies = Copies(recorder, with_gpu(), Options(transfers=True))  # type: ignore[arg-type]
    assert PROFILE.__dict__["__enter__"] is not before["__enter__"]
    copies.close()
    assert dict(PROFILE.__dict__) == before
