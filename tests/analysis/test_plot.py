"""Pictures of built traces: what they show, and what they refuse."""

from __future__ import annotations

import io
import warnings

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ebbtide.analysis.plot import draw
from ebbtide.profiler.trace import RankBuilder, Trace, TraceBuilder, TraceError

MS = 10**6
MIB = 2**20
GPU = {"device": "cuda:0", "kind": "cuda", "name": "a GPU", "capacity_bytes": 100 * MIB}
SIGNATURES = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


def train(rank: RankBuilder, iterations: int = 3, size: int = 60 * MIB) -> RankBuilder:
    """Iterations of 10 ms: 4 ms forward, 4 ms backward, 2 ms update; memory peaks at `size` between the first two."""
    for number in range(iterations):
        begin = number * 10 * MS
        rank.phase("forward", begin, begin + 4 * MS, number)
        rank.phase("backward", begin + 4 * MS, begin + 8 * MS, number)
        rank.phase("update", begin + 8 * MS, begin + 10 * MS, number)
        rank.memory(begin, size // 2).memory(begin + 4 * MS, size).memory(begin + 8 * MS, size // 3)
    return rank


def trained(iterations: int = 3, size: int = 60 * MIB, **meta: object) -> Trace:
    builder = TraceBuilder()
    train(builder.rank(0, **{"devices": [GPU], **meta}), iterations, size)
    return builder.build("trained.ebb")


def with_link(kind: str) -> Trace:
    builder = TraceBuilder()
    rank = train(builder.rank(0, devices=[{**GPU, "link": {"peak_bytes_per_s": 5e10}}]))
    if kind == "copies":
        rank.transfer("h2d", 5 * MS, 10 * MS, 2 * 10**8).transfer("d2h", 12 * MS, 13 * MS, 10**6)
    else:
        for t in range(0, 31, 5):
            rank.link(t * MS, 5 * MS, "gpm", h2d_bytes_per_s=4e10, d2h_bytes_per_s=1e9)
    return builder.build("linked.ebb")


def labels(axes: Axes) -> list[str]:
    legend = axes.get_legend()
    return [text.get_text() for text in legend.get_texts()] if legend else []


def heights(axes: Axes, label: str) -> list[float]:
    line = next(line for line in axes.get_lines() if line.get_label() == label)
    return np.asarray(line.get_ydata(), float).tolist()


def bands(axes: Axes) -> int:
    return sum(len(collection.get_paths()) for collection in axes.collections)


def rendered(figure: Figure, kind: str = "png") -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=40)
    return buffer.getvalue()


def test_a_trace_is_a_panel_with_its_memory_and_phases() -> None:
    (panel,) = draw([trained()]).axes
    assert panel.get_ylabel() == "memory (MiB)"
    assert panel.get_title(loc="left") == "trained · a GPU · no GPU link was recorded"
    assert labels(panel) == ["device", "capacity", "forward", "backward", "update"]
    assert max(heights(panel, "device")) == 60
    assert panel.get_xlim() == pytest.approx((0, 0.03))
    assert bands(panel) == 9
    assert [text.get_text() for text in panel.texts] == ["0", "1", "2"]


def test_each_trace_has_its_own_panels() -> None:
    figure = draw([trained(), with_link("copies"), trained(5)])
    assert [axes.get_ylabel() for axes in figure.axes] == [
        "memory (MiB)",
        "memory (MiB)",
        "link (GB/s)",
        "memory (MiB)",
    ]


@pytest.mark.parametrize("kind", ["copies", "counters"])
def test_a_recorded_link_has_a_panel_with_its_peak(kind: str) -> None:
    memory, link = draw([with_link(kind)]).axes
    assert "no GPU link" not in memory.get_title(loc="left")
    assert labels(link) == ["h2d", "d2h", "peak"]
    assert heights(link, "peak") == [50, 50]
    assert max(heights(link, "h2d")) == pytest.approx(40)
    assert max(heights(link, "d2h")) == pytest.approx(1)
    assert link.get_xlim() == memory.get_xlim()


def test_the_capacity_is_a_line_where_it_fits() -> None:
    (panel,) = draw([trained(size=60 * MIB)]).axes
    assert heights(panel, "capacity") == [100, 100]
    assert panel.get_ylim()[1] > 100


def test_a_capacity_far_above_is_said_instead_of_drawn() -> None:
    (panel,) = draw([trained(size=6 * MIB)]).axes
    assert "capacity 100.00 MiB, off scale" in labels(panel)
    assert panel.get_ylim()[1] < 10


def test_without_a_capacity_nothing_is_said_of_it() -> None:
    (panel,) = draw([trained(devices=[])]).axes
    assert labels(panel) == ["device", "forward", "backward", "update"]


def test_only_the_iterations_asked_for_are_shown() -> None:
    (panel,) = draw([trained(6)], span=(2, 4)).axes
    assert panel.get_xlim() == pytest.approx((0, 0.02))
    assert [text.get_text() for text in panel.texts] == ["2", "3"]
    assert bands(panel) == 6
    assert heights(panel, "device")[:2] == [30, 60]


def test_the_rank_asked_for_is_shown() -> None:
    builder = TraceBuilder()
    train(builder.rank(0), size=60 * MIB)
    train(builder.rank(3), size=90 * MIB)
    trace = builder.build()
    for rank, peak in ((None, 60), (0, 60), (3, 90)):
        (panel,) = draw([trace], rank=rank).axes
        assert max(heights(panel, "device")) == peak
        assert f"rank {rank or 0}" in panel.get_title(loc="left")


def test_an_unknown_rank_is_refused() -> None:
    with pytest.raises(TraceError, match="has no rank 7: it has 0"):
        draw([trained()], rank=7)


@pytest.mark.parametrize(("span", "text"), [((3, None), "3:"), ((7, 9), "7:9")])
def test_unknown_iterations_are_refused(span: tuple[int, int | None], text: str) -> None:
    with pytest.raises(TraceError, match=rf"has no iterations {text} \(it has 0 to 2\)"):
        draw([trained()], span=span)


def test_iterations_of_a_trace_without_any_are_refused() -> None:
    builder = TraceBuilder()
    builder.rank(0).memory(0, 1).memory(5, 2)
    with pytest.raises(TraceError, match="it has none"):
        draw([builder.build()], span=(0, 2))


def test_a_trace_with_neither_memory_nor_phases_is_refused() -> None:
    builder = TraceBuilder()
    builder.rank(0)
    with pytest.raises(TraceError, match="nothing to draw"):
        draw([builder.build()])


def test_a_trace_without_ranks_is_refused() -> None:
    with pytest.raises(TraceError, match="holds no rank"):
        draw([TraceBuilder().build()])


def test_memory_alone_and_phases_alone_are_drawn() -> None:
    memory, phases = TraceBuilder(), TraceBuilder()
    memory.rank(0).memory(0, 3).memory(8 * MS, 5)
    phases.rank(0, devices=[GPU]).phase("forward", 0, 5 * MS)
    upper, lower = draw([memory.build(), phases.build()]).axes
    assert heights(upper, "device") == [3, 5, 5]
    assert bands(upper) == 0
    assert bands(lower) == 1  # of an iteration that never finished


def test_a_hundred_iterations_are_drawn_without_bands_and_with_few_numbers() -> None:
    (panel,) = draw([trained(100)]).axes
    assert bands(panel) == 0
    assert 1 < len(panel.texts) <= 21
    assert rendered(panel.figure).startswith(SIGNATURES["png"])  # type: ignore[arg-type]


def test_a_long_line_keeps_its_extremes_when_it_is_thinned() -> None:
    builder = TraceBuilder()
    rank = builder.rank(0)
    for t in range(25_000):
        rank.memory(t, 50 + t % 7)
    rank.rows["memory"][1234]["bytes"], rank.rows["memory"][-1]["bytes"] = 3, 99
    (panel,) = draw([builder.build()]).axes
    drawn = heights(panel, "device")
    assert len(drawn) <= 20_001
    assert (min(drawn), max(drawn)) == (3, 99)


@pytest.mark.parametrize("samples", [[(5, 0), (9, 0)], [(5, 7)]])
def test_memory_that_is_nothing_or_one_sample_is_drawn_quietly(samples: list[tuple[int, int]]) -> None:
    builder = TraceBuilder()
    for t, size in samples:
        builder.rank(0).memory(t, size)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw([builder.build()])


@pytest.mark.parametrize("kind", list(SIGNATURES))
def test_a_picture_can_be_saved_in_each_format(kind: str) -> None:
    assert rendered(draw([with_link("counters")]), kind).startswith(SIGNATURES[kind])
