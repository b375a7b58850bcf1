"""Tests the lanes of a GPU's activity: the time in each lane is that of the metrics,
exact and reduced."""

from __future__ import annotations

import numpy as np
import pytest

from ebbtide.analysis.metrics.activity.activity import gpu_activity
from ebbtide.analysis.timeline.activity import IDLE_CAUSES, PAUSE, activity_lanes
from ebbtide.analysis.timeline.axis import Resolution, TimeAxis, recorded_interval
from ebbtide.profiler.trace import Trace, TraceBuilder


def busy_trace(kernels: int = 400) -> Trace:
    """Build kernels of random lengths with gaps, some of which overlap collectives and
    copies."""
    random = np.random.default_rng(1)
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[{"device": "cuda:0", "kind": "cuda"}])
    starts = 1000 + np.cumsum(random.integers(1_000, 900_000, kernels))
    ends = starts + random.integers(0, 500_000, kernels)
    kinds = random.choice(["compute", "communication", "copy"], kernels)
    launches = starts - random.integers(0, 300_000, kernels)
    rank.extend(
        "kernels",
        start_ns=starts,
        end_ns=ends,
        device="cuda:0",
        stream=7,
        kind=kinds,
        name="k",
        launch_ns=launches,
    )
    return builder.build()


@pytest.mark.parametrize("slots", [100_000, 50])
def test_activity_lanes__have_the_time_that_gpu_activity_measures(slots: int) -> None:
    trace = busy_trace()
    interval = recorded_interval(trace, 0)
    assert interval is not None
    lanes = activity_lanes(
        trace,
        0,
        TimeAxis(0, *interval, interval[1] - interval[0]),
        Resolution(slots, 1),
    )
    assert list(lanes) == ["idle", "copy", "communication", "compute"]
    figures = gpu_activity(trace)
    for lane, stack in lanes.items():
        length = np.diff(stack.edges)
        times = {
            layer.name: float((layer.values * length).sum()) / 1e6
            for layer in stack.layers
        }
        assert sum(times.values()) == pytest.approx(
            getattr(figures.total, f"{lane}_ms"), abs=1e-6
        )
        shares = np.array([layer.values for layer in stack.layers])
        assert shares.min() >= 0
        assert shares.sum(axis=0).max() <= 1 + 1e-12
        if slots > len(length):
            assert set(np.unique(shares)) <= {0.0, 1.0}
        if lane == "idle":
            causes = {
                name: figures.without_compute[cause]
                for cause, name in IDLE_CAUSES.items()
            }
            assert times == pytest.approx(
                {name: time_ms for name, time_ms in causes.items() if time_ms}, abs=1e-6
            )


def test_activity_lanes__show_pauses_of_a_recording() -> None:
    builder = TraceBuilder()
    rank = builder.rank(
        0,
        devices=[{"device": "cuda:0", "kind": "cuda"}],
        transfers_recorded=True,
        transfers_spans_ns=[[0, 30], [70, 100]],
    )
    rank.kernel(0, 10).kernel(20, 30).kernel(80, 100)
    idle = activity_lanes(
        builder.build(), 0, TimeAxis(0, 0, 100, 100), Resolution(100, 1)
    )["idle"]
    starts = {
        layer.name: idle.edges[:-1][layer.values > 0].tolist() for layer in idle.layers
    }
    assert starts == {"idle: launch not recorded": [10, 70], PAUSE: [30]}


def test_activity_lanes__are_absent_without_kernels() -> None:
    builder = TraceBuilder()
    builder.rank(0).transfer("h2d", 0, 5, 1)
    assert (
        activity_lanes(builder.build(), 0, TimeAxis(0, 0, 5, 5), Resolution(10, 1))
        == {}
    )
