"""Tests figures of a published run, imported: an interleaved update on an H100."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ebbtide.analysis.metrics.link_throughput import traffic
from ebbtide.analysis.metrics.windows import find_windows
from ebbtide.analysis.plot import draw
from ebbtide.profiler.trace import Trace, open_trace
from tests.analysis.plot.pictures import boxes, labels, outside, overlapping, steps
from tests.conftest import slow

GIB = 2**30
RUN = Path(__file__).parents[3] / "traces" / "h100-20b-interleaved-2.ebb"


@pytest.fixture(scope="module")
def trace() -> Trace:
    return open_trace(RUN)


@pytest.mark.parametrize("kind", slow(["both", "memory", "link", "windows"], but=["both"]))
def test_draw__has_no_overlapping_texts(trace: Trace, kind: str) -> None:
    figure = draw([trace, trace], kind=kind)
    assert overlapping(figure) == []
    assert outside(figure) == []


def test_draw__shows_the_memory_of_the_monitor(trace: Trace) -> None:
    memory, link = draw([trace], span=(2, 5)).axes
    rows = trace.memory(0)
    sizes = rows.loc[rows["pool"] == "device", "bytes"].to_numpy() / GIB
    drawn = steps(memory, "device")[1]
    assert any(np.array_equal(drawn, sizes[first : first + len(drawn)]) for first in range(len(sizes)))
    assert labels(memory)[:4] == ["device", "reserved", "allocated", "capacity 79.65 GiB"]
    assert link.get_xlim() == memory.get_xlim()


def test_draw__marks_impossible_rates(trace: Trace) -> None:
    rejected = {d: moved.rejected_samples for d in ("h2d", "d2h") if (moved := traffic(trace, 0, d))}
    assert rejected == {"h2d": 3, "d2h": 1}
    (link,) = draw([trace], kind="link").axes
    assert {"3 × h2d above the peak", "1 × d2h above the peak"} <= set(labels(link))
    assert link.get_ylim()[1] == pytest.approx(63.015 * 1.08, rel=0.05)


def test_draw_windows__boxes_match_find_windows(trace: Trace) -> None:
    panel, _ = draw([trace], kind="windows").axes
    windows = find_windows(trace, GIB, [0]).windows
    drawn = boxes(panel, "≥")
    assert [top - bottom for *_, bottom, top in drawn] == pytest.approx([w.free_bytes / GIB for w in windows])
    lengths = [(w.end_ms - w.start_ms) / 1e3 for w in windows]
    assert [right - left for left, right, *_ in drawn] == pytest.approx(lengths, abs=1e-6)
