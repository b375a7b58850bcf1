"""Tests the link panel: copies, counters, gaps, impossible rates."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.patches import StepPatch

from ebbtide.analysis.metrics.link_throughput import traffic
from ebbtide.analysis.plot import draw
from ebbtide.errors import TraceError
from ebbtide.profiler.trace import RankBuilder, TraceBuilder
from tests.analysis.plot.pictures import (
    LINKED,
    MS,
    PEAK,
    labels,
    line,
    notes,
    steps,
    train,
    trained,
    value_at,
    with_counters,
)


def draw_link(builder: TraceBuilder) -> Axes:
    """Draw the link of a trace."""
    (axes,) = draw([builder.build()], kind="link").axes
    return axes


def started() -> tuple[RankBuilder, TraceBuilder]:
    """Return a rank that trains and has a link, and its trace."""
    builder = TraceBuilder()
    return train(builder.rank(0, devices=[LINKED])), builder


def test_draw_link__draws_counters_as_sampled_h2d_up_d2h_down() -> None:
    memory, link = draw([with_counters()]).axes
    assert "no GPU link" not in notes(memory)
    assert labels(link) == ["h2d (up)", "d2h (down)", "peak 50 GB/s"]
    assert steps(link, "h2d (up)")[0].tolist() == [0, 5, 10, 15, 20, 25, 30]
    assert steps(link, "h2d (up)")[1].tolist() == [40] * 6
    assert steps(link, "d2h (down)")[1].tolist() == [-1] * 6
    assert line(link, "peak 50")[1] == [50, 50]
    low, high = link.get_ylim()
    assert low == -high
    assert link.get_xlim() == memory.get_xlim()
    assert link.yaxis.get_major_formatter()(-40, None) == "40"


def test_draw_link__draws_copies_from_start_to_end() -> None:
    rank, builder = started()
    rank.transfer("h2d", 5 * MS, 10 * MS, 2 * 10**8).transfer(
        "d2h", 12 * MS, 13 * MS, 10**6
    )
    link = draw_link(builder)
    assert steps(link, "h2d (up)")[0].tolist() == [0, 5, 10, 30]
    assert steps(link, "h2d (up)")[1] == pytest.approx([0, 40, 0])
    assert steps(link, "d2h (down)")[1] == pytest.approx([0, -1, 0])


def test_draw_link__draws_a_line_per_kind_of_host_memory() -> None:
    rank, builder = started()
    rank.transfer("h2d", 0, 5 * MS, 2 * 10**8, host_memory="pinned").transfer(
        "h2d", 3 * MS, 8 * MS, 10**8
    )
    rank.transfer("h2d", 6 * MS, 16 * MS, 10**8, host_memory="pageable")
    rank.transfer("d2h", 0, 5 * MS, 10**8, host_memory="pinned")
    link = draw_link(builder)
    assert labels(link)[:4] == [
        "h2d (up) pinned",
        "h2d (up) pageable",
        "h2d (up) unknown host memory",
        "d2h (down) pinned",
    ]
    drawn = [
        patch
        for patch in link.patches
        if isinstance(patch, StepPatch) and not patch.get_fill()
    ]
    assert len({str(patch.get_linestyle()) for patch in drawn[:3]}) == 3
    assert value_at(link, "h2d (up) pinned", 4) == pytest.approx(40)
    assert value_at(link, "h2d (up) pageable", 7) == pytest.approx(10)
    assert value_at(link, "h2d (up) unknown host memory", 4) == pytest.approx(20)


def test_draw_link__draws_no_rate_for_copies_without_sizes() -> None:
    rank, builder = started()
    rank.transfer("h2d", 0, 5 * MS, None)
    link = draw_link(builder)
    assert labels(link)[:2] == ["h2d (up), sizes not known", "d2h (down)"]
    assert np.isnan(steps(link, "h2d (up), sizes not known")[1]).all()


def test_draw_link__draws_a_copy_without_length_as_mean_over_a_slot() -> None:
    rank, builder = started()
    rank.transfer("h2d", 15 * MS, 15 * MS, 30 * 10**3)
    link = draw_link(builder)
    assert max(steps(link, "h2d (up)")[1]) == pytest.approx(1)
    assert "link: means over 0.03 ms each" in notes(link)


def test_draw_link__marks_samples_above_the_peak_off_scale() -> None:
    rank, builder = started()
    for t in range(1, 31):
        h2d = 4e11 if t in (7, 9) else 2e10
        rank.link(
            t * MS,
            MS,
            "gpm",
            h2d_bytes_per_s=h2d,
            d2h_bytes_per_s=3e11 if t == 12 else 1e10,
        )
    link = draw_link(builder)
    assert labels(link)[2:5] == [
        "peak 50 GB/s",
        "2 × h2d above the peak",
        "1 × d2h above the peak",
    ]
    top = link.get_ylim()[1]
    assert top == pytest.approx(54)
    assert line(link, "2 × h2d") == ([7, 9], [top, top])
    assert line(link, "1 × d2h") == ([12], [-top])
    assert np.isnan(value_at(link, "h2d (up)", 6.5))
    assert value_at(link, "h2d (up)", 7.5) == 20


SAMPLES = st.lists(
    st.tuples(st.integers(1, 3), st.none() | st.floats(0, 2 * PEAK)),
    min_size=1,
    max_size=30,
)


@given(SAMPLES)
def test_draw_link__draws_exactly_the_possible_samples(
    samples: list[tuple[int, float | None]],
) -> None:
    """Samples: milliseconds after the sample before, and a rate or None."""
    rank, builder = started()
    times = np.cumsum([gap for gap, _ in samples]) * MS
    for t, (_, rate) in zip(times.tolist(), samples, strict=True):
        rank.link(t, MS, "gpm", h2d_bytes_per_s=rate, d2h_bytes_per_s=1e9)
    trace = builder.build()
    moved = traffic(trace, 0, "h2d")
    (link,) = draw([trace], kind="link").axes
    if moved is None:
        assert not any(
            str(patch.get_label()).startswith("h2d") for patch in link.patches
        )
        return
    end = 30 * MS
    drawn = [value_at(link, "h2d (up)", t / MS - 1e-3) for t in times if t < end]
    rates = [
        np.nan if rate is None or rate > 1.02 * PEAK else rate / 1e9
        for _, rate in samples
    ][: len(drawn)]
    np.testing.assert_allclose(drawn, rates)


def test_draw_link__reduces_many_copies_to_means_with_all_bytes() -> None:
    rank, builder = started()
    starts = np.arange(0, 30 * MS, 10_000)
    rank.extend(
        "transfers",
        start_ns=starts,
        end_ns=starts + 4000,
        device="cuda:0",
        direction="h2d",
        bytes=10**5,
        name="copy",
    )
    rank.meta["transfers_recorded"] = True
    link = draw_link(builder)
    edges, rates = steps(link, "h2d (up)")
    assert len(rates) == 1000
    assert (rates * 1e9 * np.diff(edges) / 1e3).sum() == pytest.approx(
        len(starts) * 10**5
    )
    assert "link: means over 0.03 ms each" in notes(link)


def test_draw_link__refuses_a_trace_without_link() -> None:
    with pytest.raises(TraceError, match=r"rank 0 of trained\.ebb has no link to draw"):
        draw([trained()], kind="link")
