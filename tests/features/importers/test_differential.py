"""Figures of generated traces against a count that shares no code with ebbtide."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ebbtide.analysis.metrics.activity.activity import gpu_activity
from ebbtide.analysis.metrics.activity.phase_activity import COLUMNS, phase_times
from ebbtide.analysis.metrics.memory import memory_use
from ebbtide.analysis.metrics.summary import summarize
from ebbtide.features.importers.load import import_trace
from ebbtide.phases import ITERATION_PARTS
from ebbtide.profiler.trace import Trace
from tests.conftest import seeded
from tests.features.importers.kineto.made_kineto import (
    Event,
    memory_event,
    span,
    write_trace,
)
from tests.features.importers.pandas_count import PARTS, count

MIB = 1 << 20
_SLOW = pytest.mark.slow


class Job:
    """A job of random lengths whose kernels run in order on stream 7."""

    def __init__(self, source: random.Random) -> None:
        self.random = source
        self.events: list[Event] = []
        self._free = {7: 0, 8: 0, 9: 0}
        self._launches = 0

    def launch(
        self, at: int, name: str, category: str = "kernel", stream: int = 7, **args: Any
    ) -> None:
        self._launches += 1
        args |= {"correlation": self._launches, "device": 0}
        begin = max(self._free[stream], at + self.random.randint(1, 12))
        begin += self.random.choice([0, 0, self.random.randint(1, 150)])
        end = begin + self.random.randint(1, 25)
        self._free[stream] = end
        self.events += [
            span("cudaLaunchKernel", at, at + 1, "cuda_runtime", **args),
            span(name, begin, end, category, stream=stream, **args),
        ]

    def phase(self, name: str, at: int) -> int:
        """Add a phase from a time on, and return its end."""
        begin = at
        for number in range(self.random.randint(3, 7)):
            at += self.random.randint(1, 9)
            kind = self.random.choice(["gemm", "relu", "norm"])
            self.launch(at, f"{name}_{kind}" if number else name + "_first")
            at += self.random.randint(2, 9)
            if number and self.random.random() < 0.25:
                self.launch(at, "ncclDevKernel_AllReduce_Sum_f32(x)", stream=8)
            if number and self.random.random() < 0.2:
                self.launch(at, "Memset (Device)", "gpu_memset")
        self.copy(at)
        at += self.random.randint(2, 9)
        self.events.append(span(name, begin, at))
        return at

    def copy(self, at: int) -> None:
        way = self.random.choice(
            ["HtoD (Pinned -> Device)", "DtoH (Device -> Pageable)"]
        )
        if self.random.random() < 0.5:
            size = self.random.randint(1, 64) * MIB
            self.launch(at, f"Memcpy {way}", "gpu_memcpy", 9, bytes=size)

    def iteration(self, number: int, at: int) -> int:
        begin = at
        at += self.random.randint(1, 40)
        for name in ("forward", "backward", "Optimizer.step#A.step"):
            if self.random.random() < 0.5:
                self.copy(at)
            at = self.phase(name, at + self.random.randint(1, 30))
            self.memory(at - self.random.randint(1, 20))
        at += self.random.randint(1, 30)
        self.events.append(span(f"ProfilerStep#{number}", begin, at))
        return at

    def memory(self, at: int) -> None:
        allocated = self.random.randint(1, 900) * MIB
        reserved = allocated + self.random.randint(0, 99) * MIB
        self.events.append(memory_event(at, allocated, reserved))


def generated(seed: int, folder: Path) -> Path:
    with seeded(seed) as source:
        job = Job(source)
        job.memory(1)
        at = source.randint(2, 50)
        for number in range(source.randint(5, 8)):
            at = job.iteration(number, at) + source.choice([0, source.randint(1, 50)])
        return write_trace(folder / "t.json", job.events)


def medians(values: dict[str, list[float]]) -> dict[str, float]:
    return {part: float(np.median(values[part])) for part in PARTS}


def assert_phases(trace: Trace, own: dict[str, Any]) -> None:
    summary = summarize(trace).as_json()
    assert summary["warmup_iterations"] == 2
    phases = {phase["phase"]: phase for phase in summary["phases"]}
    for part, phase in phases.items():
        times = own["time"][part]
        assert phase["iterations_ms"] == pytest.approx(times)
        assert phase["median_ms"] == pytest.approx(np.median(times))
        assert phase["p95_ms"] == pytest.approx(np.percentile(times, 95))
        for direction in ("h2d", "d2h"):
            expected = np.median(own[direction][part])
            assert phase[f"{direction}_bytes"] == pytest.approx(expected, abs=1)
        assert phase["peak_bytes"] == np.median(own["allocated"]["max"][part])
    totals = [sum(step) for step in zip(*own["time"].values(), strict=True)]
    assert summary["iterations_ms"] == pytest.approx(totals)
    assert summary["iteration_ms"] == pytest.approx(np.median(totals))
    for direction, copies in summary["transfers"].items():
        assert [copies["count"], copies["bytes"]] == own[f"{direction} total"]


def assert_activity(trace: Trace, own: dict[str, Any]) -> None:
    activity = gpu_activity(trace, 0).as_json()
    for kind in ("compute", "communication", "copy", "idle"):
        shown = {phase["phase"]: phase[f"{kind}_ms"] for phase in activity["phases"]}
        assert shown == pytest.approx(medians(own[kind])), kind
        assert activity["total"][f"{kind}_ms"] == pytest.approx(own["total"][kind])
    assert activity["total"]["span_ms"] == pytest.approx(own["total"]["span"])
    share = activity["total"]["communication_overlap_share"]
    communication = own["total"]["communication"]
    assert (share or 0.0) * communication == pytest.approx(own["total"]["overlap"])
    lost = own["total"]["span"] - own["total"]["compute"]
    assert sum(activity["without_compute"].values()) == pytest.approx(lost)
    shown = {
        kernel["name"]: [
            kernel["count"],
            kernel["time_ms"] * 1e3,
            *(kernel[f"{figure}_us"] for figure in ("min", "median", "max")),
        ]
        for kernel in activity["kernels"]
    }
    assert shown.keys() == own["kernels"].keys()
    for name, figures in shown.items():
        assert figures == pytest.approx(own["kernels"][name])
    launches = activity["launches"]
    delays = [launches["median_delay_us"], launches["p95_delay_us"]]
    assert delays == pytest.approx(own["delays"])
    times = phase_times(trace, 0)
    assert times is not None
    idle = times.ms[2:, :, COLUMNS.index("idle")]
    for part, expected in own["idle"].items():
        assert idle[:, ITERATION_PARTS.index(part)] == pytest.approx(expected)


def assert_memory(trace: Trace, own: dict[str, Any]) -> None:
    for use in memory_use(trace).pools:
        expected = own[use.pool]
        assert use.low_bytes == np.median(expected["min"][use.phase])
        assert use.peak_bytes == np.median(expected["max"][use.phase])


@pytest.mark.parametrize(
    "seed",
    [seed if seed < 6 else pytest.param(seed, marks=_SLOW) for seed in range(40)],
)
def test_figures__equal_a_count_of_every_microsecond(tmp_path: Path, seed: int) -> None:
    file = generated(seed, tmp_path)
    trace = import_trace([file], tmp_path / "t.ebb")
    own = count(file)
    assert_phases(trace, own)
    assert_activity(trace, own)
    assert_memory(trace, own)
