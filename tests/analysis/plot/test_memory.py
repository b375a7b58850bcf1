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

from ebbtide.analysis.plot import draw
from ebbtide.profiler.trace import TraceBuilder
from tests.analysis.plot.pictures import (
    GPU,
    MIB,
    MS,
    labels,
    line,
    steps,
    train,
    trained,
    value_at,
)
from tests.conftest import examples

GIB = 2**30


@settings(max_examples=examples(15, by_default=4))
@given(
    st.lists(
        st.tuples(st.integers(0, 30_000), st.integers(1, 10**6)),
        min_size=1,
        max_size=40,
    ),
    st.sampled_from([1, 3000]),
)
def test_draw_memory__has_the_recorded_size_at_every_time(
    changes: list[tuple[int, int]], each: int
) -> None:
    """each: samples per change; a line of many samples is drawn as a band from the
    smallest to the largest."""
    samples = sorted(dict(changes).items())
    builder = TraceBuilder()
    rank = train(builder.rank(0, devices=[{**GPU, "capacity_bytes": None}]), size=0)
    for (start, size), (end, _) in pairwise([*samples, (30_001, 0)]):
        times = np.unique(np.linspace(start, end - 1, each).astype(np.int64)) * 1000
        rank.extend("memory", t_ns=times, device="cuda:0", pool="allocated", bytes=size)
    (panel,) = draw([builder.build()]).axes
    scale = {"memory (B)": 1.0, "memory (KiB)": 1024.0, "memory (MiB)": 1024.0**2}[
        panel.get_ylabel()
    ]
    band = [
        patch
        for patch in panel.patches
        if patch.get_fill() and isinstance(patch, StepPatch)
    ]
    assert len(band) <= (each > 1)
    for (start, size), (end, _) in pairwise([*samples, (30_001, 0)]):
        time = (start + end) / 2000
        if time < 30:
            assert value_at(panel, "allocated", time) * scale >= size * (1 - 1e-12)
            if not band:
                assert value_at(panel, "allocated", time) * scale == pytest.approx(size)
            for patch in band:
                _, edges, lowest = patch.get_data()
                assert np.asarray(lowest)[
                    np.searchsorted(edges, time, side="right") - 1
                ] * scale <= size * (1 + 1e-12)
    assert max(steps(panel, "allocated")[1]) * scale == pytest.approx(
        max(size for t, size in samples if t <= 30_000)
    )


def test_draw_memory__reduces_a_very_short_trace_to_one_step() -> None:
    dense, long = TraceBuilder(), TraceBuilder()
    dense.rank(0).extend(
        "memory",
        t_ns=np.arange(5000),
        device="cuda:0",
        pool="device",
        bytes=np.arange(5000) % 9,
    )
    long.rank(0).memory(0, 1).memory(10**9, 2)
    upper, _ = draw([dense.build("dense.ebb"), long.build("long.ebb")]).axes
    assert steps(upper, "device")[1].tolist() == [8]


def test_draw_memory__draws_a_capacity_that_fits_as_line() -> None:
    (panel,) = draw([trained(size=60 * MIB)]).axes
    assert line(panel, "capacity")[1] == [100, 100]
    assert panel.get_ylim()[1] > 100


def test_draw_memory__stacks_categories_below_the_line_of_all_tensors() -> None:
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[{"device": "cuda:0", "kind": "cuda"}])
    for start_ns, category, size in (
        (0, "parameter", 4 * MIB),
        (0, "activation", 2 * MIB),
        (6 * MS, "activation", 3 * MIB),
    ):
        rank.add(
            "allocations",
            start_ns=start_ns,
            device="cuda:0",
            bytes=size,
            category=category,
        )
    rank.memory(0, 6 * MIB, "tensors").memory(6 * MS, 9 * MIB, "tensors").memory(
        10 * MS, 9 * MIB, "tensors"
    )
    (panel,) = draw([builder.build()]).axes
    assert labels(panel) == ["tensors", "activation", "parameter"]
    areas = {
        str(p.get_label()): p.get_data()
        for p in panel.patches
        if isinstance(p, StepPatch) and p.get_fill()
    }
    # They end with the recording of the allocations.
    assert areas["parameter"].baseline.tolist() == [0, 0, 0]
    assert (
        areas["parameter"].values.tolist()
        == areas["activation"].baseline.tolist()
        == [4, 4, 0]
    )
    assert areas["activation"].values.tolist() == [6, 9, 0]
    assert steps(panel, "tensors")[1].tolist()[:2] == [6, 9]
    assert panel.get_ylim()[1] > 9


@pytest.mark.parametrize("samples", [[(5, 0), (9, 0)], [(5, 7)]])
def test_draw_memory__draws_empty_memory_and_one_sample_without_warning(
    samples: list[tuple[int, int]],
) -> None:
    builder = TraceBuilder()
    for t, size in samples:
        builder.rank(0).memory(t, size)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = draw([builder.build()])
        figure.savefig(io.BytesIO(), format="png", dpi=40)
    assert steps(figure.axes[0], "device")[1].tolist() == [size for _, size in samples]
