"""Memory in pictures: lines, bands, pools and the capacity."""

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
    facts,
    labels,
    line,
    steps,
    train,
    trained,
    value_at,
)
from tests.conftest import examples

GIB = 2**30


def test_a_line_has_the_steps_of_the_trace() -> None:
    (panel,) = draw([trained()]).axes
    edges, values = steps(panel, "device")
    assert edges.tolist() == [0, 4, 8, 10, 14, 18, 20, 24, 28, 30]
    assert values.tolist() == [30, 60, 20] * 3


@settings(max_examples=examples(15))
@given(
    st.lists(st.tuples(st.integers(0, 30_000), st.integers(1, 10**6)), min_size=1, max_size=40),
    st.sampled_from([1, 3000]),
)
def test_what_is_drawn_is_what_the_trace_says_at_every_time(changes: list[tuple[int, int]], each: int) -> None:
    """each: samples per change; many of them are drawn as a band from the smallest to the largest."""
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
        at = (start + end) / 2000
        if at < 30:
            assert value_at(panel, "allocated", at) * scale >= size * (1 - 1e-12)
            if not band:
                assert value_at(panel, "allocated", at) * scale == pytest.approx(size)
            for patch in band:
                _, edges, lowest = patch.get_data()
                assert np.asarray(lowest)[np.searchsorted(edges, at, side="right") - 1] * scale <= size * (1 + 1e-12)
    assert max(steps(panel, "allocated")[1]) * scale == pytest.approx(max(size for t, size in samples if t <= 30_000))


def test_a_band_keeps_every_peak_and_trough() -> None:
    builder = TraceBuilder()
    sizes = 50 + np.arange(25_000) % 7
    sizes[1234], sizes[-1] = 3, 99
    builder.rank(0).extend("memory", t_ns=np.arange(25_000), device="cuda:0", pool="device", bytes=sizes)
    (panel,) = draw([builder.build()]).axes
    (filled,) = [patch for patch in panel.patches if patch.get_fill()]
    assert isinstance(filled, StepPatch)
    values, edges, baseline = filled.get_data()
    assert len(values) < 1000
    assert (values.max(), np.min(baseline)) == (99, 3)
    low = int(np.argmin(baseline))
    assert edges[low] * MS <= 1234 <= edges[low + 1] * MS
    assert "memory: smallest to largest over" in facts(panel)


def test_a_trace_that_is_narrower_than_a_dot_is_a_band_of_one_step() -> None:
    dense, long = TraceBuilder(), TraceBuilder()
    dense.rank(0).extend("memory", t_ns=np.arange(5000), device="cuda:0", pool="device", bytes=np.arange(5000) % 9)
    long.rank(0).memory(0, 1).memory(10**9, 2)
    upper, _ = draw([dense.build("dense.ebb"), long.build("long.ebb")]).axes
    assert steps(upper, "device")[1].tolist() == [8]


def test_the_capacity_is_a_line_where_it_fits() -> None:
    (panel,) = draw([trained(size=60 * MIB)]).axes
    assert line(panel, "capacity")[1] == [100, 100]
    assert panel.get_ylim()[1] > 100


def test_a_capacity_far_above_is_said_instead_of_drawn() -> None:
    (panel,) = draw([trained(size=6 * MIB)]).axes
    assert "capacity 100.00 MiB, off scale" in labels(panel)
    assert panel.get_ylim()[1] < 10


def test_without_a_capacity_nothing_is_said_of_it() -> None:
    (panel,) = draw([trained(devices=[])]).axes
    assert labels(panel) == ["device", "forward", "backward", "update"]


def test_host_pools_do_not_press_the_lines_of_the_card_flat() -> None:
    builder = TraceBuilder()
    rank = train(builder.rank(0, devices=[GPU]))
    rank.memory(0, 373 * GIB, "host", "cpu").memory(0, 2 * GIB, "pinned", "cpu").memory(0, 0, "swap", "cpu")
    trace = builder.build()
    (panel,) = draw([trace]).axes
    assert labels(panel)[:2] == ["device", "capacity 100.00 MiB"]
    upper, lower = draw([trace], kind="memory").axes
    assert upper.get_ylim() == panel.get_ylim()
    assert labels(lower) == ["host", "pinned"]
    assert lower.get_ylabel() == "host (GiB)"
    assert steps(lower, "host")[1].tolist() == [373]


def test_pools_of_a_cpu_job_are_on_one_panel() -> None:
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[{"device": "cpu", "kind": "cpu", "capacity_bytes": 64 * GIB}])
    rank.memory(0, 3 * MIB, "heap", "cpu").memory(0, 5 * MIB, "rss", "cpu").memory(9 * MS, 4 * MIB, "heap", "cpu")
    (panel,) = draw([builder.build()], kind="memory").axes
    assert labels(panel) == ["heap", "rss", "capacity 64.00 GiB, off scale"]


def test_pools_that_are_not_known_are_drawn_with_styles_of_their_own() -> None:
    builder = TraceBuilder()
    pools = ["tensors", "$a_b$", "_hidden", *(f"tensors/{place}" for place in range(8)), "allocated"]
    for place, pool in enumerate(pools):
        builder.rank(0).memory(0, place + 1, pool).memory(5, place + 2, pool)
    (panel,) = draw([builder.build()]).axes
    assert labels(panel) == ["allocated", "$a_b$", " _hidden", "tensors", *(f"tensors/{place}" for place in range(8))]
    assert len({(patch.get_edgecolor(), str(patch.get_linestyle())) for patch in panel.patches}) == len(pools)


def test_known_pools_differ_by_more_than_colour() -> None:
    alike = [
        {"device", "reserved", "allocated", "requested"},
        {"heap", "rss", "swap"},
        {"host", "rss", "pinned", "swap"},
    ]
    for pools in alike:
        assert len({str(POOL_STYLES[pool].dashes) for pool in pools}) == len(pools)
    assert set(PHASE_COLORS) == {"forward", "backward", "update"}
    assert set(LINK_COLORS) == {"h2d", "d2h"}


@pytest.mark.parametrize("samples", [[(5, 0), (9, 0)], [(5, 7)]])
def test_memory_that_is_nothing_or_one_sample_is_drawn_quietly(samples: list[tuple[int, int]]) -> None:
    builder = TraceBuilder()
    for t, size in samples:
        builder.rank(0).memory(t, size)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = draw([builder.build()])
        figure.savefig(io.BytesIO(), format="png", dpi=40)
    assert steps(figure.axes[0], "device")[1].tolist() == [size for _, size in samples]
