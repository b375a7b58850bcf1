"""Tests the memory panels: lines, bands, pools and the capacity."""

from __future__ import annotations

import io
import warnings
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.patches import StepPatch

from ebbtide.analysis.plot import LINK_COLORS, PHASE_COLORS, POOL_STYLES, draw
from ebbtide.profiler.trace import TraceBuilder
from tests.analysis.plot.pictures import (
    GPU,
    MIB,
    MS,
    labels,
    line,
    notes,
    steps,
    train,
    trained,
    value_at,
)
from tests.conftest import examples

GIB = 2**30


def test_draw_memory__has_the_steps_of_the_trace() -> None:
    (panel,) = draw([trained()]).axes
    edges, values = steps(panel, "device")
    assert edges.tolist() == [0, 4, 8, 10, 14, 18, 20, 24, 28, 30]
    assert values.tolist() == [30, 60, 20] * 3


@settings(max_examples=examples(15, by_default=4))
@given(
    st.lists(st.tuples(st.integers(0, 30_000), st.integers(1, 10**6)), min_size=1, max_size=40),
    st.sampled_from([1, 3000]),
)
def test_draw_memory__has_the_recorded_size_at_every_time(changes: list[tuple[int, int]], each: int) -> None:
    """each: samples per change; a line of many samples is drawn as a band from the smallest to the largest."""
    samples = sorted(dict(changes).items())
    builder = TraceBuilder()
    rank = train(builder.rank(0, devices=[{**GPU, "capacity_bytes": None}]), size=0)
    for (start, size), (end, _) in pairwise([*samples, (30_001, 0)]):
        times = np.unique(np.linspace(start, end - 1, each).astype(np.int64)) * 1000
        rank.extend("memory", t_ns=times, device="cuda:0", pool="allocated", bytes=size)
    (panel,) = draw([builder.build()]).axes
    scale = {"memory (B)": 1.0, "memory (KiB)": 1024.0, "memory (MiB)": 1024.0**2}[panel.get_ylabel()]
    band = [patch for patch in panel.patches if patch.get_fill() and isinstance(patch, StepPatch)]
    assert len(band) <= (each > 1)
    for (start, size), (end, _) in pairwise([*samples, (30_001, 0)]):
        time = (start + end) / 2000
        if time < 30:
            assert value_at(panel, "allocated", time) * scale >= size * (1 - 1e-12)
            if not band:
                assert value_at(panel, "allocated", time) * scale == pytest.approx(size)
            for patch in band:
                _, edges, lowest = patch.get_data()
                assert np.asarray(lowest)[np.searchsorted(edges, time, side="right") - 1] * scale <= size * (1 + 1e-12)
    assert max(steps(panel, "allocated")[1]) * scale == pytest.approx(max(size for t, size in samples if t <= 30_000))


def test_draw_memory__keeps_every_extreme_in_a_band() -> None:
    builder = TraceBuilder()
    sizes = 50 + np.arange(25_000) % 7
    sizes[1234], sizes[-1] = 3, 99
    builder.rank(0).extend("memory", t_ns=np.arange(25_000), device="cuda:0", pool="device", bytes=sizes)
    (panel,) = draw([builder.build()]).axes
    (filled,) = [patch for patch in panel.patches if patch.get_fill()]
    assert isinstance(filled, StepPatch)
    values, edges, baseline = filled.get_data()
    assert len(values) == 1000
    assert (values.max(), np.min(baseline)) == (99, 3)
    low = int(np.argmin(baseline))
    assert edges[low] * MS <= 1234 <= edges[low + 1] * MS
    assert "memory: smallest to largest over" in notes(panel)


def test_draw_memory__reduces_a_very_short_trace_to_one_step() -> None:
    dense, long = TraceBuilder(), TraceBuilder()
    dense.rank(0).extend("memory", t_ns=np.arange(5000), device="cuda:0", pool="device", bytes=np.arange(5000) % 9)
    long.rank(0).memory(0, 1).memory(10**9, 2)
    upper, _ = draw([dense.build("dense.ebb"), long.build("long.ebb")]).axes
    assert steps(upper, "device")[1].tolist() == [8]


def test_draw_memory__draws_a_capacity_that_fits_as_line() -> None:
    (panel,) = draw([trained(size=60 * MIB)]).axes
    assert line(panel, "capacity")[1] == [100, 100]
    assert panel.get_ylim()[1] > 100


def test_draw_memory__lists_a_high_capacity_in_the_legend_only() -> None:
    (panel,) = draw([trained(size=6 * MIB)]).axes
    assert "capacity 100.00 MiB, off scale" in labels(panel)
    assert panel.get_ylim()[1] < 10


def test_draw_memory__omits_an_unknown_capacity() -> None:
    (panel,) = draw([trained(devices=[])]).axes
    assert labels(panel) == ["device", "forward", "backward", "update"]


def test_draw_memory__gives_host_pools_a_scale_of_their_own() -> None:
    builder = TraceBuilder()
    rank = train(builder.rank(0, devices=[GPU]))
    rank.memory(0, 373 * GIB, "host", "cpu").memory(0, 2 * GIB, "pinned", "cpu").memory(0, 0, "swap", "cpu")
    trace = builder.build()
    (panel,) = draw([trace]).axes
    assert labels(panel)[:2] == ["device", "capacity 100.00 MiB"]
    upper, lower = draw([trace], kind="memory").axes
    assert upper.get_ylim() == panel.get_ylim()
    assert labels(lower) == ["host", "pinned"]
    assert lower.get_ylabel() == "host memory (GiB)"
    assert steps(lower, "host")[1].tolist() == [373]


def test_draw_memory__draws_pools_of_a_cpu_job_on_one_panel() -> None:
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[{"device": "cpu", "kind": "cpu", "capacity_bytes": 64 * GIB}])
    rank.memory(0, 3 * MIB, "heap", "cpu").memory(0, 5 * MIB, "rss", "cpu").memory(9 * MS, 4 * MIB, "heap", "cpu")
    (panel,) = draw([builder.build()], kind="memory").axes
    assert labels(panel) == ["heap", "rss", "host memory 64.00 GiB, off scale"]
    assert panel.get_ylabel() == "host memory (MiB)"


def test_draw_memory__gives_each_unknown_pool_a_style() -> None:
    builder = TraceBuilder()
    pools = ["tensors", "$a_b$", "_hidden", *(f"pool {number}" for number in range(8)), "allocated"]
    for number, pool in enumerate(pools):
        builder.rank(0).memory(0, number + 1, pool).memory(5, number + 2, pool)
    (panel,) = draw([builder.build()]).axes
    assert labels(panel) == ["allocated", "tensors", "$a_b$", " _hidden", *(f"pool {number}" for number in range(8))]
    assert len({(patch.get_edgecolor(), str(patch.get_linestyle())) for patch in panel.patches}) == len(pools)


def test_draw_memory__stacks_categories_below_the_line_of_all_tensors() -> None:
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[{"device": "cuda:0", "kind": "cuda"}])
    for start_ns, category, size in (
        (0, "parameter", 4 * MIB),
        (0, "activation", 2 * MIB),
        (6 * MS, "activation", 3 * MIB),
    ):
        rank.add("allocations", start_ns=start_ns, device="cuda:0", bytes=size, category=category)
    rank.memory(0, 6 * MIB, "tensors").memory(6 * MS, 9 * MIB, "tensors").memory(10 * MS, 9 * MIB, "tensors")
    (panel,) = draw([builder.build()]).axes
    assert labels(panel) == ["tensors", "activation", "parameter"]
    areas = {str(p.get_label()): p.get_data() for p in panel.patches if isinstance(p, StepPatch) and p.get_fill()}
    # They end with the recording of the allocations.
    assert areas["parameter"].baseline.tolist() == [0, 0, 0]
    assert areas["parameter"].values.tolist() == areas["activation"].baseline.tolist() == [4, 4, 0]
    assert areas["activation"].values.tolist() == [6, 9, 0]
    assert steps(panel, "tensors")[1].tolist()[:2] == [6, 9]
    assert panel.get_ylim()[1] > 9


def test_pool_styles__differ_by_dash_within_a_panel() -> None:
    panels = [
        {"device", "reserved", "allocated", "requested", "tensors"},
        {"heap", "rss", "swap"},
        {"host", "rss", "pinned", "swap"},
    ]
    for pools in panels:
        assert len({str(POOL_STYLES[pool].dash) for pool in pools}) == len(pools)
    assert set(PHASE_COLORS) == {"forward", "backward", "update"}
    assert set(LINK_COLORS) == {"h2d", "d2h"}


@pytest.mark.parametrize("samples", [[(5, 0), (9, 0)], [(5, 7)]])
def test_draw_memory__draws_empty_memory_and_one_sample_without_warning(samples: list[tuple[int, int]]) -> None:
    builder = TraceBuilder()
    for t, size in samples:
        builder.rank(0).memory(t, size)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = draw([builder.build()])
        figure.savefig(io.BytesIO(), format="png", dpi=40)
    assert steps(figure.axes[0], "device")[1].tolist() == [size for _, size in samples]
