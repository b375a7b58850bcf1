"""The mean beside the median, where a few long iterations make them differ."""

from __future__ import annotations

import numpy as np
import pytest

from ebbtide.analysis.metrics.iteration_mean import (
    mean_text,
    uneven,
    uneven_iterations,
)
from ebbtide.analysis.metrics.summary import summarize
from ebbtide.analysis.tables.findings import findings_view
from ebbtide.analysis.tables.summary import summary_view
from ebbtide.profiler.trace import Trace, TraceBuilder


@pytest.mark.parametrize(
    ("times", "mean"),
    [
        ([10.0, 10.0, 10.0, 10.0], None),
        ([10.0, 10.0, 10.0, 17.9], None),
        ([10.0, 10.0, 10.0, 18.1], 12.025),
        ([1.0, 1.0, 1.0, 301.0], 76.0),
        ([float("nan"), 1.0, 1.0, 301.0], 101.0),
        ([500.0], None),
        ([], None),
    ],
)
def test_uneven__is_a_mean_above_1_2_medians(
    times: list[float], mean: float | None
) -> None:
    result = uneven(np.array(times), "steps")
    assert (None if result is None else result.mean_ms) == pytest.approx(mean)
    assert bool(mean_text(result)) == (mean is not None)


def trace_with_stalls() -> Trace:
    """Return a trace whose every fifth iteration begins 90 ms late, irregularly."""
    builder = TraceBuilder("recorded")
    rank = builder.rank(0, first_iteration_start_ns=0)
    at = 0
    for iteration in range(20):
        at += 90_000_000 if iteration in (3, 9, 11, 18) else 1_000_000
        for phase in ("forward", "backward", "update"):
            rank.add(
                "phases",
                iteration=iteration,
                micro_step=0,
                phase=phase,
                start_ns=at,
                end_ns=at + 3_000_000,
            )
            at += 3_000_000
    return builder.build()


def test_uneven_iterations__names_the_part_of_the_excess() -> None:
    result = uneven_iterations(trace_with_stalls())
    assert result is not None
    # 14 of 10 ms and 4 of 99 ms: the first two iterations are warm-up.
    assert result.mean_ms == pytest.approx((14 * 10 + 4 * 99) / 18)
    assert "4 of 18 iterations take 99.0 ms" in result.reason
    assert "100% of the excess in other" in result.reason


def test_headlines__have_both_and_why() -> None:
    from ebbtide.analysis.findings import find

    trace = trace_with_stalls()
    views = (
        summary_view(trace, summarize(trace)),
        findings_view(trace, find(trace), 10.0),
    )
    for view in views:
        first, second, *_ = (line for line in view if isinstance(line, str))
        assert "10.0 ms an iteration (median; mean 29.8 ms)" in first
        assert "4 of 18 iterations" in second
