"""Tests figures of built traces: memory and phases, and input that is refused."""

from __future__ import annotations

import numpy as np
import pytest

from ebbtide.analysis.plot import draw
from ebbtide.errors import TraceError
from ebbtide.profiler.trace import Trace, TraceBuilder
from tests.analysis.plot.pictures import (
    GPU,
    MIB,
    MS,
    bands,
    labels,
    line,
    notes,
    numbers,
    steps,
    train,
    trained,
    with_counters,
)


def test_draw__shows_memory_and_phases_of_a_trace() -> None:
    (panel,) = draw([trained()]).axes
    assert panel.get_ylabel() == "memory (MiB)"
    assert panel.get_xlabel() == "time (ms)"
    assert panel.get_title(loc="left") == "trained"
    assert notes(panel) == "a GPU · no GPU link was recorded"
    assert labels(panel) == [
        "device",
        "capacity 100.00 MiB",
        "forward",
        "backward",
        "update",
    ]
    assert panel.get_xlim() == (0, 30)
    assert bands(panel) == {
        "forward": [(0, 4), (10, 14), (20, 24)],
        "backward": [(4, 8), (14, 18), (24, 28)],
        "update": [(8, 10), (18, 20), (28, 30)],
    }
    assert numbers(panel) == [0, 1, 2]


def test_draw__puts_all_traces_on_one_scale() -> None:
    figure = draw(
        [
            trained(size=30 * MIB),
            with_counters(),
            trained(5, size=2 * MIB, name="longer"),
        ]
    )
    assert [axes.get_ylabel() for axes in figure.axes] == [
        "memory (MiB)",
        "memory (MiB)",
        "link (GB/s)",
        "memory (MiB)",
    ]
    memory = [axes for axes in figure.axes if axes.get_ylabel() == "memory (MiB)"]
    assert {axes.get_ylim() for axes in memory} == {(0, 108)}
    assert {axes.get_xlim() for axes in figure.axes} == {(0, 50)}
    assert (
        len({(axes.get_position().x0, axes.get_position().x1) for axes in figure.axes})
        == 1
    )
    assert [max(steps(axes, "device")[1]) for axes in memory] == [30, 60, 2]
    # A level ends with its trace.
    assert [line(axes, "capacity")[0] for axes in memory] == [[0, 30], [0, 30], [0, 50]]


def test_draw__puts_all_links_on_one_scale() -> None:
    builder = TraceBuilder()
    rank = train(builder.rank(0, devices=[GPU]))
    rank.link(10 * MS, 5 * MS, "gpm", h2d_bytes_per_s=3e6, d2h_bytes_per_s=9e10)
    one, other = draw([with_counters(), builder.build()], kind="link").axes
    assert (
        one.get_ylim()
        == other.get_ylim()
        == pytest.approx((-9e10 * 1.12 / 1e9, 9e10 * 1.12 / 1e9))
    )
    assert one.get_ylabel() == other.get_ylabel() == "link (GB/s)"


def test_draw__shows_only_the_selected_iterations() -> None:
    (panel,) = draw([trained(6)], span=(2, 4)).axes
    assert panel.get_xlim() == (0, 20)
    assert numbers(panel) == [2, 3]
    assert bands(panel)["update"] == [(8, 10), (18, 20)]
    assert steps(panel, "device")[1].tolist()[:6] == [30, 60, 20] * 2


def test_draw__aligns_traces_at_their_first_iteration() -> None:
    late = TraceBuilder()
    for number in range(3):
        start = (900 + 10 * number) * MS
        late.rank(0, devices=[GPU]).phase(
            "forward", start, start + 4 * MS, number
        ).memory(start, (30 + number) * MIB)
    # An iteration begins where the one before ended.
    for span, times in (((0, None), [0, 10, 20, 24]), ((1, 3), [0, 6, 16, 20])):
        early, other = draw([trained(), late.build()], span=span).axes
        assert steps(other, "device")[0].tolist() == times
        assert steps(other, "device")[1].tolist() == [30, 31, 32]
        assert bands(early)["forward"][0] == (0, 4)


def lagging() -> Trace:
    """Build iterations of 10 ms, which the GPU ends 3 ms later."""
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[GPU])
    for number in range(3):
        start, end = 10 * number * MS, (10 * number + 9) * MS
        rank.phase(
            "forward",
            start,
            end,
            number,
            gpu_start_ns=start + 3 * MS,
            gpu_end_ns=end + 3 * MS,
        )
        rank.memory(start, 30 * MIB)
    return builder.build("lagging.ebb")


def test_draw__ends_with_the_gpu() -> None:
    panel, _ = draw([lagging(), trained(4)], span=(0, 2), kind="memory").axes
    assert steps(panel, "device")[0].tolist() == [0, 10, 20, 22]
    # Of the next iteration that much is seen, and no more.
    assert bands(panel)["forward"] == [(0, 9), (10, 19), (20, 22)]


def test_draw__shows_a_little_after_the_last_phase() -> None:
    builder = TraceBuilder()
    train(builder.rank(0), 10).memory(101 * MS, MIB).memory(500 * MS, 2 * MIB)
    (panel,) = draw([builder.build()]).axes
    assert panel.get_xlim() == (0, 104)
    assert steps(panel, "device")[1][-1] == 1


def test_draw__shows_the_selected_rank() -> None:
    builder = TraceBuilder()
    train(builder.rank(0), size=60 * MIB)
    train(builder.rank(3), size=90 * MIB)
    trace = builder.build()
    for rank, peak in ((None, 60), (0, 60), (3, 90)):
        (panel,) = draw([trace], rank=rank).axes
        assert max(steps(panel, "device")[1]) == peak
        assert notes(panel).startswith(f"rank {rank or 0}")


def test_draw__draws_a_very_short_phase_as_line() -> None:
    builder = TraceBuilder()
    rank = builder.rank(0)
    for number in range(2):
        begin = number * 5000 * MS
        rank.phase("forward", begin, begin + 4000 * MS, number).phase(
            "update", begin + 4000 * MS, begin + 4001 * MS, number
        )
    (panel,) = draw([builder.build()]).axes
    ticks = [
        line.vertices
        for drawn in panel.collections
        for line in drawn.get_paths()
        if len(np.asarray(line.vertices)) == 2
    ]
    assert np.array(ticks) == pytest.approx(
        np.array([[[4.0005, 0], [4.0005, 1]], [[9.0005, 0], [9.0005, 1]]])
    )


def test_draw__refuses_an_unknown_rank() -> None:
    with pytest.raises(TraceError, match="has no rank 7: it has 0"):
        draw([trained()], rank=7)


@pytest.mark.parametrize(("span", "text"), [((3, None), "3:"), ((7, 9), "7:9")])
def test_draw__refuses_unknown_iterations(
    span: tuple[int, int | None], text: str
) -> None:
    with pytest.raises(
        TraceError, match=rf"has no iterations {text} \(it has 0 to 2\)"
    ):
        draw([trained()], span=span)


def test_draw__refuses_iterations_of_a_trace_without_any() -> None:
    builder = TraceBuilder()
    builder.rank(0).memory(0, 1).memory(5, 2)
    with pytest.raises(TraceError, match="it has none"):
        draw([builder.build()], span=(0, 2))


def test_draw__refuses_an_empty_trace() -> None:
    builder = TraceBuilder()
    builder.rank(0)
    with pytest.raises(TraceError, match="nothing to draw"):
        draw([builder.build()])


def test_draw__draws_a_link_alone_but_not_as_memory() -> None:
    builder = TraceBuilder()
    builder.rank(0, devices=[GPU]).link(5 * MS, 5 * MS, "gpm", h2d_bytes_per_s=1e9)
    (link,) = draw([builder.build()]).axes
    assert link.get_ylabel() == "link (GB/s)"
    with pytest.raises(TraceError, match="no memory of a device was recorded"):
        draw([builder.build()], kind="memory")


def test_draw__refuses_a_trace_without_ranks() -> None:
    with pytest.raises(TraceError, match="has no ranks"):
        draw([TraceBuilder().build()])


def test_draw__draws_memory_alone_and_phases_alone() -> None:
    memory, phases = TraceBuilder(), TraceBuilder()
    memory.rank(0).memory(0, 3).memory(8 * MS, 5)
    phases.rank(0, devices=[GPU]).phase("forward", 0, 5 * MS)
    upper, lower = draw([memory.build("memory.ebb"), phases.build("phases.ebb")]).axes
    assert steps(upper, "device")[1].tolist() == [3, 5]
    assert bands(upper) == {}
    assert bands(lower) == {"forward": [(0, 5)]}  # of an iteration that never finished
    assert (lower.get_ylabel(), list(lower.get_yticks())) == ("phases", [])
    assert "no memory was recorded" in notes(lower)
    with pytest.raises(TraceError, match="no memory of a device was recorded"):
        draw([phases.build("phases.ebb")], kind="memory")


def test_draw__omits_bands_of_short_iterations() -> None:
    (panel,) = draw([trained(120)]).axes
    assert bands(panel) == {}
    assert labels(panel) == ["device", "capacity 100.00 MiB"]
    assert "phases too short to draw" in notes(panel)
    upper, lower = draw([trained(10), trained(1000, name="longer")]).axes
    assert bands(upper) == bands(lower) == {}
