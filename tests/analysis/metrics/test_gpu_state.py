"""Figures of the state of the GPUs, against closed forms and a sum over every
nanosecond."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from itertools import pairwise
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.analysis import TraceAnalysis
from ebbtide.analysis.metrics.gpu_state import QUANTITIES, GpuFigure, gpu_state
from ebbtide.analysis.metrics.summary import summarize
from ebbtide.analysis.tables.summary import summary_view
from ebbtide.analysis.tables.table import Table
from ebbtide.errors import TraceError
from ebbtide.phases import ITERATION_PARTS
from ebbtide.profiler.trace import RankBuilder, Trace, TraceBuilder
from ebbtide.profiler.trace.trace import closing_lines

UNITS = {quantity: unit for quantity, (_, unit) in QUANTITIES.items()}

MS = 10**6
S = 10**9
GPU = {"device": "cuda:0", "kind": "cuda", "capacity_bytes": 1000}


def trained(
    iterations: int = 1, rank: int = 0, builder: TraceBuilder | None = None
) -> tuple[TraceBuilder, RankBuilder]:
    """Add iterations of 100 ms other, 200 ms forward, 400 ms backward and 300 ms
    update, one after the other from 0."""
    builder = builder or TraceBuilder()
    one = builder.rank(rank, devices=[GPU], first_iteration_start_ns=0)
    for number in range(iterations):
        begin = number * 1000 * MS
        for phase, start, end in (
            ("forward", 100, 300),
            ("backward", 300, 700),
            ("update", 700, 1000),
        ):
            one.phase(phase, begin + start * MS, begin + end * MS, number)
    return builder, one


def figures_of(trace: Trace, quantity: str) -> dict[str, tuple[float, float, float]]:
    return {
        f.phase: (f.min, f.mean, f.max)
        for f in gpu_state(trace).figures
        if f.quantity == quantity
    }


def test_gpu_state__without_iterations_is_of_the_whole_trace() -> None:
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[GPU])
    # The last sample holds for the median interval of 1 s.
    rank.gpu(0, power_w=100.0).gpu(S // 2, power_w=300.0).gpu(2 * S, power_w=200.0)
    trace = builder.build()
    mean = pytest.approx((100 / 2 + 300 * 1.5 + 200) / 3)
    assert gpu_state(trace).figures == [
        GpuFigure("power", "W", None, 100.0, mean, 300.0)
    ]
    summary = summarize(trace)
    assert [entry["phase"] for entry in summary.as_json()["gpu"]] == [None]
    tables = {
        part.name: part
        for part in summary_view(trace, summary, verbose=True)
        if isinstance(part, Table)
    }
    details = tables["gpu"]
    assert (details.title, [cell.text for cell in details.rows[0]]) == (
        "The GPU in the whole trace",
        ["power (W)", "100", "233", "300"],
    )
    assert (
        list(summary_view(trace, summary, verbose=False))[-1]
        == "1 note, state of the GPU, pools of memory: -v"
    )
    assert closing_lines(trace)[1] == "recorded: state of the GPU"


def test_gpu_state__uses_device_times_if_every_phase_has_them() -> None:
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[GPU], first_iteration_start_ns=0)
    rank.phase("forward", 0, 10, 0, 0, 50, 80).phase("update", 10, 20, 0, 0, 80, 100)
    rank.gpu(0, sm_clock_mhz=1.0).gpu(60, sm_clock_mhz=2.0).gpu(80, sm_clock_mhz=3.0)
    figures = figures_of(builder.build(), "sm_clock")
    assert figures["forward"] == (1.0, pytest.approx((10 + 2 * 20) / 30), 2.0)
    assert figures["update"] == (3.0, 3.0, 3.0)


@pytest.mark.parametrize("interval_ns", [50 * MS, S, 30 * S])
def test_gpu_state__weighs_by_the_intervals_of_any_monitor(interval_ns: int) -> None:
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[GPU])
    for number in range(20):
        rank.gpu(number * interval_ns, power_w=300.0)
    rank.gpu(20 * interval_ns, power_w=20.0)
    # After a gap of more than five intervals.
    rank.gpu(40 * interval_ns, power_w=20.0)
    (figure,) = gpu_state(builder.build()).figures
    assert figure.mean == pytest.approx((20 * 300 + 2 * 20) / 22)


def test_gpu_state__leaves_out_warm_up_other_devices_and_unfinished_iterations() -> (
    None
):
    builder, rank = trained(iterations=5)
    rank.phase("forward", 5100 * MS, 5200 * MS)
    for tenth in range(60):
        rank.gpu(
            tenth * 100 * MS,
            temperature_celsius=90.0 if tenth < 20 else 50.0 if tenth < 50 else 99.0,
        )
        rank.gpu(tenth * 100 * MS, "cuda:1", temperature_celsius=10.0)
    assert set(figures_of(builder.build(), "temperature").values()) == {
        (50.0, 50.0, 50.0)
    }


def test_gpu_state__takes_all_ranks_or_some() -> None:
    builder, rank = trained()
    rank.gpu(0, power_w=100.0).gpu(500 * MS, power_w=200.0)
    trained(rank=1, builder=builder)[1].gpu(0, power_w=600.0)
    trained(rank=2, builder=builder)
    trace = builder.build()
    assert figures_of(trace, "power")["backward"] == (
        100.0,
        pytest.approx((150 + 600) / 2),
        600.0,
    )
    analysis = TraceAnalysis(trace)
    assert {figure.max for figure in analysis.gpu([0]).figures} == {100.0, 200.0}
    assert {figure.max for figure in analysis.gpu([1]).figures} == {600.0}
    assert analysis.gpu([2]).figures == []
    with pytest.raises(TraceError):
        analysis.gpu([3])


REASONS = [
    (0x000, 0.0),  # none
    (0x001, 0.0),  # idle
    (0x002, 0.0),  # clocks that the user has set
    (0x004, 100.0),  # power cap
    (0x008, 100.0),  # hardware slowdown
    (0x010, 0.0),  # sync boost
    (0x020, 100.0),  # thermal slowdown by software
    (0x040, 100.0),  # thermal slowdown by hardware
    (0x080, 100.0),  # power brake
    (0x100, 0.0),  # display clocks
    (0x021, 100.0),
]


def test_gpu_state__throttled_is_the_time_with_a_power_or_thermal_limit() -> None:
    for reasons, share in REASONS:
        builder, rank = trained()
        rank.gpu(0, throttle_reasons=reasons).gpu(400 * MS, throttle_reasons=0)
        figures = figures_of(builder.build(), "throttled")
        assert figures["forward"] == (share, share, share)
        assert figures["backward"] == (0.0, pytest.approx(share / 4), share)
        assert figures["update"] == (0.0, 0.0, 0.0)


def test_gpu_state__leaves_out_missing_and_impossible_values() -> None:
    builder, rank = trained()
    rank.gpu(0, power_w=100.0, utilization_percent=math.inf).gpu(
        200 * MS, power_w=None, memory_clock_mhz=5.0
    )
    rank.gpu(400 * MS, power_w=math.nan).gpu(500 * MS, power_w=1e308)
    trace = builder.build()
    assert set(figures_of(trace, "power").values()) == {(100.0, 100.0, 100.0)}
    assert {figure.quantity for figure in gpu_state(trace).figures} == {
        "power",
        "memory_clock",
    }
    json.dumps(summarize(trace).as_json(), allow_nan=False)


@given(
    st.lists(
        st.tuples(st.integers(0, 60), st.sampled_from([0.0, 25.0, 100.0])), max_size=8
    ),
    st.lists(
        st.lists(st.integers(0, 6), min_size=4, max_size=4), min_size=1, max_size=4
    ),
)
def test_gpu_state__equals_a_sum_over_every_nanosecond(
    samples: list[tuple[int, float]], lengths: list[list[int]]
) -> None:
    builder = TraceBuilder(warmup_iterations=0)
    rank = builder.rank(0, devices=[GPU], first_iteration_start_ns=0)
    phase_at: dict[int, str] = {}
    now = 0
    for number, (other, *times) in enumerate(lengths):
        phase_at |= dict.fromkeys(range(now, now + other), "other")
        now += other
        for phase, length in zip(ITERATION_PARTS, times, strict=False):
            rank.phase(phase, now, now + length, number)
            phase_at |= dict.fromkeys(range(now, now + length), phase)
            now += length
    value_at: dict[int, float] = {}
    for t, value in sorted(samples, key=lambda sample: sample[0]):
        rank.gpu(t, utilization_percent=value)
        value_at |= dict.fromkeys(range(t, 100), value)
    times = sorted(t for t, _ in samples)
    steps = [b - a for a, b in pairwise(times)]
    usual = int(median(s for s in steps if s)) if any(steps) else 100
    for t, step in zip(times, [*steps, 100], strict=False):
        if step > 5 * usual or t == times[-1]:
            for later in range(t + usual, min(t + step, 100)):
                value_at.pop(later, None)
    values: dict[str, list[float]] = defaultdict(list)
    for t, phase in phase_at.items():
        if t in value_at:
            values[phase].append(value_at[t])
    # Of samples of one time the last one counts: `value_at` is filled in the order of
    # the table.
    assert figures_of(builder.build(), "utilization") == {
        phase: (min(v), pytest.approx(sum(v) / len(v)), max(v))
        for phase, v in values.items()
    }


def test_summarize__has_an_entry_per_quantity_and_phase() -> None:
    builder, rank = trained()
    row = {
        "memory_utilization_percent": 2,
        "power_w": 3,
        "sm_clock_mhz": 4,
        "memory_clock_mhz": 5,
    }
    rank.gpu(0, utilization_percent=1, **row, temperature_celsius=6, throttle_reasons=4)
    summary = summarize(builder.build())
    assert summary.gpu is not None
    assert [(f.quantity, f.unit, f.phase) for f in summary.gpu] == [
        (quantity, unit, phase)
        for quantity, unit in UNITS.items()
        for phase in ITERATION_PARTS
    ]
    assert [f.mean for f in summary.gpu[:: len(ITERATION_PARTS)]] == [
        1,
        2,
        3,
        4,
        5,
        6,
        100,
    ]
    assert (
        summary.as_json()["gpu"]
        == TraceAnalysis(builder.build()).gpu().as_json()["gpu"]
    )
    assert summary.as_json()["gpu"][0] == {
        "quantity": "utilization", "unit": "%", "phase": "forward", "min": 1.0, "mean": 1.0, "max": 1.0,
    }  # fmt: skip


def test_summarize__state_is_null_if_it_was_not_recorded() -> None:
    builder, _ = trained()
    summary = summarize(builder.build())
    assert summary.gpu is None
    assert summary.as_json()["gpu"] is None
    table = TraceAnalysis(builder.build()).gpu().to_pandas()
    assert list(table.columns) == ["quantity", "unit", "phase", "min", "mean", "max"]
    assert len(table) == 0
