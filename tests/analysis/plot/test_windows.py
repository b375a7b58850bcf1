"""Tests figures of windows of free memory against `find_windows`."""

from __future__ import annotations

import pytest

from ebbtide.analysis.metrics.windows import find_windows
from ebbtide.analysis.plot import draw
from ebbtide.errors import TraceError
from ebbtide.profiler.trace import Trace, TraceBuilder
from tests.analysis.plot.pictures import (
    GPU,
    LINKED,
    MIB,
    MS,
    boxes,
    labels,
    notes,
    train,
    trained,
)


def uneven() -> Trace:
    """Build three iterations, of which the second uses more memory and the first has
    copies."""
    builder = TraceBuilder()
    rank = train(builder.rank(0, devices=[LINKED]), 3)
    rank.memory(14 * MS + 1, 90 * MIB).memory(15 * MS, 75 * MIB)
    rank.transfer("h2d", 1 * MS, 2 * MS, 10**6).transfer("d2h", 9 * MS, 10 * MS, 10**6)
    return builder.build("uneven.ebb")


def test_draw_windows__draws_recurring_windows_in_each_iteration() -> None:
    trace = uneven()
    guaranteed = find_windows(trace, 20 * MIB).guaranteed
    # All iterations have the same length here, so each of them has the times of the
    # typical one.
    expected = [
        (
            10 * number + w.start_ms,
            10 * number + w.end_ms,
            100 - w.free_bytes / MIB,
            100,
        )
        for w in guaranteed
        for number in range(3)
    ]
    panel, _ = draw([trace], kind="windows", min_bytes=20 * MIB).axes
    drawn = boxes(panel, "free in every iteration")
    assert sorted(drawn) == [pytest.approx(box, abs=1e-5) for box in sorted(expected)]
    # Nothing that every iteration has is more than what one has.
    assert max(100 - bottom for *_, bottom, _ in drawn) <= max(
        100 - bottom for *_, bottom, _ in boxes(panel, "≥")
    )


def test_draw_windows__fills_the_strip_by_idle_share() -> None:
    trace = uneven()
    windows = find_windows(trace, 1).windows
    _, strip = draw([trace], kind="windows", min_bytes=1).axes
    assert [label.get_text() for label in strip.get_yticklabels()] == [
        "h2d idle",
        "d2h idle",
    ]
    outlines, filled = strip.collections[0::2], strip.collections[1::2]
    for direction, outlines_row, filled_row in zip(
        ("h2d", "d2h"), outlines, filled, strict=True
    ):
        shares = []
        for outline, idle in zip(
            outlines_row.get_paths(), filled_row.get_paths(), strict=True
        ):
            shares.append(idle.get_extents().height / outline.get_extents().height)
        assert shares == pytest.approx(
            [getattr(w, f"{direction}_idle_share") for w in windows]
        )


def test_draw_windows__labels_boxes_with_least_free_bytes() -> None:
    panel, strip = draw([uneven()], kind="windows", min_bytes=20 * MIB).axes
    texts = [text.get_text() for text in panel.texts if text.get_text().endswith("MiB")]
    expected = [
        f"{w.free_bytes / MIB:.2f} MiB"
        for w in find_windows(uneven(), 20 * MIB).windows
    ]
    assert texts
    assert set(texts) <= set(expected)
    assert "100 %" in [text.get_text() for text in strip.texts]


def test_draw_windows__splits_a_trace_without_iterations() -> None:
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[GPU])
    for t, size in ((3, 20), (5, 80), (9, 10), (12, 30)):
        rank.memory(t * MS, size * MIB)
    (panel,) = draw([builder.build()], kind="windows", min_bytes=50 * MIB).axes
    assert boxes(panel, "≥") == [(0, 2, 20, 100), (6, 9, 10, 100)]
    assert "free in every iteration" not in labels(panel)


def test_draw_windows__says_when_nothing_is_free() -> None:
    (panel,) = draw([trained()], kind="windows").axes
    assert "never 1.00 GiB free" in notes(panel)
    assert labels(panel)[:2] == ["device", "capacity 100.00 MiB"]


def test_draw_windows__says_when_a_rank_has_no_memory_samples() -> None:
    builder = TraceBuilder()
    train(builder.rank(0, devices=[GPU]))
    builder.rank(1, devices=[GPU]).phase("forward", 0, 5 * MS, 0)
    (panel,) = draw([builder.build()], kind="windows", rank=1).axes
    assert "no device memory was recorded for this rank" in notes(panel)
    assert "never" not in notes(panel)
    assert "capacity 100.00 MiB" in labels(panel)


def test_draw_windows__has_a_high_capacity_on_the_scale() -> None:
    (panel,) = draw([trained(size=MIB)], kind="windows", min_bytes=MIB).axes
    assert panel.get_ylim()[1] > 100
    assert "capacity 100.00 MiB" in labels(panel)


def test_draw_windows__draws_the_longest_of_very_many() -> None:
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[GPU])
    times, sizes = [], []
    for number in range(11_000):
        times += [number * 100, number * 100 + 10 + number % 50]
        sizes += [10 * MIB, 99 * MIB]
    rank.extend("memory", t_ns=times, device="cuda:0", pool="device", bytes=sizes)
    (panel,) = draw([builder.build()], kind="windows", min_bytes=50 * MIB).axes
    drawn = boxes(panel, "≥")
    assert len(drawn) == 10_000
    assert "1,000 shorter windows are not drawn" in notes(panel)
    assert min(right - left for left, right, *_ in drawn) * MS > 13.9


def test_draw_windows__refuses_a_trace_without_capacity_or_memory() -> None:
    with pytest.raises(TraceError, match="capacity of rank 0's device is not known"):
        draw([trained(devices=[])], kind="windows")
    builder = TraceBuilder()
    builder.rank(0, devices=[GPU]).phase("forward", 0, 5, 0)
    with pytest.raises(TraceError, match="no memory of a device was recorded"):
        draw([builder.build()], kind="windows")
