"""Tests the lines of panels and their scales."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.analysis.timeline.axis import Resolution, TimeAxis, recorded_interval
from ebbtide.analysis.timeline.link import link_panel
from ebbtide.analysis.timeline.memory import (
    device_memory_panel,
    free_memory_panel,
    host_memory_panel,
    pool_line,
)
from ebbtide.analysis.timeline.panels import value_scale
from ebbtide.analysis.timeline.styles import POOL_STYLES
from ebbtide.profiler.trace import Trace, TraceBuilder
from tests.analysis.report.report_traces import GIB, GPU, MS, trained

FINE = Resolution(slots=10_000, steps_per_slot=1)


def axis_of(trace: Trace) -> TimeAxis:
    """Return the axis of everything that rank 0 recorded."""
    interval = recorded_interval(trace, 0)
    assert interval is not None
    return TimeAxis(0, *interval, interval[1] - interval[0])


def test_recorded_interval__is_none_for_an_empty_trace() -> None:
    builder = TraceBuilder()
    builder.rank(0)
    assert recorded_interval(builder.build(), 0) is None


def test_recorded_interval__spans_phases_samples_and_copies() -> None:
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[GPU])
    rank.phase("forward", 100, 200, 0, 0, 150, 900).memory(50, 1).transfer(
        "h2d", 60, 300, 1
    )
    assert recorded_interval(builder.build(), 0) == (50, 900)
    rank.link(1000, 980, "gpm", h2d_bytes_per_s=1.0)
    assert recorded_interval(builder.build(), 0) == (20, 1000)


@pytest.mark.parametrize(
    ("length", "unit", "x"), [(2 * 10**9, "s", 0.001), (2 * 10**9 - 1, "ms", 1.0)]
)
def test_time_axis__counts_in_seconds_or_milliseconds(
    length: int, unit: str, x: float
) -> None:
    axis = TimeAxis(5, 5, 5 + length, length)
    assert axis.unit == unit
    assert axis.x(np.array([5, 5 + MS])).tolist() == [0, x]


def test_memory_panels__separate_device_and_host() -> None:
    builder = trained()
    builder.rank(0).memory(-5 * MS, 100 * GIB, "host", "cpu").memory(
        0, 0, "swap", "cpu"
    )
    trace = builder.build()
    axis = axis_of(trace)
    device, host = (
        device_memory_panel(trace, 0, axis, FINE),
        host_memory_panel(trace, 0, axis, FINE),
    )
    assert host is not None
    assert [line.name for line in device.lines] == ["device", "allocated"]
    assert [line.name for line in host.lines] == ["host"]
    assert (device.level, device.level_label, device.free_pool) == (
        40 * GIB,
        "capacity 40.00 GiB",
        "device",
    )
    assert (host.level, host.free_pool) == (None, None)
    assert (device.lines[0].edges[:3] // MS).tolist() == [0, 4, 14]
    assert (device.lines[0].values[:3] // GIB).tolist() == [10, 30, 8]
    assert [line.name for line in free_memory_panel(trace, 0, axis, FINE).lines] == [
        "device"
    ]


@given(st.lists(st.integers(-9, 9), min_size=1, max_size=80), st.integers(1, 60))
def test_pool_line__keeps_the_extremes_of_each_slot(
    changes: list[int], slots: int
) -> None:
    sizes = np.array(changes) + 9
    builder = TraceBuilder()
    builder.rank(0, devices=[GPU]).extend(
        "memory",
        t_ns=np.arange(len(sizes)) * 10,
        device="cuda:0",
        pool="device",
        bytes=sizes,
    )
    trace = builder.build()
    axis = TimeAxis(0, 0, 10 * len(sizes), 10 * len(sizes))
    line = pool_line(
        trace,
        0,
        "device",
        POOL_STYLES["device"],
        axis,
        Resolution(slots, steps_per_slot=1),
    )
    assert line is not None
    assert (line.edges[0], line.edges[-1]) == (0, 10 * len(sizes))
    assert len(line.edges) == len(line.values) + 1
    if len(sizes) <= slots:
        assert line.lowest is None
        assert line.values.tolist() == sizes.tolist()
        return
    assert line.lowest is not None
    assert len(line.values) == slots
    # A slot has the values from the one that holds at its start to the one at its end.
    for start, end, lowest, largest in zip(
        line.edges[:-1], line.edges[1:], line.lowest, line.values, strict=True
    ):
        within = sizes[start // 10 : end // 10 + 1]
        assert (lowest, largest) == (within.min(), within.max())


copies = st.lists(
    st.tuples(st.integers(0, 500), st.integers(1, 60), st.integers(0, 10**6)),
    min_size=1,
    max_size=12,
)


@given(copies, st.integers(3, 60))
def test_link_panel__has_the_copied_bytes_as_area(rows: Any, slots: int) -> None:
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[GPU], transfers_recorded=True)
    for start, length, size in rows:
        rank.transfer("h2d", start, start + length, size)
    trace = builder.build()
    panel = link_panel(trace, 0, axis_of(trace), Resolution(slots, steps_per_slot=1))
    assert panel is not None
    for line in panel.lines:
        area = float((line.values * np.diff(line.edges)).sum()) / 1e9
        assert area == pytest.approx(
            sum(size for *_, size in rows) if line.name == "h2d" else 0,
            rel=1e-6,
            abs=1e-3,
        )


def test_value_scale__leaves_far_levels_off_unless_required() -> None:
    assert value_scale(30 * GIB, [4000 * GIB]).top == pytest.approx(33.6 * GIB)
    assert value_scale(30 * GIB, [40 * GIB]).top == pytest.approx(43.2 * GIB)
    assert value_scale(30 * GIB, [], [4000 * GIB]).top == pytest.approx(4320 * GIB)
    assert value_scale(0, []).top == 1.0


@pytest.mark.parametrize(
    ("largest", "unit"), [(2e9, "GB/s"), (2e6, "MB/s"), (2e3, "kB/s"), (2.0, "B/s")]
)
def test_value_scale__chooses_the_unit_of_rates(largest: float, unit: str) -> None:
    assert value_scale(largest, [], rates=True).unit == unit
    assert value_scale(3 * GIB, []).unit == "GiB"
